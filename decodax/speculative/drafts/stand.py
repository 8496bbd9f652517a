"""STAND, stochastic adaptive n-gram drafting (Song et al. 2025): averaged next-token distributions of n-grams.

Where an n-gram table keeps counts of what was drawn, STAND keeps what the target thought: for each n-gram the average
of its next-token distributions, cut to the likeliest tokens. The longest n-gram at the end of a path that was seen
before gives the distribution from which children are drawn: without replacement (Gumbel-top-k's distribution) for
`MultiRound`, one by one for `Rejection`, coupled with the target's own draws for `SeedExact`. q is what they were
drawn from, so the first two keep the target's distribution.

The paper computes its Gumbel noise once and uses it again from step to step. Not here: a draft whose noise has already
decided an earlier token is no draw from q given the text, and the distribution would not be kept. Each draw has noise
of its own, addressed by position, node and rank. What is shared is noise between draft and target, under `SeedExact`:
children come in the order of the race that will pick the target's token.

Here the distributions are kept with the text, one for each place of the prompt and the output, and averaged where an
n-gram is looked up, over its latest `places` occurrences; the paper's table keeps a running average, which it cuts to
the likeliest tokens after each update. The paper shares the table among the rollouts of a problem; here rows do not
depend on each other.

The paper's tree is fitted to data, from a large one; `shape` takes any, and this is how to fit one:

    large = Speculative(Stand(lm.vocab_size), shape=Fixed.balanced(6, 3, 2, 2, 1))
    tree = fit_tree(lm, large, samples, nodes=15, temperature=0.8)
    stand = Speculative(Stand(lm.vocab_size), shape=tree)           # or system("stand", lm, shape=tree)
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.cache import Window, take
from decodax.core.state import State
from decodax.core.types import Decision, Out, Params
from decodax.speculative.drafts.ngram import Paths
from decodax.speculative.drafts.recycling import SMALL_TREE
from decodax.speculative.drafts.text import best_places, known, matched
from decodax.speculative.source import Level, Shape, Stateless
from decodax.struct import Struct, struct


@struct
class Seen(Struct):
    """What the target predicted behind each place of the text.

    Attributes:
        tokens: `i32[B, N, k]`, its likeliest tokens. chances: `f32[B, N, k]`, theirs, 0 where nothing is known.
        paths: contexts of the tree's nodes between `start` and `observe`, else None.
    """

    tokens: Array
    chances: Array
    paths: Paths | None = None


@dataclasses.dataclass(frozen=True)
class Stand(Stateless):
    """A `Source` whose distributions are averages of the target's own after the same tokens.

    Attributes:
        vocab: size of the target's vocabulary.
        order: the longest n-gram that is looked up, of the tokens before the predicted one; the shortest is one token.
        k: tokens kept of each distribution.
        places: occurrences that are averaged.
        shape: how its tree grows if `Speculative` is told nothing else.

    Where nothing is known of a node's last token its distribution is uniform.

    Raises:
        ValueError: one of the numbers below 1, or more tokens kept than there are.
    """

    vocab: int
    order: int = 3
    k: int = 10
    places: int = 16
    shape: Shape = SMALL_TREE

    def __post_init__(self) -> None:
        for name in ("vocab", "order", "k", "places"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, takes at least 1")
        if self.k > self.vocab:
            raise ValueError(f"k: got {self.k}, takes at most {self.vocab}, the vocabulary")

    def init(self, params: Params, s: State) -> Seen:
        shape = (*s.tokens.shape, self.k)
        return Seen(tokens=jnp.zeros(shape, jnp.int32), chances=jnp.zeros(shape, jnp.float32))

    def start(self, params: Params, s: State, state: Any, room: int) -> tuple[Any, Array]:
        paths = Paths.start(s, self.order, room)
        return state.replace(paths=paths), self._logits(s, state, paths.contexts[:, :1])

    def extend(self, params: Params, s: State, state: Any, level: Level) -> tuple[Any, Array]:
        paths, contexts = state.paths.extend(level)
        return state.replace(paths=paths), self._logits(s, state, contexts)

    def observe(self, s: State, window: Window, out: Out, decision: Decision | None, state: Any) -> Any:
        N = s.tokens.shape[1]
        if decision is None:
            nodes, true = None, window.live
        else:
            nodes = decision.source       # the newest token, then the accepted drafts
            true = (jnp.arange(nodes.shape[1]) < decision.count[:, None]) & s.running[:, None]
        at = jnp.where(true, window.positions if nodes is None else take(window.positions, nodes), N)
        chances, tokens = lax.top_k(jax.nn.softmax(out.logits(nodes)), self.k)
        put = jax.vmap(lambda table, at, x: table.at[at].set(x, mode="drop"))
        return Seen(tokens=put(state.tokens, at, tokens.astype(jnp.int32)), chances=put(state.chances, at, chances))

    def _logits(self, s: State, seen: Seen, contexts: Array) -> Array:
        """`f32[B, w, V]` from contexts `i32[B, w, n]`."""
        def node(text: Array, tokens: Array, chances: Array, context: Array) -> Array:
            places, match = best_places(matched(text, context), self.places)
            here = (match == match[0]) & (match > 0)
            total = jnp.zeros(self.vocab).at[tokens[places]].add(jnp.where(here[:, None], chances[places], 0))
            p = total / jnp.maximum(here.sum(), 1)
            return jnp.where((p > 0).any(), jnp.log(p), 0.0)

        return jax.vmap(jax.vmap(node, (None, None, None, 0)))(known(s), seen.tokens, seen.chances, contexts)
