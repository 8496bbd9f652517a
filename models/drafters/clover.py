"""Clover's head: an augmenting block over the target's hidden states, then a recurrent state that takes in the drafted
tokens one by one (Xiao et al., 2024), and its successor Clover-2 (Xiao, Gui, Su and Chen, 2024)."""

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
from decodax.models.layers import Linear, Norm


@dataclasses.dataclass(frozen=True)
class CloverHead(PrefixedHead):
    """Clover (Xiao et al., 2024): each drafted token changes one state, from which the next token is predicted.

    The state starts as the output of the augmenting block on the target's hidden state. The *attention decoder* adds
    the newest token, and then each drafted one (the *regressive connection*); after draft `i` a residual block of its
    own, `z + silu(W_i z + b_i)`, and the target's vocabulary matrix predict the next token.

    The attention decoder attends to one key, so a softmax would always be 1. As in the authors' code, each attention
    head weights the token's value by the cosine of query and key instead. That code is of Clover-2. What
    Clover's own norms are, and whether its drafts share their residual block, was not at hand; here the decoder has the
    norm of that code, and blocks are apart, as Medusa's. Embeddings are the target's; in the code they are the rows of
    its vocabulary matrix.

    Attributes:
        taps: empty: the hidden state after the final norm.
        vocab: number of logits.
        width: width `D` of the target.
        heads: largest number of drafts `K`.
        prefix: the augmenting block; its number of attention heads and kind of norm are those of the attention decoder.
        tokens_first: True (Clover-2): an attention decoder of its own adds the newest token before the augmenting
            block, and the output is a linear layer, which also reads the embedding of a drafted token, and a norm.
    """

    width: int = dataclasses.field(kw_only=True)
    heads: int = dataclasses.field(default=5, kw_only=True)
    prefix: DecoderConfig = dataclasses.field(kw_only=True)
    tokens_first: bool = False

    @property
    def own_head(self) -> bool:
        """False: the vocabulary matrix is the target's."""
        return False

    def module(self, rngs: nnx.Rngs) -> nnx.Module:
        module, D = self.with_prefix(rngs), self.width
        module.decoder = AttentionDecoder(self.prefix, rngs)
        if self.tokens_first:
            module.newest = AttentionDecoder(self.prefix, rngs)
            module.output, module.output_drafted = _identity(rngs, D, D), _identity(rngs, 2 * D, D)
            module.norm = Norm(self.prefix.norm, (D,), ("embed",))
        else:
            # Zeros, so that a fresh block changes nothing.
            module.blocks = nnx.Dict({str(i): Linear(rngs, (D, D), ("embed", None), True, 0.0)
                                      for i in range(self.heads)})
        return module

    def step(self, weights: Weights, tokens: Array, embed: Embed, state: Array, positions: Array, depth: Depth,
             attend: Attend | None) -> HeadStep:
        network, token = self.network(weights), embed(tokens).astype(state.dtype)
        verified = attend is not None
        if self.tokens_first and verified:
            state = network.newest(state, token)
        state, entries = self.through_prefix(network, state, positions, attend)
        if not self.tokens_first:
            state = network.decoder(state, token)
            one = lambda i, z: z + jax.nn.silu(network.blocks[str(i)](z))
            return HeadStep(hidden=at_depth(depth, self.heads, one, state), state=state, entries=entries)
        if verified:
            return HeadStep(hidden=network.norm(network.output(state)), state=state, entries=entries)
        state = network.decoder(state, token)
        hidden = network.norm(network.output_drafted(jnp.concatenate([state, token], -1)))
        return HeadStep(hidden=hidden, state=state, entries=entries)

    def logits(self, weights: Weights, hidden: Array, depth: Depth, head: Callable[[Array], Array]) -> Array:
        return head(hidden)


class AttentionDecoder(nnx.Module):
    """A module that adds drafted tokens to states `f[B, W, D]`: in each attention head it adds `cos(q, k) v`, with the
    query `q` from the norm of the state, and key `k` and value `v` from the token's embedding."""

    def __init__(self, c: DecoderConfig, rngs: nnx.Rngs):
        self.heads = c.heads
        project = lambda: Linear(rngs, (c.width, c.width), ("embed", None), True)
        self.norm, self.q, self.k, self.v = Norm(c.norm, (c.width,), ("embed",)), project(), project(), project()

    def __call__(self, state: Array, token: Array) -> Array:
        split = lambda x: x.reshape(*x.shape[:2], self.heads, -1)
        unit = lambda x: x / jnp.maximum(jnp.linalg.norm(x.astype(jnp.float32), axis=-1, keepdims=True), 1e-6)
        q, k, v = split(self.q(self.norm(state))), split(self.k(token)), split(self.v(token))
        cosine = (unit(q) * unit(k)).sum(-1, keepdims=True).astype(v.dtype)
        return state + (cosine * v).reshape(state.shape)


def _identity(rngs: nnx.Rngs, inputs: int, outputs: int) -> Linear:
    """Returns a linear layer with a bias that begins as the first `outputs` of its inputs."""
    made = Linear(rngs, (inputs, outputs), (None, "embed"), True)
    made.kernel = nnx.Param(jnp.eye(inputs, outputs), axes=(None, "embed"))
    return made


__all__ = ["AttentionDecoder", "CloverHead"]
