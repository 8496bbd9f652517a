"""Heads that read the target's keys and values: GliDe (Du et al., 2024) and LongSpec (Yang et al., 2025).

One decoder layer has self-attention, then attention to the keys and values of one of the target's layers, which are in
the target's cache already, then an MLP. It reads the embeddings of tokens and nothing else of the target, so its own
keys and values depend on the tokens alone. The target's keys are rotated; the head has queries for them, rotated at
their positions, and an output projection.

Letters: G key/value heads of a layer and d their width, which are those of the target.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, cast

from flax import nnx
from jax import Array

from decodax.cache import KVLayer, Latest, cache_of, dense
from decodax.cache.entry import KVEntry
from decodax.core.cache import Cache
from decodax.models.blocks.attention import Attend, Attention
from decodax.models.blocks.layer import DecoderLayer
from decodax.models.config import DecoderConfig
from decodax.models.drafters.head import Depth, Embed, HeadStep, ModuleHead, Weights
from decodax.models.kv_shapes import kv_layers
from decodax.models.layers import Norm, optional
from decodax.models.rope import Dynamic, LongRope, Rope


@dataclasses.dataclass(frozen=True)
class CrossKVHead(ModuleHead):
    """A drafter head of one decoder layer with self-attention and attention to the keys and values of a layer of the
    target (GliDe, LongSpec).

    Attributes:
        taps: empty: it does not read the target's hidden states.
        vocab: number of logits.
        config: shape and options of its one layer; `vocab` is its number of logits. A sliding window is that of the
            self-attention.
        layer: index of the target's layer whose keys and values are read.
        cross_norm: True: a norm precedes the attention to the target (LongSpec).
        final_norm: True: a norm precedes the target's vocabulary matrix (GliDe).
    """

    config: DecoderConfig = dataclasses.field(kw_only=True)
    layer: int = dataclasses.field(kw_only=True)
    cross_norm: bool = False
    final_norm: bool = True

    def __post_init__(self) -> None:
        c = self.config
        if self.vocab != c.vocab:
            raise ValueError(f"vocab: got {self.vocab}, takes that of config, {c.vocab}")
        if len(c.layers) != 1 or c.recurrent or c.latent or c.summing or c.streams is not None or c.block != "pre" or (
                c.layers[0].mixture is not None):
            raise ValueError("config: takes one layer with softmax attention and a dense MLP, each after a norm")
        rope = c.layers[0].rope
        if rope is not None and (rope.axes or rope.chunks or isinstance(rope.scaling, (Dynamic, LongRope))):
            raise ValueError("config: takes a rope whose rotations depend on the position alone, not on the text's "
                             "length or on images")

    @property
    def own_head(self) -> bool:
        """False: the vocabulary matrix is the target's."""
        return False

    @property
    def target_width(self) -> int:
        return self.config.width

    @property
    def state_width(self) -> int:
        return self.config.width

    @property
    def kv_layers(self) -> tuple[KVLayer, ...]:
        return tuple(kv_layers(self.config, None))

    def init_cache(self, batch: int, capacity: int, dtype: Any) -> Cache:
        """Returns an empty cache for the self-attention; with a sliding window its size does not grow with the text."""
        window = self.config.layers[0].sliding
        return cache_of(dense if window is None else Latest(window), self.kv_layers, batch, capacity, dtype, None)

    def check_target(self, config: DecoderConfig) -> None:
        """Checks that the head can read the keys and values of a target.

        Raises:
            ValueError: its layer has none of its own, or others than the head reads.
        """
        if self.layer not in config.attending:
            raise ValueError(f"draft: the head reads the keys and values of layer {self.layer} of its target, which "
                             f"has keys and values of its own in the layers {config.attending}")
        self._check_shape(config, self.layer)
        theirs, own = config.layers[self.layer].rope, self.config.layers[0].rope
        if theirs != own:
            raise ValueError(f"draft: the head rotates its queries by {own}, and the keys of layer {self.layer} of the "
                             f"target are rotated by {theirs}")

    def _check_shape(self, config: DecoderConfig, layer: int) -> None:
        theirs, own = kv_layers(config, None)[config.attending.index(layer)], self.kv_layers[0]
        if theirs.heads != own.heads or theirs.width != own.width or theirs.value_width not in (None, own.width):
            raise ValueError(f"draft: the head reads {own.heads} keys and values of width {own.width} for a token, and "
                             f"layer {layer} of the target has {theirs.heads} of width {theirs.width}")

    def module(self, rngs: nnx.Rngs) -> CrossKVNetwork:
        return CrossKVNetwork(self, rngs)

    def enter(self, weights: Weights, features: Array) -> Array:
        return features

    def known(self, weights: Weights, entries: Mapping[int, KVEntry],
              positions: Array) -> tuple[Array, Array]:
        """Returns the keys and values `f[B, W, G, d]` to which drafts attend by cross-attention, for tokens at
        positions `i32[B, W]`. Here they are those of the target's layer `layer`; `entries` has those of its layers by
        index."""
        return entries[self.layer].keys, entries[self.layer].values

    def keys_values(self, weights: Weights, embedded: Array, positions: Array) -> tuple[Array, Array]:
        """Returns the keys and values `f[B, W, G, d]` of the self-attention for tokens with the embeddings `f[B, W, D]`
        at positions `i32[B, W]`."""
        return self.network(weights).keys_values(embedded, positions)

    def step(self, weights: Weights, tokens: Array, embed: Embed, state: Array, positions: Array, depth: Depth,
             attend: Attend | None, own_positions: Array | None = None) -> HeadStep:
        """Runs the head on tokens at positions `i32[B, W]`; the hidden state of a token predicts the one after it.

        `state` gives only the dtype; `depth` is not used. `attend` is called for layer 0, the self-attention, and for
        layer 1, the target's keys and values, with None in place of keys and values. `own_positions`, `i32[B, W]`, are
        those of the self-attention, if they are others.
        """
        assert attend is not None
        own = positions if own_positions is None else own_positions
        hidden, entry = self.network(weights)(embed(tokens).astype(state.dtype), positions, own, attend)
        return HeadStep(hidden=hidden, state=hidden, entries=(entry,))

    def logits(self, weights: Weights, hidden: Array, depth: Depth, head: Callable[[Array], Array]) -> Array:
        return head(hidden)


