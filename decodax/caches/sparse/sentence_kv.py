"""SentenceKV: each query attends to whole sentences ("SentenceKV: Efficient LLM Inference via Sentence-Level Semantic
KV Caching", Zhu et al., 2025).

Of a prompt, SnapKV keeps `factor` times as many tokens as a query attends to. Each sentence of the kept tokens is
represented by the mean of its keys in a head. The score of a sentence is the product of this mean with the mean query
of the sentence that is being written. A query takes the sentences of highest score until the budget is full, and the
earliest tokens of the last one. It attends to these, to the first `sinks` tokens and to the latest `recent` tokens. A
token that ends a sentence, and the first `threshold` tokens of a sentence, attend to all tokens. A sentence can be
taken as soon as it has ended.

The sentence of each node is determined from the tokens before it that the node attends to: entries hold the query of
each node and whether it ends a sentence. So every node of a chain or tree gets the same result as in plain decoding. A
query with at most `budget` tokens before it attends to all of them.

The outputs are those of the authors' plain attention (d6bb131), with three exceptions: the token after the first ones
can be chosen, a query within the budget attends to everything, and sentences of any length count. Key heads choose
the tokens of the prompt, not query heads.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.cache.entry import AskedEntry
from decodax.cache.key_values import FittedConfig, KVLayer
from decodax.cache.wrapper import Wrapper
from decodax.caches.evict.evicting import Evicting, Eviction
from decodax.caches.evict.selection import Top
from decodax.caches.evict.snapkv import WindowAttention
from decodax.caches.sparse.reading import SparseConfig, attention_to
from decodax.common.options import Count, Odd, Range, TokenId, Whole
from decodax.common.registry import CACHES
from decodax.common.struct import Struct, static, struct
from decodax.core.cache import Cache, Entries, PyTree
from decodax.core.capabilities import ReadPrompt
from decodax.core.window import each_node
from decodax.pallas_kernels.window_attention import Bias, merge, window_attention_lse

ENDS = (".", "!", "?", ". ", "! ", "? ", "...", "\n\n", "\n\n\n", "。", "！", "？", "。。")
"""Tokens that end a sentence, from the authors' list."""


def is_one_of(tokens: Array, ids: tuple[int, ...]) -> Array:
    """Returns a mask of the tokens that are one of `ids`, `bool[...]`."""
    return (tokens[..., None] == jnp.asarray(ids, jnp.int32)).any(-1)


@struct
class SentenceKeys(Struct):
    """Sentences of a layer. Slots are those of `Evicting`; every head has the same number.

    Attributes:
        means: `f32[B, G, N, d]`, mean key of each sentence that has ended.
        of: `i32[B, G, S]`, number of the sentence of each slot.
        ended: `i32[B, G]`, number of sentences that have ended; the one that is being written has this number.
        queries: `f32[B, H, d]`, sum of the queries of the sentence that is being written.
        keys: `f32[B, G, d]`, sum of its keys.
    """

    means: Array
    of: Array
    ended: Array
    queries: Array
    keys: Array


@struct
class SentenceEntry(AskedEntry):
    """Keys, values and queries (not scaled) of a window's own nodes.

    Attributes:
        ends: `bool[B, W]`, nodes that end a sentence.
    """

    ends: Array


