"""Ranks documents by the n-grams of a search that occur in them (SEAL's intersective score: Bevilacqua et al., 2022,
section 3.3)."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from decodax.algorithms.beams.corpus import Corpus, Finder
from decodax.algorithms.beams.seal import NGram


@dataclasses.dataclass(frozen=True)
class Match:
    """A document that was found.

    Attributes:
        document: its index in the corpus.
        score: sum of the contributions of its n-grams.
        ngrams: the n-grams that contribute, each with its contribution, in the order in which they were added.
    """

    document: int
    score: float
    ngrams: list[NGram]


@dataclasses.dataclass(frozen=True)
class Evidence:
    """Scores documents by n-grams that a model has generated for a query. The defaults are those of the authors'
    searcher.

    An n-gram `n` that occurs `c` times among the corpus's `N` tokens has the weight

        w(n) = max(0, logit p(n | query) - logit((c + smoothing) / (N + smoothing))) ** power

    The score of a document is a sum over n-grams that occur in it and do not overlap, chosen greedily from the largest
    weight down. Each n-gram contributes once: its weight times `1 - repetition + repetition * new / all`, where `new /
    all` is the share of its distinct tokens that no earlier n-gram has.

    Single tokens contribute if the model's distribution over first tokens is given. At positions of a document without
    an n-gram, each of the `first` most likely tokens has the weight `max(0, logit p - logit q)`, where `q` is its
    frequency in the corpus. The best of them are also treated as n-grams, as many as there are n-grams.

    Attributes:
        power: see above.
        repetition: see above, from 0 to 1.
        smoothing: see above.
        first: number of most likely first tokens that are used.
        rare: n-grams that occur more often than this do not find documents, but contribute to the scores of documents
            found by others.
        frequent: n-grams that occur more often than this are ignored.
        documents: number of found documents that are scored; they are selected by a sum over their rare n-grams.

    Raises:
        ValueError: a number out of its range.
    """

    power: float = 2.0
    repetition: float = 0.8
    smoothing: float = 5.0
    first: int = 1000
    rare: int = 1500
    frequent: int = 10_000_000
    documents: int = 1500

    def __post_init__(self) -> None:
        for name, low in (("power", 0), ("repetition", 0), ("smoothing", 0), ("first", 0), ("rare", 1), ("frequent", 1),
                          ("documents", 1)):
            if not getattr(self, name) >= low:
                raise ValueError(f"{name}: got {getattr(self, name)!r}, takes {low} or more")
        if self.repetition > 1:
            raise ValueError(f"repetition: got {self.repetition!r}, takes at most 1")

    def rank(self, corpus: Corpus, ngrams: Iterable[NGram], unigrams: Sequence[float] | None = None) -> list[Match]:
        """Returns the documents in which some of the n-grams occur, by falling score (a sum of n-gram weights).

        Args:
            corpus: the documents.
            ngrams: pairs of the token ids of an n-gram and its log-probability; of equal n-grams the first one is used.
            unigrams: `f32[V]`, the model's log-probabilities of the first token; likely tokens then count as n-grams of
                one token. None: only `ngrams` count.
        """
        finder = Finder(corpus)
        given: dict[tuple[int, ...], float] = {}
        for ngram, log_p in ngrams:
            if len(ngram):
                given.setdefault(tuple(ngram), log_p)
        count = {n: finder.count(n) for n in given}
        total = len(finder.tokens) - corpus.documents
        weight = {n: self.weight(given[n], c, total) ** self.power if c else 0.0 for n, c in count.items()}
        single: dict[int, float] = {}
        if unigrams is not None:
            chances = np.asarray(unigrams)
            held = {n[0] for n in given if len(n) == 1}
            for token in np.argsort(-chances, kind="stable")[:self.first].tolist():
                c = finder.count((token,))
                if token not in held and c and (w := self.weight(float(chances[token]), c, total, 0.0)) > 0:
                    single[token] = w
            for token in sorted(sorted(single), key=lambda t: -single[t])[:len(given)]:
                count[token,], weight[token,] = finder.count((token,)), single[token]
        counts = lambda n: weight[n] > 0 and count[n] <= self.frequent
        weight = {n: weight[n] for n in sorted(filter(counts, weight), key=lambda n: -weight[n])}
        where = {n: self._by_document(finder, n) for n in weight if count[n] <= self.rare}
        found = self._found(weight, where)
        common = [n for n in weight if n not in where]
        matches = []
        for document in found:
            tokens = tuple(finder.document(document))
            places = {n: at[document] for n, at in where.items() if document in at}
            places |= {n: at for n in common if (at := occurrences(tokens, n))}
            matches.append(self._score(document, tokens, places, weight, single))
        return sorted(matches, key=lambda m: -m.score)

    def weight(self, log_p: float, count: int, total: int, less: float = 1e-10) -> float:
        """Returns the weight of an n-gram, before `power`: `max(0, logit p - logit q)`.

        Args:
            log_p: log-probability `log p` of the n-gram under the model.
            count: number of occurrences in the corpus.
            total: number of tokens in the corpus; `q = (count + smoothing) / (total + smoothing)`.
            less: amount subtracted from `log_p`, so that the weight is finite for `p = 1`.
        """
        log_p, log_q = log_p - less, math.log((count + self.smoothing) / (total + self.smoothing))
        if log_p == -math.inf:
            return 0.0
        odds = lambda x: x - math.log(1 - math.exp(x))
        return max(0.0, odds(log_p) - odds(log_q))

    def share(self, ngram: Iterable[int], covered: set[int]) -> float:
        """Returns the factor by which an n-gram's weight is reduced if the n-grams counted before it had the tokens
        `covered`: `1 - repetition + repetition * new / all`, for `new` of its `all` different tokens not in
        `covered`."""
        own = set(ngram)
        return 1 - self.repetition + self.repetition * len(own - covered) / len(own) if covered else 1.0

    def _by_document(self, finder: Finder, ngram: tuple[int, ...]) -> dict[int, list[int]]:
        """Returns the positions of an n-gram in each document in which it occurs."""
        at, found = finder.positions(ngram), defaultdict(list)
        for position, document in zip(at.tolist(), finder.document_of(at).tolist(), strict=True):
            found[document].append(position - int(finder.starts[document]))
        return dict(found)

    def _found(self, weight: dict[tuple[int, ...], float],
               where: dict[tuple[int, ...], dict[int, list[int]]]) -> list[int]:
        """Returns the documents that are scored, selected by their rare n-grams. An n-gram contributes if one of its
        occurrences overlaps no earlier n-gram."""
        score: defaultdict[int, float] = defaultdict(float)
        taken: defaultdict[int, set[int]] = defaultdict(set)
        covered: defaultdict[int, set[int]] = defaultdict(set)
        for ngram, documents in where.items():
            for document, starts in documents.items():
                free = False
                for start in starts:
                    places = range(start, start + len(ngram))
                    if taken[document].isdisjoint(places):
                        taken[document].update(places)
                        free = True
                score[document] += weight[ngram] * self.share(ngram, covered[document]) if free else 0.0
                if free:
                    covered[document].update(ngram)
        return sorted(score, key=lambda d: -score[d])[:self.documents]

    def _score(self, document: int, tokens: tuple[int, ...], places: dict[tuple[int, ...], list[int]],
               weight: dict[tuple[int, ...], float], single: dict[int, float]) -> Match:
        """Returns the score of one document, from the positions (`places`) of its n-grams."""
        free, covered = np.ones(len(tokens), bool), set[int]()
        taken: list[NGram] = []
        for ngram in sorted(places, key=lambda n: (-weight[n], n)):
            added = weight[ngram] * self.share(ngram, covered)
            if added <= 0:
                continue
            before = len(taken)
            for start in places[ngram]:
                if free[start:start + len(ngram)].all():
                    free[start:start + len(ngram)] = False
                    if len(taken) == before:
                        taken.append((ngram, added))
                        covered |= set(ngram)
        left = dict.fromkeys(token for token, place in zip(tokens, free, strict=True) if place)
        taken += [((t,), single[t] * self.share((t,), covered)) for t in left if t in single]
        return Match(document, sum(w for _, w in taken), taken)


def occurrences(tokens: tuple[int, ...], ngram: tuple[int, ...]) -> list[int]:
    """Returns the indices in `tokens` at which `ngram` begins, in ascending order; occurrences may overlap."""
    n = len(ngram)
    return [i for i in range(len(tokens) - n + 1) if tokens[i:i + n] == ngram]
