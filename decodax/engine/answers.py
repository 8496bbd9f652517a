"""What can take the place of plain generation in `decodax.generate`: searches, and rules that choose one of several
samples. Both answer with a `Result` of one row for each prompt."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

from decodax.engine.result import Result


class Search(abc.ABC):
    """A search over texts, for `search=`."""

    @abc.abstractmethod
    def run(self, lm: Any, prompts: Any, options: Mapping[str, Any]) -> Result:
        """Returns one text for each prompt.

        Args:
            lm, prompts: as of `decodax.generate`. options: other arguments of `generate`.
        """


class Select(abc.ABC):
    """A rule that chooses one of several samples, for `select=`."""

    @abc.abstractmethod
    def run(self, lm: Any, prompts: Any, num_samples: int, options: Mapping[str, Any]) -> Result:
        """Returns one of `num_samples` texts for each prompt.

        Args:
            lm, prompts: as of `decodax.generate`. options: other arguments of `generate`.
        """
