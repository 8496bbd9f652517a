"""The contracts of the round: what a model, an algorithm and a policy are to the core, and to nothing else.

Letters: B batch, N token buffer, S cache slots, W window, M most tokens a round can emit, D model width, V vocabulary.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import jax
from jax import Array

from decodax.common.struct import Struct, struct
from decodax.core.cache import Cache, CacheConfig, Entries
from decodax.core.record import Record
from decodax.core.window import Window, take

PyTree = Any

INVALID = -1
"""In place of a token: the logits hold a NaN or +inf."""

DEAD_END = -2
"""In place of a token: the policy forbids every token."""


@dataclasses.dataclass(frozen=True)
class Out:
    """What one model call returns. It lives inside a trace and never crosses a jit boundary.

    Attributes:
        hidden: `f[B, W, D]` after the final norm.
        entries: what the cache may take over of the window's nodes, for each layer a pytree of arrays `[B, W, ...]`.
        head: maps hidden states `f[..., D]` to logits `f32[..., V]`.
        layers: `f[B, W, D]` after each layer, before the final norm, from models that show them; what nobody reads
            costs nothing.
        norm: maps those to what `head` takes.
    """

    hidden: Array
    entries: Entries
    head: Callable[[Array], Array]
    layers: tuple[Array, ...] | None = None
    norm: Callable[[Array], Array] | None = None

    def rows(self, rows: Array) -> Out:
        """That of rows `rows` (`i32[B']`)."""
        parts = jax.tree.map(lambda x: x[rows], (self.hidden, self.entries, self.layers))
        return dataclasses.replace(self, hidden=parts[0], entries=parts[1], layers=parts[2])

    def first(self, count: int) -> Out:
        """That of the first `count` nodes."""
        parts = jax.tree.map(lambda x: x[:, :count], (self.hidden, self.entries, self.layers))
        return dataclasses.replace(self, hidden=parts[0], entries=parts[1], layers=parts[2])

    def logits(self, select: Array | None = None) -> Array:
        """`f32[B, W', V]`: the head's output at window nodes `select` (`i32[B, W']`), or at all of them."""
        return self.head(self.hidden if select is None else take(self.hidden, select))


class Model(abc.ABC):
    """A network as the core sees it: derive a frozen dataclass from this. It is compared by value and static under jit;
    its weights are handed in.

    `apply` never writes the cache. A layer of attention calls `cache.attend(layer, q, k, v, window, scale=...)` once,
    which gives its output and its entry.
    """

    @property
    def max_positions(self) -> int | None:
        """Positions beyond which the model would be silently wrong; None: no such bound."""
        return None

    @property
    def trained_positions(self) -> int | None:
        """Positions that the model was trained on; None: not known."""
        return None

    @property
    def cache_kind(self) -> CacheKind | None:
        """The kind of its caches of keys and values; None: it has a cache of its own. A model that takes any kind keeps
        it in a field, makes its cache by it in `init_cache`, and overrides this and `with_cache`."""
        return None

    def with_cache(self, kind: CacheKind) -> Model:
        """Returns this model with caches of another kind.

        Raises:
            ValueError: it has a cache of its own.
        """
        raise ValueError(f"cache: got {kind}, but {type(self).__name__} has a cache of its own")

    @abc.abstractmethod
    def init_cache(self, batch: int, capacity: int, *, params: PyTree = None, inputs: PyTree = None) -> Cache:
        """An empty cache for `batch` rows of `capacity` positions.

        Args:
            params: the weights, where something is computed of `inputs`; None where only shapes are asked for, and
                then a model that needs inputs goes without.
            inputs: what each row is given beside its tokens, a pytree of arrays `[batch, ...]` (what an encoder reads,
                embeddings of a soft prompt, an adapter); None: nothing. What of it is used later lies in the cache
                (`Cache.inputs`), and so goes with its row.

        Raises:
            ValueError: inputs that the model does not take, or none where it needs them; see
            `decodax.core.types.no_inputs`.
        """

    @abc.abstractmethod
    def apply(self, params: PyTree, window: Window, cache: Cache) -> Out:
        """Scores the window. The logits of node `w` predict what follows it."""


class ShowsWeights(Model):
    """A model that shows parts of its weights, for methods and cache policies that compute with them."""

    def outputs(self, params: PyTree, layer: int) -> Array:
        """Returns how the heads of a layer's attention are projected to the residual stream, `f32[H, e, D]`. Some cache
        policies weigh values by it."""
        raise ValueError(f"cache: takes a model that gives its output projections; {type(self).__name__} does not")

    def embeddings(self, params: PyTree, tokens: Array) -> Array:
        """Returns rows of the embedding table of tokens `i32[B, W]`, on the scale of `Window.embeddings`:
        `f[B, W, D]`."""
        raise ValueError(f"embeddings: takes a model that gives those of its tokens; {type(self).__name__} does not")


class LayeredModel(ShowsWeights):
    """A model whose layers can be run one by one, or without some of them: what methods need that draft with the
    target's own layers, or recompute some of its nodes."""

    if TYPE_CHECKING:

        @property
        def config(self) -> Any:
            """Its shape and options: `width`, `heads`, `head_dim`, `layers`."""

    @property
    @abc.abstractmethod
    def depth(self) -> int:
        """Layers `L`."""

    @abc.abstractmethod
    def apply(self, params: PyTree, window: Window, cache: Cache, keep: Any = None) -> Out:
        """As `Model.apply`. `keep` says what of the layers runs (None: all): attention and MLP of each, `L` pairs of
        bools; or as data, whole layers `bool[B or 1, L]` or their halves `bool[B or 1, L, 2]`."""

    @abc.abstractmethod
    def walk(self, params: PyTree, window: Window, cache: Cache) -> tuple[Array, Callable[[int, Array], Array]]:
        """The network layer by layer: the embeddings `f[B, W, D]` of a window, and what maps a layer's index and any
        residual stream `f[B, W, D]` at the window's places to the stream after that layer."""

    @abc.abstractmethod
    def pieces(self, params: PyTree) -> Any:
        """The network in pieces, for callers that decide what of it runs for which nodes."""


class CacheKind(Protocol):
    """A kind of cache of keys and values, compared by value and static under jit."""

    def __call__(self, layers: Sequence[tuple[Any, ...]], batch: int, capacity: int, dtype: jax.typing.DTypeLike,
                 inputs: PyTree = None) -> Cache:
        """An empty cache; `layers` gives the shape of each layer, a `KVLayer` or a tuple of its first numbers
        (key/value heads `G`, width of keys, width of values if it is another one)."""


@dataclasses.dataclass(frozen=True)
class PartialForward:
    """A hint (`Window.hints`): the first layers of a model's forward over the window, run beforehand. The model may
    start from their output or run them again: but for rounding the result is the same.

    Attributes:
        layers: `f[B, W, D]`, the residual stream after each of them; one or more.
        entries: what those layers leave for the cache.
        model: whose they are.
    """

    layers: tuple[Array, ...]
    entries: tuple[PyTree, ...]
    model: Any


jax.tree_util.register_dataclass(PartialForward, ["layers", "entries"], ["model"])


@struct
class Params(Struct):
    """Weights of the model and of the method.

    Attributes:
        target: the model's. draft: what the method brings (`Composed.weights`): those of a draft model, of heads, of a
            judge; None: nothing.
    """

    target: PyTree
    draft: PyTree = None


@struct
class Decision(Struct):
    """What a round holds to be true.

    Attributes:
        tokens: `i32[B, M]` tokens to append; a negative one says that the distribution was broken (`INVALID`,
            `DEAD_END`) and finishes the row with that status.
        count: `i32[B]` how many of them; `clip` may take fewer.
        slots: `i32[B, W]` the position under which the cache keeps each window entry, -1 to drop it. It must depend on
            what the model returned (any function of the drawn tokens does), or XLA:CPU copies the whole cache to
            protect its readers.
        source: `i32[B, M]` the window node whose logits decided each token (log-probabilities and the policy's state
            are taken there).
        algo: the algorithm's own state for the next round.
        drafted: `i32[B]` draft tokens that were offered for verification this round, for the statistics.
        accepted: `i32[B]` draft tokens that were accepted.
        record: log-probabilities that the algorithm noted itself, where tokens are decided long before they are
            emitted (diffusion); None lets the core take them at `source`.
        idle: `bool[B]` rows that sat this round out, for the statistics; None: none did.
        rows: `i32[B]`: row `i` goes on from what row `rows[i]` was (beams, particles); None: each from itself. All else
            here is of the rows after that move: tokens that follow the chosen row's text, slots and sources in its
            window. What a row is by its place does not move: its key, so that two copies of a row draw different
            tokens, its bounds and the constants of its policy.
        status: `i32[B]`, a `Status` with which the method itself ends a row behind these tokens where nothing else
            does; `Status.RUNNING` goes on. None: it ends none.
    """

    tokens: Array
    count: Array
    slots: Array
    source: Array
    algo: PyTree
    drafted: Array | None = None
    accepted: Array | None = None
    record: Record | None = None
    idle: Array | None = None
    rows: Array | None = None
    status: Array | None = None


def outputs(model: Any, params: PyTree, layer: int) -> Array:
    """`ShowsWeights.outputs`.

    Raises:
        ValueError: the model does not give them.
    """
    if not hasattr(model, "outputs"):
        raise ValueError(f"cache: takes a model that gives its output projections; {type(model).__name__} does not")
    return model.outputs(params, layer)


def embeddings(model: Any, params: PyTree, tokens: Array) -> Array:
    """`ShowsWeights.embeddings`.

    Raises:
        ValueError: the model does not give them.
    """
    if not isinstance(model, ShowsWeights):
        raise ValueError(f"embeddings: takes a model that gives those of its tokens; {type(model).__name__} does not")
    return model.embeddings(params, tokens)


def no_inputs(model: Model, inputs: PyTree) -> None:
    """Raises ValueError where a model that takes no inputs is given some."""
    if inputs is not None:
        raise ValueError(f"inputs: {type(model).__name__} takes none")


def wrap_cache(model: Model, wrap: Callable[[CacheKind], CacheKind]) -> Model:
    """Returns the model with caches of the kind that `wrap` makes of its own.

    Raises:
        ValueError: it has a cache of its own.
    """
    if (kind := model.cache_kind) is None:
        raise ValueError(f"cache: {type(model).__name__} has a cache of its own, beside which no other kind can be")
    return model.with_cache(wrap(kind))


def fit_cache(model: Model, new: int) -> Model:
    """Returns the model with caches for texts of at most `new` tokens after their prompts (`CacheConfig.fit`); the
    model itself where that changes nothing."""
    kind = model.cache_kind
    if not isinstance(kind, CacheConfig) or (fitted := kind.fit(new)) == kind:
        return model
    return model.with_cache(fitted)


def read_beyond(model: Model, longest: int) -> int:
    """Returns the number of positions that the model's caches have it read after a prompt (`CacheConfig.beyond`)."""
    return kind.beyond(longest) if isinstance(kind := model.cache_kind, CacheConfig) else 0
