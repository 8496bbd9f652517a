"""What a format of weights is."""

from __future__ import annotations

import abc
from typing import Any

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


def kernels(weights: Any) -> list[str]:
    """The dotted paths of what formats pack among a decoder's weights: kernels, but for the routers of experts, whose
    choices turn on the last digits. An embedding table that is also the head is one."""
    found = flatten(weights)
    inside = [path for path in found if path.endswith(".kernel") and ".router." not in path]
    return inside if "lm_head.kernel" in found else [*inside, "embed"]
