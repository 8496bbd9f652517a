"""The one distribution: a chain of transforms of logits, lifted over windows.

A transform is written for one row and one position, as its paper has it; `Policy` lifts the chain over rows and over
the nodes of a window, so that a penalty, a ban or an automaton is exact at every draft position, along chains and
trees alike. Sampler and verifiers take tokens and probabilities from the same lifted chain.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal, Protocol, cast

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.common.struct import Struct, static, struct
from decodax.core import keys
from decodax.core.checks import array
from decodax.core.keys import Purpose
from decodax.core.types import Out
from decodax.core.window import Window, parents, take
from decodax.pallas_kernels import vocabulary
from decodax.pallas_kernels.vocabulary import by_nodes
from decodax.sampling.draw import checked, draw, first_argmax, winner

PyTree = Any

Reads = Literal["nothing", "bag", "sequence"]
"""What a transform reads of the earlier tokens: see `Transform`."""

Stage = Literal["logits", "probabilities", "last"]
"""Where a transform of the user's stands in the chain: see `Transform`."""

TRUNCATIONS = "k", "p", "min_p"
"""What `decodax.pallas_kernels.vocabulary.draw` does behind the temperature, in its order: see `Transform.truncation`.
"""


@struct
class Context(Struct):
    """What a transform knows of its row at one position. Row level: no batch axis.

    Attributes:
        tokens: `i32[N]` the sequence, prompt first, by position; -1 where no token is known. Along a sequence the
            known ones are those below `length`; on a diffusion canvas they lie on both sides of it.
        length: `i32[]` the index of the token to be chosen.
        prompt_length: `i32[]`.
        key: the row's key, for transforms that toss a coin: `keys.at(ctx.key, ctx.length, Purpose.TRANSFORM)`.
    """

    tokens: Array
    length: Array
    prompt_length: Array
    key: Array


class Transform(Struct):
    """One link of the chain, a struct whose array fields are per-row values: `[B, ...]` in a `Policy`, without `B`
    inside these methods.

    `needs` says what of the past it reads: "nothing", the "bag" of earlier tokens in any order, or the "sequence".
    Samplers that fill positions in any order take the first two and refuse the third. A transform that carries a state
    of its own (an automaton, mirostat's mu) gives a pytree from `init`; most read the context and keep none. A state
    never has a vocabulary-sized leaf.

    `stage` says where `build(transforms=...)` puts it. A class fixes it, or makes it a static field that each instance
    sets, as `Custom` does:

    - "logits": before the temperature, behind the penalties and bans of `build`. Penalties, biases and bans belong
      here, and whatever greedy decoding must obey.
    - "probabilities": behind the temperature and the truncations of `build` (top-k to eta), in front of XTC, dynamic
      temperature and mirostat. Truncations belong here.
    - "last": behind all others.

    Behind the temperature a greedy row has only its largest logit left, and keeps it whatever a transform returns.

    `by_token` says that `advance` goes by the token alone, as that of an automaton does. Such a state is carried along
    what a draft model writes, which then obeys the transform too; drafts are not held to other transforms with a state.
    """

    needs: ClassVar[Reads] = "nothing"
    stage: ClassVar[Stage] = "logits"
    by_token: ClassVar[bool] = False

    def bound(self, tables: tuple[Any, ...]) -> Transform:
        """This transform with what it reads of the policy's `tables`, which rows share."""
        return self

    def truncation(self) -> tuple[str, Array] | None:
        """What of `TRUNCATIONS` this transform is, and its numbers, if that is all that it does. Called on the policy's
        own transforms, with a batch axis."""
        return None

    def init(self, ctx: Context) -> PyTree:
        """State after the prompt `ctx`."""
        return None

    def logits(self, state: PyTree, ctx: Context, logits: Array) -> Array:
        """Maps `f32[V]` to `f32[V]`; -inf removes a token."""
        raise NotImplementedError

    def note(self, state: PyTree, ctx: Context, logits: Array) -> PyTree:
        """The state with what `advance` will want to know of `logits`, those that this transform was shown."""
        return state

    def advance(self, state: PyTree, token: Array, log_prob: Array) -> PyTree:
        """State after `token`, which had `log_prob` under the whole chain's distribution."""
        return state


