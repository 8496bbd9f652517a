"""The parts that HAMburger adds to a model: a merge embedder before it, and a micro-step decoder after it ("HAMburger:
Accelerating LLM Inference via Token Smashing", Liu and Zhu, 2025).

The model reads a group of up to `steps` tokens as one position, and the decoder writes the next group from the hidden
states of that position alone.
"""

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
from decodax.models.drafters.prefixed import plain_layers, rope_tables
from decodax.models.kv_shapes import kv_layers
from decodax.models.layers import Linear, weight

LAYERS, MERGE_WIDTH = 4, 32
"""Layers of the decoder, and channels of a head of the merge embedder (64 heads of 2,048 channels), as the authors
have them."""


@dataclasses.dataclass(frozen=True)
class HamburgerHead(ModuleHead):
    """HAMburger's merge embedder and micro-step decoder (Liu and Zhu, 2025).

    The vector of a group of `n` tokens with embeddings `e_1 ... e_n` is `m + W a`, where `m` is their mean and `a`
    cross-attention from `m` to the embeddings, each with a learned vector for its place in the group. That of a single
    token is its embedding.

    The decoder reads a sequence of its own for each position: the hidden states of the model there, one for each tap
    and that after the final norm, then the embeddings of the group's tokens as they are written. The first token is
    predicted from the final hidden state itself, each further one from the decoder's output at the token before it, all
    by the model's vocabulary matrix. A network of three linear layers gives the logit that the group ends.

    Attributes:
        taps: layers of the model whose outputs are read, counted from 0; the state after the final norm follows them.
        vocab: number of logits of the model.
        config: shape and options of the decoder's layers, of the model's width.
        steps: largest number of tokens of a group.
        merge_heads: number of attention heads of the merge embedder, a divisor of the width.

    Raises:
        ValueError: no steps, an odd width, or one that `merge_heads` does not divide.
    """

    config: DecoderConfig = dataclasses.field(kw_only=True)
    steps: int = dataclasses.field(default=4, kw_only=True)
    merge_heads: int = dataclasses.field(kw_only=True)

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps: got {self.steps}, takes at least 1")
        if self.config.width % 2 or self.merge_heads < 1 or self.config.width % self.merge_heads:
            raise ValueError(f"merge_heads: got {self.merge_heads} for a width of {self.config.width}, take a divisor "
                             "of an even width")

    @classmethod
    def of(cls, config: DecoderConfig, steps: int = 4) -> HamburgerHead:
        """Returns the head for a model. It reads the outputs after each quarter of the layers, as the authors do."""
        depth = len(config.layers)
        taps = tuple(max(depth * i // LAYERS - 1, 0) for i in range(1, LAYERS))
        width = next(w for w in range(min(MERGE_WIDTH, config.width), 0, -1) if config.width % w == 0)
        return cls(taps, config.vocab, config=plain_layers(config, config.vocab, LAYERS), steps=steps,
                   merge_heads=config.width // width)

    @property
    def own_head(self) -> bool:
        """False: the vocabulary matrix is the model's."""
        return False

    @property
    def target_width(self) -> int:
        return self.config.width

    @property
    def state_width(self) -> int:
        return self.config.width

    @property
    def longest(self) -> int:
        return self.steps

    @property
    def read(self) -> int:
        """Number `F` of hidden states of the model that the decoder reads at a position: one for each tap, and the
        final one."""
        return len(self.taps) + 1

    @property
    def kv_layers(self) -> tuple[KVLayer, ...]:
        return tuple(kv_layers(self.config, None))

    def module(self, rngs: nnx.Rngs) -> nnx.Module:
        module: Any = nnx.Module()
        D = self.config.width
        # of the standard deviation of PyTorch's linear layers, whose uniform values the authors begin with
        into = lambda inputs, outputs: Linear(rngs, (inputs, outputs), (None, None), True, (3 * inputs) ** -0.5)
        module.merge = nnx.Dict({"q": into(D, D), "k": into(D + D // 2, D), "v": into(D + D // 2, D), "o": into(D, D)})
        module.places = weight(rngs, (self.steps, D // 2), (None, None), (2 / (self.steps + D // 2)) ** 0.5)
        module.layers = nnx.Dict({str(i): DecoderLayer(self.config, layer, rngs)
                                  for i, layer in enumerate(self.config.layers)})
        module.stop = nnx.Dict({"0": into(D, D), "1": into(D, D), "2": into(D, 1)})
        return module

    def features(self, hidden: Array, layers: tuple[Array, ...] | None) -> Array:
        """Returns the hidden states that the decoder reads, `f[B, W, F, D]`: the outputs of the layers in `taps`, then
        the state after the final norm. `hidden` is that state, `f[B, W, D]`, and `layers` the output of each layer."""
        tapped = super().features(hidden, layers) if self.taps else hidden[..., :0]
        return jnp.concatenate([tapped, hidden], -1).reshape(*hidden.shape[:2], self.read, -1)

    def merge(self, weights: Weights, embedded: Array, count: Array) -> Array:
        """Returns the vector of each group of tokens, `f[..., D]`, by the formula in `HamburgerHead`.

        Args:
            weights: the weights of the head.
            embedded: `f[..., steps, D]`, the embeddings of a group's tokens; those after the first `count` are not
                read.
            count: `i32[...]`, number of tokens of each group, 1 to `steps`.
        """
        network, H = self.network(weights), self.merge_heads
        inside = jnp.arange(self.steps) < count[..., None]
        mean = jnp.where(inside[..., None], embedded, 0).sum(-2) / count[..., None].astype(embedded.dtype)
        places = jnp.broadcast_to(network.places[...], (*embedded.shape[:-1], self.config.width // 2))
        placed = jnp.concatenate([embedded, places.astype(embedded.dtype)], -1)
        heads = lambda x: x.reshape(*x.shape[:-1], H, -1)
        q, k, v = heads(network.merge["q"](mean)), heads(network.merge["k"](placed)), heads(network.merge["v"](placed))
        scores = jnp.einsum("...hd,...shd->...hs", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5
        shares = jax.nn.softmax(jnp.where(inside[..., None, :], scores, -jnp.inf)).astype(v.dtype)
        read = jnp.einsum("...hs,...shd->...hd", shares, v).reshape(mean.shape)
        return jnp.where(count[..., None] == 1, embedded[..., 0, :], mean + network.merge["o"](read))

    def stop(self, weights: Weights, hidden: Array) -> Array:
        """Returns the logit, `f32[...]`, of the probability that a group ends with the token that is predicted from
        each of the hidden states `f[..., D]`."""
        network = self.network(weights).stop
        inside = jax.nn.silu(network["1"](jax.nn.silu(network["0"](hidden))))
        return network["2"](inside)[..., 0].astype(jnp.float32)

    def enter(self, weights: Weights, features: Array) -> Array:
        return features

    def step(self, weights: Weights, tokens: Array, embed: Embed, state: Array, positions: Array, depth: Depth,
             attend: Attend | None) -> HeadStep:
        """Runs the decoder's layers on `state`, `f[B, W, D]`: the model's hidden states and then the embeddings of a
        group's tokens. `positions` are their places in this short sequence; `tokens`, `embed` and `depth` are not used.
        """
        assert attend is not None
        network, tables, x, entries = self.network(weights), rope_tables(self.config, positions), state, []
        for i in range(len(self.config.layers)):
            x, entry = network.layers[str(i)](i, x, tables, attend)
            entries.append(entry)
        return HeadStep(hidden=x, state=x, entries=tuple(entries))

    def logits(self, weights: Weights, hidden: Array, depth: Depth, head: Callable[[Array], Array]) -> Array:
        return head(hidden)


__all__ = ["HamburgerHead"]
