"""SuffixDecoding: drafts the most likely continuations in a suffix tree with frequencies ("SuffixDecoding: Extreme
Speculative Decoding for Emerging AI Applications", Oliaro, Jia, Campos, Qiao, 2024).

The paper keeps two suffix trees with a count at each node: one of the request's own prompt and output, and one of
earlier outputs. A pattern, the last p tokens of the text, leads to a node N. From there the draft tree grows greedily:
the next node is the one with the largest

    D(node) = D(parent) * C(node),    C(node) = count(node) / count of all children of its parent,    D(N) = 1

which is the empirical probability that the text continues to this node. The tree gets `alpha * p` nodes, so a longer
match gives a larger draft. The score of a tree is the sum of its nodes' D, the expected number of accepted drafts. Over
all pattern lengths p and both suffix trees, the draft is the tree with the largest score; of equal ones, which the
paper leaves open, that of the request's own text, then that of the longer pattern.

Here the tree of a pattern is built when it is needed, from the places where the pattern occurred, as in `NGramTrie`:
nodes and counts are the same, and nothing has to be inserted. Of a pattern with more than `places` occurrences, those
with the longest matches are counted, and among equally long ones the most recent. The paper's hybrid, which uses a
draft model if the score is low, is not implemented.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafter import Form
from decodax.algorithms.speculative.drafts.text.history import (
    Corpus,
    FromText,
    best_places,
    best_prefixes,
    following,
    known,
    matched,
    shared,
    tail,
)
from decodax.algorithms.speculative.source import Draft, Drawn
from decodax.algorithms.speculative.tree import Proposal
from decodax.algorithms.speculative.verifier import SeedExact, Verifier
from decodax.common.arguments import check_counts
from decodax.common.options import Count, Positive
from decodax.common.registry import ALGORITHMS
from decodax.core.state import State
from decodax.core.types import Params


@dataclasses.dataclass(frozen=True)
class SuffixTree(FromText, Draft):
    """Drafts the most likely continuations of the pattern whose tree has the most expected accepted tokens (Oliaro et
    al., 2024).

    Attributes:
        alpha: largest number of drafts for each token of the pattern; the paper's is between 1 and 4.
        pattern: length of the longest pattern, in tokens.
        nodes: largest number of nodes of the draft tree, a limit that the paper does not have.
        branch: largest number of tokens on a path, a limit that the paper does not have.
        places: largest number of occurrences that are counted in each of the two texts.
        corpus: earlier outputs, as documents of token ids (`FromText`).

    Raises:
        ValueError: a number below 1, or an alpha of 0 or less.
    """

    alpha: float = 2.0
    pattern: int = 16
    nodes: int = 16
    branch: int = 12
    places: int = 24
    proposes: ClassVar[frozenset[Form]] = frozenset(("trees",))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, "pattern", "nodes", "branch", "places")
        if not self.alpha > 0:
            raise ValueError(f"alpha: got {self.alpha}, takes more than 0")

    @property
    def length(self) -> int:
        return min(self.branch, self.nodes)

    def propose(self, params: Params, policy: Any, s: State, state: Any, drawn: Drawn) -> tuple[Proposal, Any]:
        ending = tail(s, self.pattern)
        score, draft = self._search(known(s), ending)
        corpus = self.weights if params.draft is None else params.draft
        if corpus is not None:
            there, other = self._search(jnp.broadcast_to(corpus, (s.batch, corpus.shape[0])), ending)
            better = there > score
            draft = jax.tree.map(lambda x, y: jnp.where(better[:, None], y, x), draft, other)
        return draft, state

    def _search(self, history: Array, ending: Array) -> tuple[Array, Proposal]:
        """Returns the largest score over the pattern lengths, `f32[B]`, and its tree. `history` is `i32[B, H]`, and
        `ending`, the last tokens of the text, `i32[B, pattern]`."""
        places, match = best_places(matched(history, ending), self.places)
        paths = jnp.where(match[..., None] > 0, following(history, places, self.length), -1)
        lengths = jnp.arange(1, self.pattern + 1)
        allowed = jnp.clip(jnp.floor(self.alpha * lengths), 1, self.nodes).astype(jnp.int32)

        def row(alike: Array, paths: Array, match: Array) -> tuple[Array, Array, Array, Array]:
            takes_part = match >= lengths[:, None]                                      # [p, R]
            weight, live = takes_part.astype(jnp.float32), paths >= 0
            count = jnp.einsum("pq,qrd->prd", weight, alike.astype(jnp.float32))
            # children of the same parent: the parent's places without those at which the text ends
            siblings = jnp.concatenate([jnp.ones((*alike.shape[:2], 1), bool), alike[..., :-1]], -1) & live[:, None]
            total = jnp.einsum("pq,qrd->prd", weight, siblings.astype(jnp.float32))
            D = jnp.where(takes_part[..., None] & live, jnp.cumprod(count / jnp.maximum(total, 1), -1), -1)
            own = jnp.argmax(alike & takes_part[:, :, None, None], 1) == jnp.arange(paths.shape[0])[:, None]
            best = lax.top_k(jnp.where(own, D, 0).reshape(len(lengths), -1), min(self.nodes, paths.size))[0]
            kept = jnp.arange(best.shape[1]) < allowed[:, None]
            score = jnp.where(kept, jnp.maximum(best, 0), 0).sum(-1)
            chosen = len(lengths) - 1 - jnp.argmax(score[::-1])                         # of equal ones the longest
            alike = alike & (takes_part[chosen][:, None] & takes_part[chosen])[..., None]
            return score[chosen], alike, D[chosen], allowed[chosen]

        score, alike, D, most = jax.vmap(row)(shared(paths), paths, match)
        return score, best_prefixes(paths, alike, D, self.nodes, most)


@ALGORITHMS.register("suffix-decoding", "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications",
                     "Oliaro et al. 2024", family="speculative-tree", guarantee="seed-exact")
def suffix_decoding(alpha: Positive = 2.0, pattern: Count = 16, nodes: Count = 16, branch: Count = 12,
                    corpus: Corpus = (), verify: Verifier = SeedExact()) -> Speculative:
    """Drafts the most likely continuations of the best matching pattern, with a suffix tree with frequencies.

    For agents and other loops whose outputs repeat earlier ones, which are given as the corpus.

    Args:
        alpha: largest number of drafts for each token of the pattern; the paper's is between 1 and 4.
        pattern: length of the longest pattern, in tokens.
        nodes: largest number of nodes of the draft tree.
        branch: largest number of tokens on a path.
        corpus: earlier outputs, as documents of token ids.
        verify: the rule that accepts drafts.
    """
    return Speculative(SuffixTree(alpha, pattern, nodes, branch, corpus=corpus), verify)
