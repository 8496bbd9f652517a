"""Chain-of-retrieval generation: searches for the best sequence of questions, retrieved documents and answers."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from decodax.common.options import Count, Whole
from decodax.common.registry import SEARCHES
from decodax.front.score import score
from decodax.io.appended import appended
from decodax.search.explorer import Explorer, Ranked, Score
from decodax.search.forks import Forks

Retrieve = Callable[[Any, str], str | None]
"""A function of a prompt and a text that ends with a question. It returns the retrieved documents as text to append;
None if there is no question."""

NOTHING = "No relevant information found"
"""The ending of an unsuccessful chain, in the paper's data."""


@SEARCHES.register("corag", "Chain-of-Retrieval Augmented Generation", "Wang et al. 2025",
                   "chains of questions and what a retriever finds, of which the best is looked for")
@dataclasses.dataclass(frozen=True)
class CoRAG(Explorer):
    """Chain-of-retrieval generation (Wang et al., 2025, CoRAG).

    In each round a chain asks a question, gets the documents that a retriever finds, and answers the question. The
    chain is finished after `rounds` rounds, or if it asks no question. A step ends where a question or its answer does
    (`until`). The penalty of a chain is the log-probability of the answer "No relevant information found" after it; the
    chain with the smallest penalty is chosen. This needs no reward model. `way` determines the search:

    - "best-of-n": `n` complete chains are sampled. With `n = 1` and temperature 0 it is the paper's greedy decoding.
    - "tree": in each round `n / rollouts` next questions are tried. From each of them `rollouts` chains continue for
      `ahead` more rounds, and the question whose chains have the smallest mean penalty is kept. The rollouts are
      discarded.

    A chain is one text, so that the model processes no token twice. A model that was trained on separate prompts for
    questions and answers is therefore asked in another form. DRAG is a prompt with documents; IterDRAG, chains without
    a choice among them, is `WithTools`.

    Attributes:
        retrieve: takes a prompt and its chain so far; returns the text of the documents to append, or None. It is
            called for all rows in parallel threads.
        n: number of rows of a prompt.
        rounds: maximum number of questions of a chain.
        way: "best-of-n" or "tree".
        rollouts: number of chains that "tree" continues from each question.
        ahead: number of further rounds of these chains.
        last: text that is appended to a finished chain, such as "So the answer is"; the answer is then generated to its
            end. None: no text.
        nothing: the answer whose log-probability is the penalty.
        penalty: replaces that log-probability; smaller is better.
    """

    retrieve: Retrieve
    n: Count = 8
    rounds: Count = 6
    way: Literal["best-of-n", "tree"] = "best-of-n"
    rollouts: Count = 2
    ahead: Whole = 2
    last: str | None = None
    nothing: str = NOTHING
    penalty: Score | None = None

    reads = "puts texts into a row"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.way == "tree" and self.n % self.rollouts:
            raise ValueError(f"rollouts: got {self.rollouts} for {self.n} rows, takes a divisor of n")

    def search(self, forks: Forks, asked: Sequence[Any]) -> Ranked:
        # A row continues while it is live and asks questions.
        going = forks.live
        for done in range(self.rounds):
            if not going.any():
                break
            if self.way == "best-of-n":
                going = self._round(forks, asked, going)
                continue
            parents = np.tile(np.arange(self.n), (len(forks), 1))
            # One text of each candidate writes the question, and its others continue from it.
            first = going & (np.arange(self.n) % self.rollouts == 0)
            there = self._round(forks, asked, first)
            of = np.arange(self.n) // self.rollouts * self.rollouts
            parents[:] = np.where(going, of, parents)
            forks.fork(parents)
            there = np.take_along_axis(there, parents, 1)
            chains = forks.ahead(np.zeros_like(going), tokens=1)
            left = there.copy()
            for _ in range(min(self.ahead, self.rounds - done - 1)):
                left = self._round(chains, asked, left)
            forks.spent += chains.spent
            penalty = self._penalties(chains, asked, going)
            best = penalty.reshape(len(forks), -1, self.rollouts).mean(2).argmin(1) * self.rollouts
            chosen = np.where(going, best[:, None], np.arange(self.n))
            forks.fork(chosen)
            going = np.take_along_axis(there, chosen, 1)
        ranked = -self._penalties(forks, asked, np.ones_like(going))
        if self.last is not None:
            forks.feed([[self.last if live else None for live in row] for row in forks.live])
        forks.extend(whole=True)
        return Ranked(ranked)

    def _round(self, forks: Forks, asked: Sequence[Any], going: np.ndarray) -> np.ndarray:
        """Runs one round of question, retrieval and answer in the rows `going`; returns the rows that continue."""
        wrote = forks.extend(going) & forks.live
        waits = list(zip(*np.nonzero(wrote), strict=True))
        texts = forks.texts()
        with concurrent.futures.ThreadPoolExecutor(max_workers=32) as pool:
            found = list(pool.map(self.retrieve, [asked[p] for p, _ in waits], [texts[p][i] for p, i in waits]))
        fed: list[list[str | None]] = [[None] * self.n for _ in range(len(forks))]
        asks = np.zeros_like(going)
        for (p, i), text in zip(waits, found, strict=True):
            fed[p][i], asks[p, i] = text, text is not None
        forks.feed(fed)
        forks.extend(asks)
        return asks & forks.live

    def _penalties(self, forks: Forks, asked: Sequence[Any], which: np.ndarray) -> np.ndarray:
        """Returns the penalties of the chains in `which`, and 0 for the others: `f64[P, n]`."""
        out = np.zeros(which.shape)
        at = list(zip(*np.nonzero(which), strict=True))
        if self.penalty is not None:
            texts = forks.texts()
            for p, prompt in enumerate(asked):
                if len(rows := np.flatnonzero(which[p])):
                    out[p, rows] = np.asarray(self.penalty(prompt, [texts[p][i] for i in rows]), np.float64)
            return out
        lm = forks.job.request.lm
        assert lm.tokenizer is not None
        pairs = []
        for p, i in at:
            chain = forks.prompts[p] + forks.tokens(p, i)
            for text in filter(None, (self.last, self.nothing)):
                before, chain = chain, chain + appended(lm.tokenizer, chain, text)
            pairs.append((before, chain[len(before):]))
        for (p, i), value in zip(at, score(lm, pairs).sum if pairs else [], strict=True):
            out[p, i] = value
        return out