@struct
class SentenceKVCache(Wrapper):
    """The kept tokens of a prompt and all later tokens, with their sentences.

    Attributes:
        base: the cache of these tokens.
        sentences: the `SentenceKeys` of each layer; None: the layer attends to all tokens.
        written: `i32[B]`, number of tokens of the sentence that is being written.
        kind: static; the configuration.
    """

    base: Evicting
    sentences: tuple[SentenceKeys | None, ...]
    written: Array
    kind: SentenceKVConfig = static()

    def check_window(self, nodes: int) -> None:
        if any(held is not None for held in self.sentences):
            self.kind.check_window(nodes)

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float,    # type: ignore[override]
               sliding: int | None = None, softcap: float | None = None,
               bias: Bias | None = None, sinks: Array | None = None) -> tuple[Array, PyTree]:
        own = k.shape[1] - q.shape[1]
        if window.tokens is None or (own and window.before is None):
            raise ValueError("cache: sentence-kv depends on the ids of the tokens of a window; takes a model that "
                             "reads tokens by id, and a method that does not read a token twice")
        ends = is_one_of(window.tokens, self.kind.marks)
        entry, held = SentenceEntry(k[:, own:], v[:, own:], q, ends), self.sentences[layer]
        options: dict[str, Any] = dict(scale=scale, sliding=sliding, softcap=softcap, bias=bias, sinks=sinks)
        whole = lambda: self.base.attend(layer, q, k, v, window, **options)[0]
        if held is None:
            return whole(), entry
        self.check_window(k.shape[1])
        before = window.before
        queries = q if before is None else jnp.concatenate([before.queries, q], 1)
        ended = ends if before is None else jnp.concatenate([before.ends, ends], 1)
        seen, at, own_at = window.visible(), window.key_positions[:, None], window.positions[:, :, None]
        seen = jnp.broadcast_to(seen, (q.shape[0], *seen.shape[1:]))
        earlier = seen & (at < own_at) & ended[:, None]         # ends of sentences before a node
        last = jnp.where(earlier, at, -1).max(-1)
        first = jnp.where(earlier, at, jnp.iinfo(jnp.int32).max).min(-1)
        of_own, of_first = seen & (at > last[..., None]), seen & (at <= first[..., None])
        closed, f32 = last >= 0, jnp.float32
        share = lambda nodes, x: jnp.einsum("bwk,bkhd->bwhd", nodes.astype(f32), x.astype(f32))
        written = of_own.sum(-1) + jnp.where(closed, 0, self.written[:, None])
        mean = share(of_own, queries) + jnp.where(closed[..., None, None], 0, held.queries[:, None])
        # the sentence that was being written before this window, if a node sees its end
        open_mean = (held.keys[:, None] + share(of_first, k)) / jnp.maximum(
            self.written[:, None] + of_first.sum(-1), 1)[..., None, None]
        place = self.base.count[layer][:, :1] + window.positions - self.length[:, None]
        full = ends | (written <= self.kind.threshold) | (place < self.kind.budget)
        near = window_attention_lse(q, k, v, window.visible(), window.positions, scale=scale, sinks=sinks,
                                    key_positions=window.key_positions)
        node = q.astype(f32) * scale, mean / written[..., None, None], open_mean, closed, place
        each = jax.vmap(self._read, in_axes=(0, 0, 0, 0))
        read = functools.partial(each, self.base.kv[layer], self.base.count[layer][:, 0], held)
        out = merge(near, each_node(read, node))[0]
        everything = lax.cond(full.any(), whole, lambda: jnp.zeros_like(out))
        return jnp.where(full[:, :, None, None], everything, out), entry

    def _read(self, kv: Array, count: Array, held: SentenceKeys, node: tuple[Array, ...]) -> tuple[Array, Array]:
        """Returns attention of one node of one row to the tokens of a layer that it chooses, `f32[H, e]`, and the
        logarithms of the softmax sums."""
        (q, mean, open_mean, closed, place), kind = node, self.kind
        (G, S, _), (H, d) = kv.shape, q.shape
        mean = mean.reshape(G, -1, d)
        likeness = jnp.einsum("grd,gnd->grn", mean, held.means)
        number = jnp.arange(held.means.shape[1], dtype=jnp.int32)
        written = jnp.where(closed, jnp.einsum("grd,gd->gr", mean, open_mean), -jnp.inf)
        likeness = jnp.where((number == held.ended[:, None])[:, None], written[..., None], likeness)
        worth = jnp.take_along_axis(likeness, held.of[:, None], 2)
        slot = jnp.arange(S, dtype=jnp.int32)
        free = (slot >= kind.sinks) & (slot <= place - kind.recent) & (slot < count)
        # tokens of a sentence have the same score, and `top_k` takes the earlier ones first
        found, far = lax.top_k(jnp.where(free, worth, -jnp.inf), min(kind.chosen, S))
        far = jnp.where(found > -jnp.inf, far, -1)
        late = jnp.maximum(place - kind.recent + 1, kind.sinks) + jnp.arange(min(kind.recent, S), dtype=jnp.int32)
        always = jnp.concatenate([jnp.arange(min(kind.sinks, S), dtype=jnp.int32), late])
        always = jnp.where(always < count, always, -1)
        at = jnp.concatenate([jnp.broadcast_to(always, (*far.shape[:2], len(always))), far], 2)     # [G, r, n]
        some = jax.vmap(lambda own, at: own[jnp.maximum(at, 0)])(kv, at).astype(jnp.float32)
        return attention_to(q[:, None], some.reshape(H, at.shape[2], -1), (at >= 0).reshape(H, -1), d)

    def commit(self, entries: Entries, slots: Array) -> SentenceKVCache:
        base = self.base.commit([entry.pair for entry in entries], slots)
        if not self.base.kv:
            return self.replace(base=base)
        wanted = slots >= 0
        ends = entries[0].ends & wanted
        rank = ((slots[:, None] < slots[:, :, None]) & ends[:, None]).sum(-1, dtype=jnp.int32)      # ends before it
        number = ends.sum(1, dtype=jnp.int32)
        part = jnp.arange(slots.shape[1] + 1, dtype=jnp.int32)
        groups = (wanted[:, None] & (rank[:, None] == part[:, None])).astype(jnp.float32)         # [B, W + 1, W]
        size = groups.sum(-1).at[:, 0].add(self.written)
        in_open = part == number[:, None]
        made: list[SentenceKeys | None] = []
        for layer, (held, entry) in enumerate(zip(self.sentences, entries, strict=True)):
            if held is None:
                made.append(None)
                continue
            sums = lambda x, old: jnp.einsum("bjw,bwhd->bjhd", groups, x.astype(jnp.float32)).at[:, 0].add(old)
            keys, queries = sums(entry.keys, held.keys), sums(entry.queries, held.queries)
            of_open = lambda x: jnp.where(in_open[..., None, None], x, 0).sum(1)
            to = jnp.where(part < number[:, None], part, held.means.shape[2])
            to_slot = jnp.where(wanted, self.base.count[layer][:, :1] + jnp.cumsum(wanted, 1, dtype=jnp.int32) - 1,
                                held.of.shape[2])
            put = jax.vmap(lambda old, new, at: old.at[at].set(new, mode="drop"))
            put_all = jax.vmap(put, in_axes=(0, 0, 0))
            made.append(SentenceKeys(
                means=put_all(held.means, (keys / jnp.maximum(size, 1)[..., None, None]).swapaxes(1, 2),
                              held.ended[..., None] + to[:, None]),
                of=put_all(held.of, held.ended[..., None] + rank[:, None],
                           jnp.broadcast_to(to_slot[:, None], (*held.ended.shape, slots.shape[1]))),
                ended=held.ended + number[:, None], queries=of_open(queries), keys=of_open(keys)))
        return self.replace(base=base, sentences=tuple(made),
                            written=jnp.where(in_open, size, 0).sum(1).astype(jnp.int32))

    def prefill_cache(self) -> Cache:      # type: ignore[override]
        return PromptOfSentences(base=self.base.prefill_cache(), kind=self.kind) if self.base.kv else self


