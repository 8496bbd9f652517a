"""A training run that is killed and resumed, for the tests of every recipe."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from rich.console import Console

from recipes import run as program

QUIET = Console(quiet=True)
LOGGED = "step", "tokens", "loss", "rate", "bits_per_byte", "expected_tokens"


class Killed(Exception):
    """Stands for the signal that ends a job."""


def resumed(options: Any, output: Path, step: int) -> tuple[Any, list[int]]:
    """Trains into `output`, is killed in a step, and goes on: the result, and the steps since the last checkpoint."""

    def on_step(done: int) -> None:
        if done == step:
            raise Killed

    second, steps = replace(options, output=output), list[int]()
    with pytest.raises(Killed):
        program.train(second, on_step=on_step, console=QUIET)
    return program.train(second, on_step=steps.append, console=QUIET), steps


def metrics(output: Path) -> list[dict[str, float]]:
    """The logged entries without their times."""
    entries = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [{k: entry[k] for k in LOGGED if k in entry} for entry in entries]


def same(a: object, b: object) -> bool:
    """True if all arrays of two trees are equal."""
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