SCORES = (1e-30, 1e30)
"""The temperatures of scores; beyond, a log-probability over one is no float32."""


@struct
class Temperature(Transform):
    """Divides logits by `temperature` (`f32[B]`); at 0 only the (first) largest remains: greedy.

    Near 0, where quotients are large, the largest logit is subtracted first: see `cooled`. Equal largest ones stay
    equally likely at every temperature above 0.

    >>> Temperature(jnp.float32(0.5)).logits(None, None, jnp.array([1.0, 2.0])).tolist()
    [2.0, 4.0]
    >>> Temperature(jnp.float32(0.0)).logits(None, None, jnp.array([1.0, 2.0])).tolist()
    [-inf, 2.0]
    """

    temperature: Array

    def logits(self, state: PyTree, ctx: Context, logits: Array) -> Array:
        greedy = self.temperature == 0
        # of logits with a NaN that one is taken, so it stays visible
        best = jnp.where(jnp.arange(logits.shape[-1]) == first_argmax(logits), logits, -jnp.inf)
        return jnp.where(greedy, best, vocabulary.cooled(logits, jnp.where(greedy, 1, self.temperature)))


@struct
class WarmTemperature(Temperature):
    """A temperature above 0 in all rows. It is spared the search for the largest logit."""

    def logits(self, state: PyTree, ctx: Context, logits: Array) -> Array:
        return vocabulary.cooled(logits, self.temperature)


@struct
class ScoreTemperature(WarmTemperature):
    """Divides log-probabilities that are scores of texts: nothing is subtracted, so that texts can be compared."""

    def logits(self, state: PyTree, ctx: Context, logits: Array) -> Array:
        return logits / jnp.clip(self.temperature, *SCORES)


class Decoding(Protocol):
    """What a policy reads of a decoding state."""

    tokens: Array
    length: Array
    prompt_length: Array
    key: Array
    policy: PyTree


@struct
class Texts(Struct):
    """The verified text of each row, and the states of the transforms after it.

    Attributes:
        tokens: `i32[B, N]`. length, prompt_length: `i32[B]`. key: `key[B]`.
        states: one for each transform, `[B, ...]` leaves.
    """

    tokens: Array
    length: Array
    prompt_length: Array
    key: Array
    states: PyTree


