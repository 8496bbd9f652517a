"""Predictors of acceptance, fitted to a target and a draft, which decide when drafting stops.

DISCO (Mamou et al. 2024) trains a small classifier for this. Samples are continued: chains are drafted and verified,
and each tested draft is an example, accepted or rejected, with the features known when it was drafted. Here the
predictor is a logistic regression on the draft's probability, the entropy of its distribution and its index in the
chain; DISCO's classifier is a two-layer network on similar features. For heads on hidden states see `stoppers`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.algorithms.speculative.adaptive.fit_trees import continued
from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafter import AroundSource
from decodax.algorithms.speculative.source import Draft, Drawn, Grower, Source, fitted
from decodax.algorithms.speculative.tree import Proposal
from decodax.algorithms.speculative.trees.layers import at_least
from decodax.algorithms.speculative.trees.threshold import DraftFeatures, entropy
from decodax.algorithms.speculative.verifier import SeedExact
from decodax.common.struct import Struct, struct
from decodax.core.state import State
from decodax.core.types import Decision, Out, Params
from decodax.core.window import Window


@dataclasses.dataclass(frozen=True)
class Logistic:
    """A `Predictor` by logistic regression: the probability that a draft is accepted is `sigmoid(weights . (1, p, log
    p, H, log(1 + place)))`, with the draft's probability `p`, the entropy `H` of its distribution, and its index
    `place` in the chain.

    >>> float(Logistic((0.0,) * 5)(DraftFeatures(jnp.float32(-1), jnp.float32(0.5), jnp.int32(2))))
    0.5
    """

    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.weights) != 5:
            raise ValueError(f"weights: got {len(self.weights)}, takes 5")

    def __call__(self, draft: DraftFeatures) -> Array:
        x = features(jnp, draft.log_p, draft.entropy, draft.place)
        return jax.nn.sigmoid(sum(w * x for w, x in zip(self.weights, x, strict=True)))


def features(xp: Any, log_p: Any, entropy: Any, position: Any) -> tuple[Any, ...]:
    """Returns the five inputs of the regression, as NumPy (`xp=numpy`) or JAX arrays. Log-probabilities are at least
    -12."""
    log_p = xp.maximum(log_p, -12.0)
    return 1.0, xp.exp(log_p), log_p, entropy, xp.log1p(position * 1.0)


@struct
class AcceptanceExamples(Struct):
    """State of `Watched`.

    Attributes:
        now: `f32[B, K, 2]`, log-probability and entropy of this round's drafts.
        seen: `f32[B, M, K, 2]`, the same for each round.
        accepted: `i32[B, M]`, number of accepted drafts in each round, -1 for no round.
        source: the source's state.
    """

    now: Array
    seen: Array
    accepted: Array
    source: Any


@dataclasses.dataclass(frozen=True)
class Watched(AroundSource, Draft):
    """Drafts chains of `length` from a source, and records features and acceptance of the drafts for up to `rounds`
    rounds."""

    source: Source
    length: int
    rounds: int

    @property
    def reader(self) -> Self | None:
        return None if self.source.reader is None else self

    def init(self, params: Params, s: State) -> AcceptanceExamples:
        seen = jnp.zeros((s.batch, self.rounds, self.length, 2), jnp.float32)
        return AcceptanceExamples(now=seen[:, 0], seen=seen, accepted=jnp.full((s.batch, self.rounds), -1, jnp.int32),
                     source=self.source.init(params, s))

    def propose(self, params: Params, policy: Any, s: State, state: AcceptanceExamples,
                drawn: Drawn) -> tuple[Proposal, AcceptanceExamples]:
        K = self.length
        grower = Grower(fitted(self.source, policy.vocab_size), params, policy, s, drawn)
        g, child = grower.start(state.source, K - 1, 1)
        children = [child]
        for i in range(K - 1):
            g, child = grower.expand(g, child.tokens[:, 0], jnp.full((1, 1), i), 1)
            children.append(child)
        joined = lambda get: jnp.concatenate([get(c) for c in children], 1)
        log_q = None if child.log_q is None else joined(lambda c: c.log_q)
        live = joined(lambda c: c.live[:, :, 0]).astype(jnp.int32).cumprod(1).astype(bool)
        now = jnp.stack([joined(lambda c: c.own[:, :, 0]), joined(lambda c: entropy(c.log_own))], -1)
        source = self.source.place(g.source, jnp.arange(1, K, dtype=jnp.int32)[None])
        return (Proposal(tokens=joined(lambda c: c.tokens[:, :, 0]), live=live, log_q=log_q),
                state.replace(now=now, source=source))

    def observe(self, params: Params, s: State, window: Window, out: Out, decision: Decision | None,
                state: AcceptanceExamples) -> AcceptanceExamples:
        source = self.source.observe(params, s, window, out, decision, state.source)
        if decision is None:
            return state.replace(source=source)
        assert decision.accepted is not None
        at = jnp.arange(s.batch), jnp.where(s.running, s.stats.rounds, self.rounds)
        return state.replace(source=source, seen=state.seen.at[at].set(state.now, mode="drop"),
                             accepted=state.accepted.at[at].set(decision.accepted, mode="drop"))


def fit_predictor(lm: Any, draft: Any, samples: Sequence[Sequence[int]], *, length: int = 8, verify: Any = None,
                  rejected: float = 1.0, max_new_tokens: int = 64, seed: int = 0, **sampling: Any) -> Logistic:
    """Fits a predictor of acceptance to a target and a draft, for shapes that stop by a predictor: `ConfidenceChain`,
    `RiskThreshold`, `Sliced`.

    Args:
        lm: the result of `decodax.load`.
        draft: a `Source`, such as `drafts.DraftModel(small)`.
        samples: token ids of prompts that are typical for later use. They are decoded in one batch.
        length: number of drafts in a round.
        verify: the verifier that you will use; None: `SeedExact`.
        rejected: weight of an example with a rejected draft; accepted ones have weight 1. SpecDec++ trains with 6.
        max_new_tokens: number of tokens to decode for each sample.
        seed: random seed of the decoding.
        sampling: sampling options of `decodax.generate`.

    Raises:
        ValueError: no samples or an empty one, a number out of range, or drafts that were all accepted or all rejected.

        predictor = fit_predictor(lm, drafts.DraftModel(small), samples)
        out = generate(lm, prompts, algorithm=algorithms.make("disco", lm, small, predictor=predictor))
    """
    if not rejected > 0:
        raise ValueError(f"rejected: got {rejected}, takes more than 0")
    x, held = examples(lm, draft, samples, length, verify, max_new_tokens, seed, **sampling)
    if held.all() or not held.any():
        raise ValueError(f"samples: of {held.size} drafts {int(held.sum())} held, takes some that did and some that "
                         "did not")
    return Logistic(tuple(round(float(w), 4) for w in logistic(x, held, np.where(held, 1.0, rejected))))


def examples(lm: Any, draft: Any, samples: Sequence[Sequence[int]], length: int, verify: Any, max_new_tokens: int,
             seed: int = 0, **sampling: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the features `f64[n, 5]` of the drafts that are tested while the samples are continued, and True for
    those that were accepted, `bool[n]`."""
    at_least(length=length)
    alg = Speculative(Watched(draft, length, max_new_tokens), verify or SeedExact())
    noted: AcceptanceExamples = continued(lm, alg, samples, max_new_tokens, seed, **sampling).algo[0]
    seen, accepted = np.asarray(noted.seen, np.float64), np.asarray(noted.accepted)
    place = np.broadcast_to(np.arange(length), seen.shape[:-1])
    tested = (accepted[..., None] >= 0) & (place <= accepted[..., None])
    x = np.stack(np.broadcast_arrays(*features(np, seen[..., 0], seen[..., 1], place)), -1)
    return x[tested], (place < accepted[..., None])[tested]


