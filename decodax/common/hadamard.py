"""Hadamard matrices, which spread a few large numbers of a row over all of it."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np


def rotation(n: int) -> np.ndarray:
    """Returns an orthogonal matrix `f64[n, n]`: Sylvester's Hadamard matrix for the powers of 2 in `n`, times the
    smallest known Hadamard matrix for the rest (`hadamard`).

    Raises:
        ValueError: no such matrix is known for `n`.
    """
    core, many = doubled(n)
    while many > 1:
        core, many = np.kron([[1, 1], [1, -1]], core), many // 2
    return core / n ** 0.5


@functools.lru_cache(maxsize=16)
def doubled(n: int) -> tuple[np.ndarray, int]:
    """Returns the smallest known Hadamard matrix from which doubling leads to size `n`, and the power of 2 between
    them."""
    size = n
    while size % 2 == 0:
        try:
            hadamard(size // 2)
        except ValueError:
            break
        size //= 2
    return np.round(hadamard(size) * size ** 0.5), n // size


def hadamard(n: int) -> np.ndarray:
    """Returns an orthogonal matrix `f64[n, n]` with entries of one size: a Hadamard matrix, by Sylvester and Paley.

    Raises:
        ValueError: `n` is not a power of 2, nor one times `q + 1` (or `2 (q + 1)`) for a prime `q` that is 3 (or 1)
            modulo 4. Most models' widths are.

    >>> (hadamard(2) * 2 ** 0.5).round().tolist()
    [[1.0, 1.0], [1.0, -1.0]]
    """
    m: int = n
    core: Any
    while True:
        if m <= 2:
            core = np.ones((m, m))
            core[1:, 1:] = -1
            break
        if m % 4 == 0 and _prime(q := m - 1):
            core = np.eye(m) + _paley(q, -1)
            break
        if m % 4 == 0 and (q := m // 2 - 1) % 4 == 1 and _prime(q):
            core = np.kron(_paley(q, 1), [[1, 1], [1, -1]]) + np.kron(np.eye(q + 1), [[1, -1], [-1, -1]])
            break
        if m % 2:
            raise ValueError(f"width: got {n}, takes a number with a known Hadamard matrix")
        m //= 2
    while len(core) < n:
        core = np.kron([[1, 1], [1, -1]], core)
    return core / n ** 0.5


def _paley(q: int, sign: int) -> np.ndarray:
    """Returns a matrix `[q + 1, q + 1]`: 0 on the diagonal, 1 where the difference of two indices is a square modulo
    `q`, else -1.

    The first column is `sign` times the first row.
    """
    squares = {i * i % q for i in range(1, q)}
    residue = np.array([0] + [1 if i in squares else -1 for i in range(1, q)])
    made = np.zeros((q + 1, q + 1))
    made[0, 1:], made[1:, 0] = 1, sign
    made[1:, 1:] = residue[(np.arange(q)[:, None] - np.arange(q)) % q]
    return made


def _prime(q: int) -> bool:
    return q > 2 and all(q % i for i in range(2, math.isqrt(q) + 1))
