"""Lookahead with a trie of n-grams: drafts the most frequent branches of what followed the last tokens ("Lookahead: An
Inference Acceleration Framework for Large Language Model with Lossless Generation Accuracy", Zhao et al., 2023).

The paper keeps a trie of all n-grams of prompts and outputs with their frequencies. A retrieval descends from the last
tokens, the longest suffix first; the first suffix with at least a branch's worth of nodes, its last token counted,
gives the draft, or else the one with the most; its most frequent nodes are the draft tree. Here the trie below a suffix
is made when it is asked for, from the places where the suffix occurred: the same nodes and the same frequencies, with
nothing to insert, prune or evict. The `places` with the longest matches and, among those, the most recent take part.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafts.text.history import (
    Corpus,
    FromText,
    best_places,
    following,
    matched,
    prefix_tree,
    shared,
    tail,
)
from decodax.algorithms.speculative.source import Draft, Drawn
from decodax.algorithms.speculative.tree import Proposal
from decodax.algorithms.speculative.verifier import SeedExact, Verifier
from decodax.common.options import Count
from decodax.common.registry import ALGORITHMS
from decodax.core.state import State
from decodax.core.types import Params


@dataclasses.dataclass(frozen=True)
class NGramTrie(FromText, Draft):
    """Drafts the most frequent continuations of the longest suffix with enough of them, as a tree.

    Attributes:
        decoding_length, branch_length: most nodes of the tree and of a path; the paper uses 64 and 8, and 128 and 32.
        suffix: longest suffix that is looked up.
        places: number of occurrences that are counted.
        corpus: warm-up samples, as in `FromText`.

    Raises:
        ValueError: one of the numbers below 1.
    """

    decoding_length: int = 32
    branch_length: int = 8
    suffix: int = 8
    places: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("decoding_length", "branch_length", "suffix", "places"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, takes at least 1")

    @property
    def length(self) -> int:
        return min(self.branch_length, self.decoding_length)

    def propose(self, params: Params, policy: Any, s: State, state: Any, drawn: Drawn) -> tuple[Proposal, Any]:
        history = self.history(params, s)
        places, match = best_places(matched(history, tail(s, self.suffix)), self.places)
        paths = jnp.where(match[..., None] > 0, following(history, places, self.length), -1)
        # nodes that each place adds to the trie: prefixes that no place with a longer match has
        alike = shared(paths)
        fresh = (jnp.argmax(alike, 1) == jnp.arange(paths.shape[1])[:, None]) & (paths >= 0)
        size = jnp.cumsum(fresh.sum(-1), 1)       # nodes below the suffix that this place is the last to match
        last = match != jnp.pad(match[:, 1:], ((0, 0), (0, 1)))
        enough = last & (size + 1 >= self.length) & (match > 0)         # the last token counts too
        chosen = jnp.take_along_axis(match, jnp.argmax(enough, 1)[:, None], 1)
        least = jnp.where(enough.any(1, keepdims=True), chosen, 1)
        weight = ((match >= least) & (match > 0)).astype(jnp.int32)
        return prefix_tree(paths, weight, self.decoding_length), state


@ALGORITHMS.register("pain-lookahead", "Lookahead: An Inference Acceleration Framework for Large Language Model with "
                     "Lossless Generation Accuracy", "Zhao et al. 2023", family="speculative-tree",
                     guarantee="seed-exact")
def pain_lookahead(decoding_length: Count = 32, branch_length: Count = 8, corpus: Corpus = (),
                   verify: Verifier = SeedExact()) -> Speculative:
    """Drafts a tree of the most frequent continuations of the last tokens, by a trie of n-grams.

    Several branches at once catch what `prompt_lookup` misses where one context goes on in different ways.

    Args:
        decoding_length: most nodes of the draft tree. branch_length: most tokens of a path.
        corpus: documents of token ids that are searched beside the text.
        verify: rule that accepts drafts.
    """
    return Speculative(NGramTrie(decoding_length, branch_length, corpus=corpus), verify)