class CrossKVNetwork(nnx.Module):
    """The module with the weights of a `CrossKVHead`: a decoder layer, and cross-attention to the target's keys and
    values."""

    def __init__(self, h: CrossKVHead, rngs: nnx.Rngs):
        c = h.config
        norm = lambda: Norm(c.norm, (c.width,), ("embed",))
        self.rope = c.layers[0].rope
        self.layers = nnx.Dict({"0": DecoderLayer(c, c.layers[0], rngs)})
        # A layer that reads the keys of another one has projections of queries and outputs alone.
        self.cross = Attention(c, dataclasses.replace(c.layers[0], reads=0, sliding=None), rngs)
        self.cross_norm = norm() if h.cross_norm else None
        self.norm = norm() if h.final_norm else None

    def keys_values(self, x: Array, positions: Array) -> tuple[Array, Array]:
        """Returns the keys and values `f[B, W, G, d]` of the head's self-attention for tokens with the embeddings `x`,
        `f[B, W, D]`, at `positions`, `i32[B, W]`."""
        layer = self.layers["0"]
        return cast(Attention, layer.attn).keys_values(optional(layer.attn_in, x), rotations(self.rope, positions))

    def __call__(self, x: Array, positions: Array, own: Array, attend: Attend) -> tuple[Array, Any]:
        """Returns the hidden states `f[B, W, D]`, and the entry of the self-attention, whose positions are `own`."""
        layer, tables = self.layers["0"], rotations(self.rope, positions)
        branch, entry = layer.attention_half(0, x, rotations(self.rope, own), attend)
        x = x + branch
        x = x + self.cross(1, optional(self.cross_norm, x), tables, attend)[0]
        return optional(self.norm, x + layer.mlp_half(x)), entry


def rotations(rope: Rope | None, positions: Array) -> dict[Any, Any]:
    """Returns the table argument of a `DecoderLayer` for positions `i32[B, W]`: cosine and sine of `rope` (if not
    None), the positions themselves under None, and None under "inputs"."""
    return {None: positions, "inputs": None} | ({} if rope is None else {rope: rope.table(positions)})


__all__ = ["CrossKVHead", "CrossKVNetwork", "rotations"]
