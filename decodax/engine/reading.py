"""Prefills the prompts of a batch: each by itself, after a prefix that all have in common, or after contexts whose
cache is finished first."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from decodax.algorithms.plain import Autoregressive
from decodax.cache.dense import Dense
from decodax.cache.prefix import Prefix
from decodax.cache.shared_prefix import SharedPrefixCache, sharing
from decodax.common.struct import short
from decodax.core import drivers
from decodax.core.algorithm import Algorithm, prefill_observer
from decodax.core.cache import Cache
from decodax.core.memory import bucket, power
from decodax.core.state import State
from decodax.core.types import Model, Params
from decodax.engine.request import Request
from decodax.sampling import Policy
from decodax.sharding import place

NARROW, SHORT = 32, 128
"""Number of prompt tokens in a prefill round if no prompt of the batch is longer than `SHORT`. On a CPU narrow rounds
take about the same time per token as wide ones (3.3 and 2.6 ms for a 125M shape with 32 and 128 tokens), and the last
one has less padding."""

SHARED = 64
"""Minimum number of common tokens for which a prefix is prefilled once for several prompts."""


KNOWN = 4
"""Maximum number of contexts whose caches are kept for later prompts."""


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Returns the number of tokens that two prompts have in common at the beginning.

    >>> common([1, 2, 3, 4], [1, 2, 5])
    2
    """
    low, high = 0, min(len(a), len(b))
    while low < high:       # slices are compared at C's speed, tokens one by one are not
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def chunk_width(left: int, chunk: int, size: int) -> int:
    """Returns the number of tokens of one prefill round. There are few different widths, so that few programs are
    compiled.

    Args:
        left: number of tokens that the longest prompt still has to prefill; if few, a narrow round is used.
        chunk: maximum number of tokens of a round.
        size: number of slots of the token buffer, also a maximum.
    """
    return min(NARROW if left < SHORT else chunk, chunk, size)


