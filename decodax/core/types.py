"""Contracts of the round: a model, its output, a decision and the weights.

Letters: B batch, N token buffer, S cache slots, W window, M largest number of tokens of a round, D model width, V
vocabulary.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
from jax import Array

from decodax.common.struct import Struct, struct
from decodax.core.cache import Cache, Entries
from decodax.core.record import Record
from decodax.core.window import Window, take

PyTree = Any

INVALID = -1
"""Stands for a token if the logits have a NaN or +inf."""

DEAD_END = -2
"""Stands for a token if the policy forbids every token."""


@dataclasses.dataclass(frozen=True)
class Out:
    """Output of one model call. It exists inside a trace and never crosses a jit boundary.

    Attributes:
        hidden: `f[B, W, D]`, hidden states after the final norm.
        entries: values for the cache: for each layer a pytree of arrays `[B, W, ...]`.
        head: maps hidden states `f[..., D]` to logits `f32[..., V]`.
        layers: `f[B, W, D]` after each layer, before the final norm; None if the model does not return them. Unused
            ones cost nothing, since the compiler removes them.
        norm: maps an element of `layers` to an input of `head` (the final norm); None without `layers` or such a norm.
        expect: maps probabilities `f[..., V]` to the expected embedding `f[..., D]`; None if the model has no
            self-conditioning.
        streams: `f[B, W, n D]`, the residual streams of a model with hyper-connections after the last layer, before
            they are joined; None for other models.
    """

    hidden: Array
    entries: Entries
    head: Callable[[Array], Array]
    layers: tuple[Array, ...] | None = None
    norm: Callable[[Array], Array] | None = None
    expect: Callable[[Array], Array] | None = None
    streams: Array | None = None

    def normed(self, layer: Array) -> Array:
        """Returns `norm` of an element of `layers`. Raises a ValueError if `norm` is None."""
        if self.norm is None:
            raise ValueError("model: got one whose head cannot read outputs of layers, takes one with a final norm")
        return self.norm(layer)

    @property
    def states(self) -> tuple[Array, ...] | None:
        """Returns `layers`, followed by `streams` if there are some: what drafter heads read (`DraftHead.taps`)."""
        return self.layers if self.streams is None else (*(self.layers or ()), self.streams)

    def rows(self, rows: Array) -> Out:
        """Returns the output for the rows `rows` (`i32[B']`)."""
        return self._each(lambda x: x[rows])

    def first(self, count: int) -> Out:
        """Returns the output for the first `count` nodes."""
        return self._each(lambda x: x[:, :count])

    def _each(self, change: Callable[[Array], Array]) -> Out:
        """Returns the output with all its arrays replaced by `change(array)`."""
        hidden, entries, layers, streams = jax.tree.map(change, (self.hidden, self.entries, self.layers, self.streams))
        return dataclasses.replace(self, hidden=hidden, entries=entries, layers=layers, streams=streams)

    def logits(self, select: Array | None = None) -> Array:
        """Returns the logits at the window nodes `select` (`i32[B, W']`), or at all nodes: `f32[B, W', V]`."""
        return self.head(self.hidden if select is None else take(self.hidden, select))


class Model(abc.ABC):
    """Base class of networks: derive a frozen dataclass from it. It is compared by value and static under jit; the
    weights are arguments.

    `apply` never writes the cache. Each attention layer calls `cache.attend(layer, q, k, v, window, scale=...)` once,
    which returns its output and its entry.
    """

    @property
    def max_positions(self) -> int | None:
        """Number of positions beyond which the output would be silently wrong; None: no limit."""
        return None

    @property
    def trained_positions(self) -> int | None:
        """Number of positions that the model was trained on; None: unknown."""
        return None

    @property
    def cache_kind(self) -> CacheKind | None:
        """Configuration of its caches of keys and values; None if the model has a cache class of its own.

        A model that takes any configuration keeps it in a field, makes its cache by it in `init_cache`, and overrides
        this and `with_cache`.
        """
        return None

    def with_cache(self, kind: CacheKind) -> Model:
        """Returns this model with caches of the configuration `kind`.

        Raises:
            ValueError: the model has a cache class of its own.
        """
        raise ValueError(f"cache: got {kind}, but {type(self).__name__} has a cache of its own")

    @abc.abstractmethod
    def init_cache(self, batch: int, capacity: int, *, params: PyTree = None, inputs: PyTree = None) -> Cache:
        """Returns an empty cache.

        Args:
            batch: number of rows.
            capacity: number of positions of each row.
            params: the weights, if something is computed from `inputs`. None if only shapes are needed; `inputs` may
                then be missing even if the model requires them.
            inputs: inputs of each row beside its tokens, a pytree of arrays `[batch, ...]` (encoder input, embeddings
                of a soft prompt, an adapter); None: nothing. The cache keeps what is needed later (`Cache.inputs`), so
                it moves with its row.

        Raises:
            ValueError: the model does not take such inputs (`no_inputs`), or requires inputs and got none.
        """

    @abc.abstractmethod
    def apply(self, params: PyTree, window: Window, cache: Cache) -> Out:
        """Runs the network on a window. The logits of node `w` predict the token after it."""


class ShowsWeights(Model):
    """A model that gives access to some of its weights, for methods and caches that compute with them."""

    def outputs(self, params: PyTree, layer: int) -> Array:
        """Returns the output projection of a layer's attention, by head: `f32[H, e, D]`. Some eviction policies weight
        values by it."""
        raise _hidden(self, "outputs")

    def embeddings(self, params: PyTree, tokens: Array) -> Array:
        """Returns the embeddings of the tokens `i32[B, W]`, on the scale of `Window.embeddings`: `f[B, W, D]`."""
        raise _hidden(self, "embeddings")

    def logits(self, params: PyTree, hidden: Array) -> Array:
        """Returns the logits `f32[..., V]` of hidden states `f[..., D]` after the final norm."""
        raise _hidden(self, "logits")


class RandomWeights(Model):
    """A model that can make random weights, for training from scratch and to count the parameters of packed weights."""

    @abc.abstractmethod
    def init_params(self, key: Array, dtype: jax.typing.DTypeLike = jnp.float32) -> PyTree:
        """Returns random weights in `dtype`."""


class LayeredConfig(Protocol):
    """The properties that the configuration of a `LayeredModel` has."""

    @property
    def width(self) -> int:
        """Model width `D`."""

    @property
    def heads(self) -> int:
        """Number of query heads."""

    @property
    def head_dim(self) -> int:
        """Width of a head."""

    @property
    def layers(self) -> Sequence[Any]:
        """Options of each layer."""

    @property
    def tied(self) -> bool:
        """True if the output head is the embedding table."""

    @property
    def shared(self) -> bool:
        """True if some layers use the keys and values, or the attention weights, of other layers."""

    @property
    def summing(self) -> tuple[int, ...]:
        """Indices of the layers with linear attention, which have a state in place of keys and values."""


class LayeredModel(ShowsWeights):
    """A model whose layers can be run one by one or left out, for methods that draft with some of the target's layers
    or recompute some nodes."""

    if TYPE_CHECKING:

        @property
        def config(self) -> LayeredConfig:
            """Its shape and options."""

    @property
    @abc.abstractmethod
    def depth(self) -> int:
        """Number of layers `L`."""

    @abc.abstractmethod
    def apply(self, params: PyTree, window: Window, cache: Cache, keep: Any = None) -> Out:
        """Runs the network on a window with some of its layers.

        Args:
            params: the weights.
            window: the tokens.
            cache: the cache, which is not written.
            keep: the parts that run. None: all. Static: `L` pairs of bools, for attention and MLP of each layer. As an
                array: `bool[B or 1, L]` for complete layers, or `bool[B or 1, L, 2]` for attention and MLP.
        """

    @abc.abstractmethod
    def walk(self, params: PyTree, window: Window, cache: Cache) -> tuple[Array, Callable[[int, Array], Array]]:
        """Returns functions to run the network layer by layer: the embeddings of the window, `f[B, W, D]`, and a
        function from a layer's index and a residual stream `f[B, W, D]` to the stream after that layer."""

    @abc.abstractmethod
    def pieces(self, params: PyTree) -> Any:
        """Returns an object with the parts of the network (such as embeddings, attention and MLP of each layer, and
        head) as functions bound to `params`, for callers that run different parts for different nodes."""


