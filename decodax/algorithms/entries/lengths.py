"""The length of drafts, chosen as decoding goes on, and speculation over batches."""

from __future__ import annotations

from typing import Any

from decodax.algorithms.entries.shared import (
    BATCH,
    DRAFT,
    EXACT,
    TARGET,
    THEORY,
)
from decodax.algorithms.speculative import Adaptive, Bandit, Bass, SeedExact, Speculative, drafts, trees
from decodax.algorithms.speculative.adaptive.arms import NOTHING
from decodax.algorithms.speculative.adaptive.measure import automatic
from decodax.common.registry import ALGORITHMS


@ALGORITHMS.register("automatic", "Draft length by measured cost and acceptance", "",
                     "chains as long as they pay here, or none", family=THEORY, needs=TARGET, guarantee="seed-exact")
def _automatic(lm: Any, draft: Any = None, lengths: tuple[int, ...] = (2, 4, 7), batch: int = 1) -> Any:
    source = drafts.PromptLookup(max(lengths)) if draft is None else drafts.DraftModel(draft)
    return automatic(lm, source, lengths, batch=batch)


def _arms(draft: Any, lengths: tuple[int, ...]) -> tuple[Speculative, ...]:
    source = drafts.PromptLookup(max(lengths)) if draft is None else drafts.DraftModel(draft)
    return tuple(NOTHING if k == 0 else Speculative(source, shape=trees.Chain(k)) for k in lengths)


def _choices(lm: Any, draft: Any, lengths: tuple[int, ...], arms: Any) -> tuple[Speculative, ...]:
    """Arms of a bandit, given or by default: chains of several lengths from the text, and from a draft model."""
    if arms is None:
        suffix, ngram = drafts.SuffixAutomaton(max(lengths)), drafts.NGram(max(lengths))
        return (*_arms(None, lengths), Speculative(suffix), Speculative(ngram),
                *(() if draft is None else _arms(draft, tuple(k for k in lengths if k))))
    made: Any = tuple(a if not isinstance(a, str) else NOTHING if a == "autoregressive" else ALGORITHMS.make(a, lm,
                                                                                                             draft)
                      for a in arms)
    if wrong := [a for a in made if not isinstance(a, Speculative)]:
        raise ValueError(f"arms: got {type(wrong[0]).__name__}, takes Speculative algorithms and names of such systems")
    return made


BANDIT = "BanditSpec: Adaptive Speculative Decoding via Bandit Algorithms"


@ALGORITHMS.register("ucbspec", BANDIT, "Hou et al. 2025",
                     "drafts and their lengths as arms of a bandit, by upper confidence bounds", family=THEORY,
                     guarantee="seed-exact")
def _ucb(lm: Any = None, draft: Any = None, lengths: tuple[int, ...] = (0, 3, 7), arms: Any = None) -> Any:
    return Adaptive(_choices(lm, draft, lengths, arms), Bandit("ucb"))


@ALGORITHMS.register("exp3spec", BANDIT, "Hou et al. 2025",
                     "drafts and their lengths as arms of a bandit, by exponential weights", family=THEORY,
                     guarantee="seed-exact")
def _exp3(lm: Any = None, draft: Any = None, lengths: tuple[int, ...] = (0, 3, 7), arms: Any = None) -> Any:
    return Adaptive(_choices(lm, draft, lengths, arms), Bandit("exp3"))


@ALGORITHMS.register("bass", "BASS: Batched Attention-optimized Speculative Sampling", "Qian et al. 2024",
                     "ragged acceptance, one draft length that follows the best row", family=BATCH, needs=DRAFT,
                     guarantee="seed-exact")
def _bass(draft: Any, lengths: tuple[int, ...] = (1, 2, 3, 5, 7)) -> Any:
    return Adaptive(_arms(draft, lengths), Bass())


ALGORITHMS.alias("eqspec", "seed-exact", "Batch Speculative Decoding Done Right", "Zhang et al. 2025",
                 "rows of a batch accept different lengths and stay equal to plain decoding, as everything here does",
                 family=BATCH)


@ALGORITHMS.register("ems-sd",
                     "EMS-SD: Efficient Multi-sample Speculative Decoding for Accelerating Large Language Models",
                     "Ni et al. 2024", "drafts of unequal number, of prompt lookup or a draft model, stand side by "
                     "side in dense layers, without tokens that fill up", family=BATCH, guarantee="seed-exact")
def _ems(draft: Any = None, length: int = 8, verify: Any = EXACT) -> Any:
    source = drafts.PromptLookup(length) if draft is None else drafts.DraftModel(draft)
    shape = None if draft is None else trees.ConfidenceChain(length)
    return Speculative(source, verify, shape, packed=True)


@ALGORITHMS.register("tetris", "TETRIS: Optimal Draft Token Selection for Batch Speculative Decoding", "Wu et al. 2025",
                     "the batch's likeliest drafts share one budget", family=BATCH, needs=DRAFT, guarantee="seed-exact")
def _tetris(draft: Any, capacity: int = 16, length: int = 7) -> Any:
    return Speculative(drafts.DraftModel(draft), SeedExact(), trees.Tetris(capacity, length), packed=True)
