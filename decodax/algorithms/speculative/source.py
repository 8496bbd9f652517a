"""The interfaces of drafting. `Draft` proposes complete chains or trees; `Source` gives the distribution of the token
after any node of a tree, `Shape` decides which nodes are expanded, and `Grown` combines the two into a `Draft`. So each
tree rule is written once, for draft models, skipped layers and tables."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.algorithms.speculative.contracts import answered
from decodax.algorithms.speculative.drafter import CHAINS, AroundSource, Drafter
from decodax.algorithms.speculative.nodes import Answer, Children, Growth, Level
from decodax.algorithms.speculative.tree import Drawn, Probes, Proposal
from decodax.core import keys
from decodax.core.cache import Feature
from decodax.core.keys import Purpose
from decodax.core.state import State
from decodax.core.types import Params
from decodax.core.window import Window, take
from decodax.pallas_kernels.vocabulary import top_k
from decodax.sampling.draw import draw, race, winner


class Draft(Drafter, abc.ABC):
    """Base class of drafters that make complete chains or trees of drafts by themselves, such as by look-up in the
    text. Derive a frozen dataclass, static under jit.

    Attributes:
        length: `K`, largest number of drafts on a path of the tree.
    """

    if TYPE_CHECKING:       # a dataclass would take a property here for the default of its field

        @property
        def length(self) -> int: ...

    @property
    def least_nodes(self) -> int:
        """Smallest number of drafts and probes that a proposal has, padding included."""
        return 1 if "trees" in self.proposes else self.length

    @property
    def remembers(self) -> bool:
        """True if the draft carries a state from round to round: its class defines `init`."""
        return type(self).init is not Drafter.init

    @property
    def form(self) -> Shape | None:
        """The shape of the draft trees, if it is the same in each round and known; otherwise None."""
        return None

    @abc.abstractmethod
    def propose(self, params: Params, policy: Any, s: State, state: Any, drawn: Drawn) -> tuple[Proposal, Any]:
        """Returns the drafts of a round, a `Proposal` of tokens that may follow each row's newest token, and the
        drafter's new state.

        Args:
            params: weights of the target and of the drafter.
            policy: the sampling policy.
            s: the decoding state.
            state: the drafter's state.
            drawn: how the verifier needs sampled drafts to be drawn, see `Drawn`; a deterministic draft may ignore it.
        """


class Source(Drafter, abc.ABC):
    """A drafter that gives the distribution of the next token at any node of a draft tree: derive a frozen dataclass
    from this, static under jit.

    A `Shape` grows the tree. `observe` gets the state that the last `extend` (then `place`) returned.

    Attributes:
        knows_depth: True if the state is a `DepthState`, which `SparseTrees` takes.
    """

    cache_needs: ClassVar[frozenset[Feature]] = CHAINS      # the shape may need more
    knows_depth: ClassVar[bool] = False

    @property
    def shape(self) -> Shape | None:
        """The shape of the draft tree that is used if the user gives none; None: a chain."""
        return None

    @property
    def longest(self) -> int | None:
        """Largest number of drafts on a path of the tree that the source can make; None: no limit."""
        return None

    def check_chained(self) -> None:
        """Raises ValueError if `extend` takes no level of several nodes that form a chain (`Level.chained`)."""

    @abc.abstractmethod
    def start(self, params: Params, s: State, state: Any, room: int) -> tuple[Any, Answer]:
        """Begins a draft tree at each row's newest token. Returns the source's state, with space for `room` nodes, and
        its prediction after the newest token: an `Answer` whose logits are `f32[B, 1, V]`."""

    @abc.abstractmethod
    def extend(self, params: Params, s: State, state: Any, level: Level) -> tuple[Any, Answer]:
        """Adds the `w` nodes of `level` to the draft tree. Returns the source's state with them, and its predictions
        after each of them: an `Answer` whose logits are `f32[B, w, V]`."""

    def place(self, state: Any, slots: Array) -> Any:
        """Returns the state with the places of the expanded nodes in the target's window. `slots` is `i32[B or 1,
        room]`, the window node of each expanded node, -1 for nodes that are not in it; a NumPy array if the topology is
        fixed."""
        return state

    def begin(self, params: Params, s: State, state: Any, proposal: Proposal, slots: Array) -> Any:
        """Returns what drafting has already computed of the target's forward pass over the newest token and the drafts
        (for sources that run the target's own first layers), or None.

        Args:
            params: weights of the target and of the source.
            s: the decoding state.
            state: the source's state.
            proposal: the drafts.
            slots: `i32[B or 1, room]`, the window index of each node that `extend` was called with, -1 if it is not
                there.
        """
        return None

    def probes(self, params: Params, s: State, state: Any, proposal: Proposal) -> Probes | None:
        """Returns additional nodes for the target's window that are scored but never accepted, for sources that predict
        from the target's output at them; None: no such nodes."""
        return None


class SourceAround(AroundSource, Source):
    """Base class of sources that wrap another source, their field `source`, and by default pass every call on to it.
    The state is a struct whose field `source` is the wrapped source's state."""

    @property
    def prefill_observer(self) -> Self | None:
        return None if self.source.prefill_observer is None else self

    @property
    def longest(self) -> int | None:
        return self.source.longest

    def extend(self, params: Params, s: State, state: Any, level: Level) -> tuple[Any, Answer]:
        source, answer = self.source.extend(params, s, state.source, level)
        return state.replace(source=source), answer

    def place(self, state: Any, slots: Array) -> Any:
        return state.replace(source=self.source.place(state.source, slots))

    def probes(self, params: Params, s: State, state: Any, proposal: Proposal) -> Probes | None:
        return self.source.probes(params, s, state.source, proposal)


PLACES, RANKS = 1 << 16, 1 << 8
"""Largest number of slots in a tree, and of children of a node, in the addresses of a shape's draws."""


@dataclasses.dataclass(frozen=True)
class Grower:
    """Grows a tree for a `Shape`, in one round and inside one trace, with the arguments of `Draft.propose`.

    Attributes:
        drawn: how children are drawn, see `Drawn`. For sampled drafts, a shape may use earlier draws to decide whether
            *another* child is drawn, but not a child's own probability to decide whether it is kept: kept children
            would not be draws from q. A shape that does so uses `ranked`, whose children no verifier treats as draws.
        stream: number that separates the draws of several sources in one round.
    """

    source: Source
    params: Params
    policy: Any
    s: State
    drawn: Drawn
    stream: int = 0

    @property
    def ranked(self) -> Grower:
        """This grower with children that are chosen by rank instead of drawn, unless they are "coupled" to the target's
        draw. A shape that keeps or drops children by their own probability must use it, since those kept are no
        draws."""
        return self if self.drawn == "coupled" else dataclasses.replace(self, drawn="ranked")

    def start(self, state: Any, room: int, children: int) -> tuple[Growth, Children]:
        """Begins a tree; `Shape.grow` calls it before `expand`. Returns the tree with the newest token alone (slot 0),
        space for `room` nodes that will be expanded, and `children` candidates for the tokens after the newest one,
        which are not in the tree yet. `state` is the source's state."""
        B = self.s.batch
        state, answer = answered(self.source, "start", self.source.start(self.params, self.s, state, room), B, 1)
        tokens = jnp.zeros((B, 1 + room), jnp.int32).at[:, 0].set(self.s.newest)
        sees = jnp.broadcast_to(jnp.eye(1 + room, dtype=bool), (B, 1 + room, 1 + room))
        states = jax.tree.map(lambda x: jnp.repeat(x[:, None], 1 + room, 1), self.policy.drafted(self.s.policy))
        g = Growth(tokens=tokens, sees=sees, filled=jnp.ones((), jnp.int32), source=state, states=states)
        return g, self._children(g, answer, jnp.zeros((B, 1), jnp.int32), children)

    def expand(self, g: Growth, tokens: Array, parents: Array, children: int,
               chained: bool = False) -> tuple[Growth, Children]:
        """Adds nodes (`tokens` is `i32[B, w]`) with the parent slots `parents` (`i32[B or 1, w]`) to the tree. Returns
        the tree, and `children` candidates after each node. With `chained`, each node is the parent of the next and
        only the first entry of `parents` is used; not every source supports this."""
        B, w = tokens.shape
        slots = g.filled + jnp.arange(w, dtype=jnp.int32)
        parents = jnp.broadcast_to(parents, (B, w)).astype(jnp.int32)
        above = jnp.take_along_axis(g.sees, (parents[:, :1] if chained else parents)[:, :, None], 1)
        here = slots[:, None] == jnp.arange(g.tokens.shape[1])
        own = above | (jnp.cumsum(here, 0) > 0 if chained else here)
        if chained:
            parents = jnp.concatenate([parents[:, :1], jnp.broadcast_to(slots[:-1], (B, w - 1))], 1)
        level = Level(tokens=tokens, positions=self.s.length[:, None] - 2 + own.sum(-1, dtype=jnp.int32),
                      parents=parents, sees=jnp.broadcast_to(above, own.shape)[:, :, 1:], at=g.filled - 1,
                      chained=chained)
        state, answer = answered(self.source, "extend", self.source.extend(self.params, self.s, g.source, level), B, w)
        put = lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, g.filled, 1)
        states = jax.tree.map(put, g.states, self._followed(g, tokens, parents, chained))
        g = Growth(tokens=put(g.tokens, tokens), sees=put(g.sees, own), filled=g.filled + w, source=state,
                   states=states)
        return g, self._children(g, answer, jnp.broadcast_to(slots, (B, w)), children)

    def _followed(self, g: Growth, tokens: Array, parents: Array, chained: bool) -> Any:
        """Returns the states of the policy's transforms after the nodes of a level."""
        if not chained or not jax.tree.leaves(g.states):
            return self.policy.follow(_at(g.states, parents), tokens)

        def visit(before: Any, token: Array) -> tuple[Any, Any]:
            behind = self.policy.follow(before, token[:, None])
            return behind, behind

        behind = jax.lax.scan(visit, _at(g.states, parents[:, :1]), tokens.T)[1]
        return jax.tree.map(lambda x: x[:, :, 0].swapaxes(0, 1), behind)

    def uniforms(self, g: Growth, nodes: Array, count: int) -> Array:
        """Returns uniform random numbers in [0, 1) that a shape may use for any purpose: `f32[B, w, count, 2]`, `count`
        pairs at each of the tree slots `nodes` (`i32[B, w]`)."""
        return self.uniforms_for(g, nodes, count, Purpose.ORDER)

    def _children(self, g: Growth, answer: Answer, nodes: Array, count: int) -> Children:
        window = Window(tokens=g.tokens, positions=self._positions(g), mask=g.sees, live=jnp.ones(g.tokens.shape, bool))
        raw, warm = self.policy.on_draft(self.s, window, answer.logits, nodes, _at(g.states, nodes))
        log_all = log_p = jax.nn.log_softmax(raw)
        cold = self.policy.greedy[:, None]
        if self.drawn == "ranked":
            log_q, tokens = None, likeliest(log_p, count)
        elif self.drawn == "coupled":
            predicts = jnp.take_along_axis(window.positions, nodes, 1) + 1

            def couple() -> tuple[Array, Array]:
                # the race that the target will run, by the draft's distribution; after it the tokens that the policy
                # forbids the draft, and may allow the target
                arrival = race(warm(), keys.addresses(self.s.key, predicts, Purpose.TOKEN))
                tokens = likeliest(jnp.where(cold[..., None] | (arrival == -jnp.inf), log_p - 1, arrival), count)
                # by its time so far each token's share of what may come first
                share = jax.nn.log_softmax(-jnp.log(-arrival))
                return tokens, jnp.where(cold[..., None], log_p, share)

            log_q = None
            tokens, log_all = lax.cond(cold.all(), lambda: (likeliest(log_p, count), log_p), couple)
        else:
            # where the policy leaves one token the draft ranks all: any q keeps the verifiers exact
            log_q = jnp.where(cold[..., None], log_p, jax.nn.log_softmax(warm()))
            if self.drawn == "distinct":        # the order of arrival is a draw without replacement
                drawn = likeliest(race(log_q, self._addresses(g, nodes, 1)[:, :, 0]), count)
            else:
                drawn = draw(log_q[:, :, None], self._addresses(g, nodes, count))
            tokens = jnp.where(cold[..., None], likeliest(log_p, count), drawn)
        of = lambda x: jnp.take_along_axis(x, jnp.maximum(tokens, 0), -1)
        # what a transform of the draft forbids may still be drawn first: the target decides
        live = (tokens >= 0) & ((jnp.arange(count) == 0) | jnp.isfinite(of(log_p)))
        return Children(tokens=jnp.maximum(tokens, 0), live=live, log_p=jnp.where(live, of(log_all), -jnp.inf),
                        log_q=log_q, log_all=log_all, log_own=log_p, hidden=answer.hidden, chance=answer.chance)

    def _positions(self, g: Growth) -> Array:
        return self.s.length[:, None] - 2 + g.sees.sum(-1, dtype=jnp.int32)

    def _addresses(self, g: Growth, nodes: Array, count: int) -> Array:
        """Returns the addresses of `count` draws of drafts at tree slots `nodes`, `u32[B, w, count, 2]`."""
        return self._each(g, nodes, count, Purpose.DRAFT, keys.address)

    def uniforms_for(self, g: Growth, nodes: Array, count: int, purpose: Purpose) -> Array:
        return self._each(g, nodes, count, purpose, lambda key: jax.random.uniform(key, (2,), jnp.float32))

    def _each(self, g: Growth, nodes: Array, count: int, purpose: Purpose, make: Callable[[Array], Array]) -> Array:
        """Applies `make` to the keys of `count` draws at tree slots `nodes` (`i32[B, w]`): `[B, w, count, ...]`.

        No two draws for one position share noise: in different rounds the position has different depths, and draws of
        one round differ in the slot, the rank among the children or the stream.
        """
        if count > RANKS:
            raise ValueError(f"children: got {count} draws at a node, takes at most {RANKS}")
        depth = jnp.take_along_axis(g.sees.sum(-1, dtype=jnp.int32), nodes, 1)
        place = (self.stream * PLACES + nodes)[..., None] * RANKS + jnp.arange(count, dtype=jnp.int32)
        one = lambda key, position, depth, place: make(
            jax.random.fold_in(keys.at(key, position, purpose, depth), place))
        each = jax.vmap(jax.vmap(jax.vmap(one, (None, None, None, 0)), (None, 0, 0, 0)))
        return each(self.s.key, jnp.take_along_axis(self._positions(g), nodes, 1) + 1, depth, place)


def _at(states: Any, slots: Array) -> Any:
    """Returns the states at tree slots `slots` (`i32[B, w]`)."""
    return jax.tree.map(lambda x: take(x, slots), states)


def likeliest(log_p: Array, count: int) -> Array:
    """Returns the `count` most likely tokens in order, `i32[..., count]`, from log-probabilities or scores `f32[...,
    V]`; -1 if fewer tokens are possible."""
    if count == 1:
        return jnp.maximum(winner(log_p), -1)[..., None]
    best, tokens = top_k(log_p, min(count, log_p.shape[-1]))
    tokens = jnp.where(best > -jnp.inf, tokens, -1).astype(jnp.int32)
    spare = count - tokens.shape[-1]
    return jnp.pad(tokens, [(0, 0)] * (tokens.ndim - 1) + [(0, spare)], constant_values=-1) if spare else tokens


def fitted(source: Any, size: int | None) -> Any:
    """Returns the drafter for a target with `size` logits: the drafter's own logits are cut or padded to this number
    (`Drafter.for_vocabulary`). If `size` is None, the drafter is returned unchanged."""
    return source if size is None else source.for_vocabulary(size)


class Shape(abc.ABC):
    """Base class of the rules by which a draft tree grows from a source's predictions. Derive a frozen dataclass,
    static under jit.

    Attributes:
        length: largest number of drafts on a path of the tree.
    """

    if TYPE_CHECKING:       # as in `Draft`

        @property
        def length(self) -> int: ...

    @property
    def is_chain(self) -> bool:
        """True if the tree is a chain of fixed length."""
        return False

    @property
    def branches(self) -> bool:
        """True if a node may have several children."""
        return not self.is_chain

    @property
    def least_nodes(self) -> int:
        """Smallest number of drafts that a proposal has, padding included."""
        return 1 if self.branches else self.length

    def check_source(self, source: Source) -> None:     # noqa: B027
        """Raises ValueError if the shape does not grow the trees of `source`."""

    def check_drawn(self, drawn: Drawn) -> None:        # noqa: B027
        """Raises ValueError if the shape cannot draw children as a verifier needs it, see `Drawn`."""

    @abc.abstractmethod
    def grow(self, grower: Grower, state: Any) -> tuple[Proposal, Any, Array]:
        """Grows the draft tree of a round.

        Args:
            grower: calls the source and draws children; see its `start` and `expand`.
            state: the source's state.

        Returns:
            The tree; the source's new state; and the window index of each node that was expanded, `i32[B or 1, room]`,
                -1 for those that are not in the tree.
        """


def distinct(shape: Shape, drawn: Drawn) -> None:
    """Raises ValueError if the verifier needs siblings that are drawn independently ("with replacement"). For
    `check_drawn` of shapes whose siblings are drawn without replacement; `shape` is named in the error."""
    if drawn == "independent":
        raise ValueError(f"verify: {type(shape).__name__} draws siblings without replacement; takes SeedExact or "
                         "MultiRound(replacement=False)")


class SharesBudget(Shape):
    """A shape whose trees share a budget of drafts of the whole batch."""

    @property
    @abc.abstractmethod
    def batch_budget(self) -> int:
        """Largest number of drafts that all rows of a batch have together in a round."""


__all__ = ["PLACES", "RANKS", "Answer", "Children", "Draft", "Drawn", "Grower", "Growth", "Level", "Shape",
           "SharesBudget", "Source", "SourceAround", "distinct", "fitted", "likeliest"]