class CacheKind(Protocol):
    """The configuration of a cache of keys and values: a callable that is compared by value and static under jit."""

    def __call__(self, layers: Sequence[tuple[Any, ...]], batch: int, capacity: int, dtype: jax.typing.DTypeLike,
                 inputs: PyTree = None) -> Cache:
        """Makes an empty cache.

        Args:
            layers: shape of each layer: a `KVLayer`, or a tuple of its first numbers: key/value heads `G`, width of
                keys, and width of values if it differs.
            batch: number of rows.
            capacity: number of positions of each row.
            dtype: dtype of keys and values.
            inputs: see `Model.init_cache`.
        """


@dataclasses.dataclass(frozen=True)
class PartialForward:
    """A hint (`Window.hints`): the first layers of the forward pass over this window have already run. The model may
    start from their output or run them again; the results differ only by rounding.

    Attributes:
        layers: `f[B, W, D]`, the residual stream after each of these layers; at least one.
        entries: the cache entries of these layers.
        model: the model whose layers they are.
    """

    layers: tuple[Array, ...]
    entries: tuple[PyTree, ...]
    model: Any


jax.tree_util.register_dataclass(PartialForward, ["layers", "entries"], ["model"])


@struct
class CanvasNodes(Struct):
    """A hint (`Window.hints`) for models that read their last predictions on a canvas (self-conditioning).

    Attributes:
        inside: `bool[B, W]`, nodes of the canvas.
        start: `i32[B]`, position of the canvas's first node.
        expected: `f[B, W, D]`, expected embedding under the last prediction at each node; 0 in the first step.
    """

    inside: Array
    start: Array
    expected: Array