@struct
class PromptOfSentences(Wrapper):
    """SentenceKV's cache during prefill, with all tokens of the prompt in `base`. `finish_prefill` evicts tokens and
    finds the sentences."""

    base: Evicting
    kind: SentenceKVConfig = static()

    def finish_prefill(self, prompt: ReadPrompt) -> Cache:     # type: ignore[override]
        base = self.base.finish_prefill(prompt)
        made: list[SentenceKeys | None] = []
        ends = is_one_of(prompt.tokens, self.kind.marks).astype(jnp.int32)
        before = jnp.cumsum(ends, 1) - ends
        empty = self.kind.around(base)
        for layer, held in enumerate(empty.sentences):
            if held is None:
                made.append(None)
                continue
            d, at = base.widths[layer], base.positions[layer]
            whose = jax.vmap(lambda before, at: before[jnp.maximum(at, 0)])(before, at)
            # each head has its own numbers, since all tokens of a sentence may have been evicted
            begins = jnp.pad(whose[..., 1:] != whose[..., :-1], ((0, 0), (0, 0), (1, 0))) & (at >= 0)
            of = jnp.cumsum(begins, -1, dtype=jnp.int32)
            N = held.means.shape[2]
            to = jnp.where(at >= 0, of, N)
            total = lambda x, to, N=N: jax.ops.segment_sum(x, to, N + 1)[:N]
            keys = base.kv[layer][..., :d].astype(jnp.float32)
            sums = jax.vmap(jax.vmap(total))(keys, to)
            size = jax.vmap(jax.vmap(total))(jnp.ones(to.shape, jnp.float32), to)
            made.append(held.replace(means=sums / jnp.maximum(size, 1)[..., None], of=of,
                                     ended=jnp.where(at >= 0, of + 1, 0).max(-1)))
        return empty.replace(sentences=tuple(made))


