"""Staged speculation: the draft is a tree, and the draft model's own decoding is speculative, too ("Accelerating LLM
Inference with Staged Speculative Decoding", Spector and Ré, 2023).

First comes the trunk, the draft model's own continuation of `length` tokens. A forward pass of the draft model
processes the last trunk token together with the guesses of `inner`, in the paper an n-gram model. Guesses that equal
the draft model's own choice are the next tokens of the trunk. The result is the same chain with fewer forward passes.

Every node of the trunk also gives the next most likely tokens, as siblings of the trunk's own. The `branches` most
likely of them, by the product of draft probabilities down to each, are processed in one forward pass, and their
children join the candidates. The `nodes - length` most likely of all candidates are verified beside the trunk. So the
depth of the tree costs few steps of the draft model, and its width costs almost none.

The inner draft may be a model, too. In TriForce (Sun et al., 2024) a small model guesses a token after the trunk, which
the target decodes with a part of its cache (`OwnCache`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.contracts import propose
from decodax.algorithms.speculative.drafter import CHAINS, TREES, Form
from decodax.algorithms.speculative.drafts.model.draft_model import DraftModel
from decodax.algorithms.speculative.drafts.text.ngram import NGram
from decodax.algorithms.speculative.source import Children, Draft, Drawn, Grower, Growth, Source, fitted
from decodax.algorithms.speculative.tree import Proposal
from decodax.algorithms.speculative.trees.layers import at_least
from decodax.common.options import Count, Range, Whole
from decodax.common.registry import ALGORITHMS
from decodax.common.struct import Struct, struct
from decodax.core.cache import Feature
from decodax.core.checks import draft_weights
from decodax.core.state import State
from decodax.core.types import Decision, Out, Params
from decodax.core.window import Window, take


@struct
class Trunk(Struct):
    """The trunk while it grows.

    Attributes:
        tokens: `i32[B, K, R]`, candidates at each depth, the trunk's own first.
        live: `bool[B, K, R]`, False for padding.
        log_p: `f32[B, K, R]`, their log-probabilities.
        slots: `i32[B, K]`, slot of each trunk node in the growth, -1 if it has none; the last node never has one.
        count: `i32[B]`, number of tokens of the trunk so far.
    """

    tokens: Array
    live: Array
    log_p: Array
    slots: Array
    count: Array

    def add(self, c: Children, held: Array) -> Trunk:
        """Returns the trunk extended by the children of a chain's first `1 + held` nodes, where `held` (`i32[B]`) is
        the number of accepted guesses. `c` has the children of all nodes of the chain."""
        at = self.count[:, None] + jnp.arange(c.tokens.shape[1])
        at = jnp.where(at <= (self.count + held)[:, None], at, self.tokens.shape[1])
        put = jax.vmap(lambda x, at, new: x.at[at].set(new, mode="drop"))
        return self.replace(tokens=put(self.tokens, at, c.tokens), live=put(self.live, at, c.live),
                            log_p=put(self.log_p, at, c.log_p),
                            count=jnp.minimum(self.count + 1 + held, self.tokens.shape[1]))


@dataclasses.dataclass(frozen=True)
class Staged(Draft):
    """Drafts a tree along the continuation of one source, the trunk, which is itself decoded with guesses of another
    draft (Spector and Ré, 2023).

    Attributes:
        draft: the source of the trunk: a `DraftModel` or an `OwnCache`.
        inner: the draft that guesses for it: a `Draft` of deterministic chains that depends on the text alone (`NGram`,
            `PromptLookup`), or a `Source`.
        length: number of tokens in the trunk.
        nodes: number of drafts to verify; None: the trunk alone.
        width: number of candidates after a node.
        branches: number of siblings of the trunk that are expanded; 0 for none.
        guesses: number of guesses in each forward pass, if `inner` is a `Source`.

    Raises:
        ValueError: a number out of range; or, before it is traced, an inner draft with a state or with trees, or a
            verifier that needs drafts drawn from q.
    """

    draft: Source
    inner: Draft | Source
    length: int = 7
    nodes: int | None = None
    width: int = 4
    branches: int = 0
    guesses: int = 1

    def __post_init__(self) -> None:
        at_least(length=self.length, width=self.width, branches=self.branches + 1, guesses=self.guesses)
        if self.nodes is not None and self.nodes < self.length:
            raise ValueError(f"nodes: got {self.nodes}, takes at least the length, {self.length}")

    @property
    def spare(self) -> int:
        """Number of drafts that are verified beside the trunk, the main chain of `length` tokens."""
        return min((self.nodes or self.length) - self.length,
                   self.length * (self.width - 1) + self.run * self.width)

    @property
    def run(self) -> int:
        """Number of tree nodes beside the trunk for which the draft model computes children."""
        return min(self.branches, (self.length - 1) * (self.width - 1), (self.nodes or self.length) - self.length)

    @property
    def most(self) -> int:
        """Number of tokens that the inner draft guesses for each forward pass of the draft model, at most `length -
        1`."""
        return min(self.guesses if isinstance(self.inner, Source) else self.inner.length, self.length - 1)

    if not TYPE_CHECKING:       # of class variables

        @property
        def proposes(self) -> frozenset[Form]:
            return frozenset(("trees",)) if self.spare else frozenset()

        @property
        def cache_needs(self) -> frozenset[Feature]:
            guesses = self.inner.cache_needs if isinstance(self.inner, Source) else CHAINS      # others read no cache
            return self.draft.cache_needs | guesses | (TREES if self.spare else CHAINS)

    def init(self, params: Params, s: State) -> Any:
        draft_weights(params.draft, self, what="pair of weights, of the draft model and of the inner draft,")
        model, inner = (params.replace(draft=x) for x in params.draft)
        kept = self.inner.init(inner, s)
        if not isinstance(self.inner, Source) and jax.tree.leaves(kept):
            raise self._stateful
        return self.draft.init(model, s), kept

    @property
    def _stateful(self) -> ValueError:
        return ValueError(f"inner: got {type(self.inner).__name__}, which carries a state from round to round; takes a "
                          "Draft that is made from the text alone, or a Source")

    @property
    def _branching(self) -> ValueError:
        return ValueError(f"inner: got {type(self.inner).__name__}, takes a Draft of deterministic chains")

    def check_fit(self, model: Any, cache: Any) -> None:
        super().check_fit(model, cache)
        if isinstance(self.inner, Draft):
            if self.inner.proposes & {"trees", "probes"}:
                raise self._branching
            if self.inner.remembers:
                raise self._stateful
        self.draft.check_chained()

    def check_drawn(self, drawn: Drawn) -> None:
        if drawn not in ("coupled", "ranked"):
            raise ValueError("verify: Staged drafts with the target's uniforms and knows no q; takes SeedExact")

    def propose(self, params: Params, policy: Any, s: State, state: Any, drawn: Drawn) -> tuple[Proposal, Any]:
        self.check_drawn(drawn)
        model, inner = (params.replace(draft=x) for x in params.draft)
        state, kept = state
        grower = Grower(fitted(self.draft, policy.vocab_size), model, policy, s, drawn)
        guess: Callable[[Trunk], tuple[Array, Array]] = functools.partial(self._guess, inner, policy, s)
        if isinstance(self.inner, Source) and self.most:
            guess, kept = self._guesser(Grower(fitted(self.inner, policy.vocab_size), inner, policy, s, drawn), kept)
        B, K, R = s.batch, self.length, self.width
        wide = 1 + self.most            # nodes of a forward: the last token and its guesses
        g, children = grower.start(state, (K - 1) * wide + self.run, R)
        zero = lambda dtype: jnp.zeros((B, K, R), dtype)
        trunk = Trunk(tokens=zero(jnp.int32), live=zero(bool), log_p=zero(jnp.float32),
                      slots=jnp.full((B, K), -1, jnp.int32), count=jnp.zeros(B, jnp.int32))
        trunk = trunk.add(children, trunk.count)

        def unfinished(carry: tuple[Growth, Trunk]) -> Array:
            return (s.running & (carry[1].count < K)).any()

        def visit(carry: tuple[Growth, Trunk]) -> tuple[Growth, Trunk]:
            g, trunk = carry
            guesses, count = guess(trunk)
            last = trunk.count - 1
            parent = jnp.where(last > 0, take(trunk.slots, jnp.maximum(last - 1, 0)), 0)
            nodes = jnp.concatenate([take(trunk.tokens[:, :, 0], last)[:, None], guesses], 1)
            slots = g.filled + jnp.arange(wide, dtype=jnp.int32)
            g, children = grower.expand(g, nodes, parent[:, None], R, chained=True)
            same = (children.tokens[:, :-1, 0] == guesses) & (jnp.arange(wide - 1) < count[:, None])
            held = jnp.cumprod(same & children.live[:, :-1, 0], 1).sum(1, dtype=jnp.int32)
            held = jnp.where(trunk.count < K, held, -1)     # a trunk that is done stays as it is
            at = last[:, None] + jnp.arange(wide)
            at = jnp.where(jnp.arange(wide) <= held[:, None], at, K)
            placed = jax.vmap(lambda x, at: x.at[at].set(slots, mode="drop"))(trunk.slots, at)
            return g, trunk.replace(slots=placed).add(children, held)

        if K > 1:
            g, trunk = jax.lax.while_loop(unfinished, visit, (g, trunk))
        proposal, state = self._tree(grower, g, trunk)
        return proposal, (state, kept)

    def _guesser(self, grower: Grower, kept: Any) -> tuple[Callable[[Trunk], tuple[Array, Array]], Any]:
        """Returns a function that guesses with an inner source (with the results of `_guess`), and the source's state
        after the round."""
        K, most = self.length, self.most
        began, _ = grower.start(kept, K + most - 1, 1)

        def guess(trunk: Trunk) -> tuple[Array, Array]:
            # the trunk is read again each time, by rows that have got further than others
            g, c = grower.expand(began, trunk.tokens[:, :, 0], jnp.zeros((1, 1), jnp.int32), 1, chained=True)
            token, parent = take(c.tokens[:, :, 0], trunk.count - 1)[:, None], trunk.count[:, None]
            guesses = [token]
            for _ in range(most - 1):
                at = g.filled
                g, c = grower.expand(g, token, parent, 1)
                token, parent = c.tokens[:, :, 0], jnp.broadcast_to(at, parent.shape)
                guesses.append(token)
            return jnp.concatenate(guesses, 1), jnp.full(trunk.count.shape, most)

        # what it ran is forgotten: it reads the accepted tokens at the next round
        return guess, grower.source.place(began.source, jnp.asarray(np.full((1, K + most - 1), -1, np.int32)))

    def _guess(self, params: Params, policy: Any, s: State, trunk: Trunk) -> tuple[Array, Array]:
        """Returns the inner draft's guesses of the tokens after the trunk, `i32[B, most]`, and their number,
        `i32[B]`."""
        if not (most := self.most):
            return jnp.zeros((s.batch, 0), jnp.int32), jnp.zeros(s.batch, jnp.int32)
        place = s.length[:, None] + jnp.arange(self.length)
        place = jnp.where(jnp.arange(self.length) < trunk.count[:, None], place, s.tokens.shape[1])
        text = jax.vmap(lambda row, at, new: row.at[at].set(new, mode="drop"))(s.tokens, place, trunk.tokens[:, :, 0])
        assert isinstance(self.inner, Draft)
        p, _ = propose(self.inner, params, policy, s.replace(tokens=text, length=s.length + trunk.count), None,
                       "coupled")
        if p.parents is not None or p.log_q is not None or p.probes is not None:
            raise self._branching
        return p.tokens[:, :most], jnp.minimum(p.count, most)

    def _tree(self, grower: Grower, g: Growth, trunk: Trunk) -> tuple[Proposal, Any]:
        """Returns the tree of the trunk and of the most likely drafts beside it, and the source's state."""
        B, K, R = trunk.tokens.shape
        live = jnp.cumprod(trunk.live[:, :, 0], 1) > 0
        above = jnp.cumsum(jnp.where(live, trunk.log_p[:, :, 0], 0), 1)
        above = jnp.pad(above, ((0, 0), (1, 0)))[:, :-1]                    # of the node over each depth
        up = jnp.pad(live, ((0, 0), (1, 0)), constant_values=True)[:, :-1]
        flat = lambda x: x[:, :, 1:].reshape(B, -1)
        score = flat(jnp.where(trunk.live & up[:, :, None], above[:, :, None] + trunk.log_p, -jnp.inf))
        tokens, parents = flat(trunk.tokens), jnp.repeat(jnp.arange(K, dtype=jnp.int32), R - 1)[None]
        parents = jnp.broadcast_to(parents, tokens.shape)
        ran = jnp.zeros((B, 0), jnp.int32)
        if self.run:
            best, ran = jax.lax.top_k(jnp.where(parents < K - 1, score, -jnp.inf), self.run)
            ran = ran.astype(jnp.int32)
            depth = take(parents, ran)
            slot = jnp.where(depth > 0, take(trunk.slots, jnp.maximum(depth - 1, 0)), 0)
            g, c = grower.expand(g, take(tokens, ran), jnp.maximum(slot, 0), R)
            more = jnp.where(c.live, best[:, :, None] + jnp.minimum(c.log_p, 0), -jnp.inf).reshape(B, -1)
            # a child's parent is named by its place among the candidates until that has a node
            parents = jnp.concatenate([parents, jnp.repeat(-1 - ran, R, 1)], 1)
            tokens, score = jnp.concatenate([tokens, c.tokens.reshape(B, -1)], 1), jnp.concatenate([score, more], 1)
        best, at = jax.lax.top_k(score, self.spare)         # of equal ones the first, so parents before their children
        at = jnp.sort(jnp.where(best > -jnp.inf, at, score.shape[1]), 1)
        kept, index = at < score.shape[1], jnp.minimum(at, score.shape[1] - 1)
        node = jnp.full((B, score.shape[1] + 1), -1, jnp.int32)
        node = jax.vmap(lambda x, i: x.at[i].set(K + 1 + jnp.arange(self.spare, dtype=jnp.int32)))(node, at)[:, :-1]
        over = take(parents, index)
        over = jnp.where(over < 0, take(node, jnp.maximum(-1 - over, 0)), over)
        chain = jnp.broadcast_to(jnp.arange(K, dtype=jnp.int32), (B, K))
        proposal = Proposal(tokens=jnp.concatenate([trunk.tokens[:, :, 0], take(tokens, index)], 1),
                            live=jnp.concatenate([live, kept], 1),
                            parents=jnp.concatenate([chain, jnp.where(kept, over, 0)], 1) if self.spare else None)
        # the window node of each slot: the trunk's, then the branches'; guesses that failed have none
        room = g.tokens.shape[1] - 1
        nodes = jnp.full((B, 1 + room), -1, jnp.int32)
        put = jax.vmap(lambda x, i, new: x.at[i].set(new, mode="drop"))
        slots = jnp.where(trunk.slots >= 0, trunk.slots, 1 + room)
        nodes = put(nodes, slots, chain + 1)
        if self.run:
            last = jnp.broadcast_to(g.filled - self.run + jnp.arange(self.run), ran.shape)
            nodes = put(nodes, last, take(node, ran))
        return proposal, self.draft.place(g.source, nodes[:, 1:])

    def observe(self, params: Params, s: State, window: Window, out: Out, decision: Decision | None, state: Any) -> Any:
        trunk, kept = state
        model, inner = (params.replace(draft=x) for x in params.draft)
        if isinstance(self.inner, Source):
            kept = self.inner.observe(inner, s, window, out, decision, kept)
        return self.draft.observe(model, s, window, out, decision, trunk), kept


@ALGORITHMS.register("staged", "Accelerating LLM Inference with Staged Speculative Decoding", "Spector, Re 2023",
                     family="speculative-tree", needs="a draft model", guarantee="seed-exact")
def staged(draft: Any, length: Count = 6, nodes: Count = 16, width: Count = 4, branches: Whole = 4, inner: Count = 4,
           order: Annotated[int, Range(2)] = 3) -> Speculative:
    """Drafts a tree along the draft model's continuation, which is itself decoded with drafts from n-grams.

    For draft models whose own steps take a noticeable part of the time.

    Args:
        draft: the draft model.
        length: number of tokens in its continuation.
        nodes: number of drafts in all.
        width: number of candidates after a node.
        branches: number of siblings of the continuation that are expanded; 0 for none.
        inner: largest number of tokens that n-grams draft for the draft model at once.
        order: length of the longest n-gram.
    """
    return Speculative(Staged(DraftModel(draft), NGram(inner, order), length, nodes, width, branches))
