"""First-finish search (Agarwal et al., 2025): of several samples that run in parallel, takes the one that ends first.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from decodax.common.registry import SELECTS
from decodax.core.state import Status
from decodax.engine.batch import Job
from decodax.engine.request import Request
from decodax.io.load import LM
from decodax.select.candidates import Candidates, Choice, Chosen, SelectionRule, candidates_of

BURST = 32
"""Number of rounds between two checks for rows that have ended."""

ENDED = (Status.EOS, Status.STOP)


@SELECTS.register("first-finish", "First Finish Search: Efficient Test-Time Scaling in Large Language Models",
                  "Agarwal et al. 2025", "of several samples the one that ends first; the others are not continued")
@dataclasses.dataclass(frozen=True)
class FirstFinish(SelectionRule):
    """Takes the sample that ends first, by an end-of-sequence token or a stop string (Agarwal et al., 2025).

    Of samples that end in the same round, and if no sample ends within its budget, the first is taken. The others are
    not continued; their unfinished texts are among the candidates.
    """

    def scores(self, candidates: Candidates) -> np.ndarray:
        """Returns `f64[n]`, the negative length of each text, for texts that have all ended."""
        if candidates.lengths is None:
            raise ValueError("lengths: got None, but the rule goes by which candidate is the shortest")
        return -np.asarray(candidates.lengths, np.float64)

    def drawn(self, lm: LM, prompts: Any, n: int, sampling: Mapping[str, Any]) -> Chosen:
        if self.greedy:
            raise ValueError("greedy: first-finish compares samples that run side by side; takes False")
        if sampling.get("batch_size") is not None:
            raise TypeError("batch_size: first-finish takes no such argument; all answers run side by side")
        clock = time.monotonic()
        request = Request.read(lm, prompts, num_samples=n, **sampling)
        job = Job.begin(request)
        while job.running:
            job.advance(None, rounds=BURST)
            ended = np.isin(job.status, ENDED).reshape(len(request), n).any(1)
            job.end(np.repeat(ended, n))
            if request.max_time is not None and time.monotonic() > clock + request.max_time:
                job.expire()
        result = job.result()
        rounds = np.where(np.isin(result.status, ENDED), result.stats.rounds, np.inf).reshape(-1, n)
        candidates = candidates_of(result, request.prompts, n, request)
        choices = [Choice(int(row.argmin()), -row) for row in rounds]
        index = [choice.index for choice in choices]
        return Chosen([each.texts[i] for each, i in zip(candidates, index, strict=True)], candidates, choices,
                      result.select(np.arange(len(request)) * n + np.array(index)))
