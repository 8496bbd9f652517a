"""The scaling laws of drafters ("Scaling Laws for Speculative Decoding", Yan et al., 2025), fitted to training runs.

The mean number of tokens of a round grows linearly in the logarithms of the training tokens and of the drafter's
parameters. With the cost of a round this says how large a drafter should be.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class DrafterRun:
    """A finished training of a drafter.

    Attributes:
        tokens: number of training tokens.
        parameters: number of the drafter's parameters.
        accepted: mean number of tokens that a target forward yields with it.
    """

    tokens: float
    parameters: float
    accepted: float

    @classmethod
    def read(cls, directory: str | os.PathLike[str], figure: str = "greedy") -> DrafterRun:
        """Reads what `scripts/train.py drafter` wrote into a directory; `figure` is "greedy", "sampled" or "tree".

        Raises:
            ValueError: the directory says nothing about a training, or not this figure.
        """
        file = Path(directory) / "config.json"
        facts = json.loads(file.read_text("utf-8")).get("training", {}) if file.is_file() else {}
        if missing := [name for name in ("tokens", "parameters", figure) if name not in facts]:
            raise ValueError(f"directory: {directory} has no {missing[0]!r} of a training; takes what scripts/train.py "
                             "drafter wrote")
        return cls(facts["tokens"], facts["parameters"], facts[figure])


@dataclass(frozen=True)
class ScalingLaw:
    """A log-linear law: `accepted = base + tokens log10(training tokens) + parameters log10(parameters)`.

    >>> law = ScalingLaw(-10.0, 0.5, 1.0)
    >>> law(1e8, 1e9)
    3.0
    >>> law.best_size([1e8, 1e9, 1e10], 1e8, lambda size: 1 + size / 1e10)
    1000000000.0
    """

    base: float
    tokens: float
    parameters: float

    def __call__(self, tokens: float, parameters: float) -> float:
        """Returns the predicted mean number of tokens of a round."""
        return float(self.base + self.tokens * np.log10(tokens) + self.parameters * np.log10(parameters))

    def best_size(self, sizes: Sequence[float], tokens: float, cost: Callable[[float], float]) -> float:
        """Returns the number of parameters with the most tokens a second.

        Args:
            sizes: numbers of parameters to choose from.
            tokens: number of training tokens.
            cost: the duration of a round by the number of parameters, drafting and verification, such as one measured
                with random weights at the batch size of later use.

        Raises:
            ValueError: no sizes.
        """
        if not len(sizes):
            raise ValueError("sizes: got none, takes one or more")
        return max(sizes, key=lambda size: self(tokens, size) / cost(size))


def fit_scaling(runs: Sequence[DrafterRun | str | os.PathLike[str]]) -> ScalingLaw:
    """Fits the scaling law of drafters to runs by least squares (Yan et al., 2025).

        law = dx.train.fit_scaling(["runs/pycode-eagle-3-small/model", ...])
        size = law.best_size([3e5, 1e6, 3e6], tokens=1e8, cost=seconds_of_a_round)

    Args:
        runs: runs, or directories of drafters that `scripts/train.py drafter` wrote. If all have one size or one number
            of tokens, the law does not depend on it.

    Raises:
        ValueError: runs that do not differ enough to fit a law, or a number that is not positive.
    """
    found = [run if isinstance(run, DrafterRun) else DrafterRun.read(run) for run in runs]
    for run in found:
        if not min(run.tokens, run.parameters) > 0:
            raise ValueError(f"runs: got {run}, takes positive numbers of tokens and parameters")
    x = np.log10([[run.tokens, run.parameters] for run in found]).reshape(-1, 2)
    varies = np.ptp(x, 0) > 1e-9 if len(x) else np.zeros(2, bool)
    table = np.concatenate([np.ones((len(x), 1)), x[:, varies]], 1)
    if not varies.any() or np.linalg.matrix_rank(table) < table.shape[1]:
        raise ValueError(f"runs: got {len(found)}, which differ too little; takes runs with several numbers of tokens "
                         "or of parameters, which do not grow together")
    base, *slopes = np.linalg.lstsq(table, np.array([run.accepted for run in found]))[0]
    full = np.zeros(2)
    full[varies] = slopes
    return ScalingLaw(float(base), *map(float, full))


__all__ = ["DrafterRun", "ScalingLaw", "fit_scaling"]
