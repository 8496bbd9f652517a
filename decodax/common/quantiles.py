"""Rewards by their quantile among those of a reference policy (InfAlign-CTRL: Balashankar et al., 2024)."""

from __future__ import annotations

import numpy as np


def quantiles(rewards: np.ndarray, references: np.ndarray) -> np.ndarray:
    """Returns for each of `n` rewards the share of the `m` reference rewards that are at most as large, `f64[n]`."""
    return np.searchsorted(np.sort(references), rewards, side="right") / len(references)


def transformed(c: np.ndarray, t: float) -> np.ndarray:
    """Returns `(exp(t c) - 1) / t` for calibrated rewards `c` from 0 to 1, or `c` if `t` is 0. It orders rewards as
    `exp(t c)`, or `-exp(t c)` for a negative `t`, of InfAlign-CTRL (Balashankar et al., 2024)."""
    return c if t == 0 else np.expm1(t * c) / t
