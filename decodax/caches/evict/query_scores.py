"""Scores of who asks for a token: the attention that queries pay, or would pay. One class is one published rule."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

from decodax.cache.key_values import KVLayer
from decodax.caches.evict.held import HeldLayer
from decodax.caches.evict.key_scores import unit
from decodax.caches.evict.scores import Gathered, Taken, TokenScore
from decodax.models.rope import Rope, rotate
from decodax.pallas_kernels.window_attention import slot_weights


@dataclasses.dataclass(frozen=True)
class WindowAttention(TokenScore):
    """The attention that the latest queries pay, pooled over neighbouring tokens; their own tokens stay ("SnapKV: LLM
    Knows What You are Looking for Before Generation", Li et al., 2024).

    Attributes:
        window: the latest queries. kernel: neighbours that are pooled, an odd number.
        pool: "mean" (the authors' and kvpress's default) or "max" (AdaKV's).
        reduce: over the queries: "mean", or "max".
        over: each "group" of heads has scores of its own, or all "heads" of a layer have the same (TOVA).
    """

    window: int = 64
    kernel: int = 5
    pool: Literal["mean", "max"] = "mean"
    reduce: Literal["mean", "max"] = "mean"
    over: Literal["group", "heads"] = "group"

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window: got {self.window}, takes 1 or more")
        if self.kernel < 1 or not self.kernel % 2:
            raise ValueError(f"kernel: got {self.kernel}, takes an odd number")

    @property
    def latest(self) -> int:
        return self.window

    @property
    def always(self) -> int:
        return self.window

    def __call__(self, held: HeldLayer) -> Array:
        weights = held.attention()
        asked = jnp.maximum((held.asked_at >= 0).sum(), 1)
        paid = weights.sum(2) / asked if self.reduce == "mean" else weights.max(2)
        early = held.index < (held.count - self.window)[:, None]
        paid = pooled(jnp.where(early[:, None], paid, 0), self.kernel, self.pool)
        worth = paid.mean(1) if self.over == "group" else jnp.broadcast_to(paid.mean((0, 1)), early.shape)
        return jnp.where(early, worth, jnp.inf)


def pooled(x: Array, kernel: int, how: Literal["mean", "max"]) -> Array:
    """Pools neighbours along the last axis, zeros beyond its ends."""
    around = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(kernel // 2, kernel // 2)])
    parts = jnp.stack([around[..., i:i + x.shape[-1]] for i in range(kernel)])
    return parts.mean(0) if how == "mean" else parts.max(0)


@dataclasses.dataclass(frozen=True)
class ChunkMeans(TokenScore):
    """The product of the newest query with the mean key of each chunk of tokens, which all of its tokens are worth; the
    first chunk and the last, which may be shorter, stay ("TriForce: Lossless Acceleration of Long Sequence Generation
    with Hierarchical Speculative Decoding", Sun et al., 2024). The heads of a group have the largest of theirs.

    Attributes:
        chunk: tokens of a chunk.
    """

    chunk: int = 8

    def __post_init__(self) -> None:
        if self.chunk < 1:
            raise ValueError(f"chunk: got {self.chunk}, takes 1 or more")

    @property
    def latest(self) -> int:
        return 1

    @property
    def always(self) -> int:
        return 2 * self.chunk

    def __call__(self, held: HeldLayer) -> Array:
        G, S, d = held.keys.shape
        keys = jnp.pad(jnp.where(held.valid[..., None], held.keys, 0), ((0, 0), (0, -S % self.chunk), (0, 0)))
        number = jnp.clip(held.count[:, None] - self.chunk * jnp.arange(keys.shape[1] // self.chunk), 1, self.chunk)
        means = keys.reshape(G, -1, self.chunk, d).sum(2) / number[..., None]
        worth = jnp.einsum("grd,gnd->grn", held.queries[0].reshape(G, -1, d), means).max(1)
        stays = (held.index < self.chunk) | (held.index // self.chunk >= (held.count // self.chunk)[:, None])
        return jnp.where(stays, jnp.inf, jnp.repeat(worth, self.chunk, 1)[:, :S])


@dataclasses.dataclass(frozen=True)
class Accumulated(TokenScore):
    """The attention that a token has received from all queries so far, its own among them.

    Attributes:
        recent: the latest tokens, which stay. sinks: the first ones, which do.
        mean: over the queries that could see it, so that early tokens have no advantage ("Observed attention" of
            kvpress, 2024; ZipCache's normalisation); else the sum ("H2O: Heavy-Hitter Oracle for Efficient Generative
            Inference of Large Language Models", Zhang et al., 2023).
        every: tokens between two choices; theirs are counted when it comes to that. None: there is one choice.
        over: each "group" of heads has scores of its own, or all "heads" of a layer have the same (PrefixKV).
    """

    recent: int = 0
    mean: bool = False
    every: int | None = None
    sinks: int = 0
    over: Literal["group", "heads"] = "group"

    reads = "attention"

    @property
    def latest(self) -> int:
        return self.every or 0

    @property
    def always(self) -> int:
        return self.recent + self.sinks

    def start(self, shape: KVLayer, batch: int, slots: int) -> Gathered:
        return Gathered(slots=jnp.zeros((batch, shape.heads, slots), jnp.float32))

    def gather(self, shape: KVLayer, gathered: Gathered, new: Taken) -> Gathered:
        paid = slot_weights(new.queries, new.sums, new.positions, new.kv, slot_positions=new.held, scale=1.0,
                            causal=True)
        return gathered.replace(slots=gathered.slots + paid)

    def renew(self, held: HeldLayer) -> Any:
        weights = jnp.where((held.asked_at >= held.since)[:, None], held.attention(), 0)
        return held.gathered.slots + weights.sum((1, 2))

    def __call__(self, held: HeldLayer) -> Array:
        paid = held.gathered.slots
        if self.mean:
            paid = paid / jnp.maximum(held.length - held.positions, 1)
        if self.over == "heads":
            paid = jnp.broadcast_to(paid.mean(0), paid.shape)
        stays = (held.index >= (held.count - self.recent)[:, None]) | (held.positions < self.sinks)
        return jnp.where(stays, jnp.inf, paid)


@dataclasses.dataclass(frozen=True)
class ExpectedAttention(TokenScore):
    """The attention that future queries are expected to pay, if they are distributed as the past ones ("Expected
    Attention: KV Cache Compression by Estimating Attention from Future Queries Distribution", Devoto et al., 2025).

    Mean and covariance of the queries before their rotation, without the first `sinks`, are rotated by the mean
    rotation of the next `future` positions; keys are scored by the mean of `exp(q k)` under that Gaussian, relative to
    all keys, times the norm of the value.

    Attributes:
        covariance: else by the mean alone. norms: whether values' norms count.
        epsilon: added before norms are multiplied.
    """

    sinks: int = 4
    future: int = 512
    covariance: bool = True
    norms: bool = True
    epsilon: float = 0.0

    reads = "queries"

    @property
    def always(self) -> int:
        return self.sinks

    def start(self, shape: KVLayer, batch: int, slots: int) -> Gathered:
        zeros = lambda *rest: jnp.zeros((batch, *rest), jnp.float32)
        more = (zeros(shape.queries, shape.width, shape.width),) if self.covariance else ()
        return Gathered(rest=(zeros(), zeros(shape.queries, shape.width), *more))

    def gather(self, shape: KVLayer, gathered: Gathered, new: Taken) -> Gathered:
        counts = (new.positions >= self.sinks).astype(jnp.float32)
        q = turned(shape, new.queries.astype(jnp.float32), -new.positions) * counts[..., None, None]
        number, total, *products = gathered.rest
        products = [x + jnp.einsum("bwhi,bwhj->bhij", q, q) for x in products]
        return gathered.replace(rest=(number + counts.sum(1), total + q.sum(1), *products))

    def __call__(self, held: HeldLayer) -> Array:
        number, total, *products = held.gathered.rest
        number = jnp.maximum(number, 1)
        ahead = held.length + jnp.arange(self.future, dtype=jnp.int32)
        mean = total / number
        own = mean_turn(held.shape, mean, ahead)
        G, r = held.keys.shape[0], own.shape[0] // held.keys.shape[0]
        score = jnp.einsum("grd,gsd->grs", own.reshape(G, r, -1), held.keys)
        for product in products:
            spread = product / number - mean[:, :, None] * mean[:, None]
            spread = mean_turn(held.shape, mean_turn(held.shape, spread, ahead).swapaxes(1, 2), ahead)
            score += jnp.einsum("gsi,grij,gsj->grs", held.keys, spread.reshape(G, r, *spread.shape[1:]), held.keys) / 2
        counted = held.valid & (held.index >= self.sinks)
        worth = jax.nn.softmax(score, axis=-1, where=counted[:, None]).mean(1)
        if self.norms:
            worth = (worth + self.epsilon) * jnp.linalg.norm(held.values, axis=-1)
        return jnp.where(held.index < self.sinks, jnp.inf, worth)


@dataclasses.dataclass(frozen=True)
class Capacity(TokenScore):
    """How much a value adds to the capacity of those kept, weighted by how its key lies to the mean query ("CapKV", as
    kvpress has it).

    Queries are averaged before their rotation, without the first `sinks`, and rotated by the mean rotation of the next
    `future` positions. A key's weight is `exp(sharpness * cosine)`, relative to the largest of its head.
    """

    sinks: int = 4
    future: int = 512
    sharpness: float = 5.0
    epsilon: float = 1e-6

    reads = "queries"

    @property
    def always(self) -> int:
        return self.sinks

    def start(self, shape: KVLayer, batch: int, slots: int) -> Gathered:
        return ExpectedAttention(self.sinks, covariance=False).start(shape, batch, slots)

    def gather(self, shape: KVLayer, gathered: Gathered, new: Taken) -> Gathered:
        return ExpectedAttention(self.sinks, covariance=False).gather(shape, gathered, new)

    def __call__(self, held: HeldLayer) -> Array:
        number, total = held.gathered.rest
        ahead = held.length + jnp.arange(self.future, dtype=jnp.int32)
        anchor = mean_turn(held.shape, total / jnp.maximum(number, 1), ahead)
        G = held.keys.shape[0]
        cosine = jnp.einsum("grd,gsd->grs", unit(anchor).reshape(G, -1, anchor.shape[-1]), unit(held.keys))
        counted = (held.valid & (held.index >= self.sinks))[:, None]
        weights = jnp.exp(self.sharpness * (cosine - jnp.where(counted, cosine, -1).max(-1, keepdims=True)))
        weights = jnp.where(counted, weights, 0)
        scaled = jnp.where(counted, weights + self.epsilon, 0)
        matrix = jnp.eye(held.values.shape[-1]) + jnp.einsum("grs,gsi,gsj->grij", scaled, held.values, held.values)
        solved = jnp.linalg.solve(matrix, held.values.swapaxes(1, 2)[:, None])         # [G, r, e, S]
        leverage = jnp.einsum("gsi,gris->grs", held.values, solved)
        return jnp.where(held.index < self.sinks, jnp.inf, (weights * leverage).mean(1))


@dataclasses.dataclass(frozen=True)
class Critical(TokenScore):
    """Another score, times how much the value changes the output of attention ("Identify Critical KV Cache in LLM
    Inference from an Output Perturbation Perspective", Feng et al., 2025).

    Attributes:
        score: the other one; its own norms of values should be off. epsilon: added to it.
    """

    score: TokenScore
    epsilon: float = 1e-4

    @property
    def reads(self) -> Literal["nothing", "queries", "attention"]:      # type: ignore[override]
        return self.score.reads

    @property
    def projects(self) -> bool:
        return True

    @property
    def latest(self) -> int:
        return self.score.latest

    @property
    def always(self) -> int:
        return self.score.always

    def start(self, shape: KVLayer, batch: int, slots: int) -> Gathered:
        return self.score.start(shape, batch, slots)

    def gather(self, shape: KVLayer, gathered: Gathered, new: Taken) -> Gathered:
        return self.score.gather(shape, gathered, new)

    def renew(self, held: HeldLayer) -> Any:
        return self.score.renew(held)

    def __call__(self, held: HeldLayer) -> Array:
        return self.weighted(held, self.score(held))

    def weighted(self, held: HeldLayer, worth: Array) -> Array:
        """`(worth + epsilon) * |W_o v|_1`, the norm averaged over the group's heads."""
        assert held.outputs is not None
        G = held.values.shape[0]
        heads = held.outputs.reshape(G, -1, *held.outputs.shape[1:])
        norm = lambda head: jnp.abs(jnp.einsum("gse,ged->gsd", held.values, head)).sum(-1)      # one head of each group
        norms = sum(norm(heads[:, i]) for i in range(heads.shape[1])) / heads.shape[1]
        return (worth + self.epsilon) * norms


def rope_of(shape: KVLayer) -> Rope | None:
    """The rotation of a layer's keys, for what turns them from one position to another.

    Raises:
        ValueError: positions are counted anew in each chunk (dual chunk attention), so a key has none to be moved from.
    """
    rope: Rope | None = shape.rope
    if rope is not None and rope.chunks is not None:
        raise ValueError("cache: takes a model without dual chunk attention, since it turns keys to other positions, "
                         "which are counted within chunks here")
    return rope


def turned(shape: KVLayer, x: Array, by: Array) -> Array:
    """`f[B, W, H, d]` rotated by `i32[B, W]` positions; a factor of the rotation (YaRN) is taken off for each."""
    rope = rope_of(shape)
    if rope is None:
        return x
    cos, sin = rope.table(by, shape.context)
    factor = (cos ** 2 + sin ** 2)      # the square of the factor
    return rotate(x, cos / factor, sin / factor, rope.interleaved)


def moved(shape: KVLayer, x: Array, by: Array) -> Array:
    """`f[B, W, H, d]`, rotated to some positions, as if rotated to those `by` (`i32[B, W]`) behind; a factor of the
    rotation (YaRN) stays."""
    rope = rope_of(shape)
    if rope is None:
        return x
    cos, sin = rope.table(by, shape.context)
    factor = jnp.sqrt(cos ** 2 + sin ** 2)
    return rotate(x, cos / factor, sin / factor, rope.interleaved)


def mean_turn(shape: KVLayer, x: Array, positions: Array) -> Array:
    """`f[..., d]` under the mean of the rotations to `i32[n]` positions."""
    rope = rope_of(shape)
    if rope is None:
        return x
    cos, sin = (t[0, :, 0].mean(0) for t in rope.table(positions[None], shape.context))
    return rotate(x, cos, sin, rope.interleaved)
