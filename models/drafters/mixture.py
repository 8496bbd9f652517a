"""Mixture of Attentions (Zimmer et al., 2024): a head that reads the keys and values of all the target's layers.

The keys and values of a verified token are one vector for each of the target's layers. A decoder layer lets these
attend to each other (layer self-attention); their mean, projected to the head's width, stands for the token. Drafts run
through a decoder layer over the tokens and one whose queries read those vectors (cross-attention). Some of the target's
last layers may run after it (target layer inference); then its final norm and vocabulary matrix follow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

import jax.numpy as jnp
from flax import nnx
from jax import Array

from decodax.cache import KVLayer
from decodax.cache.entry import KVEntry
from decodax.models.blocks.attention import Attend, Attention
from decodax.models.blocks.layer import DecoderLayer
from decodax.models.config import DecoderConfig
from decodax.models.drafters.cross_kv import CrossKVHead, rotations
from decodax.models.drafters.head import Weights
from decodax.models.kv_shapes import kv_layers
from decodax.models.layers import Linear, Norm, optional
from decodax.pallas_kernels.window_attention import window_attention


@dataclasses.dataclass(frozen=True)
class MixtureHead(CrossKVHead):
    """A head that reads the keys and values of all the target's layers, by layer self-attention and cross-attention.

    Attributes:
        layer: index of the target's last layer.
        config: shape and options of its two layers; that of keys and values is the target's.
        summary: shape and options of the layer self-attention; `width` is that of a token's keys and values in a layer.
        above: number of the target's last layers `N` that run on the head's output, which stands for the target's
            hidden state before them (target layer inference).
    """

    summary: DecoderConfig = dataclasses.field(kw_only=True)
    above: int = 0

    @property
    def kv_layers(self) -> tuple[KVLayer, ...]:
        return tuple(kv_layers(self.config, None)) * 2

    @property
    def keep(self) -> tuple[tuple[bool, bool], ...]:
        """For each layer of the target, whether its attention and its MLP run after the head: True for the last `above`
        layers. It is the argument `keep` of `LayeredModel.apply`."""
        return tuple((i > self.layer - self.above,) * 2 for i in range(self.layer + 1))

    def check_target(self, config: DecoderConfig) -> None:
        if config.attending != tuple(range(self.layer + 1)) or len(config.entries) != self.layer + 1:
            raise ValueError(f"draft: the head reads the keys and values of the layers 0 to {self.layer} of its "
                             f"target, which has keys and values of its own in the layers {config.attending}")
        for i in config.attending:
            self._check_shape(config, i)
        if not 0 <= self.above <= self.layer or (self.above and (config.embed_scale != 1 or config.shared or (
                config.shortcuts))):
            raise ValueError(f"draft: the head runs the last {self.above} layers of its target, which takes at most "
                             f"{self.layer}, no factor of embeddings, and layers with keys and values of their own")

    def module(self, rngs: nnx.Rngs) -> MixtureNetwork:     # type: ignore[override]
        return MixtureNetwork(self, rngs)

    def known(self, weights: Weights, entries: Mapping[int, KVEntry],
              positions: Array) -> tuple[Array, Array]:
        return self.network(weights).known([entries[i] for i in range(self.layer + 1)], positions)


class MixtureNetwork(nnx.Module):
    """The module with the weights of a `MixtureHead`: the layer self-attention, and the two decoder layers of drafts.
    """

    def __init__(self, h: MixtureHead, rngs: nnx.Rngs):
        c = h.config
        self.ropes = h.summary.layers[0].rope, c.layers[0].rope
        self.summary = DecoderLayer(h.summary, h.summary.layers[0], rngs)
        self.project = Linear(rngs, (h.summary.width, c.width), (None, "embed"), True)
        self.layers = nnx.Dict({str(i): DecoderLayer(c, c.layers[0], rngs) for i in range(2)})
        self.norm = Norm(c.norm, (c.width,), ("embed",)) if h.final_norm else None

    def known(self, entries: list[KVEntry], positions: Array) -> tuple[Array, Array]:
        """Returns the keys and values `f[B, W, G, d]` to which drafts attend by cross-attention, computed from those of
        all the target's layers, `entries`, for tokens at `positions`, `i32[B, W]`."""
        assert self.project.bias is not None
        dtype = self.project.bias[...].dtype       # the kernel may be packed
        x = jnp.stack([entry.both.reshape(*positions.shape, -1) for entry in entries], 2).astype(dtype)
        x = x.reshape(-1, *x.shape[2:])         # the layers of a token are a sequence
        at = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[:2])
        mask = jnp.ones((1, x.shape[1], x.shape[1]), bool)
        attend: Attend = lambda layer, q, k, v, **options: (window_attention(q, k, v, mask, at, **options), ())
        x = self.summary(0, x, rotations(self.ropes[0], at), attend)[0].mean(1)
        cross = self.layers["1"]
        x = optional(cross.attn_in, self.project(x).reshape(*positions.shape, -1))
        return cast(Attention, cross.attn).keys_values(x, rotations(self.ropes[1], positions))

    def keys_values(self, x: Array, positions: Array) -> tuple[Array, Array]:
        """Returns the keys and values `f[B, W, G, d]` of the head's self-attention for tokens with the embeddings `x`,
        `f[B, W, D]`, at `positions`, `i32[B, W]`."""
        layer = self.layers["0"]
        return cast(Attention, layer.attn).keys_values(optional(layer.attn_in, x), rotations(self.ropes[1], positions))

    def __call__(self, x: Array, positions: Array, own: Array, attend: Attend) -> tuple[Array, Any]:
        """Returns the hidden states `f[B, W, D]`, and the entry of the self-attention, whose positions are `own`."""
        tables = rotations(self.ropes[1], positions)
        x, entry = self.layers["0"](0, x, rotations(self.ropes[1], own), attend)
        x, _ = self.layers["1"](1, x, tables, lambda layer, q, k, v, **options: attend(layer, q, None, None, **options))
        return optional(self.norm, x), entry


__all__ = ["MixtureHead", "MixtureNetwork"]
