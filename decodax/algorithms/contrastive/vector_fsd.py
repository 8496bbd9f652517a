"""Frustratingly simple decoding with vectors: likely tokens that did not follow similar hidden states before ("A
Frustratingly Simple Decoding Method for Neural Text Generation", Yang et al., 2024)."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jax import Array

from decodax.algorithms.contrastive.contrastive_search import hidden_width
from decodax.common.options import Count, NonNegative, Range, Share, TokenId
from decodax.common.registry import ALGORITHMS
from decodax.core.algorithm import LearnsFromPrompt, Observer, Traits
from decodax.core.composed import data
from decodax.core.state import State
from decodax.core.types import Decision, Out, Params
from decodax.core.window import Window, causal
from decodax.pallas_kernels.vocabulary import top_k
from decodax.sampling.draw import winner


@dataclasses.dataclass(frozen=True)
class _StateReader(Observer):
    """Stores the hidden states of the prompt."""

    def observe(self, params: Params, s: State, window: Window, out: Out, algo: Any) -> Any:
        at = jnp.where(window.live, window.positions, algo.shape[1])
        return algo.at[jnp.arange(s.batch)[:, None], at].set(out.hidden.astype(algo.dtype), mode="drop")


@dataclasses.dataclass(frozen=True)
class VectorFSD(LearnsFromPrompt):
    """Takes the token with the largest `(1 - alpha) p - alpha g` among the `k` most likely ones (Yang et al., 2024).

    `p` is the token's probability. `g` compares the hidden states of the last `n - 1` tokens with those before each
    earlier occurrence of the token: it is the largest cosine, or 0 if that is negative. Nothing is drawn: in rows with
    a temperature, `p` is the probability at that temperature. Hidden states are those after the final norm; the
    authors' code leaves the choice open. The form with counts of n-grams is `FSD` (the argument `fsd_alpha`).

    Attributes:
        width: width of the hidden states.
        alpha: weight of `g`, in [0, 1]. It may change without a retrace.
        k: number of candidates.
        n: the states of the last `n - 1` tokens are compared.
        stop_words: ids of tokens that are penalised less.
        stop_weight: factor of `g` for `stop_words`.
    """

    width: int
    alpha: float = data(0.45, bare=0.0)
    k: int = 3
    n: int = 2
    stop_words: tuple[int, ...] = ()
    stop_weight: float = data(0.0, bare=0.0)

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha: got {self.alpha!r}, takes a number from 0 to 1")
        if self.k < 1 or self.n < 2:
            raise ValueError(f"k and n: got {self.k} and {self.n}, take at least 1 and 2")
        if not self.stop_weight >= 0:
            raise ValueError(f"stop_weight: got {self.stop_weight!r}, takes a number from 0 on")

    @property
    def traits(self) -> Traits:
        return Traits(commits=1)

    @property
    def prefill_observer(self) -> Observer:
        return _StateReader()

    def init(self, params: Params, s: State) -> Array:
        """Returns the hidden state at each position, `f32[B, N, D]`."""
        return jnp.zeros((*s.tokens.shape, self.width), jnp.float32)

    def propose(self, params: Params, policy: Any, s: State) -> tuple[Window, Any]:
        return causal(s.newest[:, None], s.length - 1, s.running[:, None]), s.algo

    def decide(self, params: Params, dist: Any, s: State, window: Window, out: Out, algo: Any) -> Decision:
        alpha, light = params.draft
        states = algo.at[jnp.arange(s.batch), s.length - 1].set(out.hidden[:, 0].astype(algo.dtype))
        following = dist.warm.processed()[:, 0]
        chances, tokens = top_k(jax.nn.softmax(following), min(self.k, following.shape[-1]))
        place = jnp.arange(states.shape[1])
        # of the states that end at each place, and of the last ones
        near = theirs = jnp.zeros(states.shape[:2], states.dtype)
        mine = jnp.zeros((s.batch, 1), states.dtype)
        for j in range(self.n - 1):
            last = jnp.take_along_axis(states, jnp.maximum(s.length - 1 - j, 0)[:, None, None], 1)
            past = jnp.roll(states, j, 1)
            near = near + (past * last).sum(-1)
            mine, theirs = mine + (last * last).sum(-1), theirs + (past * past).sum(-1)
        cosine = near / jnp.maximum(jnp.sqrt(mine * theirs), 1e-30)
        known = (place >= self.n - 2) & (place < s.length[:, None] - 1)
        hit = known[:, None] & (jnp.roll(s.tokens, -1, 1)[:, None] == tokens[..., None])
        penalty = jnp.clip(jnp.where(hit, cosine[:, None], 0).max(-1), 0, 1)
        if self.stop_words:
            penalty = penalty * jnp.where((tokens[..., None] == jnp.asarray(self.stop_words)).any(-1), light, 1)
        score = jnp.where(chances > 0, (1 - alpha) * chances - alpha * penalty, -jnp.inf)
        token = jnp.take_along_axis(tokens, jnp.argmax(score, -1)[:, None], 1).astype(jnp.int32)
        first = winner(following)[:, None]              # negative where nothing can follow
        token = jnp.where(first < 0, first, token)
        return Decision(tokens=token, count=jnp.ones(s.batch, jnp.int32), source=jnp.zeros_like(token), algo=states,
                        slots=jnp.where(token >= 0, window.positions, -1))


@ALGORITHMS.register("vector-fsd", "A Frustratingly Simple Decoding Method for Neural Text Generation",
                     "Yang et al. 2024", family="search", needs="a model")
def vector_fsd(lm: Any, alpha: Share = 0.45, k: Count = 3, n: Annotated[int, Range(2)] = 2,
               stop_words: tuple[TokenId, ...] = (), stop_weight: NonNegative = 0.0) -> VectorFSD:
    """Takes likely tokens that did not follow similar hidden states before.

    Avoids repetitions without sampling, including those in other words. The argument `fsd_alpha` of `generate` selects
    the form with counts of n-grams.

    Args:
        alpha: weight of the penalty; 0 is greedy decoding.
        k: number of candidates.
        n: the states of the last `n - 1` tokens are compared.
        stop_words: ids of tokens that are penalised less, such as punctuation.
        stop_weight: factor of their penalty.
    """
    return VectorFSD(hidden_width(lm), alpha, k, n, tuple(stop_words), stop_weight)
