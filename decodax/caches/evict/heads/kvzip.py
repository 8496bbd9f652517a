"""KVzip: scores tokens by the attention that they receive when the model repeats the text ("KVzip: Query-Agnostic KV
Cache Compression with Context Reconstruction", Kim et al., 2025).

After the text, the model is asked to repeat it, and the text is prefilled once more, a chunk at a time. The score of a
token is the maximum attention that it receives from any of these queries, where a query attends to the first tokens,
the original chunk, and the repeated tokens before it. The score does not depend on a question, so the cache suits any
question. It takes about twice the time of a prefill.

The model is asked in the authors' words; `ask`, `go_on` and `answer` replace them. A head keeps at most `head_cap`
times the budget (None: no bound, as in the paper).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from decodax.cache.entry import AskedEntry
from decodax.cache.key_values import KVLayer
from decodax.caches.evict.evicting import Evicting, Eviction
from decodax.caches.evict.heads.adakv import AdaptiveHeads, HeadCap
from decodax.caches.evict.scores import Gathered, HeldLayer, TokenScore
from decodax.caches.evict.selection import Budget, Selection, best
from decodax.common.options import Range, TokenId, Whole
from decodax.common.registry import CACHES
from decodax.core.capabilities import ReadPrompt
from decodax.core.window import causal

Words = str | tuple[TokenId, ...]
"""A text, which the tokenizer of the model encodes, or a tuple of token ids."""

BEFORE = 8
"""Number of tokens before a chunk that are appended to the request to repeat it (`go_on`)."""

ChunkSize = Annotated[int, Range(BEFORE)]

QUERIES = 256
"""Number of queries whose attention weights are in memory at a time."""


@dataclasses.dataclass(frozen=True)
class Reconstruction(TokenScore):
    """Scores a token by the maximum attention that it receives while the model repeats the text.

    Attributes:
        chunk_size: number of tokens that are repeated at a time.
        n_sink: number of first tokens, which are always kept and not repeated.
        ask: request to repeat the first chunk.
        go_on: request to repeat a later chunk; it is followed by the 8 tokens before that chunk.
        answer: put between the request and the chunk. None: what the chat template puts after a user's message, or a
            line break if there is none.
    """

    chunk_size: ChunkSize = 2048
    n_sink: Whole = 4
    ask: Words = "\n\nRepeat the previous context exactly."
    go_on: Words = "\n\nRepeat the part of the previous context exactly, starting with"
    answer: Words | None = None

    reads = "queries"
    once = True

    @property
    def always(self) -> int:
        return self.n_sink

    def of_model(self, lm: Any) -> Reconstruction:
        answer = _after_user(lm) if self.answer is None else self.answer
        ids = lambda name, words: words if not isinstance(words, str) else _spelled(lm, words, name)
        return dataclasses.replace(self, ask=ids("ask", self.ask), go_on=ids("go_on", self.go_on),
                                   answer=ids("answer", answer))

    def start(self, shape: KVLayer, batch: int, slots: int) -> Gathered:
        return Gathered(slots=jnp.zeros((batch, shape.heads, slots), jnp.float32))

    def check(self, shapes: Sequence[KVLayer]) -> None:
        for name in ("ask", "go_on", "answer"):
            if not isinstance(getattr(self, name), tuple):
                raise ValueError(f"{name}: got a text; a model without a tokenizer, or a cache that was not given "
                                 "to generate, takes token ids")

    def consult(self, cache: Evicting, prompt: ReadPrompt) -> Sequence[Gathered]:
        # row by row: a chunk is as wide as many rows of other windows
        one = lambda row: self._repeated(jax.tree.map(lambda x: x[None], row[0]), row[1], prompt)
        worth = lax.map(one, (cache, prompt.tokens))
        return [own.replace(slots=new) for own, new in zip(cache.gathered, worth, strict=True)]

    def beyond(self, longest: int) -> int:
        return self._width(longest)

    def _width(self, longest: int) -> int:
        """Returns the number of nodes of a window with a request and a chunk, for a text of `longest` tokens."""
        head = max(len(self.ask), len(self.go_on) + BEFORE) + len(self.answer or ())
        return head + min(self.chunk_size, longest)

    def _repeated(self, cache: Evicting, tokens: Array, prompt: ReadPrompt) -> list[Array]:
        """Returns the scores of the tokens of one row for each layer, `f32[G, S]`."""
        assert self.answer is not None
        length, width = cache.length[0], self._width(cache.size)
        chunk = min(self.chunk_size, cache.size)
        ids = lambda *parts: np.array([i for part in parts for i in part], np.int32)
        hole = [0] * BEFORE
        first, later = ids(self.ask, self.answer), ids(self.go_on, hole, self.answer)
        heads = np.zeros((2, width), np.int32)
        heads[0, :len(first)], heads[1, :len(later)] = first, later
        node = jnp.arange(width, dtype=jnp.int32)

        def repeat(i: Array, worth: list[Array]) -> list[Array]:
            start, again = self.n_sink + i * chunk, (i > 0).astype(jnp.int32)
            head = jnp.where(again, len(later), len(first))
            number = jnp.minimum(length - start, chunk)
            said = jnp.asarray(heads)[again]
            before = node - len(self.go_on)             # the place among the tokens before
            at = jnp.where((again > 0) & (before >= 0) & (before < BEFORE), start - BEFORE + before,
                           jnp.where(node >= head, start + node - head, -1))
            said = jnp.where(at >= 0, tokens[jnp.clip(at, 0, len(tokens) - 1)], said)
            live = node < head + number
            window = causal(said[None], cache.length, live[None])
            out = prompt.model.apply(prompt.params, window, cache)
            return [self._most(own, kv, entry, live, start, number, chunk)
                    for own, kv, entry in zip(worth, cache.kv, out.entries, strict=True)]

        nothing = [jnp.zeros(kv.shape[1:3], jnp.float32) for kv in cache.kv]
        chunks = jnp.maximum(length - self.n_sink + chunk - 1, 0) // chunk
        return lax.fori_loop(0, chunks, repeat, nothing)

    def _most(self, worth: Array, kv: Array, entry: AskedEntry, live: Array, start: Array, number: Array,
              chunk: int) -> Array:
        """Returns the scores of a layer, updated by the maximum weights that the tokens of a chunk receive."""
        k, q = (x[0].astype(jnp.float32) for x in (entry.keys, entry.queries))
        W, H, d = q.shape
        G, S = kv.shape[1:3]
        begin = jnp.minimum(start, S - chunk)
        place = begin + jnp.arange(chunk, dtype=jnp.int32)
        own = (place >= start) & (place < start + number)
        keys = jnp.concatenate([kv[0, :, :self.n_sink, :d].astype(jnp.float32),
                                lax.dynamic_slice_in_dim(kv[0], begin, chunk, 1)[..., :d].astype(jnp.float32),
                                k.swapaxes(0, 1)], 1)
        held = jnp.concatenate([jnp.ones(self.n_sink, bool), own])
        block = min(W, QUERIES)
        padded = jnp.pad(q, ((0, -W % block), (0, 0), (0, 0))).reshape(-1, block, G, H // G, d)
        asking = jnp.pad(live, (0, -W % block)).reshape(-1, block)

        def some(most: Array, part: tuple[Array, Array, Array]) -> tuple[Array, None]:
            q, asks, first = part
            node = first + jnp.arange(block)
            before = live & (jnp.arange(W) <= node[:, None])
            seen = jnp.concatenate([jnp.broadcast_to(held, (block, len(held))), before], 1)
            weights = jax.nn.softmax(jnp.einsum("wgrd,gsd->grws", q, keys), axis=-1, where=seen)
            weights = jnp.where(asks[:, None], weights, 0)[..., self.n_sink:self.n_sink + chunk]
            return jnp.maximum(most, weights.max((1, 2))), None

        most, _ = lax.scan(some, jnp.zeros((G, chunk), jnp.float32),
                           (padded, asking, jnp.arange(len(padded), dtype=jnp.int32) * block))
        old = lax.dynamic_slice_in_dim(worth, begin, chunk, 1)
        return lax.dynamic_update_slice_in_dim(worth, jnp.where(own, most, old), begin, 1)

    def __call__(self, held: HeldLayer) -> Array:
        return jnp.where(held.index < self.n_sink, jnp.inf, held.gathered.slots)


@dataclasses.dataclass(frozen=True)
class AcrossLayers(Selection):
    """Keeps the best tokens of all heads of all layers together.

    Attributes:
        score: score of the tokens.
        head_cap: see `HeadCap`.
    """

    score: TokenScore
    head_cap: HeadCap = None

    uniform = False
    compares = True

    def slots(self, table: np.ndarray, heads: int) -> int:
        return len(table) - 1 if self.head_cap is None else min(len(table) - 1, int(int(table.max()) * self.head_cap))

    def choose(self, held: HeldLayer, count: Array) -> Array:
        return self.choose_all([held], [count])[0]

    def choose_all(self, held: Sequence[HeldLayer], counts: Sequence[Array]) -> Sequence[Array]:
        worth, valid = [self.score(own) for own in held], [own.valid for own in held]
        if self.head_cap is not None:
            most = [jnp.floor(count * self.head_cap).astype(jnp.int32) for count in counts]
            valid = [best(*own) for own in zip(worth, valid, most, strict=True)]
        total = sum(count * own.shape[0] for own, count in zip(worth, counts, strict=True))
        flat = lambda xs: jnp.concatenate([x.reshape(-1) for x in xs])[None]
        chosen = best(flat(worth), flat(valid), jnp.asarray(total))[0]
        ends = np.cumsum([own.size for own in worth])[:-1]
        return [part.reshape(own.shape) for part, own in zip(jnp.split(chosen, ends), worth, strict=True)]


def _spelled(lm: Any, words: str, name: str) -> tuple[int, ...]:
    if lm.tokenizer is None:
        raise ValueError(f"{name}: got a text, but this model has no tokenizer; takes token ids")
    return tuple(lm.tokenizer.encode_after(None, words))


def _after_user(lm: Any) -> str:
    """Returns the text that a chat template puts between a user's message and the answer; a line break without a
    template."""
    if lm.tokenizer is None or "default" not in lm.tokenizer.chat_templates:
        return "\n"
    mark = "decodax"
    return lm.tokenizer.chat_text([{"role": "user", "content": mark}]).rpartition(mark)[2]


@CACHES.register("kvzip", "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction", "Kim et al. 2025",
                 family="evict")
def kvzip(budget: Budget = 0.5, chunk_size: ChunkSize = 2048, n_sink: Whole = 4,
          layers: Literal["together", "each"] = "together", head_cap: HeadCap = 2.0, ask: Words = Reconstruction.ask,
          go_on: Words = Reconstruction.go_on, answer: Words | None = None) -> Eviction:
    """Keeps the tokens that the model attends to when it repeats the text.

    The best choice if several questions are asked about one text (`context=`). Evicts once, after the prompt, which is
    prefilled a second time.

    Args:
        budget: tokens that each head keeps on average; below 1, a share of the text; or bytes such as "64MB".
        chunk_size: number of tokens that are repeated at a time.
        n_sink: number of first tokens, which are always kept and not repeated.
        layers: "together": all heads of all layers share one budget, as in the paper. "each": the heads of a layer do.
        head_cap: a head keeps at most this multiple of the budget; arrays are as large as the largest head. None: no
            bound, as in the paper.
        ask: request to repeat the text, as a text or token ids.
        go_on: request to repeat a later chunk.
        answer: put between the request and the chunk. None: what the chat template puts after a user's message, or a
            line break if there is none.
    """
    score = Reconstruction(chunk_size, n_sink, ask, go_on, answer)
    selection = AcrossLayers(score, head_cap) if layers == "together" else AdaptiveHeads(score, 0.0, head_cap)
    return Eviction(selection, budget, name="kvzip")
