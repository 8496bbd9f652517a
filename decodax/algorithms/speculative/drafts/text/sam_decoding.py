"""SAM-Decoding: drafts the tokens that followed the longest suffix of the text that has occurred before ("SAM Decoding:
Speculative Decoding via Suffix Automaton", Hu et al., 2024).

The suffix may have any length, and the match may be in the text or in a corpus; the longer the match, the longer the
draft. The paper finds it with a suffix automaton; here two structures of fixed size give exactly the same match. For a
row's own text it is the length of the match that ends at each place, updated with each decided token (one more than at
the place before, or 0). For the corpus it is a suffix array of its reversed documents, built on the host and searched
by bisection.

As in the authors' code, the earliest of several longest matches in the row's own text is used, which leaves the most
tokens to copy, and the corpus only if its match is more than `len_bias` tokens longer. The length of the draft depends
on whether another source drafts for rows with short matches (`Fallback`):

- alone, at most `factor` times the length of the match, 4 in the code;
- with another source, always a draft of full length (`full`): if fewer tokens follow the earliest longest match, the
  longest shorter match with enough of them is used instead.

Of several places in the corpus any may be used. The authors' code takes the first, and without another source it grows
a tree of the most frequent continuations there; `SuffixTree` (Oliaro et al. 2024) grows trees.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafter import CHAINS, Form
from decodax.algorithms.speculative.drafts.fallback import Fallback
from decodax.algorithms.speculative.drafts.model.draft_model import DraftModel
from decodax.algorithms.speculative.drafts.text.history import Corpus, FromText, known
from decodax.algorithms.speculative.drafts.text.token_recycling import TokenRecycling
from decodax.algorithms.speculative.fixed_trees import Chain
from decodax.algorithms.speculative.source import Draft, Drawn
from decodax.algorithms.speculative.tree import Proposal, chain
from decodax.algorithms.speculative.verifier import SeedExact, Verifier
from decodax.common.options import Count, Positive, Whole, check_options
from decodax.common.registry import ALGORITHMS
from decodax.core.cache import Feature
from decodax.core.state import State
from decodax.core.types import Decision, Out, Params
from decodax.core.window import Window, take


@dataclasses.dataclass(frozen=True)
class SuffixAutomaton(FromText, Draft):
    """Drafts the tokens that followed the longest suffix of the text that has occurred before (Hu et al., 2024).

    Attributes:
        length: largest number of tokens in a draft.
        factor: largest number of drafts for each token of the match.
        min_match: length of the shortest match; shorter ones draft nothing.
        len_bias: number of tokens by which a match in the corpus must be longer than that in the text itself.
        longest: largest length of a match in the corpus, in tokens; matches in the text itself have no limit.
        full: True: a shorter match with a draft of full length after it is preferred to a longer one without, and
            `factor` does not limit the draft.

    Raises:
        ValueError: a length, match or limit below 1, a factor of 0 or less, a negative `len_bias`, or a corpus in which
            every document has one token.
    """

    length: Count = 10
    factor: Positive = 4.0
    min_match: Count = 1
    len_bias: Whole = 5
    longest: Count = 32
    full: bool = False
    free: ClassVar[bool] = True
    cache_needs: ClassVar[frozenset[Feature]] = CHAINS
    proposes: ClassVar[frozenset[Form]] = frozenset(("matches",))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_options(type(self), vars(self))
        if self.corpus and max(map(len, self.corpus)) < 2:
            raise ValueError("corpus: got documents of one token each, takes one of two or more")

    @property
    def weights(self) -> Any:
        """Arrays for look-ups in the documents, arguments of the compiled programs; None without documents. "text":
        `i32[C]`, the documents; "order": the indices of their tokens, sorted lexicographically by the text that ends at
        each of them, read backwards."""
        text = super().weights
        if text is None:
            return None
        order = len(text) - 1 - suffix_array(text[::-1])
        # a document's last token ends no match that could be continued
        usable = (text[order] >= 0) & (text[np.minimum(order + 1, len(text) - 1)] >= 0)
        return dict(text=text, order=order[usable].astype(np.int32))

    def init(self, params: Params, s: State) -> Any:
        """Returns the state, `i32[B, N]`: for each index in a row's text, the number of tokens up to and including it
        that equal the last tokens of the text."""
        return jax.vmap(common_suffixes)(known(s), s.length)

    def propose(self, params: Params, policy: Any, s: State, state: Any, drawn: Drawn) -> tuple[Proposal, Any]:
        N = s.tokens.shape[1]
        at = jnp.arange(N)
        length = jnp.where(at < s.length[:, None] - 1, state, 0)
        match = wanted = length.max(1)
        text, end = known(s), s.length
        if self.full:       # as in the code the text ends before the newest token, and one token more must follow
            end = s.length - 1
            wanted = jnp.max(jnp.where(at < end[:, None] - self.length - 1, length, 0), 1)
            wanted = jnp.maximum(wanted, 1)
        place = jnp.argmax(length >= wanted[:, None], 1).astype(jnp.int32)          # the first that is long enough
        corpus, certain = self.weights if params.draft is None else params.draft, match
        if corpus is not None:
            found, lasting = jax.vmap(lambda row, end: self._bisect(corpus, row, end))(text, s.length)
            ours = match >= lasting - self.len_bias
            place = jnp.where(ours, place, N + found)
            match = jnp.where(ours, match, lasting)
            certain = jnp.where(ours, match, lasting - self.len_bias)
            text = jnp.concatenate([text, jnp.broadcast_to(corpus["text"], (s.batch, corpus["text"].shape[0]))], 1)
        index = place[:, None] + 1 + jnp.arange(self.length)
        tokens = take(text, jnp.minimum(index, text.shape[1] - 1))
        # a draft from the text itself ends where the text does, before the corpus, which comes after it
        inside = (tokens >= 0) & (index < jnp.where(place < N, end, text.shape[1])[:, None])
        count = jnp.cumprod(inside, 1).sum(1)
        if not self.full:
            count = jnp.minimum(count, jnp.clip(jnp.floor(self.factor * match), 1, self.length))
        count = jnp.where(match >= self.min_match, count, 0)
        return chain(jnp.maximum(tokens, 0), count.astype(jnp.int32)).replace(match=certain), state

    def observe(self, params: Params, s: State, window: Window, out: Out, decision: Decision | None, state: Any) -> Any:
        if decision is None:
            return state
        return jax.vmap(follow)(known(s), s.length, state, decision.tokens, decision.count)

    def _bisect(self, corpus: Any, row: Array, end: Array) -> tuple[Array, Array]:
        """Returns the place in the corpus with the longest match with the end of a row's text (`i32[N]`, length
        `i32[]`), and the length of the match."""
        text, order = jnp.asarray(corpus["text"]), jnp.asarray(corpus["order"])
        back = jnp.arange(self.longest, dtype=jnp.int32)
        read = lambda x, place: jnp.where(back <= place, x[jnp.maximum(place - back, 0)], -2)
        query = read(row, end - 1)

        def closer(_: Any, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
            low, high = bounds
            middle = (low + high) // 2
            there = read(text, order[jnp.minimum(middle, order.shape[0] - 1)])
            differs = there != query
            at = jnp.argmax(differs)
            less = differs.any() & (there[at] < query[at]) & (low < high)
            return jnp.where(less, middle + 1, low), jnp.where(less, high, jnp.maximum(middle, low))

        size = order.shape[0]
        start = (jnp.zeros((), jnp.int32), jnp.full((), size, jnp.int32))
        low, _ = lax.fori_loop(0, size.bit_length() + 1, closer, start)
        # the suffix with the longest common prefix is next to the place of the query
        near = order[jnp.clip(jnp.stack([low - 1, low]), 0, size - 1)]
        length = jax.vmap(lambda p: jnp.cumprod((read(text, p) == query) & (query >= 0)).sum())(near)
        best = jnp.argmax(length)
        return near[best], length[best].astype(jnp.int32)


def suffix_array(text: np.ndarray) -> np.ndarray:
    """Returns the starts of a text's suffixes in lexicographic order, by prefix doubling: O(C log^2 C) on the host.

    >>> suffix_array(np.array([2, 1, 2, 1])).tolist()
    [3, 1, 2, 0]
    """
    rank = np.unique(text, return_inverse=True)[1].astype(np.int64)
    order, step = np.argsort(rank, kind="stable"), 1
    while step < len(text):
        later = np.full(len(text), -1, np.int64)
        later[:-step] = rank[step:]
        order = np.lexsort((later, rank))
        fresh = (np.diff(rank[order]) != 0) | (np.diff(later[order]) != 0)
        rank[order] = np.concatenate([[0], np.cumsum(fresh)])
        if rank[order[-1]] == len(text) - 1:
            break
        step *= 2
    return order


def common_suffixes(text: Array, length: Array) -> Array:
    """Returns the length of the longest common suffix of a text (`i32[N]` with `length` valid tokens) and of the text
    up to each place: `i32[N]`.

    The cost is one pass over the text for each token of the longest match. At the last place the value is undefined.

    >>> common_suffixes(jnp.array([1, 2, 3, 1, 2, 9, 1, 2, -1]), jnp.int32(8)).tolist()[:7]
    [0, 2, 0, 0, 2, 0, 0]
    """
    place = jnp.arange(text.shape[0], dtype=jnp.int32)

    def agree(carry: tuple[Array, Array, Array]) -> Array:
        return carry[1].any()

    def back(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        d, equal, found = carry
        equal = equal & (jnp.roll(text, d) == text[jnp.maximum(length - 1 - d, 0)]) & (place >= d)
        return d + 1, equal, found + equal

    start = (jnp.zeros((), jnp.int32), place < length - 1, jnp.zeros(text.shape, jnp.int32))
    return lax.while_loop(agree, back, start)[2]


def follow(text: Array, length: Array, match: Array, tokens: Array, count: Array) -> Array:
    """Returns the result of `common_suffixes` after the first `count` (`i32[]`) of `tokens` (`i32[M]`) are appended to
    a text.

    Args:
        text: `i32[N]`, the text before them.
        length: `i32[]`, its length.
        match: `i32[N]`, the result of `common_suffixes` before them.
        tokens: the new tokens.
        count: number of new tokens.
    """
    def step(carry: tuple[Array, Array], x: tuple[Array, Array]) -> tuple[tuple[Array, Array], None]:
        text, match = carry
        i, token = x
        text = text.at[length + i].set(token, mode="drop")
        longer = jnp.where(text == token, jnp.pad(match, (1, 0))[:-1] + 1, 0)
        return (jnp.where(i < count, text, carry[0]), jnp.where(i < count, longer, match)), None

    index = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    return lax.scan(step, (text, match), (index, tokens))[0][1]


@ALGORITHMS.register("sam-decoding", "SAM Decoding: Speculative Decoding via Suffix Automaton", "Hu et al. 2024",
                     family="speculative-linear", guarantee="seed-exact")
def sam_decoding(length: Count = 10, corpus: Corpus = (), verify: Verifier = SeedExact()) -> Speculative:
    """Drafts the tokens that followed the longest suffix that has occurred before, in the text or in a corpus.

    Like `prompt_lookup`, with matches of any length. A corpus of earlier outputs helps with new prompts.

    Args:
        length: largest number of tokens in a draft.
        corpus: documents of token ids that are searched beside the text.
        verify: the rule that accepts drafts.
    """
    return Speculative(SuffixAutomaton(length, corpus=corpus), verify)


@ALGORITHMS.register("sam-decoding-hybrid", "SAM Decoding: Speculative Decoding via Suffix Automaton", "Hu et al. 2024",
                     family="speculative-linear", guarantee="seed-exact")
def sam_decoding_hybrid(draft: Any = None, length: Count = 39, len_threshold: Count = 5, len_bias: Whole = 5,
                        corpus: Corpus = (), model_length: Count = 4, verify: Verifier = SeedExact()) -> Speculative:
    """Drafts the tokens that followed a long suffix match; with another source in rows where the match is short.

    The other source is a draft model if there is one, otherwise Token Recycling's tree.

    Args:
        draft: the draft model; None: Token Recycling.
        length: number of tokens in a draft from the text.
        len_threshold: length of the shortest match whose continuation is drafted.
        len_bias: number of tokens by which a match in the corpus must be longer than that in the text itself.
        corpus: documents of token ids that are searched beside the text.
        model_length: number of drafts of the draft model in a round.
        verify: the rule that accepts drafts.
    """
    text = SuffixAutomaton(length, len_bias=len_bias, full=True, corpus=corpus)
    other = TokenRecycling() if draft is None else DraftModel(draft)
    return Speculative(Fallback(text, other, len_threshold, Chain(model_length)), verify)
