"""Ranks documents by n-grams that occur in them (SEAL's intersective score: Bevilacqua et al., 2022, section 3.3)."""

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
        document: its index in the corpus. score: sum of the contributions of its n-grams. ngrams: n-grams that count,
            each with its contribution, in the order in which they were taken.
    """

    document: int
    score: float
    ngrams: list[NGram]


@dataclasses.dataclass(frozen=True)
class Evidence:
    """Scores n-grams and documents; the defaults are those of the authors' searcher.

    An n-gram `n` that occurs `c` times among the corpus's `N` tokens has the weight

        w(n) = max(0, logit p(n | q) - logit((c + smoothing) / (N + smoothing))) ** power

    The score of a document is the sum of the weights of its n-grams that do not overlap, taken greedily from the
    largest weight down. Each counts once, and times `1 - repetition + repetition * new / all`, the share of its
    distinct tokens that no n-gram before it has.

    With the model's distribution over first tokens, single tokens add to it: where the document has no n-gram, each
    of the `first` likeliest has the weight `max(0, logit p - logit q)`. As many of them as there are n-grams count
    among the n-grams.

    Attributes:
        power, repetition, smoothing, first: see above. rare: n-grams that occur more often than this find no document,
            but count in those that others find. frequent: n-grams that occur more often than this do not count at all.
            documents: number of found documents that are scored, the best by a sum over their rare n-grams alone.

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
        """Returns the documents that n-grams find, the best first.

        Args:
            ngrams: token ids and log-probabilities; of equal ones the first counts. unigrams: `f32[V]`, the
                model's log-probabilities of first tokens.
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
        """Returns the log odds by which an n-gram is likelier than in the corpus; `less` keeps a probability of 1
        finite."""
        log_p, log_q = log_p - less, math.log((count + self.smoothing) / (total + self.smoothing))
        if log_p == -math.inf:
            return 0.0
        odds = lambda x: x - math.log(1 - math.exp(x))
        return max(0.0, odds(log_p) - odds(log_q))

    def share(self, ngram: Iterable[int], covered: set[int]) -> float:
        """Returns the share of an n-gram's weight that counts after n-grams with the tokens `covered`."""
        own = set(ngram)
        return 1 - self.repetition + self.repetition * len(own - covered) / len(own) if covered else 1.0

    def _by_document(self, finder: Finder, ngram: tuple[int, ...]) -> dict[int, list[int]]:
        """Returns the positions of an n-gram in each document that has it."""
        at, found = finder.positions(ngram), defaultdict(list)
        for position, document in zip(at.tolist(), finder.document_of(at).tolist(), strict=True):
            found[document].append(position - int(finder.starts[document]))
        return dict(found)

    def _found(self, weight: dict[tuple[int, ...], float],
               where: dict[tuple[int, ...], dict[int, list[int]]]) -> list[int]:
        """Returns the documents that are scored, by the rare n-grams alone; an occurrence may not overlap any
        before."""
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
        """Returns one document's score, from its n-grams and their first positions."""
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
    """Returns the first positions of an n-gram in a text."""
    n = len(ngram)
    return [i for i in range(len(tokens) - n + 1) if tokens[i:i + n] == ngram]