@CACHES.register("sentence-kv", "SentenceKV: Efficient LLM Inference via Sentence-Level Semantic KV Caching",
                 "Zhu et al. 2025", family="sparse")
@dataclasses.dataclass(frozen=True)
class SentenceKVConfig(FittedConfig, SparseConfig):
    """Keeps prompt tokens that SnapKV chooses; each query attends to the sentences that are similar to the one being
    written, to the first tokens and to the latest.

    It saves memory for long prompts, and the time of attention. Example: `cache="sentence-kv:budget=512"`.

    Attributes:
        ends: ids of the tokens that end a sentence; None: the tokenizer's tokens whose text is one of `ENDS`.
        budget: number of tokens that a query attends to, first and latest ones included.
        factor: number of prompt tokens to keep, divided by the budget.
        sinks: number of first tokens that are always attended to.
        recent: number of latest tokens that are always attended to; no window may be wider.
        threshold: number of tokens at the beginning of a sentence that attend to all tokens.
        window_size: number of latest queries by which SnapKV scores prompt tokens.
        kernel_size: number of neighbouring tokens over which SnapKV takes the maximum score, odd.
    """

    ends: tuple[TokenId, ...] | None = None
    budget: Count = 1024
    factor: Annotated[float, Range(1)] = 3.0
    sinks: Whole = 32
    recent: Count = 32
    threshold: Whole = 1
    window_size: Count = 32
    kernel_size: Odd = 7

    name: ClassVar[str] = "sentence-kv"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.budget <= self.sinks + self.recent:
            raise ValueError(f"budget: got {self.budget}, takes more than the {self.sinks + self.recent} first and "
                             "latest tokens")
        assert self.eviction

    @property
    def marks(self) -> tuple[int, ...]:
        """Ids of the tokens that end a sentence."""
        if self.ends is None:
            raise ValueError("ends: got None; a model without a tokenizer, or a cache that was not given to "
                             "generate, takes the ids of the tokens that end a sentence")
        return self.ends

    @property
    def chosen(self) -> int:
        """Number of tokens that a query attends to in sentences that it chooses: those of the budget that the first and
        the latest tokens leave."""
        return self.budget - self.sinks - self.recent

    @property
    def eviction(self) -> Eviction:
        """The rule that evicts tokens of a prompt."""
        return Eviction(Top(WindowAttention(self.window_size, self.kernel_size, "max")), int(self.budget * self.factor),
                        new=self._new, name="sentence-kv")

    def of_model(self, lm: Any) -> SentenceKVConfig:
        if self.ends is not None or lm.tokenizer is None:
            return self
        spelled = {end.encode() for end in ENDS}
        return dataclasses.replace(self, ends=tuple(i for i, piece in enumerate(lm.tokenizer.token_bytes())
                                                    if piece in spelled))

    def around(self, base: Evicting) -> SentenceKVCache:
        """Returns a cache that wraps `base`, without sentences."""
        made: list[SentenceKeys | None] = []
        for layer, shape in enumerate(base.shapes if base.kv else ()):
            B, G, S, _ = base.kv[layer].shape
            zeros = lambda *rest, B=B: jnp.zeros((B, *rest), jnp.float32)
            made.append(None if self.eviction.keeps_all(layer, shape) else SentenceKeys(
                means=zeros(G, S + 1, shape.width), of=jnp.zeros((B, G, S), jnp.int32),
                ended=jnp.zeros((B, G), jnp.int32), queries=zeros(shape.queries or G, shape.width),
                keys=zeros(G, shape.width)))
        return SentenceKVCache(base=base, sentences=tuple(made), written=jnp.zeros_like(base.length), kind=self)

    def empty(self, shapes: tuple[KVLayer, ...], batch: int, size: int, dtype: Any, inputs: PyTree) -> Cache:
        assert self.marks is not None
        base = self.eviction.empty(shapes, batch, size, dtype, inputs)
        assert isinstance(base, Evicting)
        return self.around(base)