@dataclasses.dataclass(frozen=True)
class Reader:
    """Prefills the prompts of one batch.

    Attributes:
        request: the batch, padded to the rows of the programs.
        algorithm: the algorithm without its weights.
        model: the network.
        params: all weights.
        policy: the policy of the rows.
        mesh: mesh on which rows are placed, or None.
        size: number of slots of the token buffer.
        top_logprobs: number of most likely tokens that are recorded, as in `drivers.begin`.
        known: caches of contexts that were prefilled, with one row each; new ones are added. None: nothing is kept.
        later: True leaves prompts to be prefilled in the rounds; if they have a context, only the text after it.
    """

    __repr__ = short

    request: Request
    algorithm: Algorithm
    model: Model
    params: Params
    policy: Policy
    mesh: Mesh | None
    size: int
    top_logprobs: int | None
    known: dict[tuple[int, ...], Cache] | None = None
    later: bool = False

    def read(self) -> tuple[Model, State, int]:
        """Prefills the prompts.

        Returns:
            The model, with a cache config that shares a prefix if rows have one in common; the state after the prompts;
            and the number of forward passes.
        """
        lengths = np.array([len(row) for row in self.request.prompts], np.int32)
        if self.request.context is not None:
            return self.model, *self._behind_contexts(lengths, self.request.context)
        if self.later:
            return self.model, self._begin(self.model, lengths), 0
        if common := self._common():
            shared = sharing(self.model, bucket(common + 1), power(int(lengths.max()) - common))
            if shared is not None:
                return shared[0], *self._behind_prefix(lengths, common, *shared)
        return self.model, *self._prefilled(self._begin(self.model, lengths), 0, int(lengths.max()) - 1)

    def _begin(self, model: Model, lengths: np.ndarray) -> State:
        each = self.request
        tokens = np.zeros((len(each), self.size), np.int32)
        for row, prompt, more in zip(tokens, each.prompts, each.behind or [[]] * len(each), strict=True):
            row[:len(prompt) + len(more)] = [*prompt, *more]
        inputs = place(self.mesh, jax.tree.map(jnp.asarray, each.inputs))
        return drivers.begin(self.algorithm, model, self.params, self.policy, place(self.mesh, tokens), lengths,
                             size=self.size, seed=each.seeds, max_new=each.max_new, min_new=each.min_new,
                             request=each.request_ids, sample=np.zeros(len(each), np.uint32),
                             top_logprobs=self.top_logprobs, inputs=inputs)

    def _prefilled(self, s: State, before: int, left: int, model: Model | None = None) -> tuple[State, int]:
        """Returns the state with the prompts in the cache, of which the longest has `left` tokens left, and the number
        of forward passes, including the `before` earlier ones."""
        if not self.algorithm.traits.prefills or left <= 0:
            return s, before
        width = chunk_width(left, self.request.chunk, self.size)
        s = drivers.prefill(self.algorithm, model or self.model, self.params, s, width=width)
        return s, before - (-left // width)

    def _common(self) -> int:
        """Returns the number of first tokens that all prompts have in common and that are worth sharing; 0 if there are
        too few, or if rows have inputs of their own."""
        each = self.request
        alone = each.behind is None and each.inputs is None and each.guidance is None
        if not alone or not self.algorithm.traits.prefills or prefill_observer(self.algorithm) is not None:
            return 0
        least, most = min(each.prompts), max(each.prompts)      # in the order of lists, whose ends differ earliest
        if least is most:
            return 0
        same = min(common(least, most), min(map(len, each.prompts)) - 1)
        return same if same >= SHARED else 0

    def _behind_prefix(self, lengths: np.ndarray, common: int, model: Model, reader: Model) -> tuple[State, int]:
        size, chunk = bucket(common + 1), self.request.chunk
        given = np.zeros((1, size), np.int32)
        given[0, :common + 1] = self.request.prompts[0][:common + 1]
        plain, first = Autoregressive(), self.policy.select(jnp.zeros(1, jnp.int32))
        one = drivers.begin(plain, reader, self.params, first, given, np.array([common + 1], np.int32), size=size,
                            seed=np.zeros((1, 2), np.uint32), max_new=1, min_new=0)
        one = drivers.prefill(plain, reader, self.params, one, width=min(chunk, size))
        s = self._begin(model, lengths)
        s = s.replace(cache=cast(SharedPrefixCache, s.cache).adopt(cast(Dense, one.cache)))
        return self._prefilled(s, -(-common // chunk), int(lengths.max()) - 1 - common, model)

    def _behind_contexts(self, lengths: np.ndarray, context: np.ndarray) -> tuple[State, int]:
        each = self.request
        texts = [tuple(row[:n]) for row, n in zip(each.prompts, context, strict=True)]
        if each.prefixes is not None:
            s, forwards = self._begin(self.model, lengths), 0
            s = s.replace(cache=self._brought(s, each.prefixes))
        else:
            cache, forwards = self._held(texts) if self.known is not None else self._read_texts(texts)
            s = self._begin(self.model, lengths).replace(cache=cache)
        if self.later:
            return s, forwards
        left = int((lengths - context).max())
        width = min(NARROW if left < SHORT else each.chunk, each.chunk, power(left))
        return drivers.extend(self.algorithm, self.model, self.params, s, width=width), forwards - (-left // width)

    def _brought(self, s: State, prefixes: list[Prefix]) -> Cache:
        """Returns the cache filled with the given keys and values of each row's context."""
        longest = max(len(one) for one in prefixes)
        stack = lambda layer: np.stack([np.pad(one.kv[layer], ((0, 0), (0, longest - len(one)), (0, 0)))
                                        for one in prefixes])
        kv = tuple(stack(layer) for layer in range(len(prefixes[0].kv)))
        reuse = None
        if any(one.reuse is not None for one in prefixes):
            attention, change = (np.zeros((len(prefixes), longest), np.float32) for _ in range(2))
            for i, one in enumerate(prefixes):
                if one.reuse is not None:
                    attention[i, :len(one)], change[i, :len(one)] = one.reuse.attention, one.reuse.change
            reuse = attention, change
        return drivers.load_prefix(self.algorithm, self.model, self.params, s.cache, s.tokens, kv,
                                 np.array([len(one) for one in prefixes], np.int32), reuse)

    def _read_texts(self, texts: list[tuple[int, ...]]) -> tuple[Cache, int]:
        """Returns a cache with one of the texts in each row, and the number of forward passes; equal texts are
        prefilled once."""
        each, unique = self.request, {text: i for i, text in enumerate(dict.fromkeys(texts))}
        order = [texts.index(text) for text in unique]
        few = dataclasses.replace(each.select(order), prompts=[list(text) for text in unique], context=None)
        # as many rows as there are prompts, if all are different, or a power of two
        few = few.fill(min(power(len(few)), len(each)))
        of: Any = np.array([unique[text] for text in texts], np.int32)
        firsts = place(self.mesh, jax.tree.map(jnp.asarray, few.firsts))
        before = dataclasses.replace(self, request=few, policy=firsts)
        held, forwards = before._prefilled(
            before._begin(self.model, np.array([len(row) for row in few.prompts], np.int32)), 0,
            max(map(len, unique)) - 1)
        return drivers.take_rows(held.cache, of), forwards

    def _held(self, texts: list[tuple[int, ...]]) -> tuple[Cache, int]:
        """Returns the same as `_read_texts`, but reuses the caches in `known`, and adds new ones to it."""
        assert self.known is not None
        forwards = 0
        for i, text in enumerate(texts):
            if text not in self.known:
                one = dataclasses.replace(self, request=self.request.select([i]), known=None)
                self.known[text], more = one._read_texts([text])
                forwards += more
            self.known[text] = self.known.pop(text)     # the one used last comes last
        cache = drivers.stack_rows(tuple(self.known[text] for text in texts))
        while len(self.known) > KNOWN:
            del self.known[next(iter(self.known))]
        return cache, forwards
