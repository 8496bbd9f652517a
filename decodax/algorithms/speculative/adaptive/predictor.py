"""The predictor of acceptance that is fitted to a target and a draft and decides when drafting stops: the classifier
of DISCO ("Accelerating Speculative Decoding using Dynamic Speculation Length", Mamou et al., 2024), a network with two
layers.

Samples are continued: chains are drafted and verified, and each tested draft is an example, accepted or rejected, with
the features known when it was drafted. The features are the draft's probability, the entropy of its distribution, its
index in the chain, and the ten largest probabilities. The width of the hidden layer is ours. For heads on hidden states
see `stoppers`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.algorithms.speculative.adaptive.fit_lengths import minimized
from decodax.algorithms.speculative.adaptive.fit_trees import continued
from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafter import AroundSource
from decodax.algorithms.speculative.source import Draft, Drawn, Grower, Source, fitted
from decodax.algorithms.speculative.tree import Proposal
from decodax.algorithms.speculative.trees.layers import at_least
from decodax.algorithms.speculative.trees.threshold import TOP, DraftFeatures, entropy, likeliest
from decodax.algorithms.speculative.verifier import SeedExact
from decodax.common.struct import Struct, struct
from decodax.core.state import State
from decodax.core.types import Decision, Out, Params
from decodax.core.window import Window

FEATURES, WIDTH = 3 + TOP, 16
"""Number of inputs of the network, and width of its hidden layer."""


@dataclasses.dataclass(frozen=True)
class DraftClassifier:
    """A `Predictor` by a network with two layers: `sigmoid(second . relu(first x + first_bias) + second_bias)`, with
    the features `x` of a draft.

    >>> float(DraftClassifier(((0.0,),) * FEATURES, (0.0,), (0.0,), 0.0)(DraftFeatures(
    ...     jnp.float32(-1), jnp.float32(0.5), jnp.int32(2), top=jnp.zeros(TOP))))
    0.5

    Attributes:
        first: `FEATURES` rows of `M` weights.
        first_bias: `M` numbers.
        second: `M` weights.
        second_bias: a number.

    Raises:
        ValueError: the weights have other sizes.
    """

    first: tuple[tuple[float, ...], ...]
    first_bias: tuple[float, ...]
    second: tuple[float, ...]
    second_bias: float

    def __post_init__(self) -> None:
        sizes = {len(self.first_bias), len(self.second), *map(len, self.first)}
        if len(self.first) != FEATURES or len(sizes) != 1:
            raise ValueError(f"weights: got {len(self.first)} features and widths {sorted(sizes)}, takes {FEATURES} "
                             "and one width")

    def __call__(self, draft: DraftFeatures) -> Array:
        weights = {"first": jnp.array(self.first), "first_bias": jnp.array(self.first_bias),
                   "second": jnp.array(self.second), "second_bias": self.second_bias}
        return jax.nn.sigmoid(acceptance_logit(weights, features(draft)))


def features(draft: DraftFeatures) -> Array:
    """Returns the inputs of the acceptance classifier for one or more drafts, `f32[..., FEATURES]`: the draft's
    probability, the entropy, the log of one plus its index in the chain, and the largest probabilities."""
    assert draft.top is not None
    place = jnp.broadcast_to(jnp.log1p(draft.place * 1.0), draft.log_p.shape)
    return jnp.concatenate([jnp.stack([jnp.exp(draft.log_p), draft.entropy, place], -1), draft.top], -1)


def acceptance_logit(weights: Any, x: Array) -> Array:
    """Returns the classifier's log-odds that a draft is accepted, `f32[...]`, from its features `x`, `f32[...,
    FEATURES]`."""
    return jax.nn.relu(x @ weights["first"] + weights["first_bias"]) @ weights["second"] + weights["second_bias"]


@struct
class AcceptanceExamples(Struct):
    """State of `Watched`, with `M` rounds of `K` drafts each.

    Attributes:
        now: `f32[B, K, FEATURES]`, features of the current round's drafts.
        seen: `f32[B, M, K, FEATURES]`, features of the drafts of each recorded round.
        accepted: `i32[B, M]`, number of accepted drafts in each round; -1 for rounds that were not recorded.
        source: the source's state.
    """

    now: Array
    seen: Array
    accepted: Array
    source: Any


@dataclasses.dataclass(frozen=True)
class Watched(AroundSource, Draft):
    """Drafts chains of `length` tokens from the source `source`, and records the features of the drafts and how many
    were accepted, for the first `rounds` rounds."""

    source: Source
    length: int
    rounds: int

    @property
    def prefill_observer(self) -> Self | None:
        return None if self.source.prefill_observer is None else self

    def init(self, params: Params, s: State) -> AcceptanceExamples:
        seen = jnp.zeros((s.batch, self.rounds, self.length, FEATURES), jnp.float32)
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
        now = features(DraftFeatures(
            joined(lambda c: c.own[:, :, 0]), joined(lambda c: entropy(c.log_own)), jnp.arange(K, dtype=jnp.int32),
            top=joined(lambda c: likeliest(c.log_own))))
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
                  rejected: float = 1.0, max_new_tokens: int = 64, steps: int = 300, rate: float = 1e-2, seed: int = 0,
                  **sampling: Any) -> DraftClassifier:
    """Trains DISCO's predictor of acceptance for a target and a draft (Mamou et al., 2024), for shapes that stop by a
    predictor: `ConfidenceChain`, `RiskThreshold`, `Sliced`. Needs optax (`decodax[train]`).

    Args:
        lm: the result of `decodax.load`.
        draft: a `Source`, such as `drafts.DraftModel(small)`.
        samples: token ids of prompts that are typical for later use. They are decoded in one batch.
        length: number of drafts in a round.
        verify: the verifier that you will use; None: `SeedExact`.
        rejected: weight of an example with a rejected draft; accepted ones have weight 1. SpecDec++ trains with 6.
        max_new_tokens: number of tokens to decode for each sample.
        steps: number of steps of Adam, each on all examples.
        rate: learning rate.
        seed: random seed of decoding and training.
        sampling: sampling options of `decodax.generate`.

    Raises:
        ValueError: no samples or an empty one, a number out of range, or drafts that were all accepted or all rejected.

        predictor = fit_predictor(lm, drafts.DraftModel(small), samples)
        out = generate(lm, prompts, algorithm=algorithms.make("disco", lm, small, predictor=predictor))
    """
    at_least(steps=steps)
    if not rejected > 0:
        raise ValueError(f"rejected: got {rejected}, takes more than 0")
    x, held = examples(lm, draft, samples, length, verify, max_new_tokens, seed, **sampling)
    if held.all() or not held.any():
        raise ValueError(f"samples: of {held.size} drafts {int(held.sum())} held, takes some that did and some that "
                         "did not")
    mean, scale = x.mean(0), x.std(0) + 1e-3
    inputs, labels = jnp.asarray((x - mean) / scale), jnp.asarray(held)
    weight = jnp.where(labels, 1.0, rejected)

    def loss(weights: Any, step: Array) -> Array:
        logit = acceptance_logit(weights, inputs)
        return -(weight * jax.nn.log_sigmoid(jnp.where(labels, logit, -logit))).sum() / weight.sum()

    one, two = jax.random.split(jax.random.key(seed))
    start = {"first": jax.random.normal(one, (FEATURES, WIDTH)) * (2 / FEATURES) ** 0.5, "first_bias": jnp.zeros(WIDTH),
             "second": jax.random.normal(two, (WIDTH,)) * WIDTH ** -0.5, "second_bias": jnp.zeros(())}
    found = {name: np.asarray(w, np.float64) for name, w in minimized(loss, start, steps, rate).items()}
    first = found["first"] / scale[:, None]                 # reads features as they are
    listed = lambda w: tuple(map(float, w))
    return DraftClassifier(tuple(map(listed, first)), listed(found["first_bias"] - mean @ first),
                           listed(found["second"]), float(found["second_bias"]))


def examples(lm: Any, draft: Any, samples: Sequence[Sequence[int]], length: int, verify: Any, max_new_tokens: int,
             seed: int = 0, **sampling: Any) -> tuple[np.ndarray, np.ndarray]:
    """Continues prompts by speculative decoding, to collect examples for a predictor of acceptance. Returns the
    features of all drafts that were tested, `f32[n, FEATURES]`, and whether each was accepted, `bool[n]`. A draft is
    tested if all drafts before it in its chain were accepted."""
    at_least(length=length)
    alg = Speculative(Watched(draft, length, max_new_tokens), verify or SeedExact())
    noted: AcceptanceExamples = continued(lm, alg, samples, max_new_tokens, seed, **sampling).algo[0]
    accepted = np.asarray(noted.accepted)[..., None]
    place = np.broadcast_to(np.arange(length), (*accepted.shape[:2], length))
    tested = (accepted >= 0) & (place <= accepted)
    return np.asarray(noted.seen)[tested], (place < accepted)[tested]


def given_or_fitted(name: str, what: str, fit: Callable[..., Any], given: Any, samples: Any, *of: Any) -> Any:
    """Returns `given`, the value of a method's option, or else the result of fitting one, `fit(*of, samples)`.

    Args:
        name: name of the method, for errors.
        what: name of the option, for errors.
        fit: the function that fits a value.
        given: the option's value, or None.
        samples: prompts (token ids) to fit to, or None.
        of: further arguments of `with_length`.

    Raises:
        ValueError: both `given` and `samples` are None, or neither is.
    """
    if (given is None) == (samples is None):
        raise ValueError(f"{name!r} needs {what}=, from decodax.train.{fit.__name__}, or samples=, prompts as token "
                         "ids to fit one to; takes one of the two")
    return given if samples is None else fit(*of, samples)
