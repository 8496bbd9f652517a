"""Defaults from a model's generation config, for options that the caller does not give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from decodax.io.load import LM
from decodax.sampling.config import blaming


class Config:
    """The entries of a loaded model's generation config (`LM.generation_config`), which are defaults of the caller's
    arguments."""

    def __init__(self, lm: LM):
        self.entries, self.origin = dict(lm.generation_config or {}), f"generation config of {lm.name!r}"

    def or_given(self, key: str, given: Any, read: Callable[[str, Any], Any], default: Any = None,
                 name: str | None = None) -> Any:
        """Returns the argument `name` (default `key`), converted by `read`; if it is None, the entry `key` of the
        generation config, or else `default`."""
        if given is not None:
            return read(name or key, given)
        found = self.entries.get(key)
        if found is None:
            return default
        with blaming(self.origin, (key, name or key)):
            return read(key, found)
