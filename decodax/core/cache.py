"""The contract of a cache: the state that a model keeps for each row from round to round."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import jax
import numpy as np
from jax import Array

from decodax.common.struct import Struct
from decodax.core.host_memory import take_rows
from decodax.pallas_kernels.window_attention import Bias

PyTree = Any

Entries = Sequence[PyTree]
"""What a model call returns for the cache: for each layer a pytree of arrays `[B, W, ...]`, one entry for each node.
The cache decides what an entry is: keys and values, a latent, a recurrent state, statistics of attention."""

Feature = Literal["trees", "subsets", "rewrites", "truncation"]
"""What a cache may support beyond chains that grow at the end.

"trees": windows in which a node does not see all nodes before it.
"subsets": windows that see only some of the cached entries (`Window.cached`).
"rewrites": entries at any position, in any order, more than once.
"truncation": `Cache.truncate`.
"""

ALL: frozenset[Feature] = frozenset(("trees", "subsets", "rewrites", "truncation"))
NONE: frozenset[Feature] = frozenset()


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the arrays of a cache lie.

    Attributes:
        by_row: True if every array has a leading batch axis, so that rows can lie on different devices. False for a
            cache with arrays that rows share, such as a pool of pages; it has a `select` of its own.
        hosted: the arrays that lie in host memory (`decodax.core.host_memory`), as a pytree; None if no array does.
        specs: layouts of fields on a mesh that differ from the default (`decodax.core.mesh.cache_specs`): a pytree of
            `PartitionSpec` by the name of the field.
        order: maps the width `W` of a prefill window to the order in which its nodes are laid out best, `i32[W]`: the
            first nodes for the first of the devices that divide the entries; or to None. None: the order of the text.
    """

    by_row: bool = True
    hosted: PyTree = None
    specs: Mapping[str, PyTree] = dataclasses.field(default_factory=dict)
    order: Callable[[int], np.ndarray | None] | None = None


class Cache(Struct, abc.ABC):
    """The state that a model keeps for each row of a batch: keys and values, or recurrent states. Derive a `@struct`.

    Only `capacity`, `attend` and `commit` have to be defined; the defaults of the other members suit a cache of fixed
    size in which nothing is evicted. Every kind obeys the same laws (`tests/contracts`). Slots are identified by the
    position of their token; where an entry is stored is up to the kind. A kind that can do more also derives from the
    classes of `decodax.core.capabilities`: `PromptPhase`, `LoadsPrefix`, `Refreshes`, `Truncates`, `DraftBase`.

    Attributes:
        supports: features that the kind has. An algorithm that needs another one is refused by name.
        length: `i32[B]`, number of positions that it has taken in, from 0 on.
    """

    supports: ClassVar[frozenset[Feature]] = NONE

    if TYPE_CHECKING:

        @property
        def length(self) -> Array:
            """`i32[B]`, number of positions that it has taken in."""

    @property
    @abc.abstractmethod
    def capacity(self) -> int:
        """Number of positions `S` that the cache was made for; 0 holds nothing."""

    @property
    def inputs(self) -> PyTree:
        """The inputs that each row was given beside its tokens (`Model.init_cache`), as far as the model needs them
        later; None: nothing."""
        return None

    @property
    def layout(self) -> Layout:
        """Where its arrays lie. By default all of them have a leading batch axis and lie on the device."""
        return Layout()

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float,
               sliding: int | None = None, softcap: float | None = None,
               bias: Bias | None = None) -> tuple[Array, PyTree]:
        """Attends from the window's queries `q`, `f[B, W, H, d]`, to the cached entries and to the window itself.

        Args:
            k, v: `f[B, K, G, d]` and `f[B, K, G, e]`, keys and values of the window. `K` is `W`, unless nodes of
                earlier windows come before its own (`AttentionView`).
            window: a `Window` or an `AttentionView`; read are `visible()`, `tokens`, `positions`, `key_positions`,
                `before`, `cached` and `is_prefill`, and `live` of a prefill. `before` has this layer's entries of the
                nodes that come before the window's own, or None.
            scale, sliding, softcap, bias: of the attention scores; see `decodax.pallas_kernels.window_attention`.

        Returns:
            `f[B, W, H, e]`, and the entry of this layer: a pytree of arrays `[B, W, ...]`.
        """
        raise NotImplementedError(f"{type(self).__name__} holds no keys and values to attend to")

    @abc.abstractmethod
    def commit(self, entries: Any, slots: Array) -> Self:
        """Writes entry `w` of row `b` for position `slots[b, w]` (`i32[B, W]`); -1 drops the entry.

        `entries` are those that the model returned for the window (`Entries`)."""

    def select(self, rows: Array) -> Self:
        """Returns the cache whose row `i` is row `rows[i]` of this one (`i32[B']`). Beams call it in every round with
        as many rows as there are, so a kind that can move less data then overrides it."""
        return jax.tree.map(lambda x: take_rows(x, rows), self)

    def room(self, running: Array) -> Array | None:
        """Returns the number of further positions that fit, `i32[B]`; a row that needs more ends with
        `Status.CAPACITY`. None: as many as the token buffer has.

        Args:
            running: `bool[B]`, rows that have not finished; the others need no room.
        """
        return None

    def max_commit(self) -> Array | None:
        """Returns the number of tokens that a round may commit at most, `i32[B]`, at least 1, because an eviction or a
        flush follows them. None: any number. A round that commits no more sees what plain decoding would see, so
        speculation stays exact."""
        return None