def logistic(x: np.ndarray, y: np.ndarray, weight: np.ndarray, ridge: float = 1e-2, steps: int = 50) -> np.ndarray:
    """Fits a logistic regression of `y` (`bool[n]`) on `x` (`f64[n, F]`) by Newton's method. Returns its weights,
    `f64[F]`."""
    w = np.zeros(x.shape[1])
    for _ in range(steps):
        p = 1 / (1 + np.exp(-x @ w))
        gradient = x.T @ (weight * (p - y)) + ridge * w
        curvature = (x * (weight * np.maximum(p * (1 - p), 1e-6))[:, None]).T @ x + ridge * np.eye(len(w))
        step = np.linalg.solve(curvature, gradient)
        w = w - step
        if np.abs(step).max() < 1e-8:
            break
    return w


def given_or_fitted(name: str, what: str, fit: Callable[..., Any], given: Any, samples: Any, *of: Any) -> Any:
    """Returns what stops the chains of the entry `name`: its option `what` if given, or the result of `fit` for `of`
    and samples.

    Raises:
        ValueError: both are given, or none.
    """
    if (given is None) == (samples is None):
        raise ValueError(f"{name!r} needs {what}=, from decodax.train.{fit.__name__}, or samples=, prompts as token "
                         "ids to fit one to; takes one of the two")
    return given if samples is None else fit(*of, samples)
