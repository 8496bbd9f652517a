"""Tokens by how much they are needed to repeat the text ("KVzip: Query-Agnostic KV Cache Compression with Context
Reconstruction", Kim et al., 2025).

Behind the text the model is asked to repeat it, and given the text once more, a chunk at a time. A token is worth the
largest attention that any of these queries pays to it, where a query sees the first tokens, the chunk and what has been
repeated of it. No question is needed, so that the cache serves any. It takes about twice the time of reading.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from decodax.cache.key_values import KVLayer
from decodax.caches.evict.evicting import Evicting
from decodax.caches.evict.held import HeldLayer
from decodax.caches.evict.scores import Gathered, TokenScore
from decodax.core.cache import ReadPrompt
from decodax.core.window import causal

Words = str | tuple[int, ...]
"""A text that the model's tokenizer writes, or token ids."""

BEFORE = 8
"""Tokens of the chunk before that a later one is announced by."""

QUERIES = 256
"""Queries whose weights are live at once."""


@dataclasses.dataclass(frozen=True)
class Reconstruction(TokenScore):
    """The largest attention that a token receives while the model repeats the text.

    Attributes:
        chunk: tokens that are repeated at once, 8 or more. sinks: the first tokens, which stay and are not repeated.
        ask: what asks for the first chunk. go_on: what asks for a later one; the 8 tokens before it follow.
        answer: what stands between that and the chunk; None: what the model's chat template puts behind a user's
            message, or a line break.
    """

    chunk: int = 2048
    sinks: int = 4
    ask: Words = "\n\nRepeat the previous context exactly."
    go_on: Words = "\n\nRepeat the part of the previous context exactly, starting with"
    answer: Words | None = None

    reads = "queries"

    def __post_init__(self) -> None:
        if self.chunk < BEFORE:
            raise ValueError(f"chunk: got {self.chunk}, takes {BEFORE} or more")
        if self.sinks < 0:
            raise ValueError(f"sinks: got {self.sinks}, takes 0 or more")

    @property
    def always(self) -> int:
        return self.sinks

    @property
    def once(self) -> bool:
        return True

    def of_model(self, lm: Any) -> Reconstruction:
        answer = _behind_user(lm) if self.answer is None else self.answer
        ids = lambda name, words: words if not isinstance(words, str) else _spelled(lm, words, name)
        return dataclasses.replace(self, ask=ids("ask", self.ask), go_on=ids("go_on", self.go_on),
                                   answer=ids("answer", answer))

    def start(self, shape: KVLayer, batch: int, slots: int) -> Gathered:
        return Gathered(slots=jnp.zeros((batch, shape.heads, slots), jnp.float32))

    def consult(self, cache: Evicting, prompt: ReadPrompt) -> Sequence[Gathered]:
        for name in ("ask", "go_on", "answer"):
            if not isinstance(getattr(self, name), tuple):
                raise ValueError(f"{name}: got a text; a model without a tokenizer, or a kind of cache that was set by "
                                 "hand, takes token ids")
        # row by row: a chunk is as wide as many rows of other windows
        one = lambda row: self._repeated(jax.tree.map(lambda x: x[None], row[0]), row[1], prompt)
        worth = lax.map(one, (cache, prompt.tokens))
        return [own.replace(slots=new) for own, new in zip(cache.gathered, worth, strict=True)]

    def beyond(self, longest: int) -> int:
        return self._width(longest)

    def _width(self, longest: int) -> int:
        """Nodes of a window: what asks, and a chunk of a text of so many tokens."""
        head = max(len(self.ask), len(self.go_on) + BEFORE) + len(self.answer or ())
        return head + min(self.chunk, longest)

    def _repeated(self, cache: Evicting, tokens: Array, prompt: ReadPrompt) -> list[Array]:
        """`f32[G, S]` of each layer of a row."""
        assert self.answer is not None
        length, width = cache.length[0], self._width(cache.size)
        chunk = min(self.chunk, cache.size)
        ids = lambda *parts: np.array([i for part in parts for i in part], np.int32)
        hole = [0] * BEFORE
        first, later = ids(self.ask, self.answer), ids(self.go_on, hole, self.answer)
        heads = np.zeros((2, width), np.int32)
        heads[0, :len(first)], heads[1, :len(later)] = first, later
        node = jnp.arange(width, dtype=jnp.int32)

        def repeat(i: Array, worth: list[Array]) -> list[Array]:
            start, again = self.sinks + i * chunk, (i > 0).astype(jnp.int32)
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
        chunks = jnp.maximum(length - self.sinks + chunk - 1, 0) // chunk
        return lax.fori_loop(0, chunks, repeat, nothing)

    def _most(self, worth: Array, kv: Array, entry: Any, live: Array, start: Array, number: Array,
              chunk: int) -> Array:
        """With the largest weights that a chunk's tokens receive."""
        k, _, q = (x[0].astype(jnp.float32) for x in entry)
        W, H, d = q.shape
        G, S = kv.shape[1:3]
        begin = jnp.minimum(start, S - chunk)
        place = begin + jnp.arange(chunk, dtype=jnp.int32)
        own = (place >= start) & (place < start + number)
        keys = jnp.concatenate([kv[0, :, :self.sinks, :d].astype(jnp.float32),
                                lax.dynamic_slice_in_dim(kv[0], begin, chunk, 1)[..., :d].astype(jnp.float32),
                                k.swapaxes(0, 1)], 1)
        held = jnp.concatenate([jnp.ones(self.sinks, bool), own])
        block = min(W, QUERIES)
        padded = jnp.pad(q, ((0, -W % block), (0, 0), (0, 0))).reshape(-1, block, G, H // G, d)
        asking = jnp.pad(live, (0, -W % block)).reshape(-1, block)

        def some(most: Array, part: tuple[Array, Array, Array]) -> tuple[Array, None]:
            q, asks, first = part
            node = first + jnp.arange(block)
            before = live & (jnp.arange(W) <= node[:, None])
            seen = jnp.concatenate([jnp.broadcast_to(held, (block, len(held))), before], 1)
            weights = jax.nn.softmax(jnp.einsum("wgrd,gsd->grws", q, keys), axis=-1, where=seen)
            weights = jnp.where(asks[:, None], weights, 0)[..., self.sinks:self.sinks + chunk]
            return jnp.maximum(most, weights.max((1, 2))), None

        most, _ = lax.scan(some, jnp.zeros((G, chunk), jnp.float32),
                           (padded, asking, jnp.arange(len(padded), dtype=jnp.int32) * block))
        old = lax.dynamic_slice_in_dim(worth, begin, chunk, 1)
        return lax.dynamic_update_slice_in_dim(worth, jnp.where(own, most, old), begin, 1)

    def __call__(self, held: HeldLayer) -> Array:
        return jnp.where(held.index < self.sinks, jnp.inf, held.gathered.slots)


def _spelled(lm: Any, words: str, name: str) -> tuple[int, ...]:
    if lm.tokenizer is None:
        raise ValueError(f"{name}: got a text, but this model has no tokenizer; takes token ids")
    return tuple(lm.tokenizer.encode_after(None, words))


def _behind_user(lm: Any) -> str:
    """What a chat template puts between a user's message and the answer; a line break where there is none."""
    if lm.tokenizer is None or "default" not in lm.tokenizer.chat_templates:
        return "\n"
    mark = "decodax"
    return lm.tokenizer.chat_text([{"role": "user", "content": mark}]).rpartition(mark)[2]
