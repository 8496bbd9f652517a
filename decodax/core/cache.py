"""The contract of a cache: what a model keeps of each row from round to round."""

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
"""What a model returns of its window for the cache: for each layer a pytree of arrays `[B, W, ...]`, one entry a node.
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
    """What a model keeps of each row: derive a `@struct` from this. Every kind obeys the same laws (`tests/laws`).

    Every array leaf has a leading batch axis, unless `by_row` says otherwise (a pool of pages); such a kind overrides
    `select`. Slots are named by the position of their token; where an entry lies is the cache's own business.

    Attributes:
        supports: the features that it has. An algorithm that needs another one is refused by name.
        by_row: whether every array leaf has a leading batch axis, so that rows may lie on devices of their own.
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
        """Positions `S` that it was made for; 0 holds nothing."""

    @property
    def inputs(self) -> PyTree:
        """What the model keeps of the inputs that each row was given beside its tokens (`Model.init_cache`), or
        None."""
        return None

    @property
    def hosted(self) -> PyTree:
        """Those of its arrays that lie in the host's memory (`decodax.core.host_memory`), as a pytree; None: none
        does."""
        return None

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float,
               sliding: int | None = None, softcap: float | None = None,
               bias: Bias | None = None) -> tuple[Array, PyTree]:
        """Attention of the window's queries `f[B, W, H, d]` to the cache and to the window.

        Args:
            k, v: `f[B, K, G, d]` and `f[B, K, G, e]` keys and values of the window. `K` is `W`, unless nodes of earlier
                windows stand before its own (`AttentionView`).
            window: a `Window` or an `AttentionView`, of which it reads `visible()`, `tokens`, `positions`,
                `key_positions`, `before`, `cached` and `certain`; `live` only where `certain`, which a `Window` alone
                is. `before` are the entries of this layer of the nodes that stand before its own, or None: what an
                entry holds of a node, which may be made of its token, so comes back with its key.
            bias: what is added to the scores; see `decodax.pallas_kernels.window_attention`.

        Returns:
            `f[B, W, H, e]`, and the entry of this layer: a pytree of arrays `[B, W, ...]`.
        """
        raise NotImplementedError(f"{type(self).__name__} holds no keys and values to attend to")

    @abc.abstractmethod
    def commit(self, entries: Any, slots: Array) -> Self:
        """Writes entry `w` of row `b` for position `slots[b, w]` (`i32[B, W]`); -1 drops it. `entries` are those that
        the model returned (`Entries`, or what a model and a cache of its own agree on)."""

    def select(self, rows: Array) -> Self:
        """The cache whose row `i` is this one's row `rows[i]` (`i32[B']`)."""
        return jax.tree.map(lambda x: take_rows(x, rows), self)

    def succeed(self, rows: Array) -> Self:
        """As `select`, with as many rows (`i32[B]`), in each round: a cache that can do so moves less."""
        return self.select(rows)

    def truncate(self, length: Array) -> Self:
        """Without the entries at positions from `length` (`i32[B]`) on. Needs the feature "truncation"."""
        raise NotImplementedError(f"{type(self).__name__} does not support truncation")

    def room(self, running: Array) -> Array | None:
        """`i32[B]`: how many more positions fit. A row that needs more ends with `Status.CAPACITY`. None: as many as
        the token buffer has.

        Args:
            running: `bool[B]`, the rows that have not finished; the others need no room.
        """
        return None

    def horizon(self) -> Array | None:
        """`i32[B]`, at least 1: how many tokens a round may commit, because what the cache holds changes behind them
        (an eviction, a flush). None: any number. A round that commits no more than this sees what plain decoding would
        see, so that speculation stays exact."""
        return None

    def stale(self) -> Array | None:
        """`bool[B]`: rows of which entries are to be computed anew before the next round (`renewed`). None: of none,
        ever. It depends on the committed tokens alone, as everything here."""
        return None

    def renewed(self, text: ReadPrompt, rows: Array) -> Self:
        """With those entries of `rows` (`bool[B]`) computed anew, for which it may run the model once more over tokens
        that are committed. Those of `text` go up to the newest one, whose entry it does not have yet."""
        raise NotImplementedError(f"{type(self).__name__} computes no entries anew")

    def order(self, width: int) -> np.ndarray | None:
        """`i32[W]`: in which order a chain of so many nodes that will all be committed (`Window.certain`) is best laid
        out, the first nodes for the first device of those that divide its entries; None: in that of the text."""
        return None

    def specs(self) -> PyTree:
        """A `PartitionSpec` for each leaf: where it lies on a mesh. Rows lie over `DATA`, heads of keys and values
        (`[B, G, S, d]`) over `MODEL`; what rows share lies on every device."""
        inside = lambda x: x is not self and isinstance(x, Cache)
        rows = lambda x: PartitionSpec(DATA, MODEL) if x.ndim == 4 else PartitionSpec(DATA)
        own = rows if self.by_row else lambda x: PartitionSpec()
        every = lambda cache: jax.tree.map(lambda x: PartitionSpec(), cache)
        nested = (lambda x: x.specs()) if self.by_row else every
        return jax.tree.map(lambda x: nested(x) if inside(x) else own(x), self, is_leaf=inside)

    def for_prompt(self) -> Cache:
        """The empty cache that a prompt is read into, where that is another one than what the rounds go on with: a
        policy that chooses among the tokens of a prompt sees all of them first."""
        return self

    def settled(self, prompt: ReadPrompt) -> Cache:
        """What the rounds go on with, once the prompt is in what `for_prompt` gave."""
        return self

    def take_over(self, kv: Sequence[Array], length: Array) -> Self:
        """What `for_prompt` gave, with the keys and values of prompts that were computed before, `f[B, G, T, d + e]` of
        each layer, of which the first `length` (`i32[B]`) tokens count; keys are rotated."""
        raise ValueError(f"context: got keys and values that were computed before; {type(self).__name__} has to see "
                         "the text read, so it takes the text")

    def reusing(self, attention: Array, change: Array) -> Self:
        """What `take_over` gave, with what is known of tokens that were computed in another text, `f32[B, T]`
        (`decodax.caches.prefix.prefix.PrefixReuse`): for a cache that computes some of them anew."""
        return self

    @property
    def reads(self) -> int | None:
        """How many of the model's first layers run for a prompt (`Window.certain`) that is read into it; None: all. The
        model then returns the entries of these, and behind them the residual stream `f[B, W, D]` that comes out of
        them."""
        return None

    @property
    def view(self) -> Cache:
        """What a method reads of it that drafts with the model itself: less than what the model answers from, fewer
        bits of it for instance.

        Raises:
            ValueError: it has no smaller view of itself.
        """
        raise ValueError(f"cache: {type(self).__name__} has no smaller view of itself for drafts to read")

    def view_of(self, kind: Any) -> Cache:
        """The cache of the given kind that stands beside it, which drafts read (`decodax.cache.views`).

        Raises:
            ValueError: no cache of that kind stands beside it.
        """
        raise ValueError(f"cache: drafts read a cache of the kind {kind}, and none stands beside "
                         f"{type(self).__name__}; takes the model as the method runs it (Algorithm.through)")

    def adopt(self, prefix: Cache) -> Self:
        """With the beginning that all rows' texts have in common, which `prefix`, a dense cache of one row, holds: for
        kinds that `CacheConfig.share` made."""
        raise NotImplementedError(f"{type(self).__name__} cannot share a prefix")

    def scratch(self, entries: Entries, room: int) -> Draftable:
        """Room for so many nodes that are scored and not committed yet, beside this cache: for draft models. `entries`
        are those of any window, for the shapes. `Scratch.empty` makes one for keys and values."""
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
    """What a prompt was read with, for `Cache.settled`, or a text so far, for `Cache.renewed`.

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
