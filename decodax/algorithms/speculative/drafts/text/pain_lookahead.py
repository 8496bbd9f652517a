"""Lookahead with a trie of n-grams: drafts the most frequent branches among the continuations of the last tokens
("Lookahead: An Inference Acceleration Framework for Large Language Model with Lossless Generation Accuracy", Zhao et
al., 2023).

The paper keeps a trie of all n-grams of prompts and outputs with their frequencies. A lookup goes down from the last
tokens, the longest suffix first. The first suffix with at least as many nodes as a branch has, counting its last token,
gives the draft; if there is none, the one with the most nodes. Its most frequent nodes are the draft tree. Here the
trie of a suffix is built when it is needed, from the places where the suffix occurred: nodes and frequencies are the
same, and nothing has to be inserted, pruned or evicted. Only the `places` with the longest matches are used, and among
equally long ones the most recent.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafter import Form
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
from decodax.common.arguments import check_counts
from decodax.common.options import Count
from decodax.common.registry import ALGORITHMS
from decodax.core.state import State
from decodax.core.types import Params


@dataclasses.dataclass(frozen=True)
class NGramTrie(FromText, Draft):
    """Drafts a tree of the most frequent continuations of the longest suffix that has enough continuations (Zhao et
    al., 2023).

    Attributes:
        decoding_length: largest number of nodes of the tree; 64 or 128 in the paper.
        branch_length: largest number of tokens on a path; 8 or 32 in the paper.
        suffix: length of the longest suffix that is looked up.
        places: largest number of occurrences that are counted.
        corpus: documents of token ids that are searched before the text (`FromText`).

    Raises:
        ValueError: a number below 1.
    """

    decoding_length: int = 32
    branch_length: int = 8
    suffix: int = 8
    places: int = 32
    proposes: ClassVar[frozenset[Form]] = frozenset(("trees",))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, "decoding_length", "branch_length", "suffix", "places")

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
    """Drafts a tree of the most frequent continuations of the last tokens, with a trie of n-grams.

    If a context has several continuations, a tree covers more of them than the single chain of `prompt_lookup`.

    Args:
        decoding_length: largest number of nodes of the draft tree.
        branch_length: largest number of tokens on a path.
        corpus: documents of token ids that are searched beside the text.
        verify: the rule that accepts drafts.
    """
    return Speculative(NGramTrie(decoding_length, branch_length, corpus=corpus), verify)
