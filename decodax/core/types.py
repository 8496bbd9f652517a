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
from decodax.core.cache import Cache, Entries, Feature
from decodax.core.composed import Composed
from decodax.core.record import Record
from decodax.core.state import State
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

    def with_cache(self, kind: CacheKind) -> Model:
        """This model with caches of another kind.

        Raises:
            ValueError: it has a cache of its own.
        """
        raise ValueError(f"cache: got {kind}, but {type(self).__name__} has a cache of its own")

    def wrap_cache(self, wrap: Callable[[CacheKind], CacheKind]) -> Model:
        """This model with caches of the kind that `wrap` makes of its own.

        Raises:
            ValueError: as `with_cache`.
        """
        raise ValueError(f"cache: {type(self).__name__} has a cache of its own, which no other kind can stand beside")

    def fit(self, new: int) -> Model:
        """This model with caches for texts with at most `new` tokens behind their prompts (`CacheConfig.fit`)."""
        return self

    def beyond(self, longest: int) -> int:
        """How many positions behind a prompt of so many tokens its caches have it read (`CacheConfig.beyond`)."""
        return 0

    def share(self, prefix: int, more: int) -> tuple[Model, Model] | None:
        """This model with caches whose rows share a beginning (`CacheConfig.share`), and the one with dense caches that
        reads it; None: its caches cannot."""
        return None

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
            ValueError: inputs that the model does not take, or none where it needs them; see `no_inputs`.
        """

    @abc.abstractmethod
    def apply(self, params: PyTree, window: Window, cache: Cache) -> Out:
        """Scores the window. The logits of node `w` predict what follows it."""

    def outputs(self, params: PyTree, layer: int) -> Array:
        """`f32[H, e, D]`: how the heads of a layer's attention are projected to the residual stream. Some cache
        policies weigh values by it."""
        raise ValueError(f"cache: takes a model that gives its output projections; {type(self).__name__} does not")

    def embeddings(self, params: PyTree, tokens: Array) -> Array:
        """`f[B, W, D]`: rows of the embedding table, on the scale of `Window.embeddings`, of tokens `i32[B, W]`."""
        raise ValueError(f"embeddings: takes a model that gives those of its tokens; {type(self).__name__} does not")

    def no_inputs(self, inputs: PyTree) -> None:
        """Raises ValueError where a model that takes no inputs is given some."""
        if inputs is not None:
            raise ValueError(f"inputs: {type(self).__name__} takes none")


class LayeredModel(Model):
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
    """Weights by role.

    Attributes:
        target: the model's. draft: whatever the algorithm's drafts need, or None.
        others: those of further models that an algorithm asks by name (a reward model, a judge, a guide).
    """

    target: PyTree
    draft: PyTree = None
    others: dict[str, PyTree] = dataclasses.field(default_factory=dict)

    def role(self, name: str) -> PyTree:
        """The weights of a role.

        Raises:
            ValueError: there are none; lists the roles that have some.
        """
        found = {"target": self.target, "draft": self.draft, **self.others}
        if found.get(name) is None:
            there = ", ".join(role for role, weights in found.items() if weights is not None)
            raise ValueError(f"params: no weights for {name!r}; there are some for {there}")
        return found[name]


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


class Observer(Protocol):
    """What learns from the prompt while it is prefilled. It is compared by value, and static under jit."""

    def observe(self, s: State, window: Window, out: Out, algo: PyTree) -> PyTree:
        """The algorithm's state after a prefill chunk (`window`), whose hidden states and logits are in `out`.

        `s.policy` and `s.record` are None: prefill does not see the policy.
        """


class Algorithm(Composed, abc.ABC):
    """A decoding method: derive a frozen dataclass from this. It is compared by value, and static under jit.

    Only `emits`, `init`, `propose` and `decide` must be defined; the rest has defaults that suit a method which reads
    the cache, has rounds of one shape, and no weights but those of the drafts that it holds (`Composed`). One around
    another method derives from `decodax.core.around.Around`.

    Numbers that a user may change between calls without a retrace belong in the policy or the state, not here.
    """

    @property
    @abc.abstractmethod
    def emits(self) -> int:
        """`M`, the most tokens that a round can append."""

    @property
    def commits(self) -> int | None:
        """The most entries of a row that a round keeps, where these are fewer than its window has nodes, as of a tree
        whose longest path is accepted. None: any number."""
        return None

    @property
    def name(self) -> str:
        """What errors call it."""
        return type(self).__name__

    @property
    def guarantee(self) -> str:
        """What holds of the output: "seed-exact" (the tokens of plain decoding with the same seed),
        "distribution-exact" (others of the same distribution) or "approximate"."""
        return "approximate"

    @property
    def canvas(self) -> bool:
        """Whether it fills masks, in any order, with a model that was trained for it."""
        return False

    @property
    def caches(self) -> bool:
        """Whether it reads a cache; without one the prompt is not prefilled and the cache has capacity 0."""
        return True

    @property
    def prefills(self) -> bool:
        """Whether the core writes the prompt into the cache before the first round. A method that caches and does this
        by its own rounds says False."""
        return self.caches

    @property
    def cache_needs(self) -> frozenset[Feature]:
        """What it asks of the cache beyond chains that grow at the end. With "rewrites" it writes entries of tokens
        that are not emitted yet; else the core holds back what has not been emitted. By default what its parts ask
        for."""
        return frozenset().union(*(part.cache_needs for part in self.parts))

    @property
    def roles(self) -> dict[str, PyTree]:
        """Weights of further models that it was made with, for `Params.others`."""
        return {}

    @property
    def samples(self) -> int | None:
        """Rows of one prompt that it works on together, side by side (beams, particles); None: rows know nothing of one
        another. `generate` then makes so many rows of each prompt, after `init`."""
        return None

    @property
    def answers(self) -> int | None:
        """How many of those rows, the first ones, are the answers to a prompt; None: all."""
        return None

    def answering(self, count: int) -> Algorithm:
        """This method with so many answers to a prompt, if it works on rows together.

        Raises:
            ValueError: it cannot.
        """
        if count != (self.answers or self.samples):
            raise ValueError(f"num_samples: got {count}, {self.name} works on {self.samples} rows a prompt")
        return self

    def outcome(self, s: State) -> State:
        """The state whose rows are what has been found, behind the last round or where somebody stops earlier: of a
        method that keeps finished texts beside its rows. A row that is still running has not been ended."""
        return s

    def findings(self, s: State) -> dict[str, Array]:
        """What it has found of each row beside the tokens (scores, weights): arrays `[B, ...]` for
        `Result.findings`."""
        return {}

    def most_rounds(self, budget: int, rows: int) -> int:
        """More rounds than a batch of `rows` can take for `budget` new tokens a row."""
        # each round of a running row makes progress, at least one position in `emits` of a canvas
        return 2 * (budget + self.emits) + 8

    @property
    def variants(self) -> tuple[Algorithm, ...]:
        """Of a method whose rounds have several shapes (a draft length that adapts, a refresh now and then): one for
        each, on the same state. Only `emits`, `caches`, `init`, `choose` and `observer` of the method itself are then
        used. Empty: its rounds are of one shape."""
        return ()

    def choose(self, params: Params, policy: Any, s: State) -> Array:
        """Which of the `variants` runs the next round, for the whole batch: `i32[]`."""
        raise NotImplementedError(f"{type(self).__name__} has variants and no `choose`")

    @property
    def observer(self) -> Observer | None:
        """What learns from the prompt while it is prefilled; None: nothing does. Prefill is compiled once for each
        observer and model, so methods with equal observers share it."""
        return None

    def guide(self, model: Model, params: Params, policy: Any, s: State, scale: Any) -> tuple[Model, State] | None:
        """The model and a prefilled state under classifier-free guidance of `scale` by a rule of the method's own; None
        if it has none, and the usual one holds."""
        return None

    @abc.abstractmethod
    def init(self, params: Params, s: State) -> PyTree:
        """The algorithm's state for the prompts; every leaf with an explicit dtype and a leading batch axis. The
        samples of a prompt are made of it later."""

    @abc.abstractmethod
    def propose(self, params: Params, policy: Any, s: State) -> tuple[Window, PyTree]:
        """The window to score next, and what `decide` gets as `algo`."""

    @abc.abstractmethod
    def decide(self, params: Params, dist: Any, s: State, window: Window, out: Out, algo: PyTree) -> Decision:
        """What of it is true. `dist` is the policy at each node of the window: a `decodax.sampling.Distribution`.
        Weights of a further model (a judge, a reward model) are `params.role(name)`."""
