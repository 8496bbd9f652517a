"""Chains of retrieval: questions, what is found, and answers, over several of which the best chain is looked for."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from decodax.common.registry import SEARCHES
from decodax.front.score import score
from decodax.io.appended import appended
from decodax.search.explorer import Explorer, Ranked, Score
from decodax.search.forks import Forks

Retrieve = Callable[[Any, str], str | None]
"""From a prompt and a text that ends with a question what was found, as it is put behind the text; None: there was no
question."""

NOTHING = "No relevant information found"
"""What a chain that leads nowhere ends with, in the paper's data."""


@SEARCHES.register("corag", "Chain-of-Retrieval Augmented Generation", "Wang et al. 2025",
                   "chains of questions and what a retriever finds, of which the best is looked for")
@dataclasses.dataclass(frozen=True)
class CoRAG(Explorer):
    """Chain-of-retrieval generation (Wang et al., 2025, CoRAG): a chain asks a question, is given what a retriever
    finds, answers it, and asks the next one; behind `rounds` of them, or where it asks none, it is finished.

    A step ends where a question or its answer does (`until`). Of chains the best is that behind which the answer
    "No relevant information found" is the least likely, which asks for no reward. `way` says how it is looked for:

    - "best-of-n": `n` chains are sampled whole. With `n = 1` and temperature 0 it is the paper's greedy decoding.
    - "tree": in each round `n / rollouts` next questions are tried, and from each `rollouts` chains go `ahead` rounds
      further; the one whose chains have the smallest mean penalty stands. What was rolled out is thrown away.

    The text of a chain is one text, so that nothing in it is read twice: a model that was trained on separate prompts
    for questions and answers is asked in another form. DRAG is a prompt with documents, and IterDRAG, chains without
    a choice among them, is `WithTools`.

    Attributes:
        retrieve: see `Retrieve`; asked for all rows side by side, in threads. n: rows of a prompt. rounds: questions
            of a chain. way: as above. rollouts, ahead: of the tree. last: put behind a finished chain, such as "So the
            answer is"; the text is then written to its end. nothing: the answer that speaks against a chain.
        penalty: in place of its log-probability; the smaller the better.
    """

    retrieve: Retrieve
    n: int = 8
    rounds: int = 6
    way: Literal["best-of-n", "tree"] = "best-of-n"
    rollouts: int = 2
    ahead: int = 2
    last: str | None = None
    nothing: str = NOTHING
    penalty: Score | None = None

    reads = "puts texts into a row"

    def __post_init__(self) -> None:
        if self.way not in ("best-of-n", "tree"):
            raise ValueError(f"way: got {self.way!r}, takes 'best-of-n' or 'tree'")
        if self.n < 1 or self.rounds < 1 or self.ahead < 0:
            raise ValueError(f"n, rounds and ahead: got {self.n}, {self.rounds} and {self.ahead}, take 1 or more, the "
                             "last 0 or more")
        if self.way == "tree" and (self.rollouts < 1 or self.n % self.rollouts):
            raise ValueError(f"rollouts: got {self.rollouts} for {self.n} rows, takes a divisor of n")

    @property
    def rows(self) -> int:
        return self.n

    def search(self, forks: Forks, asked: Sequence[Any]) -> Ranked:
        # a row goes on while it lives and asks
        going = forks.live
        for done in range(self.rounds):
            if not going.any():
                break
            if self.way == "best-of-n":
                going = self._round(forks, asked, going)
                continue
            parents = np.tile(np.arange(self.n), (len(forks), 1))
            # one text of each candidate writes the question, from which its others then go on
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
        """A question, what is found, and the answer; which rows go on."""
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
        """`f64[P, n]`: of the chains in `which`, the others have 0."""
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