@struct
class Policy(Struct):
    """A chain of transforms with the ends of a sequence.

    Attributes:
        transforms: applied in order; every array leaf has a leading batch axis.
        eos: `i32[B, E]` tokens that end a row, padded with -1.
        stops: the automaton of stop strings (`decodax.core.stops.StopTable`), shared by all rows, or None; where a
            constraint ends rows that no end of sequence can end, `decodax.constraints.transform.Closing`.
        tables: what transforms read and all rows share; see `Transform.bound`.
        vocab_size: entries of the logits that it is for, if that is known.
    """

    transforms: tuple[Transform, ...]
    eos: Array
    stops: Any = None
    tables: tuple[Any, ...] = ()
    vocab_size: int | None = static(default=None)

    def init(self, tokens: Array, length: Array, prompt_length: Array, key: Array) -> PyTree:
        """Per-row states of the transforms after a prompt: `i32[B, N]`, `i32[B]`, `i32[B]`, `key[B]`."""
        def one(transforms: tuple[Transform, ...], *row: Array) -> PyTree:
            return tuple(t.init(Context(*row)) for t in _bound(transforms, self.tables))

        return jax.vmap(one)(self.transforms, tokens, length, prompt_length, key)

    def over(self, s: Decoding, window: Window, out: Out) -> Distribution:
        """The distribution at each node of a window that the model scored."""
        return self._at(s, window, out.hidden, out.head)

    def over_logits(self, s: Decoding, window: Window, logits: Array) -> Distribution:
        """The distribution at each node of a window whose logits `f32[B, W, V]` are given."""
        return self._at(s, window, logits, _same)

    def _at(self, s: Decoding, window: Window, hidden: Array, head: Callable[[Array], Array]) -> Distribution:
        texts = Texts(s.tokens, s.length, s.prompt_length, s.key, s.policy)
        return Distribution(self, texts, window, hidden, jnp.ones(window.tokens.shape, bool), window.positions + 1,
                            head)

    def on_draft(self, s: Decoding, window: Window, logits: Array, nodes: Array,
                 states: PyTree) -> tuple[Array, Callable[[], Array]]:
        """A draft's own logits `f32[B, W', V]` at window nodes `nodes` (`i32[B, W']`) under the chain.

        Transforms whose states drafts do not carry are left out: what a draft proposes may come from any distribution.
        So are, where they leave nothing, those whose states they do: there the target's text ends.

        Args:
            states: those of `drafted` behind the nodes, `[B, W', ...]` leaves.

        Returns:
            The logits up to the temperature, and what computes those after the whole chain.
        """
        dist = self.over_logits(s, window, logits)
        chain = [(t, here) for t, state, here in zip(self.transforms, s.policy, states, strict=True)
                 if t.by_token or not jax.tree.leaves(state)]
        cut = next((i for i, (t, _) in enumerate(chain) if isinstance(t, Temperature)), len(chain))
        part = lambda links, x: dist._map(tuple(t for t, _ in links), tuple(z for _, z in links), x, nodes)
        raw = part(chain[:cut], logits)
        if jax.tree.leaves(states):
            free = [(t, here) for t, here in chain[:cut] if not t.by_token]
            raw = jnp.where((raw == -jnp.inf).all(-1, keepdims=True), part(free, logits), raw)
        return raw, lambda: part(chain[cut:], raw)

    def drafted(self, states: PyTree) -> PyTree:
        """Of the transforms' states those that drafts carry; None for the others."""
        return tuple(state if t.by_token else None for t, state in zip(self.transforms, states, strict=True))

    def follow(self, states: PyTree, tokens: Array) -> PyTree:
        """States of `drafted`, `[B, w, ...]` leaves, each behind a token of `i32[B, w]`."""
        def row(transforms: tuple[Transform, ...], states: PyTree, tokens: Array) -> PyTree:
            chain = _bound(transforms, self.tables)
            one = lambda states, token: tuple(t.advance(z, token, jnp.zeros(())) if t.by_token else None
                                              for t, z in zip(chain, states, strict=True))
            return jax.vmap(one)(states, tokens)

        return jax.vmap(row)(self.transforms, states, tokens) if jax.tree.leaves(states) else states

    @property
    def own(self) -> Policy:
        """Without what rows share."""
        return self.replace(stops=None, tables=())

    def sharing(self, other: Policy) -> Policy:
        """With what the rows of another policy share."""
        return self.replace(stops=other.stops, tables=other.tables)

    def select(self, rows: Array) -> Policy:
        """The policy whose row `i` is this one's row `rows[i]` (`i32[B']`)."""
        transforms, eos = jax.tree.map(lambda x: x[rows], (self.transforms, self.eos))
        return self.replace(transforms=transforms, eos=eos)

    @property
    def warm(self) -> Policy:
        """The policy with 1 for a temperature of 0, under which greedy rows have probabilities too."""
        return self._heated(WarmTemperature)

    @property
    def scoring(self) -> Policy:
        """As `warm`, for log-probabilities that are added up to scores of texts."""
        return self._heated(ScoreTemperature)

    def _heated(self, kind: type[WarmTemperature]) -> Policy:
        one = lambda t: kind(jnp.where(t.temperature == 0, 1, t.temperature)) if isinstance(t, Temperature) else t
        return self.replace(transforms=tuple(map(one, self.transforms)))

    @property
    def greedy(self) -> Array:
        """`bool[B]`: rows that a temperature of 0 makes greedy."""
        cold = [t.temperature == 0 for t in self.transforms if isinstance(t, Temperature)]
        return jnp.stack(cold).any(0) if cold else jnp.zeros(self.eos.shape[0], bool)


def _same(logits: Array) -> Array:
    return logits


