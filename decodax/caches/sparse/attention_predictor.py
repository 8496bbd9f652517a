"""AttentionPredictor: each query attends to the blocks of tokens that a small network predicts to be attended to next
("AttentionPredictor: Temporal Patterns Matter for KV Cache Compression", Yang et al., 2025).

The attention of the latest `history` tokens, as the maximum weight in each block of `block_size` tokens, is an image
over time and blocks for each head. A convolutional network, the same for all layers and heads, takes this image and
predicts a score for each block. A query attends to the first tokens, the latest ones, and the blocks with the highest
scores. Its own attention becomes the next row of the image. No token is ever evicted.
`decodax.train.attention_predictor` trains the network.

The prediction depends on the attention of all tokens before. So blocks are chosen when a token is committed, and the
next `every` tokens attend to them; a round of drafts is cut there. `every=1` is the rule of the paper, with rounds that
commit one token.

If all blocks are chosen, all tokens are attended to; the authors' code leaves out one token after a text of complete
blocks. `fit_attention_predictor` trains on full attention over your texts, with the same weight for all layers and
heads, and the squared error of the maximum weights of blocks.

With `every=1` the tokens attended to are those of the authors' code (8196868), also with `full=`. Its training data
and the weights of its losses are not public.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.cache.dense import Dense, dense_like, write
from decodax.cache.entry import AskedEntry, KVEntry, own_entry
from decodax.cache.key_values import KVLayer, refuse_prefill
from decodax.cache.wrapper import Wrapper
from decodax.caches.configs import taken
from decodax.caches.sparse.attention_net import AttentionNet, expected
from decodax.caches.sparse.reading import SparseCache, SparseConfig, if_any
from decodax.common.options import Count, Whole
from decodax.common.registry import CACHES
from decodax.common.struct import static, struct
from decodax.core.cache import Cache, Entries, PyTree
from decodax.core.capabilities import ReadPrompt, WholePrompt
from decodax.pallas_kernels.window_attention import Bias


def pooled(weights: Array, at: Array, blocks: int, block: int) -> Array:
    """Returns the maximum attention weight in each of `blocks` blocks of `block` tokens, `f32[blocks]`.

    Args:
        weights: `f32[n]`, weights of tokens.
        at: `i32[n]`, positions of these tokens; -1: none.
        blocks: number of blocks, counted from position 0.
        block: number of tokens of a block.
    """
    where = jnp.where(at >= 0, at // block, blocks)
    return jnp.zeros(blocks, jnp.float32).at[where].max(weights, mode="drop")


@struct
class PooledEntry(KVEntry):
    """Keys and values of a window's own nodes, with the attention that they give.

    Attributes:
        weights: `f32[B, W, H, n]`, the largest weight in each block of the text.
    """

    weights: Array


@struct
class AttentionPredictorCache(SparseCache, WholePrompt):
    """All tokens, their latest attention, and the chosen blocks. An entry also holds the node's own attention.

    Attributes:
        images: for each layer `f32[B, H, t, n]`, the maximum weight of each of the latest `t` tokens on each of `n`
            blocks; that of position `p` is at index `p % t`. None: the layer attends to all tokens.
        chosen: for each layer `i32[B, H, C]`, the chosen blocks, -1: none. None as for `images`.
        start: `i32[B]`, number of prefilled tokens.
        since: `i32[B]`, position of the first token that attends to the chosen blocks.
        kv, length, given, shapes, kind: see `SparseCache`.
    """

    images: tuple[Array | None, ...]
    chosen: tuple[Array | None, ...]
    start: Array
    since: Array

    if TYPE_CHECKING:
        kind: AttentionPredictorConfig

    def max_commit(self) -> Array | None:
        return self.kind.every - (self.length - self.since) if any(x is not None for x in self.chosen) else None

    def prefill_cache(self) -> Cache:
        if not self.kv:
            return self
        whole = dense_like(self)
        queries = tuple(None if image is None else jnp.zeros((*image.shape[:3], d), whole.kv[0].dtype)
                        for image, d in zip(self.images, self.widths, strict=True))
        return PromptToPredict(base=whole, queries=queries, shapes=self.shapes, kind=self.kind)

    def check_windows(self) -> None:
        if any(own is not None for own in self.chosen):
            refuse_prefill(self.kind.name)

    def check_window(self, nodes: int) -> None:
        """Takes any window: its nodes see each other."""

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float,
               sliding: int | None = None, softcap: float | None = None,
               bias: Bias | None = None, sinks: Array | None = None) -> tuple[Array, PyTree]:
        entry = own_entry(q, k, v)
        if self.chosen[layer] is None:
            return self.attend_all(layer, q, k, v, window, scale=scale, sliding=sliding, softcap=softcap,
                                   bias=bias, sinks=sinks), entry
        if window.is_prefill:
            refuse_prefill(self.kind.name)
        q = q.astype(jnp.float32) * scale
        seen = jnp.broadcast_to(window.visible(), (*q.shape[:2], k.shape[1]))
        at = self._read(layer)
        out, row = self._attend(layer, q, k, v, seen, window.key_positions, at, sinks)
        if self.kind.full is not None:
            now = (window.positions - self.start[:, None] + 1) % self.kind.full == 0
            whole = if_any(now, lambda _: self._everything(layer, q, k, seen, window.key_positions, sinks), row)
            row = jnp.where(now[:, :, None, None], whole, row)
            # the output must depend on it, or XLA on CPU copies the cache at a commit to protect its readers
            out = jnp.where(jnp.isfinite(row).all(-1, keepdims=True), out, jnp.nan)
        return out.astype(v.dtype), PooledEntry(entry.keys, entry.values, row)

    def _read(self, layer: int) -> Array:
        """Returns the slots that the heads of each row attend to, without duplicates, `i32[B, H, n]`; -1: none."""
        kind, chosen = self.kind, self.chosen[layer]
        assert chosen is not None
        first = jnp.arange(kind.sinks, dtype=jnp.int32)
        # after a text of whole blocks there is one token between the last of these and the latest tokens, which the
        # authors' code does not read; where all blocks are chosen, everything is read
        end = -(-self.since // kind.block_size) - kind.recent // kind.block_size
        every = end - kind.sinks // kind.block_size <= chosen.shape[2]
        begin = self.since - kind.recent + 1
        begin = jnp.maximum(jnp.where(every, jnp.minimum(end * kind.block_size, begin), begin), kind.sinks)[:, None]
        late = begin + jnp.arange(min(kind.recent + kind.every + 1, self.capacity), dtype=jnp.int32)
        inside = jnp.arange(kind.block_size, dtype=jnp.int32)
        some = (chosen[..., None] * kind.block_size + inside).reshape(*chosen.shape[:2], -1)
        some = jnp.where((some >= kind.sinks) & (some < begin[:, :, None]), some, -1)
        wide = lambda x: jnp.broadcast_to(jnp.where(x < self.length[:, None], x, -1)[:, None],
                                          (*chosen.shape[:2], x.shape[-1]))
        return jnp.concatenate([wide(first[None]), some, wide(late)], -1)

    def _attend(self, layer: int, q: Array, k: Array, v: Array, seen: Array, keys_at: Array,
                at: Array, sinks: Array | None) -> tuple[Array, Array]:
        """Returns attention of scaled queries to slots and to the window, `f32[B, W, H, e]`, and the maximum weight in
        each block, `f32[B, W, H, blocks]`.

        Args:
            layer: number of the layer.
            q, k, v: `f32[B, W, H, d]`, `f[B, K, G, d]` and `f[B, K, G, e]`.
            seen: `bool[B, W, K]`, nodes of the window that a query attends to.
            keys_at: `i32[B, K]`, their positions.
            at: `i32[B, H, n]`, the slots; -1: none.
            sinks: see `Cache.attend`.
        """
        image, d, block = self.images[layer], self.widths[layer], self.kind.block_size
        assert image is not None

        def one(row: tuple[Array, ...]) -> tuple[Array, Array]:
            kv, k, v, q, seen, keys_at, at = row
            each = len(at) // len(kv)
            some = jax.vmap(lambda own, at: own[jnp.maximum(at, 0)])(kv, at.reshape(len(kv), -1))
            some = some.reshape(len(at), -1, some.shape[-1]).astype(jnp.float32)
            mine = jnp.concatenate([k, v], -1).astype(jnp.float32).swapaxes(0, 1).repeat(each, 0)
            held = jnp.broadcast_to((at >= 0)[None], (len(q), *at.shape))
            there = jnp.concatenate([held, jnp.broadcast_to(seen[:, None], (*held.shape[:2], seen.shape[1]))], -1)
            both = jnp.concatenate([some, mine], 1)
            scores = jnp.einsum("whd,hnd->whn", q, both[..., :d])
            weights = _weights(scores, there, sinks)
            where = jnp.concatenate([at, jnp.broadcast_to(keys_at, (len(at), len(keys_at)))], -1)
            rows = jax.vmap(lambda own: jax.vmap(lambda w, at: pooled(w, at, image.shape[3], block))(own, where))
            return jnp.einsum("whn,hne->whe", weights, both[..., d:]), rows(weights)

        return jax.vmap(lambda *row: one(row))(self.kv[layer], k, v, q, seen, keys_at, at)

    def _everything(self, layer: int, q: Array, k: Array, seen: Array, keys_at: Array, sinks: Array | None) -> Array:
        """Returns the maximum weight in each block of attention to all tokens, `f32[B, W, H, blocks]`; for the
        arguments see `_attend`."""
        image, d, block = self.images[layer], self.widths[layer], self.kind.block_size
        assert image is not None
        n = image.shape[3]

        def one(row: tuple[Array, ...]) -> Array:
            kv, length, k, q, seen, keys_at = row
            (G, S, _), (W, H, _) = kv.shape, q.shape
            q = q.reshape(W, G, H // G, d)
            far = jnp.einsum("wgrd,gsd->wgrs", q, kv[..., :d].astype(jnp.float32)).reshape(W, H, S)
            near = jnp.einsum("wgrd,kgd->wgrk", q, k.astype(jnp.float32)).reshape(W, H, -1)
            there = jnp.concatenate([jnp.broadcast_to(jnp.arange(S) < length, (W, S)), seen], -1)[:, None]
            weights = _weights(jnp.concatenate([far, near], -1), there, sinks)
            far = jnp.pad(weights[..., :S], ((0, 0), (0, 0), (0, n * block - S))).reshape(W, H, n, block).max(-1)
            rows = jax.vmap(jax.vmap(lambda own: pooled(own, keys_at, n, block)))
            return jnp.maximum(far, rows(weights[..., S:]))

        return jax.vmap(lambda *row: one(row))(self.kv[layer], self.length, k, q, seen, keys_at)

    def commit(self, entries: Entries, slots: Array) -> Self:
        if not self.kv:
            return self
        new = super().commit(entries, slots)
        length, places = new.length, ring(slots, new.length, self.kind.history)
        new = new.replace(images=tuple(None if image is None else write(image, entry.weights, places)
                                       for image, entry in zip(self.images, entries, strict=True)))
        if all(x is None for x in self.chosen):
            return new
        due = length - self.since >= self.kind.every
        # of the choice alone, since XLA copies all that the loop carries
        chosen = if_any(due, lambda _: new.choose(due).chosen, self.chosen)
        return new.replace(chosen=chosen, since=jnp.where(due, length, self.since))

    def choose(self, rows: Array) -> Self:
        """Returns the cache with new chosen blocks in `rows` (`bool[B]`), those with the highest predicted scores."""
        kind, arrays, made = self.kind, self.kind.net.arrays, []

        def one(image: Array, old: Array, length: Array, start: Array) -> Array:
            t, n = image.shape[1:]
            image = image[:, (length + jnp.arange(t)) % t]                  # in the order of time, the latest last
            block, size = jnp.arange(n), -(-length // kind.block_size)
            free = (block >= kind.sinks // kind.block_size) & (block < size - kind.recent // kind.block_size)
            real = (jnp.arange(t) >= t - jnp.minimum(start, t))[:, None] & free
            worth = expected(arrays, image, real)
            worth = jnp.where(free.sum() < 3, jnp.zeros_like(worth), worth)     # less than the kernels' width: take all
            found, chosen = lax.top_k(jnp.where(free, worth, -jnp.inf), old.shape[1])
            return jnp.where(found > -jnp.inf, chosen.astype(jnp.int32), -1)

        for image, old in zip(self.images, self.chosen, strict=True):
            new = None if image is None or old is None else jax.vmap(one)(image, old, self.length, self.start)
            made.append(None if new is None or old is None else jnp.where(rows[:, None, None], new, old))
        return self.replace(chosen=tuple(made), since=jnp.where(rows, self.length, self.since))


def ring(slots: Array, length: Array, size: int) -> Array:
    """Returns the index at which each node is stored in a ring buffer of the latest `size` tokens, its position modulo
    `size`: `i32[B, W]`; -1 for nodes that are not among the latest.

    Args:
        slots: `i32[B, W]`, positions of the nodes; -1: none.
        length: `i32[B]`, number of tokens of the text with these nodes.
        size: number of places of the ring.
    """
    return jnp.where((slots >= 0) & (slots >= length[:, None] - size), slots % size, -1)


def _weights(scores: Array, there: Array, sinks: Array | None) -> Array:
    """Returns softmax weights of scores `f32[W, H, n]`, 0 where `there` is False; see `Cache.attend` for `sinks`."""
    scores = jnp.where(there, scores, -1e30)
    if sinks is not None:
        sink = jnp.broadcast_to(sinks.astype(jnp.float32)[:, None], (*scores.shape[:2], 1))
        scores = jnp.concatenate([scores, sink], -1)
    weights = jax.nn.softmax(scores, axis=-1)
    return jnp.where(there, weights if sinks is None else weights[..., :-1], 0)


@struct
class PromptToPredict(Wrapper):
    """AttentionPredictor's cache during prefill: a dense cache, and the queries of the latest tokens.

    Attributes:
        base: the dense cache.
        queries: for each layer `f[B, H, t, d]`, the query of position `p` at index `p % t`; None: the layer attends to
            all tokens.
        shapes: static; the `KVLayer` of each layer.
        kind: static; the configuration.
    """

    base: Dense
    queries: tuple[Array | None, ...]
    shapes: tuple[KVLayer, ...] = static()
    kind: AttentionPredictorConfig = static()

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, **options: Any) -> tuple[Array, PyTree]:
        out, entry = self.base.attend(layer, q, k, v, window, **options)
        if self.queries[layer] is None:
            return out, entry
        return out, AskedEntry.of(entry, q * options["scale"])

    def commit(self, entries: Entries, slots: Array) -> PromptToPredict:
        base = self.base.commit([entry.pair for entry in entries], slots)
        places = ring(slots, base.length, self.kind.history)
        queries = tuple(None if old is None else write(old, entry.queries, places)
                        for old, entry in zip(self.queries, entries, strict=True))
        return self.replace(base=base, queries=queries)

    def finish_prefill(self, prompt: ReadPrompt) -> Cache:     # type: ignore[override]
        base, kind = self.base, self.kind
        images: list[Array | None] = []
        into = kind.empty(self.shapes, base.length.shape[0], base.capacity, base.kv[0].dtype, base.given)
        assert isinstance(into, AttentionPredictorCache)
        for kv, queries, image, d in zip(base.kv, self.queries, into.images, base.widths, strict=True):
            if queries is None or image is None:
                images.append(None)
                continue

            def one(row: tuple[Array, ...], d: int = d, shape: tuple[int, ...] = image.shape) -> Array:
                kv, q, length = row
                (t, n), S = shape[2:], kv.shape[1]
                slot = jnp.arange(t)
                at = length - 1 - (length - 1 - slot) % t       # the position of each place in the ring
                q = q.astype(jnp.float32).reshape(len(kv), -1, t, d)
                scores = jnp.einsum("grtd,gsd->grts", q, kv[..., :d].astype(jnp.float32))
                weights = jax.nn.softmax(jnp.where(jnp.arange(S) <= at[:, None], scores, -1e30), axis=-1)
                weights = jnp.where(jnp.arange(S) <= at[:, None], weights, 0).reshape(-1, t, S)
                weights = jnp.pad(weights, ((0, 0), (0, 0), (0, n * kind.block_size - S)))
                return weights.reshape(-1, t, n, kind.block_size).max(-1)

            images.append(lax.map(one, (kv, queries, base.length)))
        new = into.replace(kv=base.kv, images=tuple(images), start=base.length, since=base.length, length=base.length)
        return new.choose(jnp.ones(base.length.shape, bool))


@CACHES.register("attention-predictor", "AttentionPredictor: Temporal Patterns Matter for KV Cache Compression",
                 "Yang et al. 2025", family="sparse")
@dataclasses.dataclass(frozen=True)
class AttentionPredictorConfig(SparseConfig):
    """Keeps all tokens; each head of a query attends to the blocks that a trained network predicts to be attended to
    next, the first tokens and the latest.

    The network is trained once for a model: `net = decodax.train.fit_attention_predictor(lm, texts)`. It saves the time
    of attention to long texts, not memory. Example: `cache=caches.attention_predictor(net, budget=512)`.

    Attributes:
        net: the network, or the path of a file that `AttentionNet.save` wrote.
        budget: number of tokens that a query attends to, including the first and the latest ones and itself; at least
            two blocks more than those.
        sinks: number of first tokens that are always attended to; a multiple of `block_size`.
        recent: number of latest tokens that are always attended to; a multiple of `block_size`, at least one block.
        every: number of tokens between two choices.
        block_size: number of tokens of a block.
        history: number of tokens whose attention the network gets.
        full: number of tokens after which one token's row of the image is computed from attention to all tokens; None:
            never.
        skip: numbers of layers that attend to all tokens.
    """

    net: AttentionNet = None        # type: ignore[assignment]
    budget: Count = 1024
    sinks: Whole = 64
    recent: Count = 64
    every: Count = 1
    block_size: Count = 16
    history: Count = 64
    full: Count | None = None
    skip: tuple[Whole, ...] = ()

    name: ClassVar[str] = "attention-predictor"

    def __post_init__(self) -> None:
        if isinstance(self.net, str):
            object.__setattr__(self, "net", AttentionNet.load(self.net))
        taken("net", self.net, AttentionNet, "what decodax.train.attention_predictor trains, or a file of it")
        super().__post_init__()
        if self.sinks % self.block_size or self.recent % self.block_size:
            raise ValueError(f"sinks, recent: got {self.sinks} and {self.recent}, takes whole blocks of "
                             f"{self.block_size} tokens")
        if self.budget < self.sinks + self.recent + 2 * self.block_size:
            raise ValueError(f"budget: got {self.budget}, takes a number of tokens with room for two blocks of "
                             f"{self.block_size} beside the {self.sinks} first tokens and the {self.recent} latest")

    @property
    def blocks(self) -> int:
        """Number of blocks that each head chooses: those of the budget that the first and the latest tokens leave."""
        return (self.budget - self.sinks - self.recent) // self.block_size

    def empty(self, shapes: tuple[KVLayer, ...], batch: int, size: int, dtype: Any, inputs: PyTree) -> Cache:
        images: list[Array | None] = []
        chosen: list[Array | None] = []
        count = -(-size // self.block_size)
        for layer, shape in enumerate(shapes):
            if self.keeps_dense(layer, shape) or size <= self.budget:
                images.append(None)
                chosen.append(None)
                continue
            if shape.queries is None:
                raise ValueError("cache: attention-predictor takes a model that says how many query heads a layer has "
                                 "(`KVLayer.queries`)")
            images.append(jnp.zeros((batch, shape.queries, self.history, count), jnp.float32))
            chosen.append(jnp.full((batch, shape.queries, min(self.blocks, count)), -1, jnp.int32))
        zeros = jnp.zeros(batch, jnp.int32)
        return AttentionPredictorCache(images=tuple(images), chosen=tuple(chosen), start=zeros, since=zeros + 0,
                                       **self.parts(shapes, batch, size, dtype, inputs))
