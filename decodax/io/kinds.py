"""Tells kinds of model files apart, without importing what reads them."""

from __future__ import annotations

import os
from pathlib import Path

import decodax.models
from decodax.io.files import read_json

ZOO = Path(decodax.models.__file__).parent / "zoo"
"""Directory of the shipped models and drafters."""

DRAFTER = "decodax_drafter"
"""The entry of `config.json` that marks drafters in the library's own layout; its value is the system's name."""


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """Returns True if a path is that of a GGUF file, by its name or its first bytes."""
    file = Path(path).expanduser()
    if not file.is_file():
        return False
    with open(file, "rb") as data:
        return file.suffix == ".gguf" or data.read(4) == b"GGUF"


def is_drafter(path: str | os.PathLike[str]) -> bool:
    """Returns True if a directory holds a trained drafter in the library's layout."""
    path = shipped_path(path)
    return (path / "config.json").is_file() and DRAFTER in read_json(path / "config.json")


def shipped_path(path: str | os.PathLike[str]) -> Path:
    """Returns the directory of a shipped model or drafter if `path` is its name and not a path that exists; otherwise
    `path`."""
    inside = ZOO / path
    return inside if inside.is_dir() and not Path(path).exists() else Path(path)
