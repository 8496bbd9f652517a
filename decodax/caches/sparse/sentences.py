"""A cache whose queries read whole sentences ("SentenceKV: Efficient LLM Inference via Sentence-Level Semantic KV
Caching", Zhu et al., 2025).

Of a prompt `factor` times as many tokens stay as a query reads, those that SnapKV chooses. Each sentence of them is
described by the mean of its keys in a head. While a sentence is written, a query takes sentences in the order of the
products of their mean keys with the mean query of the tokens of its own sentence so far, whole ones until the budget is
full, and of the last one the earliest tokens. It reads these, the first `sinks` tokens and the latest `recent` ones. A
token that ends a sentence, and the first `threshold` of a sentence, read everything. A sentence that has ended is one
of those that are read from then on.

Which tokens of a window belong to the sentence that a node stands in is told by the tokens before it that the node
sees: the entries of a layer hold each node's query and whether it ends a sentence. So every node of a chain or a tree
reads what plain decoding would read. A query that has no more than `budget` tokens before it reads all of them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.cache.wrapper import Wrapper
from decodax.caches.evict.evicting import Evicting, Eviction
from decodax.caches.evict.selection import Top
from decodax.caches.evict.snapkv import WindowAttention
from decodax.caches.sparse.retrieval import attention_to
from decodax.common.struct import Struct, static, struct
from decodax.core.cache import Cache, CacheConfig, Entries, PyTree, ReadPrompt
from decodax.core.window import each_node
from decodax.pallas_kernels.window_attention import Bias, merge, window_attention_lse

ENDS = (".", "!", "?", ". ", "! ", "? ", "...", "\n\n", "\n\n\n", "。", "！", "？", "。。")
"""The tokens that end a sentence, as the authors list them."""


def is_one_of(tokens: Array, ids: tuple[int, ...]) -> Array:
    """`bool[...]`: which tokens are one of `ids`."""
    return (tokens[..., None] == jnp.asarray(ids, jnp.int32)).any(-1)


@struct
class SentenceKeys(Struct):
    """The sentences of a layer. Slots are those of `Evicting`, the same number in every head.

    Attributes:
        means: `f32[B, G, N, d]`, the mean key of each sentence that has ended. of: `i32[B, G, S]`, the sentence of each
            slot. ended: `i32[B, G]`, how many have ended; the one that is being written has this number.
        queries, keys: `f32[B, H, d]` and `f32[B, G, d]`, sums over the tokens of the sentence that is being written.
    """

    means: Array
    of: Array
    ended: Array
    queries: Array
    keys: Array


@struct
class Sentences(Wrapper):
    """What an eviction keeps of a prompt and all that follows, and its sentences.

    Attributes:
        base: the tokens. sentences: a tuple of one `SentenceKeys` a layer; None where a layer reads everything.
        written: `i32[B]`, how many tokens the sentence has that is being written.
    """

    base: Evicting
    sentences: tuple[SentenceKeys | None, ...]
    written: Array
    kind: SentenceRetrieval = static()

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float,    # type: ignore[override]
               sliding: int | None = None, softcap: float | None = None,
               bias: Bias | None = None) -> tuple[Array, PyTree]:
        own = k.shape[1] - q.shape[1]
        if window.tokens is None or (own and window.before is None):
            raise ValueError("cache: sentence-kv goes by the tokens of a window; takes a model and a method that read "
                             "each token once, by its own key")
        ends = is_one_of(window.tokens, self.kind.marks)
        entry, held = (k[:, own:], v[:, own:], q, ends), self.sentences[layer]
        options: dict[str, Any] = dict(scale=scale, sliding=sliding, softcap=softcap, bias=bias)
        whole = lambda: self.base.attend(layer, q, k, v, window, **options)[0]
        if held is None:
            return whole(), entry
        if bias is not None or softcap is not None:
            raise ValueError("cache: sentence-kv scores sentences by queries and keys alone; takes a model without a "
                             "soft cap or a bias of its attention scores")
        if k.shape[1] > self.kind.recent:
            raise ValueError(f"cache: sentence-kv takes windows of at most its {self.kind.recent} recent tokens, got "
                             f"one of {k.shape[1]} nodes; takes recent={k.shape[1]} or more")
        before = window.before
        queries = q if before is None else jnp.concatenate([before[2], q], 1)
        ended = ends if before is None else jnp.concatenate([before[3], ends], 1)
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
        near = window_attention_lse(q, k, v, window.visible(), window.positions, scale=scale,
                                    key_positions=window.key_positions)
        node = q.astype(f32) * scale, mean / written[..., None, None], open_mean, closed, place
        each = jax.vmap(self._read, in_axes=(0, 0, 0, 0))
        read = functools.partial(each, self.base.kv[layer], self.base.count[layer][:, 0], held)
        out = merge(near, each_node(read, node))[0]
        everything = lax.cond(full.any(), whole, lambda: jnp.zeros_like(out))
        return jnp.where(full[:, :, None, None], everything, out), entry

    def _read(self, kv: Array, count: Array, held: SentenceKeys, node: tuple[Array, ...]) -> tuple[Array, Array]:
        """Attention of one node of one row to what it takes of a layer, `f32[H, e]`, and the logarithm of its sums."""
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
        # tokens of a sentence are worth the same, and `top_k` takes the earlier ones first
        found, far = lax.top_k(jnp.where(free, worth, -jnp.inf), min(kind.chosen, S))
        far = jnp.where(found > -jnp.inf, far, -1)
        late = jnp.maximum(place - kind.recent + 1, kind.sinks) + jnp.arange(min(kind.recent, S), dtype=jnp.int32)
        always = jnp.concatenate([jnp.arange(min(kind.sinks, S), dtype=jnp.int32), late])
        always = jnp.where(always < count, always, -1)
        at = jnp.concatenate([jnp.broadcast_to(always, (*far.shape[:2], len(always))), far], 2)     # [G, r, n]
        some = jax.vmap(lambda own, at: own[jnp.maximum(at, 0)])(kv, at).astype(jnp.float32)
        return attention_to(q[:, None], some.reshape(H, at.shape[2], -1), (at >= 0).reshape(H, -1), d)

    def commit(self, entries: Entries, slots: Array) -> Sentences:
        base = self.base.commit([entry[:2] for entry in entries], slots)
        if not self.base.kv:
            return self.replace(base=base)
        wanted = slots >= 0
        ends = entries[0][3] & wanted
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
            keys, queries = sums(entry[0], held.keys), sums(entry[2], held.queries)
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

    def for_prompt(self) -> Cache:      # type: ignore[override]
        return PromptOfSentences(base=self.base.for_prompt(), kind=self.kind) if self.base.kv else self


@struct
class PromptOfSentences(Wrapper):
    """A prompt, of which SnapKV will choose tokens."""

    base: Evicting
    kind: SentenceRetrieval = static()

    def settled(self, prompt: ReadPrompt) -> Cache:     # type: ignore[override]
        base = self.base.settled(prompt)
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
            # numbered anew in each head, since a sentence may have none of its tokens left
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


@dataclasses.dataclass(frozen=True)
class SentenceRetrieval(CacheConfig):
    """A `Sentences` cache.

    Attributes:
        ends: ids of the tokens that end a sentence; None: those of the tokenizer that spell one of `ENDS`.
        budget: tokens that a query reads. factor: of a prompt so many times that stay.
        sinks, recent: the first and the latest tokens, which are read in any case.
        threshold: so many tokens at the beginning of a sentence read everything.
        window, kernel: of SnapKV's choice, which pools by the maximum. new: see `Eviction`.
    """

    ends: tuple[int, ...] | None = None
    budget: int = 1024
    factor: float = 3.0
    sinks: int = 32
    recent: int = 32
    threshold: int = 1
    window: int = 32
    kernel: int = 7
    new: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("budget", 1), ("sinks", 0), ("recent", 1), ("threshold", 0)):
            if not isinstance(value := getattr(self, name), int) or value < least:
                raise ValueError(f"{name}: got {value!r}, takes a number from {least}")
        if self.budget <= self.sinks + self.recent:
            raise ValueError(f"budget: got {self.budget}, takes more than the {self.sinks + self.recent} first and "
                             "latest tokens")
        if self.factor < 1:
            raise ValueError(f"factor: got {self.factor}, takes 1 or more")
        if self.ends is not None and not all(isinstance(i, int) and i >= 0 for i in self.ends):
            raise ValueError(f"ends: got {self.ends!r}, takes token ids")
        assert self.eviction

    @property
    def marks(self) -> tuple[int, ...]:
        """The tokens that end a sentence."""
        if self.ends is None:
            raise ValueError("ends: got None; a model without a tokenizer, or a kind of cache that was set by hand, "
                             "takes the ids of the tokens that end a sentence")
        return self.ends

    @property
    def chosen(self) -> int:
        """Tokens of the sentences that a query chooses."""
        return self.budget - self.sinks - self.recent

    @property
    def eviction(self) -> Eviction:
        """What chooses of a prompt."""
        return Eviction(Top(WindowAttention(self.window, self.kernel, "max")), int(self.budget * self.factor),
                        new=self.new, name="sentence-kv")

    def fit(self, new: int) -> SentenceRetrieval:
        return dataclasses.replace(self, new=new)

    def of_model(self, lm: Any) -> SentenceRetrieval:
        if self.ends is not None or lm.tokenizer is None:
            return self
        spelled = {end.encode() for end in ENDS}
        return dataclasses.replace(self, ends=tuple(i for i, piece in enumerate(lm.tokenizer.token_bytes())
                                                    if piece in spelled))

    def around(self, base: Evicting) -> Sentences:
        """A cache without sentences, of these tokens."""
        made: list[SentenceKeys | None] = []
        for layer, shape in enumerate(base.shapes if base.kv else ()):
            B, G, S, _ = base.kv[layer].shape
            zeros = lambda *rest, B=B: jnp.zeros((B, *rest), jnp.float32)
            made.append(None if self.eviction.keeps_all(layer, shape) else SentenceKeys(
                means=zeros(G, S + 1, shape.width), of=jnp.zeros((B, G, S), jnp.int32),
                ended=jnp.zeros((B, G), jnp.int32), queries=zeros(shape.queries or G, shape.width),
                keys=zeros(G, shape.width)))
        return Sentences(base=base, sentences=tuple(made), written=jnp.zeros_like(base.length), kind=self)

    def __call__(self, layers: Sequence[tuple[Any, ...]], batch: int, capacity: int, dtype: jax.typing.DTypeLike,
                 inputs: PyTree = None) -> Cache:
        assert self.marks is not None
        base = self.eviction(layers, batch, capacity, dtype, inputs)
        assert isinstance(base, Evicting)
        return self.around(base)
