"""The contract of a cache: the state that a model keeps for each row from round to round."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import jax
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

from decodax.common.axes import DATA, MODEL
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


class Cache(Struct, abc.ABC):
    """The state that a model keeps for each row of a batch: keys and values, or recurrent states. Derive a `@struct`.

    Only `capacity`, `attend` and `commit` have to be defined; the defaults of the other members suit a cache of fixed
    size in which nothing is evicted. Every kind obeys the same laws (`tests/laws`). Slots are identified by the
    position of their token; where an entry is stored is up to the kind.

    Attributes:
        supports: features that the kind has. An algorithm that needs another one is refused by name.
        by_row: True if every array leaf has a leading batch axis, so that rows can lie on different devices. A kind
            with arrays that rows share (a pool of pages) sets it to False and overrides `select`.
    """

    supports: ClassVar[frozenset[Feature]] = NONE
    by_row: ClassVar[bool] = True

    if TYPE_CHECKING:

        @property
        def length(self) -> Array:
            """`i32[B]`: positions that it has taken in, from 0 on."""

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
    def hosted(self) -> PyTree:
        """The arrays that lie in host memory (`decodax.core.host_memory`), as a pytree; None: no array does."""
        return None

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
        """Returns the cache whose row `i` is row `rows[i]` of this one (`i32[B']`)."""
        return jax.tree.map(lambda x: take_rows(x, rows), self)

    def succeed(self, rows: Array) -> Self:
        """As `select` with the same number of rows, called in every round by beams: a kind that can move less data
        overrides it."""
        return self.select(rows)

    def truncate(self, length: Array) -> Self:
        """Drops the entries at positions from `length` (`i32[B]`) on. Needs the feature "truncation"."""
        raise NotImplementedError(f"{type(self).__name__} does not support truncation")

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

    def needs_refresh(self) -> Array | None:
        """Returns the rows whose entries have to be computed anew before the next round, `bool[B]`. None: this kind
        never computes entries anew. Like everything in a cache it depends on committed tokens only."""
        return None

    def refresh(self, text: ReadPrompt, rows: Array) -> Self:
        """Recomputes those entries of `rows` (`bool[B]`). It may run the model once more on committed tokens; the
        tokens of `text` include the newest one, whose entry is not in the cache yet."""
        raise NotImplementedError(f"{type(self).__name__} computes no entries anew")

    def order(self, width: int) -> np.ndarray | None:
        """Returns the order in which the `width` nodes of a prefill window are laid out best, `i32[W]`: the first nodes
        for the first device of those that divide the entries. None: the order of the text."""
        return None

    def specs(self) -> PyTree:
        """Returns a `PartitionSpec` for each leaf, its layout on a mesh. Rows lie over `DATA`, heads of keys and values
        (`[B, G, S, d]`) over `MODEL`; arrays that rows share are replicated."""
        inside = lambda x: x is not self and isinstance(x, Cache)
        rows = lambda x: PartitionSpec(DATA, MODEL) if x.ndim == 4 else PartitionSpec(DATA)
        own = rows if self.by_row else lambda x: PartitionSpec()
        every = lambda cache: jax.tree.map(lambda x: PartitionSpec(), cache)
        nested = (lambda x: x.specs()) if self.by_row else every
        return jax.tree.map(lambda x: nested(x) if inside(x) else own(x), self, is_leaf=inside)

    def prefill_cache(self) -> Cache:
        """Returns the empty cache that a prompt is read into, if that is another one than the rounds use: a policy that
        chooses among the tokens of a prompt has to see all of them first."""
        return self

    def finish_prefill(self, prompt: ReadPrompt) -> Cache:
        """Returns the cache that the rounds use, once the prompt is in the one from `prefill_cache`."""
        return self

    def load_prefix(self, kv: Sequence[Array], length: Array) -> Self:
        """Fills the cache from `prefill_cache` with keys and values that were computed before.

        Args:
            kv: `f[B, G, T, d + e]` of each layer, keys rotated. length: `i32[B]`, number of tokens that count.
        """
        raise ValueError(f"context: got keys and values that were computed before; {type(self).__name__} has to see "
                         "the text read, so it takes the text")

    def reusing(self, attention: Array, change: Array) -> Self:
        """Adds to the result of `load_prefix` what is known of tokens that were computed in another text: their
        attention and change, `f32[B, T]` (`decodax.caches.prefix.prefix.PrefixReuse`), for kinds that recompute some of
        them."""
        return self

    @property
    def reads(self) -> int | None:
        """Number of the model's first layers that run on a prompt; None: all. The model then returns the entries of
        these layers, and after them the residual stream `f[B, W, D]` that comes out of them."""
        return None

    @property
    def view(self) -> Cache:
        """The smaller cache that drafts by the model itself read, such as fewer bits of this one.

        Raises:
            ValueError: this kind has no smaller view.
        """
        raise ValueError(f"cache: {type(self).__name__} has no smaller view of itself for drafts to read")

    def view_of(self, kind: Any) -> Cache:
        """Returns the cache of the given kind beside this one, which drafts read (`decodax.cache.views`).

        Raises:
            ValueError: no cache of that kind is beside it.
        """
        raise ValueError(f"cache: drafts read a cache of the kind {kind}, and none stands beside "
                         f"{type(self).__name__}; takes the model as the method runs it (Algorithm.through)")

    def adopt(self, prefix: Cache) -> Self:
        """Takes the common beginning of all rows' texts from `prefix`, a dense cache of one row; for kinds that
        `CacheConfig.share` made."""
        raise NotImplementedError(f"{type(self).__name__} cannot share a prefix")

    def tree_buffer(self, entries: Entries, room: int) -> Draftable:
        """Returns room for `room` nodes of a draft tree beside this cache, for draft models. `entries` of any window
        give the shapes. `Scratch.empty` makes one for keys and values."""
        raise NotImplementedError(f"{type(self).__name__} has no scratch, so its model cannot draft")


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


@dataclasses.dataclass(frozen=True)
class ReadPrompt:
    """The model and the text that a cache is finished or refreshed with (`Cache.finish_prefill`, `Cache.refresh`).

    Attributes:
        model, params: the network and its weights. tokens: `i32[B, N]`, of which a row's cache holds the first
            `Cache.length`.
    """

    model: Any
    params: PyTree
    tokens: Array


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
        prompts behind it (`Cache.adopt`); None: its rows share nothing."""
        return None