@struct
class Params(Struct):
    """Weights of the model and of the decoding method.

    Attributes:
        target: weights of the model.
        draft: weights of the method (`Composed.weights`), such as those of a draft model, of heads or of a judge; None:
            none.
    """

    target: PyTree
    draft: PyTree = None


@struct
class Decision(Struct):
    """The result of a round: the accepted tokens and the entries to commit.

    Attributes:
        tokens: `i32[B, M]`, tokens to append. A negative one (`INVALID`, `DEAD_END`) says that the distribution was
            invalid, and ends the row with that status.
        count: `i32[B]`, number of tokens to append; `clip` may reduce it.
        slots: `i32[B, W]`, the position at which the cache stores the entry of each window node, -1 to drop it. It has
            to depend on the model's output (any function of the drawn tokens does); otherwise XLA:CPU copies the whole
            cache to protect reads of it.
        source: `i32[B, M]`, the window node whose logits each token comes from. Log-probabilities and the policy's
            state are taken there.
        algo: the algorithm's state for the next round.
        drafted: `i32[B]`, number of draft tokens that were verified in this round, for the statistics.
        accepted: `i32[B]`, number of draft tokens that were accepted.
        record: log-probabilities that the algorithm recorded itself, for methods that decide tokens long before they
            are emitted (diffusion). None: the core computes them at `source`.
        idle: `bool[B]`, rows that took no part in this round, for the statistics; None: none.
        rows: `i32[B]`: row `i` continues the text of row `rows[i]` (beams, particles); None: each row continues its
            own. The other fields describe the rows after this move: tokens follow the chosen row's text, slots and
            sources refer to its window. The key, the bounds and the constants of the policy do not move, so two copies
            of a row draw different tokens.
        status: `i32[B]`, a `Status` with which the method itself ends a row after these tokens, unless it ends for
            another reason; `Status.RUNNING` continues it. None: the method ends no row.
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
    """Returns the output projection of a layer's attention by head, see `ShowsWeights.outputs`.

    Raises:
        ValueError: the model does not give access to it.
    """
    return _showing(model, "outputs").outputs(params, layer)


def embeddings(model: Any, params: PyTree, tokens: Array) -> Array:
    """Returns the embeddings of tokens, see `ShowsWeights.embeddings`.

    Raises:
        ValueError: the model does not give access to them.
    """
    return _showing(model, "embeddings").embeddings(params, tokens)


def logits_of(model: Any, params: PyTree, hidden: Array) -> Array:
    """Returns the logits of hidden states, see `ShowsWeights.logits`.

    Raises:
        ValueError: the model does not give access to its output head.
    """
    return _showing(model, "logits").logits(params, hidden)


SHOWN = {"outputs": ("cache", "its output projections"), "embeddings": ("embeddings", "those of its tokens"),
         "logits": ("logits", "its output head")}
"""For each method of `ShowsWeights`, the argument that needs it and what it gives."""


def _hidden(model: Any, method: str) -> ValueError:
    argument, what = SHOWN[method]
    return ValueError(f"{argument}: takes a model that gives {what}; {type(model).__name__} does not")


def _showing(model: Any, method: str) -> ShowsWeights:
    if not isinstance(model, ShowsWeights):
        raise _hidden(model, method)
    return model


def no_inputs(model: Model, inputs: PyTree) -> None:
    """Raises ValueError if `inputs` is not None. For models that take no inputs beside tokens."""
    if inputs is not None:
        raise ValueError(f"inputs: {type(model).__name__} takes none")


def wrap_cache(model: Model, wrap: Callable[[CacheKind], CacheKind]) -> Model:
    """Returns the model with the cache configuration `wrap(kind)`, where `kind` is its present one.

    Raises:
        ValueError: the model has a cache class of its own.
    """
    if (kind := model.cache_kind) is None:
        raise ValueError(f"cache: {type(model).__name__} has a cache of its own, beside which no other kind can be")
    return model.with_cache(wrap(kind))