class Sized(Cache):
    """A cache that declares two fields for what every cache is asked for.

    Attributes:
        size: static; the most positions of a text, its capacity. given: its inputs.
    """

    if TYPE_CHECKING:
        size: int
        given: PyTree

    @property
    def capacity(self) -> int:
        return self.size

    @property
    def inputs(self) -> PyTree:
        return self.given


class CacheConfig(abc.ABC):
    """A kind of cache with options of its own: derive a frozen dataclass from this. It is compared by value, and static
    under jit. Any function of the same arguments is a kind, too.

    Attributes:
        alone: whether it cannot stand beside another one (`decodax.cache.views`), for what it keeps is not by layers.
    """

    alone: ClassVar[bool] = False

    @abc.abstractmethod
    def __call__(self, layers: Sequence[tuple[Any, ...]], batch: int, capacity: int, dtype: jax.typing.DTypeLike,
                 inputs: PyTree = None) -> Cache:
        """An empty cache; see `decodax.core.types.CacheKind`."""

    def fit(self, new: int) -> CacheConfig:
        """This kind for texts with at most `new` tokens behind their prompts, where it left a size open."""
        return self

    def of_model(self, lm: Any) -> CacheConfig:
        """This kind with what it takes of a loaded model beside its layers: how its tokenizer writes a sentence, or
        which tokens end a text. `lm` is a `decodax.LM`."""
        return self

    def put_on(self, lm: Any) -> Any:
        """A loaded model with this kind of cache. A kind that asks another model makes one of both."""
        return dataclasses.replace(lm, model=lm.model.with_cache(self.of_model(lm)))

    def beyond(self, longest: int) -> int:
        """How many positions behind a prompt of so many tokens it has the model read, and forgets again."""
        return 0

    def share(self, prefix: int, more: int) -> CacheConfig | None:
        """This kind for rows that have a beginning of up to `prefix` positions in common and at most `more` of their
        prompts behind it (`SharedPrefixCache.adopt`); None: its rows share nothing."""
        return None


def require(cache: Cache, needs: frozenset[Feature], who: str) -> None:
    """Raises ValueError where `who` needs a feature that the cache does not have."""
    if lacking := sorted(needs - cache.supports):
        raise ValueError(f"cache: {who} needs one that supports {' and '.join(lacking)}, which {type(cache).__name__} "
                         "does not")
