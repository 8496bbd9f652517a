"""Programs that are generated as sequences of edits, and the metric pass@k."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from decodax.common.registry import FUNCTIONS

EDIT = "<|diff|>"
"""The separator between two edits."""

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


def insert(program: str, edit: str) -> str:
    """Applies an edit to a program: a diff that only inserts lines, in hunks of the unified format (LintSeq: Piterbarg
    et al., 2024).

    Hunks may have lines of context or none.

    Raises:
        ValueError: the edit is not such a diff, or does not fit the program.

    >>> insert("def f():\\n    return 1", "@@ -1,0 +2,1 @@\\n+    x = 1")
    'def f():\\n    x = 1\\n    return 1'
    """
    lines = program.split("\n") if program else []
    out, done, made = [], 0, None
    for row in edit.strip("\n").split("\n") if edit.strip() else []:
        if head := _HUNK.match(row):
            start, count = int(head[1]), int(head[2] or 1)
            at = start if count == 0 else start - 1         # without lines of its own a hunk follows a line
            if not done <= at <= len(lines):
                raise ValueError(f"edit: got a hunk at line {start} of a program of {len(lines)} lines, after "
                                 f"line {done}, takes hunks in the order of lines")
            out += lines[done:at]
            done, made = at, row
        elif made is None:
            if row.startswith(("---", "+++")):
                continue
            raise ValueError(f"edit: got {row!r} in front of the first hunk")
        elif row.startswith("+"):
            out.append(row[1:])
        elif row.startswith("-"):
            raise ValueError(f"edit: got {row!r}; takes edits that only insert lines")
        else:
            if done >= len(lines) or lines[done] != row[1:]:
                raise ValueError(f"edit: got {row[1:]!r} as line {done + 1}, which the program does not have")
            out.append(lines[done])
            done += 1
    return "\n".join([*out, *lines[done:]])


@FUNCTIONS.register("select.resolve_edits",
                    "Training Language Models on Synthetic Edit Sequences Improves Code Synthesis",
                    "Piterbarg et al. 2024", "the program that a sequence of edits makes")
def resolve_edits(text: str, separator: str = EDIT, program: str = "", partial: bool = True) -> str:
    """Returns the program that results from a sequence of edits.

    Args:
        text: the edits.
        separator: the string between two edits. `stop=separator` in `generate` ends a text after one edit.
        program: the program before the first edit.
        partial: True ignores the last edit if it is not valid, for a text that was cut off.

    Raises:
        ValueError: an edit does not fit; the message says which one.
    """
    edits = [edit for edit in text.split(separator) if edit.strip()]
    for i, edit in enumerate(edits):
        try:
            program = insert(program, edit)
        except ValueError as e:
            if partial and i == len(edits) - 1:
                break
            raise ValueError(f"edit {i + 1} of {len(edits)}: {e}") from e
    return program


@FUNCTIONS.register("select.pass_at_k", "Evaluating Large Language Models Trained on Code", "Chen et al. 2021",
                    "the chance that one of k samples is right")
def pass_at_k(samples: Any, right: Any, k: int) -> np.ndarray:
    """Returns an unbiased estimate of the probability that at least one of `k` samples is correct (Chen et al., 2021).

    With `n >= k` samples of which `c` are correct, it is `1 - C(n - c, k) / C(n, k)`.

    Args:
        samples: `i64[...]`, `n` of each problem.
        right: `i64[...]`, `c` of each problem.
        k: number of samples.

    Returns:
        `f64[...]`.

    Raises:
        ValueError: fewer samples than `k`, or more correct ones than samples.

    >>> pass_at_k([10, 10, 10], [0, 1, 10], 5).round(3).tolist()
    [0.0, 0.5, 1.0]
    """
    n, c = np.broadcast_arrays(np.asarray(samples, np.int64), np.asarray(right, np.int64))
    if k < 1 or (n < k).any():
        raise ValueError(f"k: got {k} with {int(n.min())} samples, takes from 1 to the number of samples")
    if (c < 0).any() or (c > n).any():
        raise ValueError("right: takes numbers from 0 to that of the samples")
    # the product over i of (n - c - i) / (n - i), whose factors are 0 from i = n - c on
    i = np.arange(k)
    return 1 - np.prod(np.maximum((n - c)[..., None] - i, 0) / (n[..., None] - i), -1)


def coverage(right: Sequence[Sequence[bool]], ks: Sequence[int] = (1, 10, 100)) -> dict[int, float]:
    """Returns the mean pass@k over all problems, for each `k` in `ks` for which all problems have enough samples.

    Args:
        right: for each problem, True for each correct sample.
        ks: the values of `k`.

    >>> coverage([[True, False], [False, False]])
    {1: 0.25}
    """
    n, c = np.array([len(row) for row in right]), np.array([sum(map(bool, row)) for row in right])
    return {k: float(pass_at_k(n, c, k).mean()) for k in ks if len(n) and k <= n.min()}
