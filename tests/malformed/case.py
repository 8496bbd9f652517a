"""What a malformed call is, and what it runs on."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import decodax as dx

IDS = [[40, 41, 42, 43, 44], [50, 51]]
NEW = 4
FIXED = dict(max_new_tokens=NEW, eos_token_id=[])


@dataclasses.dataclass
class World:
    """What cases run on: models, what they say to `IDS`, and a directory to break files in."""

    lm: dx.LM
    filling: dx.LM
    reference: list[list[int]]
    directory: Path
    cli: Callable[[list[str]], tuple[int, str]]


@dataclasses.dataclass(frozen=True)
class Case:
    """A call. `names`: an error has one of them in its text. `check`: of a result; None where there must be none.
    `either`: an error is as good as a result."""

    what: str
    run: Callable[[World], Any]
    names: tuple[str, ...]
    check: Callable[[World, Any], bool] | None = None
    either: bool = False


class Thing:
    """Nothing that anybody takes."""


def rows(result: dx.Result) -> list[list[int]]:
    return [result.row(i).tolist() for i in range(len(result))]


def loop() -> list[Any]:
    own: list[Any] = []
    own.append(own)
    return own
