"""A network with its weights, the form in which users pass models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jax.sharding import Mesh

from decodax.core.types import Model

PyTree = Any


class Loaded:
    """A network with its weights, as `decodax.load` returns it.

    Attributes:
        model: the network.
        params: its weights.
        vocab_size: number of token ids.
        tokenizer: its tokenizer; None for a model of bare token ids.
        name: name or path that was loaded.
        diffusion: how it unmasks tokens; None for an autoregressive model.
        directory: path of its files, or None.
        file: path of its GGUF file, or None.
        mesh: device mesh of its weights, or None.
    """

    if TYPE_CHECKING:

        @property
        def model(self) -> Model: ...

        @property
        def params(self) -> PyTree: ...

        @property
        def vocab_size(self) -> int: ...

        @property
        def tokenizer(self) -> Any: ...

        @property
        def name(self) -> str: ...

        @property
        def diffusion(self) -> Any: ...

        @property
        def directory(self) -> Any: ...

        @property
        def file(self) -> Any: ...

        @property
        def mesh(self) -> Mesh | None: ...


def network_of(given: Any, params: PyTree = None) -> tuple[Model, PyTree]:
    """Returns the network and the weights of `given`: a result of `decodax.load`, or a `Model` with weights `params`.

    Raises:
        ValueError: `given` is neither.
    """
    if isinstance(given, Loaded):
        return given.model, given.params
    if isinstance(given, Model):
        return given, params
    raise ValueError(f"model: got {type(given).__name__}, takes a Model or what decodax.load gave")


def network_name(given: Any) -> str:
    """Returns the class name of the network of a result of `decodax.load`, and of anything else its own class name, for
    error messages."""
    return type(given.model if isinstance(given, Loaded) else given).__name__