class Draftable(Struct, abc.ABC):
    """A cache beside which nodes of a draft tree are kept, level by level, until a decision says which are true. It is
    handed to the model in the cache's place."""

    if TYPE_CHECKING:
        base: Any

    @property
    def capacity(self) -> int:
        return self.base.capacity

    @property
    def inputs(self) -> Any:
        """As in `Cache`."""
        return self.base.inputs

    @abc.abstractmethod
    def seen_by(self, sees: Array) -> Self:
        """For a window whose node `i` sees the nodes `sees[:, i]` (`bool[B, W, room]`)."""

    @abc.abstractmethod
    def append(self, entries: Entries, positions: Array, at: Array) -> Self:
        """With a window's nodes, at positions `i32[B, W]`, in the places `at` (`i32[]`) and behind."""

    @abc.abstractmethod
    def commit(self, slots: Array) -> Any:
        """The cache with node `i` written for position `slots[:, i]` (`i32[B, room]`, -1 drops it)."""


def require(cache: Cache, needs: frozenset[Feature], who: str) -> None:
    """Raises ValueError where `who` needs a feature that the cache does not have."""
    if lacking := sorted(needs - cache.supports):
        raise ValueError(f"cache: {who} needs one that supports {' and '.join(lacking)}, which {type(cache).__name__} "
                         "does not")
