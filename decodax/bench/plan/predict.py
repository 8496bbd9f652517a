"""Predicts the speedup of a locally measured method for a large model on a slice."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax

from decodax import algorithms
from decodax.algorithms.beams.algorithm import BeamSearch
from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafter import AroundSource
from decodax.algorithms.speculative.heads.source import TrainedHead
from decodax.bench.comparison import PLAIN, Comparison
from decodax.bench.plan.front import Plan, plan
from decodax.common.axes import by_axes
from decodax.common.registry import ALGORITHMS
from decodax.io.load import LM
from decodax.models.drafters.block import BlockHead

COLUMNS = ("system", "tokens/forward here", "window", "plain round", "round", "drafting", "speedup")


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The prediction for one decoding method on one task and batch size.

    Attributes:
        task: the task.
        batch: the batch size.
        system: the name of the method.
        tokens: new tokens for each row and round, measured here.
        width: the number of tokens that a round scores.
        plain: minimum seconds of a round of plain decoding.
        round: minimum seconds of a round of the method.
        drafting: minimum seconds of a draft model's steps in a round.
        reason: why nothing is predicted, or None.
    """

    task: str
    batch: int
    system: str
    tokens: float | None = None
    width: int | None = None
    plain: float | None = None
    round: float | None = None
    drafting: float | None = None
    reason: str | None = None

    @property
    def speedup(self) -> float | None:
        if self.tokens is None or self.plain is None or self.round is None or self.drafting is None:
            return None
        return self.tokens * self.plain / (self.round + self.drafting)

    def cells(self) -> tuple[str, ...]:
        """Returns the prediction as texts, one for each of `COLUMNS`."""
        if self.reason is not None:
            return self.system, self.reason, *[""] * (len(COLUMNS) - 2)
        ms = lambda x: f"{1e3 * x:.2f} ms"
        return (self.system, f"{self.tokens:.2f}", str(self.width), ms(self.plain), ms(self.round), ms(self.drafting),
                f"{self.speedup:.2f}")


