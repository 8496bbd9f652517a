"""Searches that monitor a text while it is written: they insert tool results, or end redundant thoughts."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from decodax.common.options import Count
from decodax.common.registry import SEARCHES
from decodax.search.explorer import Explorer, Ranked, Score, scored
from decodax.search.forks import Forks

Act = Callable[[Any, str], str | None]
"""A function of a prompt and its text so far. It returns the text to append, or None."""


def _likelihood(forks: Forks) -> np.ndarray:
    """Returns the mean log-probability of the new tokens of each row, `f64[P, n]`."""
    made = forks.lengths - np.array([[len(prompt)] for prompt in forks.prompts])
    return forks.log_probs() / np.maximum(made, 1)


@SEARCHES.register("with-tools", "Inference Scaling for Long-Context Retrieval Augmented Generation", "Yue et al. 2024",
                   "a text that stops at a call, and goes on after its result (IterDRAG); one call of a text at a time")
@dataclasses.dataclass(frozen=True)
class WithTools(Explorer):
    """Texts that pause at a call and continue after its result: tools, or interleaved retrieval (IterDRAG: Yue et al.,
    2024).

    A step ends where a call does (`until`). `act` then gets the prompt and the text, and returns a result, which is
    appended; None appends nothing. It runs for all rows in parallel threads. The model never processes a token twice.
    After `rounds` calls of a row, `last` is appended ("So the answer is"), and `act` is not called any more.

    A text makes one call at a time. In DTA-Llama (Zhu et al., 2025) it makes several calls whose results come back
    together; to do this, let a step contain several calls, and `act` return one text with all results.

    Attributes:
        act: takes a prompt and its text so far; returns the text to append, or None.
        n: number of texts of each prompt, from which the best is chosen.
        rounds: maximum number of calls of a text.
        last: text that is appended after the last call; None: no text.
        reward: scores whole texts; None: the mean log-probability of a token.
    """

    act: Act
    n: Count = 1
    rounds: Count = 8
    last: str | None = None
    reward: Score | None = None

    reads = "puts texts into a row"

    def search(self, forks: Forks, asked: Sequence[Any]) -> Ranked:
        calls = np.zeros((len(forks), self.n), int)
        with concurrent.futures.ThreadPoolExecutor(max_workers=32) as pool:
            while forks.live.any():
                wrote = forks.extend()
                waits = [(p, i) for p, i in zip(*np.nonzero(wrote & forks.live & (calls < self.rounds)), strict=True)]
                texts = forks.texts()
                given = list(pool.map(self.act, [asked[p] for p, _ in waits], [texts[p][i] for p, i in waits]))
                fed: list[list[str | None]] = [[None] * self.n for _ in range(len(forks))]
                for (p, i), text in zip(waits, given, strict=True):
                    if text is None:
                        continue
                    calls[p, i] += 1
                    closes = self.last is not None and calls[p, i] == self.rounds
                    fed[p][i] = text + (self.last or "") if closes else text
                forks.feed(fed)
        every = np.ones((len(forks), self.n), bool)
        score = _likelihood(forks) if self.reward is None else scored(self.reward, forks, asked, every,
                                                                      np.zeros((len(forks), self.n)))
        return Ranked(score)


@SEARCHES.register("trimr", "TrimR: Verifier-based Training-Free Thinking Compression for Efficient Test-Time Scaling",
                   "Lin et al. 2025", "a verifier of yours ends thoughts that only say again what is known; of the "
                   "paper the trigger for overthinking alone")
@dataclasses.dataclass(frozen=True)
class TrimR(Explorer):
    """Ends redundant thinking early (TrimR; Lin et al., 2025).

    A thought is a step (`until`, such as "\\n\\n" or "Wait"). After each thought, the verifier `redundant` gets all
    thoughts of the text and decides whether the latest one only repeats what is known. After `patience` redundant
    thoughts in a row, `guidance` is appended to the text, once, and the answer is generated to its end.

    Of the paper this is the trigger for overthinking, with your function as the verifier; generation waits for it. The
    triggers for underthinking and repetition, and the second, forced end are not included.

    Attributes:
        redundant: returns True for a redundant thought; takes a prompt and the thoughts so far, the latest last.
        guidance: the appended text, such as "\\n</think>\\n".
        patience: number of redundant thoughts in a row that end the thinking.
        least: number of first thoughts after which thinking is never ended.
        n: number of texts of each prompt; the one with the largest mean log-probability of a token is chosen.
    """

    redundant: Callable[[Any, Sequence[str]], bool]
    guidance: str
    patience: Count = 2
    least: Count = 1
    n: Count = 1

    reads = "puts texts into a row"

    def search(self, forks: Forks, asked: Sequence[Any]) -> Ranked:
        shape = len(forks), self.n
        thoughts: list[list[list[str]]] = [[[] for _ in range(self.n)] for _ in range(len(forks))]
        row, cut = np.zeros(shape, int), np.zeros(shape, bool)
        while (going := forks.live & ~cut).any():
            before = forks.lengths.copy()
            wrote = forks.extend(going)
            said = forks.since(before)
            fed: list[list[str | None]] = [[None] * self.n for _ in range(len(forks))]
            for p, i in zip(*np.nonzero(wrote & forks.live), strict=True):
                thoughts[p][i].append(said[p][i])
                again = len(thoughts[p][i]) > self.least and bool(self.redundant(asked[p], thoughts[p][i]))
                row[p, i] = row[p, i] + 1 if again else 0
                if row[p, i] >= self.patience:
                    fed[p][i], cut[p, i] = self.guidance, True
            forks.feed(fed)
        forks.extend(whole=True)
        return Ranked(_likelihood(forks))
