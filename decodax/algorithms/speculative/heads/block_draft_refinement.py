"""Refinement of the drafts of heads that predict a block in parallel ("Exploring and Improving Drafts in Blockwise
Parallel Decoding", Kim et al., 2024).

Such heads do not see each other's tokens, so their most likely tokens repeat or contradict each other. The `k` most
likely tokens of each head are a lattice. It is rescored before verification: locally, token by token, by a small
language model (`Rescored`), or globally, by an n-gram model and a search for the best paths (`BlockLattice`).
Verification does not change, so the output does not, either.

The paper tunes the weight of the language model on held-out text. Here both scores are log-probabilities.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafter import TREES, Form
from decodax.algorithms.speculative.drafts.text.history import Corpus, prefix_tree, tail
from decodax.algorithms.speculative.drafts.text.ngram import NGramModel
from decodax.algorithms.speculative.fixed_trees import Chain
from decodax.algorithms.speculative.heads.source import TrainedHead, trained
from decodax.algorithms.speculative.source import Answer, Draft, Drawn, Grower, Level, Source, fitted
from decodax.algorithms.speculative.tree import Proposal
from decodax.algorithms.speculative.verifier import SeedExact, Verifier
from decodax.common.options import Count, NonNegative, Range
from decodax.common.registry import ALGORITHMS
from decodax.common.struct import Struct, short, struct
from decodax.core.cache import Feature
from decodax.core.state import State
from decodax.core.types import Decision, Out, Params
from decodax.core.window import Window, take
from decodax.pallas_kernels.vocabulary import top_k

STATES = 1 << 14
"""Largest number of contexts of the n-gram model at a place of the lattice."""


@struct
class Rescoring(Struct):
    """State of `Rescored`, which rescores the drafts of prediction heads by a language model: the states of both."""

    heads: Any
    model: Any


@dataclasses.dataclass(frozen=True)
class Rescored(Source):
    """The distributions of heads, restricted to their `candidates` most likely tokens and multiplied by a power of a
    language model's probabilities (local rescoring).

    Attributes:
        heads: predict a block in parallel.
        model: the language model, such as a `DraftModel` or an `NGramModel`. It reads the drafts before each node.
        candidates: number of tokens of each head that are rescored.
        weight: the power.

    Raises:
        ValueError: no candidates, or a negative weight.
    """

    __repr__ = short

    heads: Source
    model: Source
    candidates: int = 8
    weight: float = 1.0

    def __post_init__(self) -> None:
        _check(self.candidates, self.weight)

    if not TYPE_CHECKING:       # of a class variable

        @property
        def cache_needs(self) -> frozenset[Feature]:
            return self.heads.cache_needs | self.model.cache_needs

    @property
    def longest(self) -> int | None:
        return self.heads.longest

    def init(self, params: Params, s: State) -> Rescoring:
        one, two = _split(params)
        return Rescoring(self.heads.init(one, s), self.model.init(two, s))

    def start(self, params: Params, s: State, state: Rescoring, room: int) -> tuple[Rescoring, Answer]:
        one, two = _split(params)
        heads, a = self.heads.start(one, s, state.heads, room)
        model, b = self.model.start(two, s, state.model, room)
        return Rescoring(heads, model), self._mixed(a, b)

    def extend(self, params: Params, s: State, state: Rescoring, level: Level) -> tuple[Rescoring, Answer]:
        one, two = _split(params)
        heads, a = self.heads.extend(one, s, state.heads, level)
        model, b = self.model.extend(two, s, state.model, level)
        return Rescoring(heads, model), self._mixed(a, b)

    def place(self, state: Rescoring, slots: Array) -> Rescoring:
        return Rescoring(self.heads.place(state.heads, slots), self.model.place(state.model, slots))

    def observe(self, params: Params, s: State, window: Window, out: Out, decision: Decision | None,
                state: Rescoring) -> Rescoring:
        one, two = _split(params)
        heads = self.heads.observe(one, s, window, out, decision, state.heads)
        return Rescoring(heads, self.model.observe(two, s, window, out, decision, state.model))

    def _mixed(self, a: Answer, b: Answer) -> Answer:
        own, other = jax.nn.log_softmax(a.logits), jax.nn.log_softmax(b.logits)
        least = top_k(own, min(self.candidates, own.shape[-1]))[0][..., -1:]
        # the model may give a token no probability: 0 times -inf is none
        mixed = own + (self.weight * other if self.weight else 0.0)
        return Answer(jnp.where(own >= least, mixed, -jnp.inf), a.hidden, a.chance)


@dataclasses.dataclass(frozen=True)
class BlockLattice(Draft):
    """Drafts the best paths through the lattice of the heads' most likely tokens, merged into a tree (global
    rescoring).

    The score of a path is the sum of the heads' log-probabilities and of `weight` times the n-gram model's. The search
    is exact.

    Attributes:
        heads: predict a block in parallel.
        model: the n-gram model, of order 2 or more. It counts in the text so far, and in its corpus.
        length: number of drafts on a path.
        paths: number of best paths.
        candidates: number of tokens of each head in the lattice.
        weight: weight of the n-gram model.

    Raises:
        ValueError: a number below 1, an order below 2, a negative weight, more drafts than the heads predict, or a
            lattice with too many contexts for the order of the model.
    """

    __repr__ = short

    heads: Source
    model: NGramModel
    length: int
    paths: int = 4
    candidates: int = 8
    weight: float = 1.0
    proposes: ClassVar[frozenset[Form]] = frozenset(("trees",))

    def __post_init__(self) -> None:
        _check(self.candidates, self.weight)
        if isinstance(self.heads, TrainedHead) and not self.heads.head.parallel:
            raise ValueError(f"heads: got a {type(self.heads.head).__name__}, which reads the tokens drafted before; "
                             "takes heads that predict a block in parallel")
        longest = self.heads.longest
        if self.length < 1 or (longest is not None and self.length > longest):
            raise ValueError(f"length: got {self.length}, takes 1 to {longest} drafts, as many as there are heads")
        if self.paths < 1:
            raise ValueError(f"paths: got {self.paths}, takes at least 1")
        if self.model.order < 2 or self.candidates ** (self.model.order - 1) > STATES:
            raise ValueError(f"order: got {self.model.order} with {self.candidates} candidates, takes at least 2, and "
                             f"at most {STATES} contexts, candidates ** (order - 1)")

    if not TYPE_CHECKING:       # of a class variable

        @property
        def cache_needs(self) -> frozenset[Feature]:
            return TREES | self.heads.cache_needs

    def init(self, params: Params, s: State) -> Any:
        return self.heads.init(_split(params)[0], s)

    def propose(self, params: Params, policy: Any, s: State, state: Any, drawn: Drawn) -> tuple[Proposal, Any]:
        one, two = _split(params)
        grower = Grower(fitted(self.heads, policy.vocab_size), one, policy, s, drawn).ranked
        g, children = grower.start(state, self.length - 1, self.candidates)
        levels = [children]
        for depth in range(1, self.length):
            # the logits depend on the depth alone, so any token will do
            g, children = grower.expand(g, children.tokens[:, :, 0], jnp.full((1, 1), depth - 1), self.candidates)
            levels.append(children)
        scores = jnp.concatenate([jnp.where(x.live, jnp.maximum(x.log_p, -1e9), -jnp.inf) for x in levels], 1)
        history = self.model.history(two, s)
        found, best = best_paths(jnp.concatenate([x.tokens for x in levels], 1), scores, tail(s, self.model.order - 1),
                                 lambda contexts: self.weight * self.model.logits(history, contexts), self.paths)
        rank = jnp.where(best > -jnp.inf, self.paths - jnp.arange(found.shape[1], dtype=jnp.int32), 0)
        return prefix_tree(found, rank, found.shape[1] * self.length), g.source

    def observe(self, params: Params, s: State, window: Window, out: Out, decision: Decision | None, state: Any) -> Any:
        return self.heads.observe(_split(params)[0], s, window, out, decision, state)


def best_paths(tokens: Array, scores: Array, context: Array, model: Callable[[Array], Array],
               count: int) -> tuple[Array, Array]:
    """Returns the best paths through a lattice, best first: `i32[B, P, K]`, and their scores `f32[B, P]` (-inf: there
    are fewer); `P` is `count`, or the number of all paths.

    States of the search are the last `n` tokens, of which each keeps its `count` best paths (Viterbi).

    Args:
        tokens: `i32[B, K, k]`, the candidates for each place.
        scores: `f32[B, K, k]`, their scores.
        context: `i32[B, n]`, the tokens before the lattice, -1 where there are none.
        model: maps contexts `i32[B, S, n]` to the scores of the next token, `f32[B, S, V]`.
        count: number of paths.
    """
    (B, K, k), n = tokens.shape, context.shape[1]
    contexts, paths = context[:, None], jnp.zeros((B, 1, 1, 0), jnp.int32)          # [B, S, n], [B, S, P, depth]
    total = jnp.zeros((B, 1, 1))
    for depth in range(K):
        here, S = tokens[:, depth], contexts.shape[1]
        added = jnp.take_along_axis(model(contexts), jnp.broadcast_to(here[:, None], (B, S, k)), 2)
        each = total[..., None] + (added + scores[:, depth, None])[:, :, None]      # [B, S, P, k]
        # states that differ only in a token that no longer matters become one
        drop = k if k ** n == S else 1
        kept, P = S // drop, drop * total.shape[2]
        each, before = (jnp.moveaxis(x.reshape(B, drop, kept, *x.shape[2:]), 1, 2).reshape(B, kept, P, x.shape[3])
                        for x in (each, paths))
        total, at = jax.lax.top_k(each.swapaxes(2, 3), min(count, P))               # [B, kept, k, P]
        before = jax.vmap(jax.vmap(lambda x, i: x[i]))(before, at)
        token = jnp.broadcast_to(here[:, None, :, None, None], (*at.shape, 1))
        paths = jnp.concatenate([before, token], -1).reshape(B, kept * k, at.shape[3], depth + 1)
        total = total.reshape(B, kept * k, -1)
        last = jnp.broadcast_to(contexts[:, :kept, None, 1:], (B, kept, k, n - 1))
        contexts = jnp.concatenate([last, token[:, :, :, 0]], -1).reshape(B, kept * k, n)
    flat = total.reshape(B, -1)
    best, at = jax.lax.top_k(flat, min(count, flat.shape[1]))
    return take(paths.reshape(B, -1, K), at), best


def _check(candidates: int, weight: float) -> None:
    if candidates < 1:
        raise ValueError(f"candidates: got {candidates}, takes at least 1")
    if not weight >= 0:
        raise ValueError(f"weight: got {weight}, takes 0 or more")


def _split(params: Params) -> tuple[Params, Params]:
    """Returns the parameters of the heads and of the language model."""
    one, two = params.draft if params.draft is not None else (None, None)
    return params.replace(draft=one), params.replace(draft=two)


SYSTEMS = ("blockwise-parallel", "medusa")


@ALGORITHMS.register("block-draft-refinement",
                     "Exploring and Improving Drafts in Blockwise Parallel Decoding",
                     "Kim et al. 2024", family="blockwise-parallel", needs="a trained drafter",
                     drafters=SYSTEMS, guarantee="seed-exact")
def block_draft_refinement(lm: Any, draft: Any = None, rescore: Source | None = None, length: Count | None = None,
                           paths: Count = 4, candidates: Count = 8, weight: NonNegative = 0.5,
                           order: Annotated[int, Range(2)] = 3, corpus: Corpus = (),
                           verify: Verifier | None = None) -> Speculative:
    """Drafts with heads that predict a block in parallel, and rescores their drafts by a language model.

    By default an n-gram model of the text so far chooses the best paths through the heads' most likely tokens, which
    are verified together. With `rescore`, a small model chooses the tokens of one chain one after the other.

    Args:
        lm: the target.
        draft: a drafter of the systems `blockwise-parallel` or `medusa`, from `decodax.load_drafter`; None: the one
            shipped for the target, if any.
        rescore: the model of the local rescoring, such as `dx.drafts.DraftModel(small)`; None: the n-gram model.
        length: number of drafts on a path; None: one for each head.
        paths: number of paths of the n-gram model that are verified.
        candidates: number of tokens of each head that are rescored.
        weight: weight of the model's log-probabilities; those of the heads have 1.
        order: length of the longest n-gram.
        corpus: documents of token ids that are counted beside the text.
        verify: the rule that accepts drafts; None: seed-exact.
    """
    heads: TrainedHead = trained(lm, draft, *SYSTEMS)
    longest = heads.longest or 1
    drafts = min(length or longest, longest)
    rule = verify or SeedExact()
    if rescore is not None:
        return Speculative(Rescored(heads, rescore, candidates, weight), rule, Chain(drafts))
    model = NGramModel(lm.vocab_size, order, corpus=corpus)
    return Speculative(BlockLattice(heads, model, drafts, paths, candidates, weight), rule)