@struct
class Distribution(Struct):
    """What follows each node of one scored window: a policy applied to the model's logits there.

    The context of a node is the row's verified text plus the window nodes it sees, each at its position. Logits are
    computed by the methods that ask for them. In these, `nodes` is `i32[B, W']`, or None for all nodes in order.

    It is a pytree, so it can be handed to an inner `jit` or `cond`. The model's `head` closes over weights, and
    so over the tracers of the trace that made it: do not return a distribution from that trace.

    Attributes:
        policy: the chain of transforms. texts: what is verified.
        hidden: `f[B, W, D]`, from which `head` makes logits `f32[B, W, V]`.
        known: `bool[B, W]` nodes that hold a token (not a mask).
        predicts: `i32[B, W]` the index of the token that each node's logits predict.
        head: static, and compared by identity.
    """

    policy: Policy
    texts: Texts
    window: Window
    hidden: Array
    known: Array
    predicts: Array
    head: Callable[[Array], Array] = static()

    def on_canvas(self, known: Array, predicts: Array) -> Distribution:
        """That of a window which is filled in any order.

        Raises:
            ValueError: a transform needs its past in sequence, which a canvas does not have.
        """
        ordered = [type(t).__name__ for t, state in zip(self.policy.transforms, self.texts.states, strict=True)
                   if t.needs == "sequence" or jax.tree.leaves(state)]
        if ordered:
            raise ValueError(f"{', '.join(ordered)}: reads the text from left to right, and this algorithm fills "
                             "positions in any order; use transforms that need nothing or a bag of tokens")
        return self.replace(known=known, predicts=predicts)

    def first(self, count: int) -> Distribution:
        """That of the first `count` nodes of the window, none of which sees one behind them."""
        return self.replace(window=self.window.part(0, count), hidden=self.hidden[:, :count],
                            known=self.known[:, :count], predicts=self.predicts[:, :count])

    def select(self, rows: Array) -> Distribution:
        """That of rows which go on from rows `rows` (`i32[B]`): see `Decision.rows`. Keys and the policy's constants
        stay with the place."""
        t = self.texts
        texts = jax.tree.map(lambda x: x[rows], t.replace(key=None, prompt_length=None)).replace(
            key=t.key, prompt_length=t.prompt_length)
        return self.replace(texts=texts, window=self.window.select(rows), hidden=self.hidden[rows],
                            known=self.known[rows], predicts=self.predicts[rows])

    @property
    def warm(self) -> Distribution:
        """The same with temperature 1 in place of 0.

        A greedy row is certain of one token: all others have log-probability -inf. `dist.warm.log_probs()` tells how
        likely they are under the rest of the policy, for beams and for rules that go by confidence. Rows that sample
        are unchanged.
        """
        return self.replace(policy=self.policy.warm)

    def logits(self, nodes: Array | None = None) -> Array:
        """The model's own logits `f32[B, W', V]`, before the policy."""
        return self.head(self.hidden if nodes is None else take(self.hidden, nodes))

    def scores(self, log_p: Array) -> Array:
        """The chain's output `f32[B, W, V]` for log-probabilities `f32[B, W, V]` in place of the model's logits, with
        temperature 1 in place of 0: what a token adds to the score of a text."""
        return self.replace(hidden=log_p, head=_same, policy=self.policy.scoring).processed()

    @property
    def stateful(self) -> bool:
        """Whether some transform carries a state from token to token."""
        return bool(jax.tree.leaves(self.texts.states))

    def processed(self, nodes: Array | None = None) -> Array:
        """The chain's output `f32[B, W', V]`: unnormalised, -inf where a token is forbidden."""
        if self.stateful:
            out = self._walk()[1]
            return out if nodes is None else take(out, nodes)
        return self._map(self.policy.transforms, self.texts.states, self.logits(nodes), nodes)

    def stages(self) -> tuple[Array, Array]:
        """`f32[B, W, V]`: the chain's output in front of the temperature, and in the end with 1 for a temperature of 0,
        where no transform has a state. Between the two only truncations forbid a token."""
        chain = self.policy.warm.transforms
        cut = next((i for i, t in enumerate(chain) if isinstance(t, Temperature)), len(chain))
        front = self._map(chain[:cut], self.texts.states[:cut], self.logits(), None)
        return front, self._map(chain[cut:], self.texts.states[cut:], front, None)

    def log_probs(self, nodes: Array | None = None) -> Array:
        """Normalised log-probabilities `f32[B, W', V]`; all -inf where the policy allows nothing."""
        logits = self.processed(nodes)
        dead = (logits == -jnp.inf).all(-1, keepdims=True)
        return jnp.where(dead, -jnp.inf, jax.nn.log_softmax(logits, axis=-1))

    def draw(self, nodes: Array | None = None, purpose: Purpose = Purpose.TOKEN, salt: Array | None = None) -> Array:
        """One keyed token a node: `i32[B, W']`; INVALID where logits hold a NaN, DEAD_END where none is allowed."""
        if self.stateful or not any(isinstance(t, Temperature) for t in self.policy.transforms):
            return draw(self.processed(nodes), self._addresses(nodes, purpose, salt))
        tokens = lambda logits, nodes: self._draw(logits, nodes, purpose, salt)
        hidden = self.hidden if nodes is None else take(self.hidden, nodes)
        fused = self._fused(jax.eval_shape(self.head, hidden)) is not None
        return by_nodes(tokens, self.head, hidden, nodes, once=fused)

    def _draw(self, logits: Array, nodes: Array | None, purpose: Purpose, salt: Array | None) -> Array:
        """`draw` from the model's logits `f32[B, W', V]` at the nodes, where no transform has a state."""
        chain, cold = self.policy.transforms, self.policy.greedy
        cut = next(i for i, t in enumerate(chain) if isinstance(t, Temperature))
        logits = self._map(chain[:cut], self.texts.states[:cut], logits, nodes)

        fused = self._fused(logits)

        def warm() -> Array:
            if fused is not None:
                return checked(*vocabulary.draw(logits, self._addresses(nodes, purpose, salt), **fused))
            # greedy rows are decided by the logits in front of the temperature: nothing behind it can change the choice
            # among one token. Their race is run at temperature 1, for nothing, which costs less than another argmax
            hot = self._map(self.policy.warm.transforms[cut:], self.texts.states[cut:], logits, nodes)
            address = self._addresses(nodes, purpose, salt)
            return draw(hot, address, (jnp.broadcast_to(cold[:, None], address.shape[:2]), logits))

        return lax.cond(cold.all(), lambda: winner(logits), warm)

    def _fused(self, logits: Array | jax.ShapeDtypeStruct) -> dict[str, Any] | None:
        """The arguments of `vocabulary.draw` for logits `f32[B, W, V]` in front of the temperature, if it is to draw
        from them and does all that the chain does."""
        chain = self.policy.transforms
        cut = next(i for i, t in enumerate(chain) if isinstance(t, Temperature))
        behind = [t.truncation() for t in chain[cut + 1:]]
        known = [part for part in behind if part is not None]
        places = [TRUNCATIONS.index(name) for name, _ in known]
        if len(known) < len(behind) or places != sorted(set(places)) or vocabulary.choose(logits) == "xla":
            return None
        return {"temperature": cast(Temperature, chain[cut]).temperature, **dict(known)}

    def _addresses(self, nodes: Array | None, purpose: Purpose, salt: Array | None) -> Array:
        predicts = self.predicts if nodes is None else take(self.predicts, nodes)
        return keys.addresses(self.texts.key, predicts, purpose, salt)

    def advance(self, node: Array, token: Array) -> PyTree:
        """The transforms' states after `token` (`i32[B]`), decided at `node` (`i32[B]`): the next round's start."""
        if not self.stateful:
            return self.texts.states
        states, logits = self._walk()
        state = jax.tree.map(lambda x: take(x, node), states)
        log_prob = jnp.take_along_axis(jax.nn.log_softmax(take(logits, node)), jnp.maximum(token, 0)[:, None], 1)[:, 0]
        move = lambda transforms, *row: _advance(_bound(transforms, self.policy.tables), *row)
        return jax.vmap(move)(self.policy.transforms, state, token, log_prob)

    def _contexts(self, nodes: Array | None, transforms: tuple[Transform, ...]) -> Context:
        """Contexts `[B, W', ...]` of the nodes; without tokens where no transform reads any."""
        if nodes is None:
            nodes = jnp.broadcast_to(jnp.arange(self.window.width, dtype=jnp.int32), self.window.tokens.shape)
        reads = any(t.needs != "nothing" for t in transforms)
        width = self.texts.tokens.shape[1]

        def row(tokens: Array, length: Array, prompt_length: Array, key: Array, seen: Array, placed: Array,
                written: Array, predicts: Array) -> Context:
            verified = jnp.where(jnp.arange(width) < length, tokens, -1)

            def node(seen: Array, predicts: Array) -> Context:
                if not reads:
                    return Context(jnp.zeros(0, jnp.int32), predicts, prompt_length, key)
                # what a node does not see is written beyond the end, that is, dropped
                history = verified.at[jnp.where(seen, placed, width)].set(written, mode="drop")
                return Context(history, predicts, prompt_length, key)

            return jax.vmap(node)(seen, predicts)

        s, w = self.texts, self.window
        seen = take(jnp.broadcast_to(w.visible(), (*w.tokens.shape, w.width)), nodes) & self.known[:, None, :]
        return jax.vmap(row)(s.tokens, s.length, s.prompt_length, s.key, seen, w.positions, w.tokens,
                             take(self.predicts, nodes))

    def _map(self, transforms: tuple[Transform, ...], states: PyTree, logits: Array, nodes: Array | None) -> Array:
        """The chain at each node by itself, with states `[B, W', ...]` there, if some transforms have any."""
        def row(transforms: tuple[Transform, ...], states: PyTree, contexts: Context, logits: Array) -> Array:
            chain = _bound(transforms, self.policy.tables)
            return jax.vmap(lambda states, ctx, x: _chain(chain, states, ctx, x)[1])(states, contexts, logits)

        if not transforms:
            return logits
        return jax.vmap(row)(transforms, states, self._contexts(nodes, transforms), logits)

    def _walk(self) -> tuple[PyTree, Array]:
        """The chain from node to node: states `[B, W, ...]` after each node, processed logits `f32[B, W, V]`.

        A node's parent stands before it in the window. Node states start from the parent's, advanced by the node's
        token; the root's is the row's own.
        """
        def row(transforms: tuple[Transform, ...], start: PyTree, contexts: Context, logits: Array, tokens: Array,
                parent: Array) -> tuple[PyTree, Array]:
            transforms = _bound(transforms, self.policy.tables)

            def visit(carry: tuple[PyTree, Array], x: tuple[Any, ...]) -> tuple[Any, tuple[PyTree, Array]]:
                states, log_probs = carry       # [W, ...]; log_probs[i, j]: of token j after node i
                node, ctx, raw, up = x
                before = jax.tree.map(lambda s: s[up], states)
                moved = _advance(transforms, before, tokens[node], log_probs[up, node])
                state = jax.tree.map(lambda a, b: jnp.where(up < 0, a, b), start, moved)
                state, out = _chain(transforms, state, ctx, raw)
                states = jax.tree.map(lambda s, new: s.at[node].set(new), states, state)
                return (states, log_probs.at[node].set(jax.nn.log_softmax(out)[tokens])), (state, out)

            width = tokens.shape[0]
            empty = jax.tree.map(lambda x: jnp.broadcast_to(x, (width, *x.shape)), start)
            nodes = jnp.arange(width, dtype=jnp.int32)
            return lax.scan(visit, (empty, jnp.zeros((width, width))), (nodes, contexts, logits, parent))[1]

        contexts = self._contexts(None, self.policy.transforms)
        return jax.vmap(row)(self.policy.transforms, self.texts.states, contexts, self.logits(), self.window.tokens,
                             parents(self.window))


