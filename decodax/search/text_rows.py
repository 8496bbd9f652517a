"""Rows of texts between bounded runs: what they hold, and what can be read of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from decodax.common.struct import short
from decodax.core.algorithm import findings
from decodax.core.state import Status
from decodax.engine.batch import Job


@dataclasses.dataclass
class TextRows:
    """`n` rows of each of `P` prompts. Arrays over rows have shape `[P, n]`.

    Attributes:
        job: the batch.
        n: number of rows of a prompt.
        until, step_tokens: end of a step.
        stop: strings that end a text.
        status: `i32[P, n]`, why a text has ended; `Status.RUNNING` if it has not.
        lengths: `i64[P, n]`, number of tokens of each row, with the prompt.
        bound: `i64[P, n]`, largest number of tokens of each row.
        keys: random keys of the places.
        spent: number of tokens generated so far, also in rows that were dropped.
        fed: number of tokens appended from outside.
        generation: number of forks so far.
        marks: ids of tokens that also end a step.
        rounds: number of target forwards so far.
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
    generation: int = 0
    marks: tuple[int, ...] = ()
    rounds: int = 0

    def __len__(self) -> int:
        return len(self.status)

    @property
    def rows(self) -> int:
        return self.status.size

    @property
    def live(self) -> np.ndarray:
        """`bool[P, n]`, texts that have not ended."""
        return self.status == Status.RUNNING

    @property
    def prompts(self) -> list[list[int]]:
        return self.job.request.prompts

    def rng(self, prompt: int) -> np.random.Generator:
        """Returns random numbers for a prompt at this generation, from its seed and address alone."""
        r = self.job.request
        words = [*r.seeds[prompt].tolist(), int(r.request_ids[prompt]), self.generation]
        return np.random.default_rng(np.random.SeedSequence(words))

    def tokens(self, p: int, i: int) -> list[int]:
        """Returns the new tokens of a row."""
        return self._host_tokens()[p * self.n + i, len(self.prompts[p]):int(self.lengths[p, i])].tolist()

    def _host_tokens(self) -> np.ndarray:
        return np.asarray(self.job.state.tokens)

    def texts(self, which: np.ndarray | None = None, raw: bool = False) -> list[list[Any]]:
        """Returns the new text of each row, up to the string that ended it; ids without a tokenizer.

        Rows that are not in `which` are empty. With `raw` the ending string and the rest of its token are included.
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
        """Returns what each row has written after its first `lengths[p, i]` tokens (`i64[P, n]`, with the prompt).

        As in `texts`, the token that ended it is left out. A character that those tokens only began belongs to the
        result.
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
        """Returns the log-probability of each row's new tokens, `f64[P, n]`, under the model, or under the policy if
        `processed`.

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
        """Returns the log of each row's weight, `f64[P, n]`, for algorithms that do not draw by the policy.

        Weighted by it, rows of `decodax.algorithms.contrastive.awrs.AWRS` are draws by the policy. It is 0 for most
        algorithms.
        """
        found = findings(self.job.batch.algorithm, self.job.state).get("log_weight")
        if found is None:
            return np.zeros(self.status.shape)
        return np.asarray(found)[:self.rows].astype(np.float64).reshape(self.status.shape)
