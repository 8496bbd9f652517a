"""Fits Sequoia's tree to a model and a machine: measures how often the k-th child is accepted, and how long rounds take
("Sequoia: Scalable, Robust, and Hardware-aware Speculative Decoding", Chen et al., 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from decodax.algorithms.speculative.adaptive.fit_acceptance import fit_acceptance
from decodax.algorithms.speculative.adaptive.measure import measure
from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.fixed_trees import Chain, Fixed
from decodax.algorithms.speculative.source import Source
from decodax.algorithms.speculative.trees.sequoia import sequoia_for, sequoia_tree
from decodax.algorithms.speculative.verifier import Verifier
from decodax.algorithms.speculative.verify.mcsd import MultiRound
from decodax.core.target import for_target


def fit_sequoia(lm: Any, source: Source, samples: Sequence[Sequence[int]], nodes: int | None = None, *,
                length: int = 8, ranks: int = 8, sizes: Sequence[int] = (2, 4, 8, 16, 32),
                verify: Verifier | None = None, batch: int = 1, max_new_tokens: int = 64, seed: int = 0,
                **sampling: Any) -> Fixed:
    """Returns Sequoia's tree for measured acceptance, and if `nodes` is None also for the measured times of this
    machine, from which size and depth follow.

        tree = dx.train.fit_sequoia(lm, dx.drafts.DraftModel(small), samples, temperature=0.8)
        dx.generate(lm, prompts, algorithm=dx.algorithms.sequoia(shape=tree), draft=small, temperature=0.8)

    Args:
        lm, source, samples, ranks, verify, max_new_tokens, seed, sampling: see `fit_acceptance`.
        nodes: number of drafts; None: that of `sizes` with the most tokens a second.
        length: largest number of drafts on a path.
        sizes: numbers of drafts to consider, each at least 2; not used with `nodes`.
        batch: number of rows for which times are measured.

    Raises:
        ValueError: numbers below 1, no sizes or one below 2, no samples or an empty one.
    """
    if nodes is None and (not sizes or min(sizes) < 2):
        raise ValueError(f"sizes: got {tuple(sizes)}, takes one or more numbers of at least 2")
    rule = verify or MultiRound()
    acceptance = fit_acceptance(lm, source, samples, ranks, verify=rule, max_new_tokens=max_new_tokens, seed=seed,
                                **sampling)
    if nodes is not None:
        return sequoia_tree(acceptance, nodes, length)
    sizes, source = sorted(set(sizes)), for_target(source, lm)
    stars = [Speculative(source, rule, Fixed.balanced(n)) for n in sizes]
    times = measure(lm.model, lm.params, [*stars, Speculative(source, rule, Chain(sizes[-1]))], batch=batch,
                    vocab_size=lm.vocab_size, **sampling)
    # A chain of n drafts takes n draft steps, and a star of n drafts takes one.
    step = max((times[-1] - times[-2]) / (sizes[-1] - 1), 0.0)
    rounds = {n: max(seconds - step, 1e-9) for n, seconds in zip(sizes, times, strict=False)}
    return sequoia_for(acceptance, rounds, step, length)


__all__ = ["fit_acceptance", "fit_sequoia"]