def _bound(transforms: tuple[Transform, ...], tables: tuple[Any, ...]) -> tuple[Transform, ...]:
    return tuple(t.bound(tables) for t in transforms)


def _chain(transforms: tuple[Transform, ...], states: PyTree, ctx: Context, logits: Array) -> tuple[PyTree, Array]:
    """The states with what the transforms noted, and what they made of the logits."""
    cold, only, noted = None, logits, []
    for transform, state in zip(transforms, states, strict=True):
        noted.append(transform.note(state, ctx, logits))
        size, logits = logits.shape[0], transform.logits(state, ctx, logits)
        array(f"{type(transform).__name__}.logits", "logits", logits, "f[V]", {"V": size})
        if isinstance(transform, Temperature) and not isinstance(transform, WarmTemperature):
            zero = transform.temperature == 0
            cold, only = (zero, logits) if cold is None else (cold | zero, jnp.where(cold, only, logits))
    # a greedy row keeps its one token: `draw` takes it without a look at what stands behind the temperature
    return tuple(noted), logits if cold is None else jnp.where(cold, only, logits)


def _advance(transforms: tuple[Transform, ...], states: PyTree, token: Array, log_prob: Array) -> PyTree:
    return tuple(t.advance(s, token, log_prob) for t, s in zip(transforms, states, strict=True))
