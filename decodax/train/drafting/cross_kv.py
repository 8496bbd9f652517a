"""Training of heads that read the target's keys and values (`decodax.models.drafters.cross_kv`), beside a target that
does not change.

A text is read in one pass, each token as a draft of some depth: it sees the target's keys only up to as many positions
before its own as the draft of that depth does. GliDe (Du et al., 2024) has the depths in turn, LongSpec (Yang et al.,
2025) draws them, and moves the tokens after the first few to far positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from decodax.cache.entry import KVEntry
from decodax.core.types import embeddings, logits_of
from decodax.core.window import Window, causal
from decodax.models.drafters.cross_kv import CrossKVHead
from decodax.models.drafters.mixture import MixtureHead
from decodax.pallas_kernels.window_attention import window_attention
from decodax.train.drafting.blocks import key_of
from decodax.train.drafting.losses import loss_of, overlap_of
from decodax.train.drafting.unrolled import smooth_l1
from decodax.train.loop import cast

Tree = Any
KV = dict[int, KVEntry]

ANCHORS = 4
"""Largest number of first tokens that keep their positions (LongSpec)."""


@dataclass(frozen=True)
class DelayedKeys:
    """The training loss of a head with attention to the target's keys. In training, as in drafting, a token does not
    attend to the target's keys of the last few tokens, which the target has not verified yet.

    Attributes:
        target: the target's network; its weights are the third argument of the call.
        head: the head.
        steps: number of drafted tokens `K`; a query sees the target's keys up to 1 to `K` positions before its own.
        loss: name of the loss of a token, see `decodax.train.drafting.losses`.
        features: weight of the smooth L1 distance between the head's hidden state and the target's (Mixture of
            Attentions); with target layer inference the mean of that and of the distance before the target's layers.
        drawn: True: each delay is drawn (LongSpec draws one for all tokens of a batch); False: it grows from 1 to `K`
            in blocks of `K` tokens, so that a query sees the keys before its block (GliDe).
        reach: the tokens after the first few are moved to positions below this (LongSpec); 0: they are not moved.
        dtype: dtype of the computation.
    """

    target: Any
    head: CrossKVHead
    steps: int = 5
    loss: str = "hard"
    features: float = 0.0
    drawn: bool = False
    reach: int = 0
    dtype: str = "float32"
    ids: None = None

    def __call__(self, params: Tree, batch: Array, extra: Tree) -> tuple[Array, dict[str, Array]]:
        """Returns the loss, a mean over tokens, and scalars to log: "loss", and the acceptance at each depth.

        Args:
            params: the head's weights.
            batch: `i32[B, T + 1]`.
            extra: the target's weights.
        """
        tokens, labels = batch[:, :-1], batch[:, 1:]
        at = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        delay, first, moved = jax.random.split(key_of(tokens), 3)
        delays = jax.random.randint(delay, at.shape, 1, self.steps + 1) if self.drawn else at % self.steps + 1
        positions, rows = at, (tokens.shape[0], 1)
        if (spare := self.reach - tokens.shape[1]) > 0:
            stays = at < jax.random.randint(first, rows, 0, ANCHORS + 1)
            positions = jnp.where(stays, at, at + jax.random.randint(moved, rows, 0, spare + 1))
        truth, hidden, entries, layers = target_keys(self.target, extra, tokens, positions, self.dtype)
        logits, own = delayed(self.target, self.head, cast(params, self.dtype), extra, tokens, positions, entries,
                              delays)
        far = smooth_l1(own, hidden)
        if isinstance(self.head, MixtureHead) and self.head.above:
            before = layers[self.head.layer - self.head.above]
            far, own = smooth_l1(own, before) / 2, above(self.target, self.head, extra, before, own, positions, delays)
            far = far + smooth_l1(own, hidden) / 2
            logits = logits_of(self.target, jax.lax.stop_gradient(cast(extra, self.dtype)), own)
        accepted, scalars = overlap_of(truth, logits), {}
        for j in range(1, self.steps + 1):
            here = (delays == j) & (at >= j)        # the target has a key there
            scalars[f"accepted_{j}"] = jnp.where(here, accepted, 0).sum() / jnp.maximum(here.sum(), 1)
        loss = loss_of(self.loss)(truth, logits, labels).mean()
        if self.features:
            loss = loss + self.features * far
        return loss, {"loss": loss, **scalars}


def target_keys(target: Any, weights: Tree, tokens: Array, positions: Array, dtype: str
                ) -> tuple[Array, Array, KV, tuple[Array, ...]]:
    """Runs the target on texts `i32[B, T]` at positions `i32[B, T]`, without a cache and without gradients.

    Returns the logits `f32[B, T, V]`, the hidden states `f[B, T, D]` after the final norm, the keys and values `f[B, T,
    G, d]` of each layer by its index, and the outputs `f[B, T, D]` of all layers. Computed in `dtype`.
    """
    window = causal(tokens, jnp.zeros(tokens.shape[0], jnp.int32)).replace(positions=positions)
    out = target.apply(cast(weights, dtype), window, target.init_cache(tokens.shape[0], 0))
    own = {layer: out.entries[i].pair for i, (layer, recurrent) in enumerate(target.config.entries) if not recurrent}
    return jax.lax.stop_gradient((out.logits(), out.hidden, own, out.layers))


def above(target: Any, head: MixtureHead, weights: Tree, known: Array, own: Array, positions: Array,
          delays: Array) -> Array:
    """Returns the hidden states `f[B, T, D]` of the target's last layers when a head's output stands for the states
    before them (target layer inference). Each token is computed as a draft, of the depth that its delay says.

    Args:
        target: the target's network.
        head: the head.
        weights: the target's weights.
        known: `f[B, T, D]`, the target's own hidden states before these layers.
        own: `f[B, T, D]`, the head's output at each token, which stands for `known`.
        positions: `i32[B, T]`.
        delays: `i32[B, T]`, a number of tokens, at least 1: a token attends to `known` at the tokens that are at least
            this many before it, and to `own` at those after them, up to itself.
    """
    B, T = positions.shape
    at = jnp.arange(T, dtype=jnp.int32)
    before = jnp.broadcast_to(at[:, None] - at, (B, T, T))
    text = before >= 0
    drafts = jnp.concatenate([before >= delays[:, :, None], text & (before < delays[:, :, None])], 2)
    mask = jnp.concatenate([jnp.pad(text, ((0, 0), (0, 0), (0, T))), drafts], 1)
    twice = lambda x: jnp.concatenate([x, x], 1)
    window = Window(tokens=jnp.zeros((B, 2 * T), jnp.int32), positions=twice(positions), mask=mask,
                    live=jnp.ones((B, 2 * T), bool), embeddings=jnp.concatenate([known.astype(own.dtype), own], 1),
                    embedded=jnp.ones((B, 2 * T), bool))
    weights = jax.lax.stop_gradient(cast(weights, str(own.dtype)))
    return target.apply(weights, window, target.init_cache(B, 0), head.keep).hidden[:, T:]


def delayed(target: Any, head: CrossKVHead, params: Tree, weights: Tree, tokens: Array, positions: Array,
            entries: KV, delays: Array) -> tuple[Array, Array]:
    """Runs a head on all tokens of texts at once, as it would run while drafting. Returns its logits `f32[B, T, V]` and
    hidden states `f[B, T, D]` at every token, which predict the token after it.

    The delay `1 + j` at a token gives what drafting computes there if the token is the `j`-th draft of a round (`j =
    0`: the newest verified token). The target has not processed the round's tokens yet: its keys of this token, of the
    drafts before it and of the newest verified token do not exist. A token without any key of the target gets 0 from
    attention to them. The head's own keys have no delay.

    Args:
        target: the target's network.
        head: the head.
        params: the head's weights.
        weights: the target's weights.
        tokens: `i32[B, T]`.
        positions: `i32[B, T]`, positions of the tokens for position embeddings. Sliding windows and delays count
            tokens, not positions.
        entries: the target's keys and values of the texts, from `target_keys`.
        delays: `i32[B, T]`; each token attends to the target's keys of tokens that are at least this many before it.
    """
    at = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    before = at[:, None] - at
    keys, values = head.known(params, entries, positions)
    project = lambda x: logits_of(target, jax.lax.stop_gradient(weights), x)

    def attend(layer: int, q: Any, k: Any, v: Any, *, scale: float = 1.0, sliding: int | None = None,
               **options: Any) -> tuple[Array, Any]:
        if any(x is not None for x in options.values()):
            raise ValueError("head: its layer cannot have a soft cap, a bias or sinks in training")
        if k is not None:
            seen = (before >= 0) & (before < (sliding or len(at)))
            return window_attention(q, k, v, seen[None], positions, scale=scale), ()
        seen = before >= delays[:, :, None]
        out = window_attention(q, keys.astype(q.dtype), values.astype(q.dtype), seen, positions, scale=scale)
        return jnp.where(seen.any(2)[:, :, None, None], out, 0), ()

    dtype = jnp.result_type(*(x.dtype for x in jax.tree.leaves(params)))
    embed = lambda x: jax.lax.stop_gradient(embeddings(target, weights, x))
    step = head.step(params, tokens, embed, jnp.zeros((), dtype), positions, 0, attend)
    return head.logits(params, step.hidden, 0, project), step.hidden


__all__ = ["DelayedKeys", "above", "delayed", "target_keys"]
