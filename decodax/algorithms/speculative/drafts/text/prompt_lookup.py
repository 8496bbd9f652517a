"""Prompt lookup decoding: drafts the tokens that followed the last n-gram at an earlier place in the text (Saxena,
2023; LLMA, Yang et al., 2023).

The n-gram at the end of the text, with `max_ngram` down to `min_ngram` tokens, is looked up in the prompt and the
output. The tokens after the match are the draft. If it occurs more than once, implementations differ:

- "latest", the default here: the most recent place that is followed by a draft of full length; if there is none, the
  place with the longest draft.
- "first", as in transformers: the first place, whatever the length of the draft after it.
- "whole", as in Saxena's code: the first place that is followed by a draft of full length; other places are no match,
  and a shorter n-gram is looked up instead.

Tokens for each forward pass with `pycode`, drafts of 10 tokens, n-grams of at most 3 tokens, 48 prompts of each task of
`decodax compare`:

    pick    copy-edit  completion  sampled latest       7.97        4.38     1.73 first        7.63        4.07     1.67
    whole        7.60        3.63     1.59

The defaults of length and n-grams are Saxena's; in transformers `max_matching_ngram_size` is 2.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal, get_args

import jax
import jax.numpy as jnp
from jax import Array

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafter import CHAINS, Form
from decodax.algorithms.speculative.source import Draft, Drawn
from decodax.algorithms.speculative.tree import Proposal, chain
from decodax.algorithms.speculative.verifier import SeedExact, Verifier
from decodax.common.options import Count
from decodax.common.registry import ALGORITHMS
from decodax.core.cache import Feature
from decodax.core.state import State
from decodax.core.types import Params

Pick = Literal["latest", "first", "whole"]


@dataclasses.dataclass(frozen=True)
class PromptLookup(Draft):
    """Drafts the tokens that followed the last n-gram at an earlier place in the text. It costs a few passes over the
    token buffer.

    Attributes:
        length: largest number of tokens in a draft.
        max_ngram: length of the longest n-gram that is looked up.
        min_ngram: length of the shortest n-gram that is looked up.
        pick: the place that is used if the n-gram occurs more than once: "latest": the most recent with a draft of full
            length after it, or else with the longest draft. "first": the first. "whole": the first with a draft of full
            length.

    Raises:
        ValueError: a length below 1, not 1 <= min_ngram <= max_ngram, or an unknown `pick`.
    """

    length: int = 10
    max_ngram: int = 3
    min_ngram: int = 1
    pick: Pick = "latest"
    free: ClassVar[bool] = True
    cache_needs: ClassVar[frozenset[Feature]] = CHAINS
    proposes: ClassVar[frozenset[Form]] = frozenset(("matches",))

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"length: got {self.length}, takes at least 1")
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ValueError(f"min_ngram, max_ngram: got {self.min_ngram}, {self.max_ngram}, "
                             "takes 1 <= min_ngram <= max_ngram")
        if self.pick not in get_args(Pick):
            raise ValueError(f"pick: got {self.pick!r}, takes one of {', '.join(get_args(Pick))}")

    def propose(self, params: Params, policy: Any, s: State, state: Any, drawn: Drawn) -> tuple[Proposal, Any]:
        tokens, count, match = jax.vmap(self._look)(s.tokens, s.length)
        return chain(tokens, count).replace(match=match), state

    def _look(self, text: Array, length: Array) -> tuple[Array, Array, Array]:
        """Returns the drafts `i32[K]` of one row (text `i32[N]`, length `i32[]`), their number, and the length of the
        matched n-gram."""
        end = jnp.arange(text.shape[0], dtype=jnp.int32)          # a match ends here, its continuation starts after it
        matched = jnp.zeros_like(end)                             # length of the longest n-gram that ends here
        equal = jnp.ones(text.shape, bool)
        for n in range(self.max_ngram):
            tail = text[jnp.maximum(length - 1 - n, 0)]
            equal = equal & (jnp.roll(text, n) == tail) & (end >= n) & (n < length)
            matched = jnp.where(equal, n + 1, matched)
        earlier = end < length - 1                                # the suffix itself is no match
        follows = jnp.minimum(length - 1 - end, self.length)      # tokens known after it
        if self.pick == "whole":                                  # a match must not reach into the suffix, as there
            matched = jnp.where(follows == self.length, jnp.minimum(matched, length - 2 - end), 0)
        usable = earlier & (matched >= self.min_ngram)
        # longest match first, then the fuller draft and the more recent, or the first: one integer order
        N = text.shape[0] + 1
        place = follows * N + end if self.pick == "latest" else N - 1 - end
        score = jnp.where(usable, matched * (self.length + 1) * N + place, -1)
        best = jnp.argmax(score)
        found = score[best] >= 0
        source = jnp.minimum(best + 1 + jnp.arange(self.length), text.shape[0] - 1)
        count, match = jnp.where(found, follows[best], 0), jnp.where(found, matched[best], 0)
        return text[source], count.astype(jnp.int32), match.astype(jnp.int32)


@ALGORITHMS.register("prompt-lookup", "Prompt Lookup Decoding", "Saxena 2023", family="speculative-linear",
                     guarantee="seed-exact")
def prompt_lookup(length: Count = 10, max_ngram: Count = 3, min_ngram: Count = 1, pick: Pick = "latest",
                  verify: Verifier = SeedExact()) -> Speculative:
    """Drafts the tokens that followed the last n-gram at an earlier place in the text.

    The first choice for texts that repeat their prompt: edits, summaries, code, retrieval. It needs no draft model.
    `algorithm="prompt-lookup:length=5"`.

    Args:
        length: largest number of tokens in a draft.
        max_ngram, min_ngram: lengths of the longest and the shortest n-gram that is looked up.
        pick: the place that is used if the n-gram occurs more than once: the "latest" with a draft of full length after
            it, the "first" (transformers), or the first with a "whole" draft after it (Saxena's code).
        verify: the rule that accepts drafts.
    """
    return Speculative(PromptLookup(length, max_ngram, min_ngram, pick), verify)
