"""Prompt lookup decoding (Saxena 2023; LLMA, Yang et al. 2023): drafts are what followed the last tokens before.

The longest n-gram at the end of the text, `max_ngram` down to `min_ngram` tokens, is looked up in the text before it,
prompt and output alike; what followed the match is the draft. Where a length has several matches the most recent one
that is followed by a full draft counts, or else the most recent.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from decodax.core.state import State
from decodax.core.types import Params
from decodax.speculative.source import Drawn, Stateless
from decodax.speculative.tree import Proposal, chain


@dataclasses.dataclass(frozen=True)
class PromptLookup(Stateless):
    """Drafts `length` tokens from the text itself. Costs a few passes over the token buffer and no model.

    Raises:
        ValueError: a length below 1, or not 1 <= min_ngram <= max_ngram.
    """

    length: int = 10
    max_ngram: int = 3
    min_ngram: int = 1
    free: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"length: got {self.length}, takes at least 1")
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ValueError(f"min_ngram, max_ngram: got {self.min_ngram}, {self.max_ngram}, "
                             "takes 1 <= min_ngram <= max_ngram")

    def propose(self, params: Params, policy: Any, s: State, state: Any, drawn: Drawn) -> tuple[Proposal, Any]:
        tokens, count = jax.vmap(self._look)(s.tokens, s.length)
        return chain(tokens, count), state

    def _look(self, text: Array, length: Array) -> tuple[Array, Array]:
        """One row: `i32[N]`, `i32[]` to drafts `i32[K]` and their count."""
        end = jnp.arange(text.shape[0], dtype=jnp.int32)          # a match ends here, its continuation starts behind
        matched = jnp.zeros_like(end)                             # length of the longest n-gram that ends here
        equal = jnp.ones(text.shape, bool)
        for n in range(self.max_ngram):
            tail = text[jnp.maximum(length - 1 - n, 0)]
            equal = equal & (jnp.roll(text, n) == tail) & (end >= n) & (n < length)
            matched = jnp.where(equal, n + 1, matched)
        earlier = end < length - 1                                # the suffix itself is no match
        follows = jnp.minimum(length - 1 - end, self.length)      # tokens known behind it
        usable = earlier & (matched >= self.min_ngram)
        # longest match first, then the fuller draft, then the more recent: one integer order
        N = text.shape[0] + 1
        score = jnp.where(usable, (matched * (self.length + 1) + follows) * N + end, -1)
        best = jnp.argmax(score)
        count = jnp.where(score[best] >= 0, follows[best], 0)
        source = jnp.minimum(best + 1 + jnp.arange(self.length), text.shape[0] - 1)
        return text[source], count.astype(jnp.int32)
