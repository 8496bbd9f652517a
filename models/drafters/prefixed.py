"""Stacked heads after decoder layers over the target's hidden states: the prefix layer of Hydra++ (Ankner et al.,
2024) and the augmenting block of Clover (Xiao et al., 2024).

The layers see all hidden states up to the newest one and run once for each verified token. Drafted tokens have no
hidden states of the target, so they have no keys and values, and the layers do not run for them.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array

from decodax.cache import KVLayer
from decodax.models.blocks.attention import Attend
from decodax.models.blocks.layer import DecoderLayer
from decodax.models.blocks.options import Layer
from decodax.models.config import DecoderConfig
from decodax.models.drafters.stack import StackedHead
from decodax.models.kv_shapes import kv_layers
from decodax.models.layers import Norm


class PrefixedHead(StackedHead):
    """Base class of stacked heads that may have decoder layers between the target's hidden state and the heads. The
    layers read and replace the first `width` channels of a state; its other channels pass unchanged.

    Attributes:
        prefix: configuration of the layers, of the target's width; None: there are none.
    """

    prefix: DecoderConfig | None

    def __post_init__(self) -> None:
        if self.prefix is not None and self.prefix.width != self.width:
            raise ValueError(f"prefix: got layers of width {self.prefix.width}, takes the target's, {self.width}")

    @property
    def drafts_attend(self) -> bool:
        return False

    @property
    def kv_layers(self) -> tuple[KVLayer, ...]:
        return () if self.prefix is None else tuple(kv_layers(self.prefix, None))

    def with_prefix(self, rngs: nnx.Rngs) -> Any:
        """Returns a module whose attribute `prefix` has the decoder layers, or None without any, for a derived class to
        add its own parts."""
        module: Any = nnx.Module()
        module.prefix = None if self.prefix is None else PrefixLayers(self.prefix, rngs)
        return module

    def through_prefix(self, network: Any, state: Array, positions: Array,
                       attend: Attend | None) -> tuple[Array, tuple[Any, ...]]:
        """Returns the states `f[B, W, d]` after the decoder layers of `network.prefix`, and what each layer adds to the
        head's cache. Without such layers, or with `attend=None`, as for drafted tokens, returns `state` and ()."""
        if network.prefix is None or attend is None:
            return state, ()
        first, entries = network.prefix(state[..., :self.width], positions, attend)
        return jnp.concatenate([first, state[..., self.width:]], -1), entries


class PrefixLayers(nnx.Module):
    """Decoder layers and a norm over hidden states `f[B, W, D]`."""

    def __init__(self, c: DecoderConfig, rngs: nnx.Rngs):
        self.c = c
        self.layers = nnx.Dict({str(i): DecoderLayer(c, layer, rngs) for i, layer in enumerate(c.layers)})
        self.norm = Norm(c.norm, (c.width,), ("embed",))

    def __call__(self, x: Array, positions: Array, attend: Attend) -> tuple[Array, tuple[Any, ...]]:
        tables, entries = rope_tables(self.c, positions), []
        for i in range(len(self.c.layers)):
            x, entry = self.layers[str(i)](i, x, tables, attend)
            entries.append(entry)
        return self.norm(x), tuple(entries)


def rope_tables(c: DecoderConfig, positions: Array) -> dict[Any, Any]:
    """Returns the table argument of `DecoderLayer` for positions `i32[B, W]`: cosine and sine by rotary embedding, the
    positions themselves under None, and None under "inputs"."""
    return {layer.rope: layer.rope.table(positions) for layer in c.layers if layer.rope is not None} | {
        None: positions, "inputs": None}


def plain_layers(c: DecoderConfig, vocab: int, count: int = 1) -> DecoderConfig:
    """Returns a configuration of `count` layers like the last of the target `c` that has softmax attention without
    latents: same widths, rope and norms, but no experts, recurrent blocks or shared keys. `vocab` is its number of
    logits."""
    last = next((layer for layer in reversed(c.layers) if layer.recurrent is None and layer.latent is None), None)
    rope = last.rope if last is not None else None
    layer = Layer(rope=rope, scale=last.scale if last is not None else None)
    return DecoderConfig(vocab=vocab, width=c.width, heads=c.heads, kv_heads=c.kv_heads, head_dim=c.head_dim, mlp=c.mlp,
                         layers=(layer,) * count, context=c.context, norm=c.norm, qk_norm=c.qk_norm,
                         activation=c.activation, gated=c.gated, qkv_bias=c.qkv_bias)


__all__ = ["PrefixLayers", "PrefixedHead", "plain_layers", "rope_tables"]
