"""Training of a LoRA adapter (Hu et al., 2021) with any loss of a whole model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jax import Array

from decodax.models import adapters
from decodax.train.loop import Objective

Tree = Any


@dataclass(frozen=True)
class AdapterLoss:
    """The loss `objective` as a function of a LoRA adapter, for training with frozen weights (an `Objective`). The
    third argument of a call is a pair: the third argument of `objective`, and the frozen weights.

    Attributes:
        objective: the loss.
    """

    objective: Objective

    def __call__(self, params: Tree, batch: Any, extra: tuple[Any, Tree]) -> tuple[Array, dict[str, Array]]:
        """Returns the loss and scalars to log, those of `objective`.

        Args:
            params: the adapter, as `decodax.adapters.init` makes it.
            batch: the examples.
            extra: the third argument of `objective`, and the weights.
        """
        own, weights = extra
        return self.objective(adapters.apply(weights, params), batch, own)


__all__ = ["AdapterLoss"]
