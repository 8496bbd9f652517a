"""Base class of models with trained heads beside the network, whose weights are a pair."""

from __future__ import annotations

import abc
import dataclasses
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax import Array

from decodax.core.around import PairedReadout
from decodax.core.cache import Cache
from decodax.core.types import Out
from decodax.core.window import Window


@dataclasses.dataclass(frozen=True)
class TrainedReadout(PairedReadout):
    """A model whose logits trained heads compute from the hidden states and the logits of the network."""

    @abc.abstractmethod
    def read(self, own: Any, hidden: Array, logits: Array) -> Array:
        """Returns the logits of this model, `f32[..., V]`.

        Args:
            own: the weights of the readout.
            hidden: `f[..., D]`, hidden states.
            logits: `f32[..., V]`, the network's logits for them.
        """

    def apply(self, params: Any, window: Window, cache: Cache) -> Out:
        out = self.base.apply(params[0], window, cache)
        head = lambda hidden: self.read(params[1], hidden, out.head(hidden))
        return dataclasses.replace(out, head=head)


def tensors_of(directory: str | os.PathLike[str], files: str = "*.safetensors") -> dict[str, Array]:
    """Returns the arrays in the files of a directory that match a pattern, by their names."""
    from safetensors.numpy import load_file

    return {name: jnp.asarray(x) for file in sorted(Path(directory).glob(files))
            for name, x in load_file(file).items()}
