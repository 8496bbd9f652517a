"""Somebody who reads along: puts tool results into texts, or ends thoughts that lead nowhere."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from decodax.common.registry import SEARCHES
from decodax.search.explorer import Explorer, Ranked, Score, scored
from decodax.search.forks import Forks

Act = Callable[[Any, str], str | None]
"""From a prompt and the text so far what is put behind the text, or None."""


def _likelihood(forks: Forks) -> np.ndarray:
    """The mean log-probability of a token, of each row."""
    made = forks.lengths - np.array([[len(prompt)] for prompt in forks.prompts])
    return forks.log_probs() / np.maximum(made, 1)


@SEARCHES.register("with-tools", "Inference Scaling for Long-Context Retrieval Augmented Generation", "Yue et al. 2024",
                   "a text that stops at a call, and goes on after its result (IterDRAG); one call of a text at a time")
@dataclasses.dataclass(frozen=True)
class WithTools(Explorer):
    """A text that stops at a call, and goes on with what it gave: interleaved retrieval (IterDRAG: Yue et al., 2024),
    calls of tools.

    A text makes one call at a time, and one result is put after it. Calls of texts side by side are answered together.
    In DTA-Llama (Zhu et al., 2025) a text makes several calls whose results come back together. That is left to `act`:
    a step may name several calls, and `act` returns one text with all results.

    A step ends where a call does (`until`). `act` then sees the text and says what is put behind it, the result; for
    all rows side by side, in threads. Nothing that has been read is read again. Behind `rounds` calls of a row, `last`
    is put there, if it is given ("So the answer is"), and `act` is asked no more.

    Attributes:
        act: see `Act`. n: chains of each prompt, of which the best one is taken. rounds: calls of a chain. last: text.
        reward: of whole texts; None: the likeliest a token.
    """

    act: Act
    n: int = 1
    rounds: int = 8
    last: str | None = None
    reward: Score | None = None

    reads = "puts texts into a row"

    @property
    def rows(self) -> int:
        return self.n

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
    """Thinking that is cut short (Lin et al., 2025, TrimR): a verifier reads thoughts as they are written, and where it
    finds that they only say again what is known, a guidance text has the model come to its answer.

    Of the paper this is the trigger for overthinking, with a callable of yours as the verifier, which the texts wait
    for. The triggers for underthinking and repetition, and the second, forced end are not included.

    A thought is a step (`until`, such as "\\n\\n" or "Wait"). The verifier sees the thoughts of a text and says whether
    the latest is redundant. After `patience` redundant ones in a row `guidance` is put behind the text, once, and the
    text is written to its end.

    Attributes:
        redundant: from a prompt and the thoughts so far, the latest last. guidance: such as "\\n</think>\\n".
        patience: whole number. least: thoughts that are never cut. n: texts of each prompt, of which the likeliest a
            token is taken.
    """

    redundant: Callable[[Any, Sequence[str]], bool]
    guidance: str
    patience: int = 2
    least: int = 1
    n: int = 1

    reads = "puts texts into a row"

    @property
    def rows(self) -> int:
        return self.n

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
