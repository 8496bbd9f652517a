"""Chimera's head: a trigram of tokens, a decoder layer over all hidden states of the text, and a head for each draft
(Zeng et al., 2024)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from decodax.cache import KVLayer
from decodax.models.blocks.attention import Attend
from decodax.models.blocks.layer import DecoderLayer
from decodax.models.config import DecoderConfig
from decodax.models.drafters.head import Depth, Embed, HeadStep, ModuleHead, Weights
from decodax.models.drafters.prefixed import rope_tables
from decodax.models.drafters.stack import at_depth
from decodax.models.kv_shapes import kv_layers
from decodax.models.layers import Linear


@dataclasses.dataclass(frozen=True)
class ChimeraHead(ModuleHead):
    """Chimera (Zeng et al., 2024): predicts the hidden state of a token from its trigram and the text before it.

    The *trigram encoder* turns the embeddings `u` of a token and of the two before it into `P (u + silu(W u + b))`. The
    *full-context encoder*, a decoder layer without a final norm, attends from there to the target's hidden states of
    all earlier tokens and to the trigram itself; for drafted tokens its own outputs take the place of the target's
    states. Draft `i` is predicted from the output and the newest hidden state of the target together.

    The sequence and its order are those of the drafting in the authors' code. Their training also lets a trigram attend
    to the trigrams before it, and repeats the first token's embedding in another order in the first trigrams.

    Attributes:
        taps: empty: the hidden state after the final norm.
        vocab: number of logits.
        config: shape and options of the layer, of the target's width.
        heads: largest number of drafts `K`.
        own_head: True: the heads are vocabulary matrices over output and state, without a bias; False: they are linear
            layers to the target's width, before the target's vocabulary matrix.
    """

    config: DecoderConfig = dataclasses.field(kw_only=True)
    heads: int = dataclasses.field(default=5, kw_only=True)
    own_head: bool = True

    def __post_init__(self) -> None:
        if len(self.config.layers) != 1:
            raise ValueError(f"config: got {len(self.config.layers)} layers, takes one")

    @property
    def target_width(self) -> int:
        return self.config.width

    @property
    def state_width(self) -> int:
        """Width of the state, `4 D`: the concatenation of the full-context encoder's output, the newest hidden state of
        the target, and the embeddings of the two tokens before the pair's own."""
        return 4 * self.config.width

    @property
    def longest(self) -> int:
        return self.heads

    @property
    def tokens_before(self) -> int:
        return 2

    @property
    def kv_layers(self) -> tuple[KVLayer, ...]:
        # one channel more, see `_with_own`
        return tuple(layer._replace(width=layer.width + 1, sinks=True) for layer in kv_layers(self.config, None))

    def module(self, rngs: nnx.Rngs) -> nnx.Module:
        module: Any = nnx.Module()
        D, c = self.config.width, self.config
        # Zeros, as in the authors' code.
        module.trigram = Linear(rngs, (3 * D, 3 * D), (None, None), True, 0.0)
        module.project = Linear(rngs, (3 * D, D), (None, "embed"), False)
        module.layers = nnx.Dict({"0": DecoderLayer(c, c.layers[0], rngs)})
        module.heads = nnx.Dict({str(i): Linear(rngs, (2 * D, self.vocab if self.own_head else D), (
            None, "vocab" if self.own_head else "embed"), False) for i in range(self.heads)})
        if not self.own_head:           # they begin as the sum, which is the authors' first value
            for one in module.heads.values():
                one.kernel = nnx.Param(jnp.tile(jnp.eye(D), (2, 1)), axes=(None, "embed"))
        return module

    def enter(self, weights: Weights, features: Array) -> Array:
        return jnp.concatenate([features[..., :self.config.width], features], -1)

    def step(self, weights: Weights, tokens: Array, embed: Embed, state: Array, positions: Array, depth: Depth,
             attend: Attend | None) -> HeadStep:
        assert attend is not None
        network = self.network(weights)
        layer: Any = network.layers["0"]
        context, newest, *before = jnp.split(state, 4, -1)
        token = embed(tokens).astype(state.dtype)
        u = jnp.concatenate([*before, token], -1)
        x = network.project(u + jax.nn.silu(network.trigram(u)))
        # the context's key is at the position of its feature, the trigram's one further
        keys_values = layer.attn.keys_values(layer.attn_in(context), rope_tables(self.config, positions))
        branch, entry = layer.attn(0, layer.attn_in(x), rope_tables(self.config, positions + 1),
                                   _with_own(attend, *keys_values))
        x = x + branch
        x = x + layer.mlp_half(x)
        return HeadStep(hidden=jnp.concatenate([x, newest], -1), entries=(entry,),
                        state=jnp.concatenate([x, newest, before[1], token], -1))

    def logits(self, weights: Weights, hidden: Array, depth: Depth, head: Callable[[Array], Array]) -> Array:
        network = self.network(weights)
        found = at_depth(depth, self.heads, lambda i, z: network.heads[str(i)](z), hidden)
        return found.astype(jnp.float32) if self.own_head else head(found)


def _with_own(attend: Attend, keys: Array, values: Array) -> Attend:
    """Returns an attention function to keys and values `f[B, W, G, d]` that others see, too, and to those with which it
    is called, of which each query sees its own alone. Only the first are in the entry.

    The own score is subtracted from all others, by a further channel of the keys, so that it becomes that of a sink, 0;
    a further channel of the values says how much weight the others have.
    """
    def attended(layer: int, q: Any, k: Any, v: Any, **options: Any) -> tuple[Array, Any]:
        wide = lambda x: jnp.repeat(x, q.shape[2] // x.shape[2], 2)
        one = lambda x: jnp.concatenate([x, jnp.ones_like(x[..., :1])], -1)
        score = (q * wide(k)).sum(-1, keepdims=True)
        out, entry = attend(layer, jnp.concatenate([q, -score], -1), one(keys), one(values),
                            sinks=jnp.zeros(q.shape[2]), **options)
        return out[..., :-1] + (1 - out[..., -1:]) * wide(v), entry

    return attended


__all__ = ["ChimeraHead"]