def predict(found: Comparison, chosen: Mapping[str, tuple[str, dict[str, Any]]], topology: str, model: str | LM,
            *, capacity: int = 4096, draft_share: float | None = None, trained: Mapping[str, Trained] = {},
            **options: Any) -> tuple[list[Prediction], list[str]]:
    """Predicts speedups over plain decoding of a large model on a slice, from tokens per forward pass that were
    measured here with a small model.

    The tokens per forward pass are assumed to be the same. A round costs the lower bound of `decodax.bench.plan.plan`
    for its number of tokens, on the mesh on which plain decoding costs least. A draft model costs `draft_share` of a
    plain round for each token of the window after the first, a trained drafter its own share for each of its passes.

    Args:
        found: the measurements.
        chosen: for each contender of `found`, the name of the decoding method and its options.
        topology: the slice, as in `decodax.bench.plan.plan`.
        model: the large model, as in `decodax.bench.plan.plan`.
        capacity: the number of tokens of each row.
        draft_share: bytes of the draft model relative to those of the model.
        trained: by contender, the costs of a trained drafter.
        options: further arguments of `plan`: weights, dtype, cache.

    Returns:
        The predictions in the order of `found.rows`, and the assumptions as sentences.
    """
    from decodax.bench.plan.front import abstract

    lm = model if isinstance(model, LM) else abstract(model, options.get("dtype", "bfloat16"))
    bases: dict[int, Plan] = {}
    out = []
    for row in found.rows:
        if row.system == PLAIN:
            continue
        own = Prediction(row.task, row.batch, row.system)
        if row.tokens_per_forward is None:
            out.append(dataclasses.replace(own, reason=row.error or "was not measured"))
            continue
        if row.batch not in bases:
            bases[row.batch] = plan(lm, topology, batch=row.batch, capacity=capacity, compile=False, **options)[0]
        base = bases[row.batch]
        name, given = chosen[row.system]
        entry = ALGORITHMS[name]
        if not base.fits:
            out.append(dataclasses.replace(own, reason=f"{row.batch} rows do not fit"))
            continue
        own_drafter = trained.get(row.system)
        if not entry.takes_draft and own_drafter is None and (entry.needs != "nothing"
                                                              or entry.family == "speculative-self"):
            why = "drafts with the model itself" if entry.needs == "nothing" else f"needs {entry.needs}"
            out.append(dataclasses.replace(own, reason=f"{why}, so the cost of its drafts is unknown"))
            continue
        if entry.takes_draft and draft_share is None:
            out.append(dataclasses.replace(own, reason="the draft model's share of the bytes is unknown"))
            continue
        try:
            alg: Any = f"prompt-lookup:length={own_drafter.width - 1}" if own_drafter else algorithms.make(
                name, lm, lm if entry.takes_draft else None,
                **({"batch": row.batch} if "batch" in entry.options else {}), **given)
            there = plan(lm, topology, batch=row.batch, capacity=capacity, mesh=[base.mesh], compile=False,
                         algorithm=alg, **options)[0]
        except (ValueError, TypeError) as error:
            out.append(dataclasses.replace(own, reason=f"cannot be counted from shapes ({error})"))
            continue
        drafting = base.seconds * (draft_share or 0.0) * (there.width - 1) if entry.takes_draft else 0.0
        if own_drafter is not None:
            drafting = base.seconds * own_drafter.share * own_drafter.passes
        out.append(dataclasses.replace(own, tokens=row.tokens_per_forward, width=there.width, plain=base.seconds,
                                       round=there.seconds, drafting=drafting))
    device = next(iter(bases.values())).slice.device if bases else None
    small = found.facts.get("model", "the small model")
    said = [f"tokens per forward pass are those of {small} here; another model's differ",
            f"each row holds {capacity:,} tokens",
            "rounds take the larger of memory and arithmetic time at peak speed, plus collectives, and nothing else"]
    if draft_share is not None:
        said.append(f"a draft model's step costs {draft_share:.3f} of a plain round, which is the draft's share of the "
                    "model's bytes here, and each token of the window but the first takes one step")
    said += [f"a pass of the drafter of {name} costs {one.share:.3f} of a plain round, its share of the model's bytes "
             f"here; a round has {one.passes} of them and scores {one.width} tokens" for name, one in trained.items()]
    if device is not None:
        said.append(f"{device.name}: {device.bandwidth / 1e9:,.0f} GB/s, {device.flops / 1e12:,.0f} TFLOP/s "
                    f"({device.source})")
    said += [f"batch {batch}: mesh {by_axes(base.mesh)}" for batch, base in bases.items()]
    return out, said


@dataclasses.dataclass(frozen=True)
class Trained:
    """The cost of a trained drafter, relative to that of its target.

    Attributes:
        share: bytes that a pass reads, its own weights and perhaps the model's vocabulary matrix, relative to those of
            the model.
        passes: number of passes in a round.
        width: number of tokens that the model scores in a round.
    """

    share: float
    passes: int
    width: int

    @classmethod
    def of(cls, lm: LM, algorithm: Any, capacity: int = 256) -> Trained | None:
        """Returns the costs of an algorithm's drafter beside `lm`, or None if it drafts in another way."""
        draft = algorithm.draft if isinstance(algorithm, Speculative | BeamSearch) else None
        source = draft.source if isinstance(draft, AroundSource) else draft
        if not isinstance(source, TrainedHead):
            return None
        round_ = plan(lm, "v5e:1x1", batch=1, capacity=capacity, compile=False, algorithm=algorithm)[0]
        table = 0 if source.head.own_head else lm.vocab_size * source.head.target_width
        size = sum(x.size for x in jax.tree.leaves(source.weights.head)) + table
        whole = sum(math.prod(x.shape) for x in jax.tree.leaves(lm.params))
        return cls(size / whole, 1 if isinstance(source.head, BlockHead) else algorithm.traits.emits - 1, round_.width)


def share(lm: LM, draft: LM | None) -> float | None:
    """Returns the bytes of a draft model's weights relative to those of the model, or None without a draft model."""
    if draft is None:
        return None
    size = lambda params: sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(params))
    return size(draft.params) / size(lm.params)
