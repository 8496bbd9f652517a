"""What wrappers of a model have in common."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

from decodax.cache import Cache, Window
from decodax.core.around import AroundModel
from decodax.core.types import Out


@dataclasses.dataclass(frozen=True)
class Readout(AroundModel, abc.ABC):
    """`base`, its hidden states read in another way. Cache and weights are its own."""

    @abc.abstractmethod
    def apply(self, params: Any, window: Window, cache: Cache) -> Out:
        """As `Model.apply`."""
