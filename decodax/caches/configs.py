"""Parts that the configs of several shelves share: options are checked when a config is built, and errors have one
wording."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import jax

from decodax.cache.key_values import KVLayer
from decodax.common.options import check_options
from decodax.core.cache import Cache, CacheConfig, PyTree
from decodax.pallas_kernels.window_attention import Bias

T = TypeVar("T")


class PaperConfig(CacheConfig):
    """Base of configs that are registry entries: derive a frozen dataclass whose fields are the options of the paper.

    Each field is checked against its annotation when the config is built, so that `caches.quest(budget=0)` is refused
    as `"quest:budget=0"` is. A field whose name begins with an underscore is no option: `generate` fills it in.

    Attributes:
        name: name of the entry, for error messages.
    """

    if TYPE_CHECKING:

        @property
        def name(self) -> str:
            """Name of the entry; derived classes declare a class variable."""

    def __post_init__(self) -> None:
        assert dataclasses.is_dataclass(self)
        check_options(type(self), {field.name: getattr(self, field.name) for field in dataclasses.fields(self)})

    @abc.abstractmethod
    def empty(self, shapes: tuple[KVLayer, ...], batch: int, size: int, dtype: Any, inputs: PyTree) -> Cache:
        """Returns an empty cache for layers of these shapes, of which there are none where `size` is 0."""

    def __call__(self, layers: Sequence[tuple[Any, ...]], batch: int, capacity: int, dtype: jax.typing.DTypeLike,
                 inputs: PyTree = None) -> Cache:
        shapes = tuple(KVLayer(*layer) for layer in layers) if capacity else ()
        return self.empty(shapes, batch, capacity, dtype, inputs)

    def check_scores(self, softcap: float | None, bias: Bias | None, scores: str = "tokens") -> None:
        """Raises ValueError if the model changes attention scores after the product of query and key, which the rule
        does not know of."""
        if bias is not None or softcap is not None:
            raise ValueError(f"cache: {self.name} scores {scores} by queries and keys alone; takes a model without a "
                             "soft cap or a bias of its attention scores")


def taken(option: str, given: Any, kind: type[T], takes: str) -> T:
    """Returns an option that has to be of one class.

    Raises:
        ValueError: it is not; `takes` says what is.
    """
    if not isinstance(given, kind):
        raise ValueError(f"{option}: got {'none' if given is None else type(given).__name__}, takes {takes}")
    return given
