"""First-finish search (Agarwal et al., 2025): of several samples that run side by side the one that ends first."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np

from decodax.common.registry import FUNCTIONS
from decodax.core.state import Status
from decodax.engine.batch import Job
from decodax.engine.methods import model
from decodax.engine.request import Request
from decodax.io.load import LM
from decodax.select.candidates import Candidates, Choice, candidates_of

BURST = 32
"""Rounds between two looks at who has ended."""

ENDED = (Status.EOS, Status.STOP)


@FUNCTIONS.register("select.first_finish", "First Finish Search: Efficient Test-Time Scaling in Large Language Models",
                    "Agarwal et al. 2025",
                    "of several samples the one that ends first; `choose` calls it \"first-finish\"")
def first_finish(lm: LM | str | os.PathLike[str], prompts: Any, n: int = 4,
                 **options: Any) -> tuple[list[Candidates], list[Choice]]:
    """Samples `n` answers to each prompt until one of them has ended by itself: an end of sequence or a stop string.

    Of those that end in the same number of rounds the first counts. Where none ends within its budget, the first does.
    The others are not continued, but for the rounds between two looks; what they have so far stands in `candidates`.

    Args:
        options: of `generate`, but `batch_size`: all answers run side by side.

    Raises:
        TypeError, ValueError: as `generate`.
    """
    if options.get("batch_size") is not None:
        raise TypeError("batch_size: first-finish takes no such argument; all answers run side by side")
    clock = time.monotonic()
    request = Request.read(model(lm), prompts, num_samples=n, **options)
    job = Job.begin(request)
    while job.running:
        job.advance(None, rounds=BURST)
        ended = np.isin(job.status, ENDED).reshape(len(request), n).any(1)
        job.end(np.repeat(ended, n))
        if request.max_time is not None and time.monotonic() > clock + request.max_time:
            job.expire()
    result = job.result()
    rounds = np.where(np.isin(result.status, ENDED), result.stats.rounds, np.inf)
    each = candidates_of(result, request.prompts, n, request)
    return each, [Choice(int(row.argmin()), -row) for row in rounds.reshape(-1, n)]
