"""The contracts of the round: what a model, an algorithm and a policy are to the core, and to nothing else.

Letters: B batch, N token buffer, S cache slots, W window, M most tokens a round can emit, D model width, V vocabulary.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
from jax import Array

from decodax.cache import Cache, Window, WindowKV, take
from decodax.core.record import Record
from decodax.core.state import State
from decodax.struct import Struct, struct

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
        kv: keys and values of the window for each layer, not yet in the cache.
        head: maps hidden states `f[..., D]` to logits `f32[..., V]`.
        layers: `f[B, W, D]` after each layer, before the final norm, from models that show them; what nobody reads
            costs nothing.
        norm: maps those to what `head` takes.
    """

    hidden: Array
    kv: WindowKV
    head: Callable[[Array], Array]
    layers: tuple[Array, ...] | None = None
    norm: Callable[[Array], Array] | None = None

    def rows(self, rows: Array) -> Out:
        """That of rows `rows` (`i32[B']`)."""
        parts = jax.tree.map(lambda x: x[rows], (self.hidden, self.kv, self.layers))
        return dataclasses.replace(self, hidden=parts[0], kv=parts[1], layers=parts[2])

    def logits(self, select: Array | None = None) -> Array:
        """`f32[B, W', V]`: the head's output at window nodes `select` (`i32[B, W']`), or at all of them."""
        return self.head(self.hidden if select is None else take(self.hidden, select))


class Model(Protocol):
    """A decoder as the core sees it: hashable (it is static under jit), pure, its weights handed in.

    `apply` attends to the cache and to the window by `cache.attend(layer, q, k, v, window, scale=...)`, once a layer,
    and returns the window's keys and values; it never writes the cache.
    """

    def init_cache(self, batch: int, capacity: int) -> Cache:
        """An empty cache for `batch` rows of `capacity` slots."""

    def apply(self, params: PyTree, window: Window, cache: Cache) -> Out:
        """Scores the window. The logits of node `w` predict what follows it."""


@struct
class Params(Struct):
    """Weights by role. `draft` is whatever the algorithm's draft source needs (None: nothing)."""

    target: PyTree
    draft: PyTree = None


@struct
class Decision(Struct):
    """What a round holds to be true.

    Attributes:
        tokens: `i32[B, M]` tokens to append; a negative one says that the distribution was broken (`INVALID`,
            `DEAD_END`) and finishes the row with that status.
        count: `i32[B]` how many of them; `clip` may take fewer.
        slots: `i32[B, W]` the cache slot for each window entry, -1 to drop it. It must depend on what the model
            returned (any function of the drawn tokens does), or XLA:CPU copies the whole cache to protect its readers.
        source: `i32[B, M]` the window node whose logits decided each token (log-probabilities and the policy's state
            are taken there).
        algo: the algorithm's own state for the next round.
        drafted: `i32[B]` draft tokens that were offered for verification this round, for the statistics.
        accepted: `i32[B]` draft tokens that were accepted.
        record: log-probabilities that the algorithm noted itself, where tokens are decided long before they are
            emitted (diffusion); None lets the core take them at `source`.
        early: `bool[B, W]` entries that are written though their tokens are not emitted yet, for algorithms that keep
            approximate entries; None: the cache holds what has been emitted, and nothing else.
        idle: `bool[B]` rows that sat this round out, for the statistics; None: none did.
        rows: `i32[B]`: row `i` goes on from what row `rows[i]` was (beams, particles); None: each from itself. All else
            here is of the rows after that move: tokens that follow the chosen row's text, slots and sources in its
            window. What a row is by its place does not move: its key, so that two copies of a row draw different
            tokens, its bounds and the constants of its policy.
    """

    tokens: Array
    count: Array
    slots: Array
    source: Array
    algo: PyTree
    drafted: Array | None = None
    accepted: Array | None = None
    record: Record | None = None
    early: Array | None = None
    idle: Array | None = None
    rows: Array | None = None


class Observer(Protocol):
    """What learns from the prompt while it is prefilled. It is compared by value, and static under jit."""

    def observe(self, s: State, window: Window, out: Out, algo: PyTree) -> PyTree:
        """The algorithm's state after a prefill chunk (`window`), whose hidden states and logits are in `out`.

        `s.policy` and `s.record` are None: prefill does not see the policy.
        """


class Algorithm(abc.ABC):
    """A decoding method: derive a frozen dataclass from this. It is compared by value, and static under jit.

    Only `emits`, `init`, `propose` and `decide` must be defined; the rest has defaults that suit a method which reads
    the cache, has rounds of one shape, and no weights of its own.

    Numbers that a user may change between calls without a retrace belong in the policy or the state, not here.
    """

    @property
    @abc.abstractmethod
    def emits(self) -> int:
        """`M`, the most tokens that a round can append."""

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
    def weights(self) -> PyTree:
        """Weights that it was made with, for `Params.draft`; None without any."""
        return None

    def bare(self) -> Algorithm:
        """This method without those weights, as the compiled programs take it."""
        return self

    def fit(self, budget: int) -> Algorithm:
        """This method for texts of at most `budget` new tokens, where it left a size open."""
        return self

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

    def through(self, model: Model) -> Model:
        """The model as the method runs it: a model that wraps the given one may run its layers in another way, and keep
        more than keys and values in its cache."""
        return model

    def guide(self, model: Model, params: Params, policy: Any, s: State, scale: Any) -> tuple[Model, State] | None:
        """The model and a prefilled state under classifier-free guidance of `scale` by a rule of the method's own; None
        if it has none, and the usual one holds."""
        return None

    @abc.abstractmethod
    def init(self, params: Params, s: State) -> PyTree:
        """The algorithm's state for a prompt; every leaf with an explicit dtype."""

    @abc.abstractmethod
    def propose(self, params: Params, policy: Any, s: State) -> tuple[Window, PyTree]:
        """The window to score next, and what `decide` gets as `algo`."""

    @abc.abstractmethod
    def decide(self, policy: Any, s: State, window: Window, out: Out, algo: PyTree) -> Decision:
        """What of it is true. `policy` is lifted over the window: see `decodax.policy.Lifted`."""
