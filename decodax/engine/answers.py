"""Base classes of searches and of selection rules, which replace plain generation in `decodax.generate`. Both return a
`Result` with one row for each prompt."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

from decodax.engine.result import Result


class Search(abc.ABC):
    """Base class of searches over texts, for the argument `search`."""

    @abc.abstractmethod
    def run(self, lm: Any, prompts: Any, options: Mapping[str, Any]) -> Result:
        """Returns a result with one text for each prompt.

        Args:
            lm: the model, as in `decodax.generate`.
            prompts: the prompts, as in `decodax.generate`.
            options: the other arguments of `generate`.
        """


class Select(abc.ABC):
    """Base class of rules that choose one of several samples, for the argument `select`."""

    @abc.abstractmethod
    def run(self, lm: Any, prompts: Any, num_samples: int, options: Mapping[str, Any]) -> Result:
        """Returns a result with one of `num_samples` samples for each prompt.

        Args:
            lm: the model, as in `decodax.generate`.
            prompts: the prompts, as in `decodax.generate`.
            num_samples: number of samples of each prompt.
            options: the other arguments of `generate`.
        """
