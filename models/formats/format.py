"""The base classes of weight formats."""

from __future__ import annotations

import abc
import re
from collections.abc import Callable
from typing import Any

import numpy as np
from jax import Array

from decodax.common.options import Checked
from decodax.models.calibration import Statistic
from decodax.models.names import flatten
from decodax.models.packed import Packed


class Format(Checked, abc.ABC):
    """Base class of formats that pack single kernels."""

    @property
    def statistic(self) -> Statistic | None:
        """The statistic of a kernel's inputs and gradients that `pack` needs; None: it needs no data."""
        return None

    def packs(self, path: str) -> bool:
        """True if the kernel at a dotted path, such as "layers.0.attn.q.kernel", is packed; other kernels stay arrays.
        """
        return True

    @abc.abstractmethod
    def pack(self, kernel: Array, seen: Any = None) -> Packed:
        """Returns the packed form of a kernel `f[K, N]`, or of `f[E, K, N]` with one kernel for each of `E` experts.

        It is called under jit if `statistic` is None, and outside of jit otherwise.

        Args:
            kernel: the kernel.
            seen: the statistic of the kernel, a result of `calibration.observe`.
        """


class ModelFormat(Checked, abc.ABC):
    """Base class of formats that pack a whole model, since they change more than single kernels."""

    @property
    @abc.abstractmethod
    def data(self) -> bool:
        """True if the format needs calibration data."""

    @abc.abstractmethod
    def convert(self, model: Any, params: Any, tokens: np.ndarray | None,
                report: Callable[[float], None] = lambda done: None) -> tuple[Any, Any]:
        """Returns the packed model and its weights.

        Args:
            model: the network.
            params: its weights.
            tokens: `i32[S, T]` of texts, one sequence per row; None for a format that needs no data.
            report: called with the share of the work that is done.

        Raises:
            ValueError: the model is not supported.
        """


def kernels(weights: Any) -> list[str]:
    """Returns the dotted paths of those weights of a decoder or encoder-decoder that formats pack.

    The routers of experts are left out, since small errors would change the choice of experts, and the small kernels of
    decays and rates of a gated delta rule, whose errors would add up. A tied embedding table counts as a kernel.
    """
    found = flatten(weights)
    inside = [path for path in found if path.endswith(".kernel") and not EXACT.search(path)]
    return inside if {"lm_head.kernel", "head.kernel"} & found.keys() else [*inside, "embed"]


EXACT = re.compile(r"\.(router|in_a|in_b|low_a)\.")
"""Kernels that are never packed."""
