"""Measures the duration of a round of each arm on the model itself, and creates `Automatic` from the results."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from decodax.algorithms.speculative.adaptive.arms import NOTHING, Adaptive
from decodax.algorithms.speculative.adaptive.automatic import Automatic
from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafts.text.prompt_lookup import PromptLookup
from decodax.algorithms.speculative.fixed_trees import Chain
from decodax.algorithms.speculative.heads.drafting import drafting_source
from decodax.algorithms.speculative.trees.tetris import Tetris
from decodax.common.options import Count
from decodax.common.registry import ALGORITHMS
from decodax.core import drivers
from decodax.core.algorithm import variants
from decodax.core.fitting import fit_cache
from decodax.core.memory import bucket, power
from decodax.core.target import for_target
from decodax.core.types import Model, Params
from decodax.sampling import build


def measure(model: Model, weights: Any, arms: Sequence[Speculative], *, batch: int = 1, length: int = 128,
            vocab_size: int, repeats: int = 5, rounds: int = 8, **sampling: Any) -> tuple[float, ...]:
    """Returns the duration in seconds of a round of each arm, under the conditions of `Adaptive`: all drafts observe
    the round, and the target's cache keeps what any of them needs.

    Args:
        model: the target.
        weights: its weights. Drafts have their own.
        arms: the arms.
        batch: number of rows.
        length: number of tokens in the cache when the measurement starts.
        vocab_size: number of token ids.
        repeats: number of measurements of each arm, in turn; the result is their median.
        rounds: number of rounds in a measurement.
        sampling: sampling options of `decodax.generate`.

    Raises:
        ValueError: a number below 1, or arms that `Adaptive` refuses.
    """
    for name, value in (("batch", batch), ("length", length), ("repeats", repeats), ("rounds", rounds)):
        if value < 1:
            raise ValueError(f"{name}: got {value}, takes 1 or more")
    room = (max((arm.traits.emits for arm in arms), default=1) * rounds) * (repeats + 1)
    together = Adaptive(tuple(arms), Automatic((1.0,) * len(arms))).with_length(room)
    model, params, bare = fit_cache(model, power(room)), Params(weights, together.weights), together.bare()
    size = bucket(length + room)
    # the same few tokens over and over, so that drafts which look into the text find some
    tokens = np.zeros((batch, size), np.int32)
    tokens[:, :length] = np.random.default_rng(0).integers(0, vocab_size, (batch, 16))[:, np.arange(length) % 16]
    policy = build(batch, vocab_size=vocab_size, **sampling)
    states = []
    for alg in variants(bare)[:len(arms)]:
        s = drivers.begin(alg, model, params, policy, jnp.asarray(tokens), np.full(batch, length, np.int32), size=size,
                          max_new=np.full(batch, room, np.int32))
        states.append((alg, drivers.prefill(alg, model, params, s, width=min(128, size))))
    seconds: list[list[float]] = [[] for _ in arms]
    for _ in range(repeats + 1):
        for i, (alg, s) in enumerate(states):
            before = int(np.asarray(s.stats.rounds).max())
            clock = time.perf_counter()
            s = jax.block_until_ready(drivers.advance(alg, model, params, policy, s, jnp.int32(rounds)))
            spent, done = time.perf_counter() - clock, int(np.asarray(s.stats.rounds).max()) - before
            states[i] = alg, s
            if done:
                seconds[i].append(spent / done)
    return tuple(statistics.median(x[1:] or x) for x in seconds)       # the first of each was compiling


def round_times(lm: Any, source: Any, length: int, *, batch: int = 1, **options: Any) -> tuple[tuple[int, float], ...]:
    """Measures how long rounds take by the number of tokens that the batch verifies together.

    Args:
        lm: the result of `decodax.load`.
        source: what drafts.
        length: largest number of drafts of a row; all of them are drafted in each round.
        batch: number of rows.
        options: see `measure`.

    Returns:
        Ascending numbers of tokens, the newest ones included, each with the seconds of a round.
    """
    budgets = [batch * k for k in sorted({1, (length + 1) // 2, length})]
    source = for_target(source, lm)
    arms = [Speculative(source, shape=Tetris(budget, length), packed=True) for budget in budgets]
    times = measure(lm.model, lm.params, arms, batch=batch, vocab_size=lm.vocab_size, **options)
    return tuple((batch + budget, seconds) for budget, seconds in zip(budgets, times, strict=True))


def automatic(lm: Any, draft: Any, lengths: Sequence[int] = (2, 4, 7), *, batch: int = 1, length: int = 128,
              verify: Any = None, **sampling: Any) -> Adaptive:
    """Returns speculative decoding that chooses its draft length, or no drafts, by the acceptance in the text and by
    costs. The costs are measured now, on this machine and for this batch size.

    Args:
        lm: the result of `decodax.load`.
        draft: a `Draft` or `Source`; a `Draft` has to propose chains of at least `max(lengths)`.
        lengths: draft lengths to choose from, beside no drafts.
        batch: number of rows for the measurement.
        length: number of tokens in the cache for the measurement.
        verify: a verifier; None: `SeedExact`.
        sampling: sampling options of `decodax.generate`.

    Raises:
        ValueError: no lengths, or a length below 1.
    """
    if not lengths:
        raise ValueError("lengths: got none, takes one or more")
    options, draft = {} if verify is None else {"verify": verify}, for_target(draft, lm)
    arms = (NOTHING, *(Speculative(draft, shape=Chain(k), **options) for k in sorted(set(lengths))))
    costs = measure(lm.model, lm.params, arms, batch=batch, length=length, vocab_size=lm.vocab_size, **sampling)
    return Adaptive(arms, Automatic(costs))


@ALGORITHMS.register("automatic", "Draft length by measured cost and acceptance", "", family="speculative-theory",
                     needs="a model", guarantee="seed-exact")
def automatic_entry(lm: Any, draft: Any = None, lengths: tuple[Count, ...] = (2, 4, 7), batch: Count = 1) -> Adaptive:
    """Drafts chains of the length that pays on this machine, or none, by measured costs and acceptance rates.

    For use if you do not know what pays: it never costs much more than plain decoding. The length is chosen in each
    round, for all rows of the batch. Creating it measures the model, which takes seconds.

    Args:
        lm: the target.
        draft: a draft model, or a drafter from `decodax.load_drafter`; None: prompt lookup.
        lengths: draft lengths to choose from, beside plain decoding. Of a drafter that predicts fewer tokens, its own
            number takes the place of longer ones.
        batch: number of rows for which costs are measured.
    """
    if draft is None:
        return automatic(lm, PromptLookup(max(lengths)), lengths, batch=batch)
    source = drafting_source(lm, draft)
    return automatic(lm, source, [min(k, source.longest or k) for k in lengths], batch=batch)
