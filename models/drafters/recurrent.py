"""Recurrent heads: decoder layers that read a feature and the next token's embedding, and feed their output back.

EAGLE (Li et al., 2024), EAGLE-3 (Li et al., 2025), HASS (Zhang et al., 2024) and the layers for multi-token prediction
of DeepSeek-V3 and V4, GLM-4.5, Qwen3-Next, MiMo, ERNIE-4.5 and others are settings of one network. They differ in how
the two inputs are fused, which norms there are, and whether the state that is fed back has passed the final norm.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from decodax.cache import KVLayer, PerLayer
from decodax.core.cache import Cache
from decodax.models.blocks.attention import Attend, Attention
from decodax.models.blocks.layer import DecoderLayer
from decodax.models.config import DecoderConfig
from decodax.models.drafters.head import Depth, Embed, HeadStep, ModuleHead, Weights
from decodax.models.drafters.prefixed import rope_tables
from decodax.models.kv_shapes import kv_layers, numbered, places
from decodax.models.layers import STD, Linear, Norm, optional, weight
from decodax.models.packed import embedded
from decodax.models.recurrent.blocks import recurrent_states
from decodax.models.residual.hyper_connections import HyperEnds
from decodax.models.residual.options import HyperConnections

Fuse = Literal["fc", "attention", "norms"]


@dataclasses.dataclass(frozen=True)
class RecurrentHead(ModuleHead):
    """A drafter head of decoder layers, as in EAGLE: it predicts from the target's feature and the next token's
    embedding, and its output takes the place of the feature for the token after that.

    Attributes:
        config: shape and options of its layers; `vocab` is its number of logits and `width` the width `d` of its state.
        embedding_width: width `D` of the token embeddings; None: `config.width`.
        feature_width: width of one of the target's layers; None: `config.width`.
        fuse: "fc": a linear layer over embedding and state (EAGLE). "attention": queries, keys and values of the first
            layer are computed from both, each after a norm, and the state alone is the residual stream (EAGLE-3).
            "norms": a linear layer over both, each after a norm (multi-token prediction). With several residual streams
            (`config.streams`, DeepSeek V4) it is one layer for the embedding and one for each stream of the state,
            whose results are added; the state has all streams, before they are joined.
        hidden_first: True if the linear layer reads the state before the embedding (MiMo).
        bias: True adds a bias to that linear layer.
        tap_norm: norm of the features before they are projected to a state: of all together, of each layer's, or None.
        project: True projects features to states by a linear layer (`taps`); False takes them as they are.
        first_norm: False leaves out the attention norm of the first layer (EAGLE).
        final_norm: False leaves out the final norm (EAGLE, ERNIE-4.5).
        norm_residual: True: with "attention", the residual stream is the state after its norm.
        feeds_back: the state that is fed back, before or after the final norm.
        own_head: True if the head has a vocabulary matrix.
        own_table: True if the head has an embedding table.
        table_size: number of rows of that table; None: `vocab`.
        drop_first: True replaces the embedding by zeros at position 0 (MiMo).
    """

    config: DecoderConfig = dataclasses.field(kw_only=True)
    embedding_width: int | None = None
    feature_width: int | None = None
    fuse: Fuse = "attention"
    hidden_first: bool = False
    bias: bool = False
    tap_norm: Literal["all", "each"] | None = None
    project: bool = False
    first_norm: bool = True
    final_norm: bool = True
    norm_residual: bool = False
    feeds_back: Literal["before norm", "after norm"] = "after norm"
    own_head: bool = False
    own_table: bool = False
    table_size: int | None = None
    drop_first: bool = False

    def __post_init__(self) -> None:
        if self.vocab != self.config.vocab:
            raise ValueError(f"vocab: got {self.vocab}, takes that of config, {self.config.vocab}")
        if self.streams > 1:
            if self.fuse != "norms" or self.feeds_back != "after norm" or self.hidden_first or self.project:
                raise ValueError(f"config: got several residual streams with fuse = {self.fuse!r}, takes 'norms', a "
                                 "linear layer for each of embedding and state, and features as they are")
            return
        wide = max(len(self.taps), 1) * (self.feature_width or self.config.width)
        if not self.project and wide != self.config.width:
            raise ValueError(f"project: got False for features of width {wide}, takes True if the width of the state, "
                             f"{self.config.width}, is another one")

    @property
    def streams(self) -> int:
        """Number of residual streams of a layer."""
        return self.config.streams.count if isinstance(self.config.streams, HyperConnections) else 1

    @property
    def target_width(self) -> int:
        return self.feature_width or self.config.width

    @property
    def tap_width(self) -> int:
        return self.target_width * self.streams

    @property
    def state_width(self) -> int:
        return self.config.width * self.streams

    @property
    def kv_layers(self) -> tuple[KVLayer, ...]:
        return tuple(kv_layers(self.config, None))

    def check_target(self, config: DecoderConfig) -> None:
        have = config.streams.count if isinstance(config.streams, HyperConnections) else 1
        if self.streams > 1 and self.streams != have:
            raise ValueError(f"draft: got a head that reads {self.streams} residual streams, takes one for those of "
                             f"the target, {have}")

    def init_cache(self, batch: int, capacity: int, dtype: jax.typing.DTypeLike) -> Cache | None:
        c, base = self.config, super().init_cache(batch, capacity, dtype)
        if not c.recurrent:
            return base
        return PerLayer(base=base, linear=recurrent_states(c, batch, capacity, jnp.dtype(dtype), None),
                        where=places(c))

    def module(self, rngs: nnx.Rngs) -> RecurrentHeadNetwork:
        return RecurrentHeadNetwork(self, rngs)

    def enter(self, weights: Weights, features: Array) -> Array:
        return self.network(weights).enter(features)

    def step(self, weights: Weights, tokens: Array, embed: Embed, state: Array, positions: Array, depth: Depth,
             attend: Attend | None) -> HeadStep:
        assert attend is not None
        network = self.network(weights)
        own = embed(tokens).astype(state.dtype) if network.embed is None else network.embedded(tokens, state.dtype)
        return network(own, state, positions, attend)

    def logits(self, weights: Weights, hidden: Array, depth: Depth, head: Callable[[Array], Array]) -> Array:
        return self.network(weights).logits(hidden) if self.own_head else head(hidden)


class RecurrentHeadNetwork(nnx.Module):
    """The module with the weights of a `RecurrentHead`. `d` is the width of its hidden states, `config.width`."""

    def __init__(self, h: RecurrentHead, rngs: nnx.Rngs):
        c = h.config
        self.h, taps, feature = h, max(len(h.taps), 1), h.feature_width or c.width
        norm = lambda width: Norm(c.norm, (width,), ("embed",))
        self.tap_norms = nnx.Dict({str(i): norm(feature) for i in range(taps)}) if h.tap_norm == "each" else None
        self.tap_norm = norm(taps * feature) if h.tap_norm == "all" else None
        self.taps = Linear(rngs, (taps * feature, c.width), (None, "embed"), False) if h.project else None
        wide = h.embedding_width or c.width
        self.embed_norm = None if h.fuse == "fc" else norm(wide)
        self.state_norm = None if h.fuse == "fc" else norm(c.width)
        into = lambda width: Linear(rngs, (width, c.width), (None, "embed"), h.bias)
        several = h.streams > 1
        self.fc = None if h.fuse == "attention" or several else into(wide + c.width)
        self.embed_fc = into(wide) if several else None
        self.state_fc = into(c.width) if several else None
        self.streams = HyperEnds(c, rngs) if several else None
        self.layers = nnx.Dict({str(i): DecoderLayer(c, layer, rngs) for i, layer in enumerate(c.layers)})
        first = self.layers["0"]
        if h.fuse == "attention":
            # Attention reads embedding and state side by side and writes to the state.
            first.attn = Attention(dataclasses.replace(c, width=wide + c.width), c.layers[0], rngs)
            first.attn.o = Linear(rngs, (first.attn.o.kernel[...].shape[0], c.width), ("heads", "embed"), c.out_bias,
                                  STD / (2 * len(c.layers)) ** 0.5)
        if h.fuse == "attention" or not h.first_norm:
            first.attn_in = None
        self.norm = norm(c.width) if h.final_norm else None
        self.lm_head = Linear(rngs, (c.width, c.vocab), ("embed", "vocab"), c.head_bias) if h.own_head else None
        self.embed = weight(rngs, (h.table_size or c.vocab, wide), ("vocab", "embed")) if h.own_table else None

    def embedded(self, tokens: Array, dtype: Any) -> Array:
        """Returns the embeddings `f[B, W, D]` of tokens `i32[B, W]` from the head's own table, in `dtype`."""
        assert self.embed is not None
        return embedded(self.embed.get_value(), tokens, dtype)

    def enter(self, features: Array) -> Array:
        """Projects the target's features `f[B, W, F]` to the head's states `f[B, W, d]`, with the norms of `tap_norm`.
        """
        if self.tap_norms is not None:
            parts = jnp.split(features, len(self.tap_norms), -1)
            features = jnp.concatenate([self.tap_norms[str(i)](part) for i, part in enumerate(parts)], -1)
        features = optional(self.tap_norm, features)
        return features if self.taps is None else self.taps(features)

    def __call__(self, tokens: Array, state: Array, positions: Array, attend: Attend) -> HeadStep:
        h, c = self.h, self.h.config
        if h.drop_first:
            tokens = jnp.where(positions[..., None] == 0, 0, tokens)
        tables = rope_tables(c, positions)
        state = state if self.streams is None else state.reshape(*state.shape[:2], h.streams, c.width)
        a, b, entries = optional(self.embed_norm, tokens), optional(self.state_norm, state), list[Any]()
        if self.embed_fc is not None and self.state_fc is not None:
            both, x = a, self.embed_fc(a)[:, :, None] + self.state_fc(b)
        else:
            both = jnp.concatenate([b, a] if h.hidden_first else [a, b], -1)
            x = state if self.fc is None else self.fc(both)
        attend = attend if not c.recurrent else numbered(c, attend)
        for i in range(len(c.layers)):
            layer: Any = self.layers[str(i)]
            if i == 0 and h.fuse == "attention":
                branch, entry = layer.attn(0, both, tables, attend)
                x = (b if h.norm_residual else state) + branch
                x = x + layer.mlp_half(x)
            else:
                x, entry = layer(i, x, tables, attend)
            entries += entry if len(c.layers[i].parts) > 1 else [entry]
        if self.streams is not None:
            return HeadStep(hidden=optional(self.norm, self.streams.join(x)), state=x.reshape(*x.shape[:2], -1),
                            entries=tuple(entries))
        hidden = optional(self.norm, x)
        return HeadStep(hidden=hidden, state=hidden if h.feeds_back == "after norm" else x, entries=tuple(entries))

    def logits(self, hidden: Array) -> Array:
        """Returns logits `f32[..., vocab]` of hidden states `f[..., d]`, by the head's own vocabulary matrix."""
        assert self.lm_head is not None
        return self.lm_head(hidden).astype(jnp.float32)
