"""Base class of models with trained heads beside the network, whose weights are a pair."""

from __future__ import annotations

import abc
import dataclasses
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax import Array

from decodax.core.around import Readout
from decodax.core.cache import Cache
from decodax.core.types import Out, embeddings, logits_of, outputs
from decodax.core.window import Window


@dataclasses.dataclass(frozen=True)
class PairedReadout(Readout):
    """A readout with weights of its own: its weights are those of the network, and its own ones."""

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

    def init_cache(self, batch: int, capacity: int, *, params: Any = None, inputs: Any = None) -> Cache:
        own = None if params is None else params[0]
        return self.base.init_cache(batch, capacity, params=own, inputs=inputs)

    def embeddings(self, params: Any, tokens: Array) -> Array:
        return embeddings(self.base, params[0], tokens)

    def logits(self, params: Any, hidden: Array) -> Array:
        return logits_of(self.base, params[0], hidden)

    def outputs(self, params: Any, layer: int) -> Array:
        return outputs(self.base, params[0], layer)


def tensors_of(directory: str | os.PathLike[str], files: str = "*.safetensors") -> dict[str, Array]:
    """Returns the arrays in the files of a directory that match a pattern, by their names."""
    from safetensors.numpy import load_file

    return {name: jnp.asarray(x) for file in sorted(Path(directory).glob(files))
            for name, x in load_file(file).items()}
