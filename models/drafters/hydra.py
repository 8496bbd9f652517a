"""Hydra's heads, each of which also reads the tokens drafted before its own (Ankner et al., 2024), and those of
Hydra++, which read the hidden states through a decoder layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from decodax.models.blocks.attention import Attend
from decodax.models.config import DecoderConfig
from decodax.models.drafters.head import Depth, Embed, HeadStep, Weights
from decodax.models.drafters.prefixed import PrefixedHead
from decodax.models.drafters.stack import at_depth
from decodax.models.layers import Linear


@dataclasses.dataclass(frozen=True)
class HydraHead(PrefixedHead):
    """Hydra (Ankner et al., 2024): Medusa heads that also read the embeddings of the tokens drafted before.

    Head `i` reads `[f, e_0, ..., e_i]`, with the embedding `e_0` of the newest token: `R u + silu(W u + c)`, with the
    bias in `R` too, then `blocks - 1` blocks `z + silu(W z + b)` of the same weights, then a vocabulary matrix with a
    bias. The state of a node is all that its head reads.

    Hydra++ is `blocks=4` and a `prefix` of one layer like the target's: `f` is then its output. That layer has a final
    norm and no token embeddings, as in the authors' code.

    Attributes:
        taps: empty: the hidden state after the final norm.
        vocab: number of logits.
        width: width `D` of the target.
        heads: number of heads `K`.
        blocks: number of blocks of a head, the first included.
        own_head: True: each head has a vocabulary matrix with a bias; False: all use the target's.
        prefix: see `PrefixedHead`.
    """

    width: int = dataclasses.field(kw_only=True)
    heads: int = dataclasses.field(default=4, kw_only=True)
    blocks: int = 1
    own_head: bool = True
    prefix: DecoderConfig | None = None

    @property
    def state_width(self) -> int:
        return self.width * (self.heads + 1)

    def module(self, rngs: nnx.Rngs) -> nnx.Module:
        module = self.with_prefix(rngs)
        module.heads = nnx.Dict({str(i): _Hydra(self, i, rngs) for i in range(self.heads)})
        return module

    def enter(self, weights: Weights, features: Array) -> Array:
        return jnp.pad(features, ((0, 0), (0, 0), (0, self.width * self.heads)))

    def step(self, weights: Weights, tokens: Array, embed: Embed, state: Array, positions: Array, depth: Depth,
             attend: Attend | None) -> HeadStep:
        network = self.network(weights)
        state, entries = self.through_prefix(network, state, positions, attend)
        # the embedding's place in the state is that of the node's depth
        at = jnp.minimum(jnp.broadcast_to(depth, tokens.shape), self.heads - 1) + 1
        parts = state.reshape(*tokens.shape, self.heads + 1, self.width)
        state = jnp.where((jnp.arange(self.heads + 1) == at[..., None])[..., None],
                          embed(tokens).astype(state.dtype)[:, :, None], parts).reshape(state.shape)
        hidden = at_depth(depth, self.heads, lambda i, u: network.heads[str(i)](u[..., :self.width * (i + 2)]), state)
        return HeadStep(hidden=hidden, state=state, entries=entries)

    def logits(self, weights: Weights, hidden: Array, depth: Depth, head: Callable[[Array], Array]) -> Array:
        if not self.own_head:
            return head(hidden)
        network = self.network(weights)
        return at_depth(depth, self.heads, lambda i, z: network.heads[str(i)].head(z).astype(jnp.float32), hidden)


class _Hydra(nnx.Module):
    def __init__(self, h: HydraHead, index: int, rngs: nnx.Rngs):
        self.blocks, wide = h.blocks, h.width * (index + 2)
        self.residual = Linear(rngs, (wide, h.width), (None, "embed"), True)
        self.first = Linear(rngs, (wide, h.width), (None, "embed"), True, 0.0)
        self.block = Linear(rngs, (h.width, h.width), ("embed", None), True, 0.0) if h.blocks > 1 else None
        self.head = Linear(rngs, (h.width, h.vocab), ("embed", "vocab"), True) if h.own_head else None

    def __call__(self, u: Array) -> Array:
        z = self.residual(u) + jax.nn.silu(self.first(u))
        for _ in range(self.blocks - 1):
            assert self.block is not None
            z = z + jax.nn.silu(self.block(z))
        return z


__all__ = ["HydraHead"]
