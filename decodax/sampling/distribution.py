"""The sampling policy, and the distribution that results from applying it to a model's logits.

A transform is written for one row and one position, as in its paper. `Policy` applies the chain to all rows and all
nodes of a window, so that a penalty, a ban or an automaton is exact at every draft position of chains and trees. The
sampler and the verifiers use the same chain.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.common.struct import Struct, static, struct
from decodax.core import keys
from decodax.core.keys import Purpose
from decodax.core.types import Out
from decodax.core.window import Window, parents, take
from decodax.pallas_kernels import vocabulary
from decodax.pallas_kernels.vocabulary import by_nodes
from decodax.sampling.base import (
    TRUNCATIONS,
    Context,
    PyTree,
    ScoreTemperature,
    Temperature,
    Transform,
    WarmTemperature,
)
from decodax.sampling.draw import checked, draw, winner
from decodax.sampling.lift import Texts, advance_chain, apply_chain, bound_all, contexts, walk


class Decoding(Protocol):
    """Protocol of the decoding state that `Policy` reads: the text and its length, the prompt's length and the random
    key of each row, and `policy`, the states of the transforms."""

    tokens: Array
    length: Array
    prompt_length: Array
    key: Array
    policy: PyTree


@struct
class Policy(Struct):
    """A sampling policy: a chain of transforms, and the tokens and strings that end a sequence.

    Attributes:
        transforms: applied in order; every array leaf has a leading batch axis.
        eos: `i32[B, E]`, tokens that end a row, padded with -1.
        stops: the automaton of stop strings (`decodax.core.stops.StopTable`), shared by all rows, or None. For a
            constraint without an end token it is a `decodax.constraints.transform.Closing`, which also ends rows whose
            constrained text is complete.
        tables: arrays that all rows share and transforms use, such as an automaton; see `Transform.bound`.
        vocab_size: number of logits that the policy is for, or None if unknown.
    """

    transforms: tuple[Transform, ...]
    eos: Array
    stops: Any = None
    tables: tuple[Any, ...] = ()
    vocab_size: int | None = static(default=None)

    def init(self, tokens: Array, length: Array, prompt_length: Array, key: Array) -> PyTree:
        """Returns the transforms' states after the prompt, a tuple of pytrees with leaves `[B, ...]`.

        Args:
            tokens: `i32[B, N]`, the text of each row.
            length: `i32[B]`, number of tokens of the text.
            prompt_length: `i32[B]`, number of prompt tokens.
            key: `key[B]`, the rows' random keys.
        """
        def one(transforms: tuple[Transform, ...], *row: Array) -> PyTree:
            return tuple(t.init(Context(*row)) for t in bound_all(transforms, self.tables))

        return jax.vmap(one)(self.transforms, tokens, length, prompt_length, key)

    def over(self, s: Decoding, window: Window, out: Out) -> Distribution:
        """Returns the distribution of the next token at each position of `window`, which the model has scored with the
        output `out`. `s` is the decoding state before the round."""
        return self._at(s, window, out.hidden, out.head)

    def over_logits(self, s: Decoding, window: Window, logits: Array) -> Distribution:
        """Returns the distribution of the next token at each position of `window`, as `over` does, but from `logits`
        (`f32[B, W, V]`) in place of a model's output."""
        return self._at(s, window, logits, _same)

    def _at(self, s: Decoding, window: Window, hidden: Array, head: Callable[[Array], Array]) -> Distribution:
        texts = Texts(s.tokens, s.length, s.prompt_length, s.key, s.policy)
        return Distribution(self, texts, window, hidden, jnp.ones(window.tokens.shape, bool), window.positions + 1,
                            head)

    def on_draft(self, s: Decoding, window: Window, logits: Array, nodes: Array,
                 states: PyTree) -> tuple[Array, Callable[[], Array]]:
        """Applies the chain to the logits of a draft model at nodes of a window.

        Transforms with a state that drafts do not track are skipped, since a draft may propose from any distribution.
        If the tracked ones forbid every token, they are skipped as well, since the target's text ends there.

        Args:
            s: the decoding state.
            window: the window of drafts.
            logits: `f32[B, W', V]`, the draft model's logits.
            nodes: `i32[B, W']`, the window nodes of these logits.
            states: tracked states (see `drafted`) after these nodes, leaves `[B, W', ...]`.

        Returns:
            The logits before the temperature, and a function that computes the logits after the whole chain.
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
        """Returns the states that also advance along draft tokens: those of transforms whose state depends on tokens
        alone (`by_token`), and None in place of each other one."""
        return tuple(state if t.by_token else None for t, state in zip(self.transforms, states, strict=True))

    def follow(self, states: PyTree, tokens: Array) -> PyTree:
        """Returns the states that `drafted` selects after one more draft token each. `states` has leaves `[B, w, ...]`,
        one for each of `w` draft positions, and `tokens` is `i32[B, w]`."""
        def row(transforms: tuple[Transform, ...], states: PyTree, tokens: Array) -> PyTree:
            chain = bound_all(transforms, self.tables)
            one = lambda states, token: tuple(t.advance(z, token, jnp.zeros(())) if t.by_token else None
                                              for t, z in zip(chain, states, strict=True))
            return jax.vmap(one)(states, tokens)

        return jax.vmap(row)(self.transforms, states, tokens) if jax.tree.leaves(states) else states

    @property
    def own(self) -> Policy:
        """This policy without what all rows share (stop strings and tables), so that every leaf has a batch axis."""
        return self.replace(stops=None, tables=())

    def sharing(self, other: Policy) -> Policy:
        """Returns this policy with the shared parts (stop strings and tables) of the policy `other`."""
        return self.replace(stops=other.stops, tables=other.tables)

    def select(self, rows: Array) -> Policy:
        """Returns the policy whose row `i` is row `rows[i]` of this one; `rows` is `i32[R]` for a batch of any size
        `R`."""
        transforms, eos = jax.tree.map(lambda x: x[rows], (self.transforms, self.eos))
        return self.replace(transforms=transforms, eos=eos)

    @property
    def warm(self) -> Policy:
        """The policy with temperature 1 in rows whose temperature is 0, so that greedy rows have probabilities, too."""
        return self._heated(WarmTemperature)

    @property
    def scoring(self) -> Policy:
        """The policy for log-probabilities that are added up to scores of texts: temperature 1 in place of 0, as in
        `warm`, and a temperature that only divides (`ScoreTemperature`)."""
        return self._heated(ScoreTemperature)

    def _heated(self, kind: type[WarmTemperature]) -> Policy:
        one = lambda t: kind(jnp.where(t.temperature == 0, 1, t.temperature)) if isinstance(t, Temperature) else t
        return self.replace(transforms=tuple(map(one, self.transforms)))

    @property
    def greedy(self) -> Array:
        """Rows with temperature 0, `bool[B]`."""
        cold = [t.temperature == 0 for t in self.transforms if isinstance(t, Temperature)]
        return jnp.stack(cold).any(0) if cold else jnp.zeros(self.eos.shape[0], bool)


def _same(logits: Array) -> Array:
    return logits


@struct
class Distribution(Struct):
    """The distribution of the next token after each node of a scored window: a policy applied to the model's logits.

    The context of a node is the row's verified text and the window nodes to which it attends, each at its position.
    Logits are computed only by the methods that need them. In these methods, `nodes` is `i32[B, W']`, or None for all
    nodes in order.

    A distribution is a pytree, so it can be passed to an inner `jit` or `cond`. Its `head` closes over the model's
    weights, so do not return it from the trace (such as a jitted function) that made it.

    Attributes:
        policy: the chain of transforms.
        texts: the verified text.
        window: the scored window.
        hidden: `f[B, W, D]`, from which `head` computes logits `f32[B, W, V]`.
        known: `bool[B, W]`, nodes with a token; False for mask tokens.
        predicts: `i32[B, W]`, the index of the token that each node's logits predict.
        head: static, compared by identity; maps hidden states to logits.
    """

    policy: Policy
    texts: Texts
    window: Window
    hidden: Array
    known: Array
    predicts: Array
    head: Callable[[Array], Array] = static()

    def on_canvas(self, known: Array, predicts: Array) -> Distribution:
        """Returns the distribution of a window whose positions are filled in any order (text diffusion).

        Args:
            known: `bool[B, W]`, nodes with a token; False for mask tokens.
            predicts: `i32[B, W]`, the index of the token that each node's logits predict.

        Raises:
            ValueError: a transform depends on the sequence of earlier tokens, which is not known here.
        """
        ordered = [type(t).__name__ for t, state in zip(self.policy.transforms, self.texts.states, strict=True)
                   if t.needs == "sequence" or jax.tree.leaves(state)]
        if ordered:
            raise ValueError(f"{', '.join(ordered)}: reads the text from left to right, and this algorithm fills "
                             "positions in any order; use transforms that need nothing or a bag of tokens")
        return self.replace(known=known, predicts=predicts)

    def first(self, count: int) -> Distribution:
        """Returns the distribution at the first `count` positions of the window only. None of these may attend to a
        later one."""
        return self.replace(window=self.window.part(0, count), hidden=self.hidden[:, :count],
                            known=self.known[:, :count], predicts=self.predicts[:, :count])

    def select(self, rows: Array) -> Distribution:
        """Returns the distribution whose row `i` continues the text of row `rows[i]` (`i32[B]`); see `Decision.rows`.
        Random keys and the policy's constants stay those of row `i`."""
        t = self.texts
        texts = jax.tree.map(lambda x: x[rows], t.replace(key=None, prompt_length=None)).replace(
            key=t.key, prompt_length=t.prompt_length)
        return self.replace(texts=texts, window=self.window.select(rows), hidden=self.hidden[rows],
                            known=self.known[rows], predicts=self.predicts[rows])

    @property
    def warm(self) -> Distribution:
        """The same distribution, with temperature 1 for rows whose temperature is 0.

        A greedy row gives all tokens but one the log-probability -inf. `dist.warm.log_probs()` gives the
        log-probabilities before that choice, after the rest of the policy (penalties, bans, truncations). Beam search
        and rules that compare confidences use it. Rows with another temperature do not change.
        """
        return self.replace(policy=self.policy.warm)

    def logits(self, nodes: Array | None = None) -> Array:
        """Returns the model's logits before any transform at the window positions `nodes` (`i32[B, n]`), `f32[B, n,
        V]`; at all positions if `nodes` is None."""
        return self.head(self.hidden if nodes is None else take(self.hidden, nodes))

    def scores(self, log_p: Array) -> Array:
        """Returns the amount that each token adds to the score of a text, `f32[B, W, V]`: the chain's output for the
        log-probabilities `log_p` (`f32[B, W, V]`) in place of the model's logits, with the policy `Policy.scoring`."""
        return self.replace(hidden=log_p, head=_same, policy=self.policy.scoring).processed()

    @property
    def stateful(self) -> bool:
        """True if some transform of the policy has a state (an automaton, Mirostat's mu) that changes with each
        token."""
        return bool(jax.tree.leaves(self.texts.states))

    def processed(self, nodes: Array | None = None) -> Array:
        """Returns the logits after all transforms at the window positions `nodes` (`i32[B, n]`; None: all), `f32[B, n,
        V]`: unnormalised, -inf for forbidden tokens."""
        if self.stateful:
            out = self._walk()[1]
            return out if nodes is None else take(out, nodes)
        return self._map(self.policy.transforms, self.texts.states, self.logits(nodes), nodes)

    def stages(self) -> tuple[Array, Array]:
        """Returns the chain's output before the temperature and at its end, both `f32[B, W, V]`.

        The second one has temperature 1 in place of 0. Tokens forbidden in the second one only were removed by
        truncations. No transform may have a state.
        """
        chain = self.policy.warm.transforms
        cut = next((i for i, t in enumerate(chain) if isinstance(t, Temperature)), len(chain))
        front = self._map(chain[:cut], self.texts.states[:cut], self.logits(), None)
        return front, self._map(chain[cut:], self.texts.states[cut:], front, None)

    def log_probs(self, nodes: Array | None = None) -> Array:
        """Returns the log-probabilities after all transforms at the window positions `nodes` (`i32[B, n]`; None: all),
        `f32[B, n, V]`, normalised; all -inf where the policy forbids every token."""
        logits = self.processed(nodes)
        dead = (logits == -jnp.inf).all(-1, keepdims=True)
        return jnp.where(dead, -jnp.inf, jax.nn.log_softmax(logits, axis=-1))

    def draw(self, nodes: Array | None = None, purpose: Purpose = Purpose.TOKEN, salt: Array | None = None) -> Array:
        """Draws one token at each node, `i32[B, W']`. The result is INVALID if logits have a NaN or +inf, and DEAD_END
        if the policy forbids every token.

        Args:
            nodes: `i32[B, W']`, or None for all nodes.
            purpose: purpose of the draw, part of its random key.
            salt: `i32[B]` or None, distinguishes several draws for the same position.
        """
        if self.stateful or not any(isinstance(t, Temperature) for t in self.policy.transforms):
            return draw(self.processed(nodes), self._addresses(nodes, purpose, salt))
        tokens = lambda logits, nodes: self.draw_from(logits, nodes, purpose, salt)
        hidden = self.hidden if nodes is None else take(self.hidden, nodes)
        fused = self._fused(jax.eval_shape(self.head, hidden)) is not None
        return by_nodes(tokens, self.head, hidden, nodes, once=fused)

    def draw_from(self, logits: Array, nodes: Array | None, purpose: Purpose, salt: Array | None) -> Array:
        """Draws as in `draw`, from the model's logits `f32[B, W', V]` at the nodes, if no transform has a state."""
        chain, cold = self.policy.transforms, self.policy.greedy
        cut = next(i for i, t in enumerate(chain) if isinstance(t, Temperature))
        logits = self._map(chain[:cut], self.texts.states[:cut], logits, nodes)

        fused = self._fused(logits)

        def warm() -> Array:
            if fused is not None:
                return checked(*vocabulary.draw(logits, self._addresses(nodes, purpose, salt), **fused))
            # Greedy rows are decided by the logits before the temperature, since later transforms keep their token.
            # They run the race at temperature 1 too, and its result is discarded: that costs less than another argmax.
            hot = self._map(self.policy.warm.transforms[cut:], self.texts.states[cut:], logits, nodes)
            address = self._addresses(nodes, purpose, salt)
            return draw(hot, address, (jnp.broadcast_to(cold[:, None], address.shape[:2]), logits))

        return lax.cond(cold.all(), lambda: winner(logits), warm)

    def _fused(self, logits: Array | jax.ShapeDtypeStruct) -> dict[str, Any] | None:
        """Returns the arguments of `vocabulary.draw` if that kernel can replace the temperature and all later
        transforms, otherwise None. `logits` are those before the temperature, `f32[B, W, V]`."""
        chain = self.policy.transforms
        cut = next(i for i, t in enumerate(chain) if isinstance(t, Temperature))
        after = [t.truncation() for t in chain[cut + 1:]]
        known = [part for part in after if part is not None]
        places = [TRUNCATIONS.index(name) for name, _ in known]
        if len(known) < len(after) or places != sorted(set(places)) or vocabulary.choose(logits) == "xla":
            return None
        return {"temperature": cast(Temperature, chain[cut]).temperature, **dict(known)}

    def _addresses(self, nodes: Array | None, purpose: Purpose, salt: Array | None) -> Array:
        predicts = self.predicts if nodes is None else take(self.predicts, nodes)
        return keys.addresses(self.texts.key, predicts, purpose, salt)

    def advance(self, node: Array, token: Array) -> PyTree:
        """Returns the states of all transforms after `token` (`i32[B]`), which was drawn from the distribution at the
        window position `node` (`i32[B]`)."""
        if not self.stateful:
            return self.texts.states
        states, logits = self._walk()
        state = jax.tree.map(lambda x: take(x, node), states)
        log_prob = jnp.take_along_axis(jax.nn.log_softmax(take(logits, node)), jnp.maximum(token, 0)[:, None], 1)[:, 0]
        move = lambda transforms, *row: advance_chain(bound_all(transforms, self.policy.tables), *row)
        return jax.vmap(move)(self.policy.transforms, state, token, log_prob)

    def _contexts(self, nodes: Array | None, transforms: tuple[Transform, ...]) -> Context:
        """Returns the contexts of the nodes, `[B, W', ...]`; without tokens if no transform depends on them."""
        if nodes is None:
            nodes = jnp.broadcast_to(jnp.arange(self.window.width, dtype=jnp.int32), self.window.tokens.shape)
        return contexts(self.texts, self.window, self.known, self.predicts, nodes,
                        any(t.needs != "nothing" for t in transforms))

    def _map(self, transforms: tuple[Transform, ...], states: PyTree, logits: Array, nodes: Array | None) -> Array:
        """Applies transforms at each node independently, with given states `[B, W', ...]`."""
        def row(transforms: tuple[Transform, ...], states: PyTree, contexts: Context, logits: Array) -> Array:
            chain = bound_all(transforms, self.policy.tables)
            return jax.vmap(lambda states, ctx, x: apply_chain(chain, states, ctx, x)[1])(states, contexts, logits)

        if not transforms:
            return logits
        return jax.vmap(row)(transforms, states, self._contexts(nodes, transforms), logits)

    def _walk(self) -> tuple[PyTree, Array]:
        """Applies the chain node by node, parents first: returns states `[B, W, ...]` and processed logits `f32[B, W,
        V]`."""
        row = lambda transforms, *rest: walk(bound_all(transforms, self.policy.tables), *rest)
        contexts = self._contexts(None, self.policy.transforms)
        return jax.vmap(row)(self.policy.transforms, self.texts.states, contexts, self.logits(), self.window.tokens,
                             parents(self.window))
