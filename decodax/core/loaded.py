"""A network with its weights, as users hand it in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jax.sharding import Mesh

from decodax.core.types import Model

PyTree = Any


class Loaded:
    """A network with its weights, as `decodax.load` gives it.

    Attributes:
        model: the network. params: its weights. vocab_size: ids that it reads. name: what it was loaded as.
        diffusion: how it fills masks; None for an autoregressive model. directory: where its files lie, or None.
        mesh: where its weights lie, or None.
    """

    if TYPE_CHECKING:

        @property
        def model(self) -> Model: ...

        @property
        def params(self) -> PyTree: ...

        @property
        def vocab_size(self) -> int: ...

        @property
        def name(self) -> str: ...

        @property
        def diffusion(self) -> Any: ...

        @property
        def directory(self) -> Any: ...

        @property
        def mesh(self) -> Mesh | None: ...


def network_of(given: Any, params: PyTree = None) -> tuple[Model, PyTree]:
    """Returns the network and the weights of a `Model`, whose weights are `params`, or of a result of `decodax.load`.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(given, Loaded):
        return given.model, given.params
    if isinstance(given, Model):
        return given, params
    raise ValueError(f"model: got {type(given).__name__}, takes a Model or what decodax.load gave")
