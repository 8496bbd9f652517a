"""Rows of texts of one compiled batch, and functions that read them between two runs."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from decodax.common.struct import short
from decodax.core.algorithm import findings
from decodax.core.state import Status
from decodax.engine.batch import Job
from decodax.engine.request import Request


@dataclasses.dataclass
class TextRows:
    """A batch of texts that are being generated: `n` rows for each of `P` prompts. Arrays over rows have shape `[P,
    n]`.

    Attributes:
        job: the batch.
        n: number of rows of a prompt.
        until: strings that end a step.
        step_tokens: maximum number of tokens of a step; None: no limit.
        stop: strings that end a text.
        status: `i32[P, n]`, why a text has ended; `Status.RUNNING` if it has not.
        lengths: `i64[P, n]`, number of tokens of each row, including the prompt.
        bound: `i64[P, n]`, maximum number of tokens of each row.
        keys: random key of each row.
        spent: number of tokens generated so far, including rows that were dropped.
        fed: number of tokens appended from outside.
        generation: `i64[P]`, number of times that rows of each prompt were forked or truncated.
        draws: `i64[P]`, number of random generators that were made for each prompt.
        marks: ids of tokens that also end a step.
        rounds: number of forward passes of the target model so far.
    """

    __repr__ = short

    job: Job
    n: int
    until: tuple[str, ...]
    step_tokens: int | None
    stop: tuple[str, ...]
    status: np.ndarray
    lengths: np.ndarray
    bound: np.ndarray
    keys: Any
    spent: int = 0
    fed: int = 0
    generation: Any = None
    draws: Any = None
    marks: tuple[int, ...] = ()
    rounds: int = 0

    def __post_init__(self) -> None:
        if self.generation is None:
            self.generation, self.draws = (np.zeros(len(self.status), np.int64) for _ in range(2))

    def __len__(self) -> int:
        return len(self.status)

    @property
    def rows(self) -> int:
        return self.status.size

    @property
    def live(self) -> np.ndarray:
        """`bool[P, n]`, True for rows whose text has not ended."""
        return self.status == Status.RUNNING

    @property
    def prompts(self) -> list[list[int]]:
        return self.job.request.prompts

    def rng(self, prompt: int) -> np.random.Generator:
        """Returns a new random generator for a prompt, seeded by its seed, its request id and the number of generators
        that were made for it before."""
        words = [*prompt_words(self.job.request, prompt), int(self.draws[prompt])]
        self.draws = self.draws + (np.arange(len(self.draws)) == prompt)
        return np.random.default_rng(np.random.SeedSequence(words))

    def tokens(self, p: int, i: int) -> list[int]:
        """Returns the new tokens of row `i` of prompt `p`."""
        return self._host_tokens()[p * self.n + i, len(self.prompts[p]):int(self.lengths[p, i])].tolist()

    def _host_tokens(self) -> np.ndarray:
        return np.asarray(self.job.state.tokens)

    def texts(self, which: np.ndarray | None = None, raw: bool = False) -> list[list[Any]]:
        """Returns the new text of each row, `[P][n]`, without the string that ended it; token ids if there is no
        tokenizer.

        Args:
            which: `bool[P, n]`; rows that are False get an empty text. None: all rows are read.
            raw: True includes the string that ended the text, and the rest of its token.
        """
        lm, held = self.job.request.lm, self._host_tokens()
        out: list[list[Any]] = []
        for p, prompt in enumerate(self.prompts):
            row: list[Any] = []
            for i in range(self.n):
                ids = held[p * self.n + i, len(prompt):int(self.lengths[p, i])].tolist()
                if which is not None and not which[p, i]:
                    row.append("" if lm.tokenizer else [])
                elif lm.tokenizer is None:
                    row.append(ids)
                else:
                    stop = self.stop if self.status[p, i] == Status.STOP and not raw else ()
                    row.append(lm.tokenizer.continuation(prompt, ids, stop=stop,
                                                         skip_special_tokens=self.job.request.skip_special_tokens))
            out.append(row)
        return out

    def since(self, lengths: np.ndarray) -> list[list[Any]]:
        """Returns the text that each row has generated after its first `lengths[p, i]` tokens (`i64[P, n]`, including
        the prompt).

        An end-of-sequence token is left out, as in `texts`. A character whose first bytes are among the first tokens
        belongs to the result.
        """
        request, out = self.job.request, []
        for p, prompt in enumerate(self.prompts):
            row: list[Any] = []
            for i in range(self.n):
                ids, made = self.tokens(p, i), int(lengths[p, i]) - len(prompt)
                ids = ids[:-1] if self.status[p, i] == Status.EOS else ids
                if request.lm.tokenizer is None:
                    row.append(ids[made:])
                    continue
                text = request.lm.tokenizer.detokenizer(
                    prompt, stop=self.stop if self.status[p, i] == Status.STOP else (),
                    skip_special_tokens=request.skip_special_tokens)
                text.feed(ids[:made])
                row.append(text.feed(ids[made:]) + text.finish())
            out.append(row)
        return out

    def log_probs(self, processed: bool = False) -> np.ndarray:
        """Returns the log-probability of the new tokens of each row, `f64[P, n]`: under the model, or under the policy
        if `processed` is True.

        Tokens that were fed count 0.
        """
        record = self.job.state.record
        assert record is not None
        values = np.asarray(record.processed if processed else record.raw)[:self.rows].astype(np.float64)
        first = np.array([len(prompt) for prompt in self.prompts]).repeat(self.n)
        place = np.arange(values.shape[1])
        inside = (place >= first[:, None]) & (place < self.lengths.reshape(-1)[:, None])
        return np.where(inside, values, 0).sum(1).reshape(self.status.shape)

    def log_weights(self) -> np.ndarray:
        """Returns the log-weight of each row, `f64[P, n]`, for algorithms that do not sample the policy exactly; 0 for
        the others.

        Rows of `decodax.algorithms.contrastive.awrs.AWRS` with these weights are samples from the restricted policy.
        """
        found = findings(self.job.batch.algorithm, self.job.state).get("log_weight")
        if found is None:
            return np.zeros(self.status.shape)
        return np.asarray(found)[:self.rows].astype(np.float64).reshape(self.status.shape)


def prompt_words(request: Request, prompt: int) -> list[int]:
    """Returns three integers from which the random numbers of prompt number `prompt` of the request are derived: the
    two words of its seed, and its request id."""
    return [*request.seeds[prompt].tolist(), int(request.request_ids[prompt])]
