"""Gemma 4's assistants (Google, 2026): a small decoder all of whose layers attend to the target's keys and values.

The embedding of a token and the hidden state of the position before it, both of the target, become a state of the
assistant's width. Its layers have queries alone: each attends to the keys and values of the target's last layer of its
own kind, with a sliding window or without. So the assistant has no cache, and all drafts of a round are computed at the
position of the newest token. The result, widened to the target's width, takes the place of the next hidden state.

The assistants of E2B and E4B score few tokens of a large vocabulary: tokens lie in clusters of one size, a centroid
stands for each, and only tokens of the clusters with the largest scores have logits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from decodax.models.blocks.attention import Attend
from decodax.models.blocks.layer import DecoderLayer
from decodax.models.config import DecoderConfig
from decodax.models.drafters.cross_kv import rotations
from decodax.models.drafters.head import Depth, Embed, HeadStep, ModuleHead, Weights
from decodax.models.layers import Linear, Norm, weight


@dataclasses.dataclass(frozen=True)
class AssistantHead(ModuleHead):
    """A decoder whose layers attend to the target's keys and values. Its logits are ordered by clusters if it has them.

    Attributes:
        config: shape and options of its layers, as if they had keys and values of their own; `vocab` is its number of
            logits and `width` the width `d` of its states.
        backbone: the target's width `D`.
        centroids: number of clusters of tokens, a divisor of `vocab`; 0: all tokens have logits.
        chosen: number of clusters whose tokens have logits; those of others are -inf.
    """

    config: DecoderConfig = dataclasses.field(kw_only=True)
    backbone: int = dataclasses.field(kw_only=True)
    centroids: int = 0
    chosen: int = 32

    def __post_init__(self) -> None:
        if self.vocab != self.config.vocab:
            raise ValueError(f"vocab: got {self.vocab}, takes that of config, {self.config.vocab}")
        if self.centroids and (self.vocab % self.centroids or not 1 <= self.chosen <= self.centroids):
            raise ValueError(f"centroids: got {self.centroids} with chosen {self.chosen}, takes a divisor of vocab = "
                             f"{self.vocab}, and no more than that chosen")

    @property
    def own_head(self) -> bool:
        return True

    @property
    def target_width(self) -> int:
        return self.backbone

    @property
    def state_width(self) -> int:
        return self.backbone

    @property
    def drafts_attend(self) -> bool:
        return False

    def reads(self, config: DecoderConfig) -> tuple[int, ...]:
        """Returns for each layer the index of the target's layer whose keys and values it attends to; `config` is the
        target's.

        Raises:
            ValueError: the target has no layer of its kind, or one with another shape or rotation.
        """
        found = []
        for i, own in enumerate(self.config.layers):
            same = [j for j in config.attending if (config.layers[j].sliding is None) == (own.sliding is None)]
            if not same:
                raise ValueError(f"draft: layer {i} attends to keys and values of a layer "
                                 f"{'without' if own.sliding is None else 'with'} a sliding window, and the target has "
                                 "no such layer")
            theirs = config.layers[same[-1]]
            if config.kv_shape(theirs) != self.config.kv_shape(own) or theirs.rope != own.rope:
                raise ValueError(f"draft: layer {i} reads keys {self.config.kv_shape(own)} (number of heads, width) "
                                 f"rotated by {own.rope}, and those of layer {same[-1]} of the target are "
                                 f"{config.kv_shape(theirs)} rotated by {theirs.rope}")
            found.append(same[-1])
        return tuple(found)

    def check_target(self, config: DecoderConfig) -> None:
        self.reads(config)

    def module(self, rngs: nnx.Rngs) -> AssistantNetwork:
        return AssistantNetwork(self, rngs)

    def enter(self, weights: Weights, features: Array) -> Array:
        return features

    def step(self, weights: Weights, tokens: Array, embed: Embed, state: Array, positions: Array, depth: Depth,
             attend: Attend | None) -> HeadStep:
        """Runs the head on tokens `i32[B, W]` and states `f[B, W, D]` at `positions`, that of the newest token for all.
        Calls `attend` with each layer's index and None as keys and values, since those are the target's; `depth` is not
        used."""
        assert attend is not None
        # The factor is rounded to the weights' dtype, as in the target's own forward pass.
        embedded = embed(tokens).astype(state.dtype) * jnp.asarray(self.backbone ** 0.5, state.dtype)
        return self.network(weights)(embedded, state, positions, attend)

    def logits(self, weights: Weights, hidden: Array, depth: Depth, head: Callable[[Array], Array]) -> Array:
        return self.network(weights).logits(hidden)


class AssistantNetwork(nnx.Module):
    """The module with the weights of an `AssistantHead`: projections from and to the target's width, and decoder layers
    that attend to the target's keys and values."""

    def __init__(self, h: AssistantHead, rngs: nnx.Rngs):
        self.h, c = h, h.config
        self.narrow = Linear(rngs, (2 * h.backbone, c.width), (None, "embed"), False)
        # A layer that reads the keys of another one has projections of queries and outputs alone.
        self.layers = nnx.Dict({str(i): DecoderLayer(c, dataclasses.replace(layer, reads=0, keys_as_values=False), rngs)
                                for i, layer in enumerate(c.layers)})
        self.norm = Norm(c.norm, (c.width,), ("embed",))
        self.widen = Linear(rngs, (c.width, h.backbone), ("embed", None), False)
        self.centroids = Linear(rngs, (c.width, h.centroids), ("embed", None), False) if h.centroids else None
        size = (h.centroids, c.vocab // h.centroids) if h.centroids else (c.vocab,)
        self.table = weight(rngs, (*size, c.width), (*(None for _ in size), "embed"))

    def __call__(self, embedded: Array, state: Array, positions: Array, attend: Attend) -> HeadStep:
        tables = {None: positions, "inputs": None, "canvas": None}
        for rope in {layer.rope for layer in self.h.config.layers}:
            tables |= rotations(rope, positions)
        x = self.narrow(jnp.concatenate([embedded, state], -1))
        for i in range(len(self.h.config.layers)):
            x, _ = self.layers[str(i)](i, x, tables, attend)
        hidden = self.norm(x)
        return HeadStep(hidden=hidden, state=self.widen(hidden))

    def logits(self, hidden: Array) -> Array:
        """Returns logits `f32[B, W, vocab]` of hidden states `f[B, W, d]`."""
        table = self.table[...]
        if self.centroids is None:
            return jnp.einsum("bwd,vd->bwv", hidden, table).astype(jnp.float32)
        _, best = jax.lax.top_k(self.centroids(hidden), self.h.chosen)
        found = jnp.einsum("bwd,bwknd->bwkn", hidden, table[best]).astype(jnp.float32)
        b, w = (jnp.arange(n, dtype=jnp.int32) for n in best.shape[:2])
        whole = jnp.full((*best.shape[:2], *table.shape[:2]), -jnp.inf)
        return whole.at[b[:, None, None], w[:, None], best].set(found).reshape(*hidden.shape[:2], -1)


__all__ = ["AssistantHead", "AssistantNetwork"]
