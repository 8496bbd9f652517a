"""What a format of weights is."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import numpy as np
from jax import Array

from decodax.models.calibration import Statistic
from decodax.models.names import flatten
from decodax.models.packed import Packed


class Format(abc.ABC):
    """How kernels are packed."""

    @property
    def statistic(self) -> Statistic | None:
        """What `pack` is to know of the kernel's inputs and gradients; None: it takes no data."""
        return None

    def packs(self, path: str) -> bool:
        """Whether the kernel at a dotted path, such as "layers.0.attn.q.kernel", is packed; the others stay arrays."""
        return True

    @abc.abstractmethod
    def pack(self, kernel: Array, seen: Any = None) -> Packed:
        """The packed form of `f[K, N]`, or of `f[E, K, N]`, one for each expert.

        Without a `statistic` it is called under jit, and else outside of it.

        Args:
            seen: what `calibration.observe` returns for this kernel and `statistic`.
        """


class ModelFormat(abc.ABC):
    """How a whole model is packed, where a format changes more of it than single kernels."""

    @property
    @abc.abstractmethod
    def data(self) -> bool:
        """Whether it goes by data."""

    @abc.abstractmethod
    def convert(self, model: Any, params: Any, tokens: np.ndarray | None,
                report: Callable[[float], None] = lambda done: None) -> tuple[Any, Any]:
        """The packed model and its weights.

        Args:
            tokens: `i32[S, T]` of texts, one sequence a row; None: a format that does not go by data.
            report: called with the share of the work that is done.

        Raises:
            ValueError: a model that it does not take.
        """


def kernels(weights: Any) -> list[str]:
    """The dotted paths of what formats pack among a decoder's weights: kernels, but for the routers of experts, whose
    choices turn on the last digits. An embedding table that is also the head is one."""
    found = flatten(weights)
    inside = [path for path in found if path.endswith(".kernel") and ".router." not in path]
    return inside if "lm_head.kernel" in found else [*inside, "embed"]
