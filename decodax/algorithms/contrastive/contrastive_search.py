"""Contrastive search: likely tokens whose hidden states differ from those of the text so far ("A Contrastive Framework
for Neural Text Generation", Su et al., 2022)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from decodax.common.options import Count, Share
from decodax.common.registry import ALGORITHMS
from decodax.common.struct import Struct, struct
from decodax.core.algorithm import LearnsFromPrompt, Observer, Traits
from decodax.core.composed import data
from decodax.core.loaded import Loaded
from decodax.core.state import State
from decodax.core.types import Decision, Out, Params
from decodax.core.window import Window, causal
from decodax.pallas_kernels.vocabulary import top_k
from decodax.sampling.draw import winner


@struct
class Said(Struct):
    """State of contrastive search.

    Attributes:
        history: `f32[B, N, D]`, the normalised hidden state at each position of the text except the newest.
        candidates: `i32[B, k]`, the candidates for the next token; if no token is possible, the first is negative.
        chances: `f32[B, k]`, their probabilities.
        ready: `bool[B]`, False before the first round, when the candidates are not known yet.
    """

    history: Array
    candidates: Array
    chances: Array
    ready: Array


def hidden_width(lm: Loaded) -> int:
    """Returns the width of the model's hidden states."""
    def hidden(params: Any) -> Array:
        window = causal(jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, jnp.int32))
        return lm.model.apply(params, window, lm.model.init_cache(1, 16, params=params)).hidden

    return jax.eval_shape(hidden, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), lm.params)).shape[-1]


@dataclasses.dataclass(frozen=True)
class _DirectionReader(Observer):
    """Stores the normalised hidden states of the prompt."""

    def observe(self, params: Params, s: State, window: Window, out: Out, algo: Any) -> Any:
        at = jnp.where(window.live, window.positions, algo.history.shape[1])
        rows = jnp.arange(s.batch)[:, None]
        return algo.replace(history=algo.history.at[rows, at].set(_direction(out.hidden), mode="drop"))


def _direction(x: Array) -> Array:
    x = x.astype(jnp.float32)
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-30)


@dataclasses.dataclass(frozen=True)
class ContrastiveSearch(LearnsFromPrompt):
    """Takes the token with the largest `(1 - alpha) p - alpha c` among the `k` most likely ones (Su et al., 2022).

    `p` is the token's probability, and `c` the largest cosine between its hidden state and that of an earlier token.
    Nothing is drawn: in rows with a temperature, `p` is the probability at that temperature. Each round scores the
    newest token and the `k` candidates after it, so a token takes one forward pass.

    Attributes:
        width: width of the hidden states.
        alpha: weight of `c`, in [0, 1]. It may change without a retrace.
        k: number of candidates.
    """

    width: int
    alpha: float = data(0.6, bare=0.0)
    k: int = 4

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"penalty_alpha: got {self.alpha!r}, takes a number from 0 to 1")
        if self.k < 1:
            raise ValueError(f"top_k: got {self.k!r}, takes at least 1")

    @property
    def traits(self) -> Traits:
        return Traits(commits=1, needs=frozenset(("trees",)))

    @property
    def prefill_observer(self) -> Observer:
        return _DirectionReader()

    def init(self, params: Params, s: State) -> Said:
        return Said(history=jnp.zeros((*s.tokens.shape, self.width), jnp.float32),
                    candidates=jnp.zeros((s.batch, self.k), jnp.int32),
                    chances=jnp.zeros((s.batch, self.k), jnp.float32), ready=jnp.zeros(s.batch, bool))

    def propose(self, params: Params, policy: Any, s: State) -> tuple[Window, Any]:
        a = s.algo
        tokens = jnp.concatenate([s.newest[:, None], jnp.maximum(a.candidates, 0)], 1)
        depth = jnp.minimum(jnp.arange(self.k + 1, dtype=jnp.int32), 1)
        inside = jnp.eye(self.k + 1, dtype=bool).at[:, 0].set(True)
        live = jnp.broadcast_to(depth == 0, tokens.shape) | a.ready[:, None]
        return Window(tokens=tokens, positions=s.length[:, None] - 1 + depth, mask=inside[None],
                      live=live & s.running[:, None]), a

    def decide(self, params: Params, dist: Any, s: State, window: Window, out: Out, algo: Any) -> Decision:
        states = _direction(out.hidden)
        rows = jnp.arange(s.batch)
        history = algo.history.at[rows, s.length - 1].set(states[:, 0])
        near = jnp.einsum("bkd,bnd->bkn", states[:, 1:], history, preferred_element_type=jnp.float32)
        known = jnp.arange(history.shape[1]) < s.length[:, None]
        nearest = jnp.where(known[:, None], near, -jnp.inf).max(-1)
        score = jnp.where(algo.chances > 0, (1 - params.draft) * algo.chances - params.draft * nearest, -jnp.inf)
        best = jnp.argmax(jnp.where(jnp.isnan(score), jnp.inf, score), -1).astype(jnp.int32)
        token = jnp.take_along_axis(algo.candidates, best[:, None], 1)
        token = jnp.where(algo.candidates[:, :1] < 0, algo.candidates[:, :1], token)

        # the candidates after it, or after the newest token in the first round
        node = jnp.where(algo.ready, best + 1, 0)[:, None]
        following = dist.warm.processed(node)[:, 0]
        chances, candidates = top_k(jax.nn.softmax(following), min(self.k, following.shape[-1]))
        first = winner(following)
        candidates = candidates.astype(jnp.int32).at[:, 0].set(jnp.where(first < 0, first, candidates[:, 0]))
        commits = algo.ready & (token[:, 0] >= 0)
        slots = jnp.where(commits[:, None] & (jnp.arange(self.k + 1) == 0), window.positions, -1)
        return Decision(tokens=token, count=algo.ready.astype(jnp.int32), slots=slots, source=jnp.zeros_like(token),
                        algo=Said(history, candidates, chances, jnp.ones_like(algo.ready)))


@ALGORITHMS.register("contrastive-search", "A Contrastive Framework for Neural Text Generation", "Su et al. 2022",
                     family="search", needs="a model")
def contrastive_search(lm: Any, alpha: Share = 0.6, k: Count = 4) -> ContrastiveSearch:
    """Takes likely tokens whose hidden states differ from those of the text so far.

    Avoids the repetitions of greedy decoding without sampling. The generation argument `penalty_alpha` selects the same
    method.

    Args:
        alpha: weight of the degeneration penalty; 0 is greedy decoding.
        k: number of candidates.
    """
    return ContrastiveSearch(hidden_width(lm), alpha, k)
