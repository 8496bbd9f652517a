"""Predicts, for a large model on a slice, which draft length pays at each batch size, and whether any does.

How many drafts hold is measured here, with a small model. What a round costs there comes from XLA's own compiler for
each length and batch size. Trained drafters are those of the same method for the large model, so that their weights,
caches and passes are a part of the compiled round.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from decodax.algorithms.speculative import Speculative
from decodax.algorithms.speculative.drafts.model.draft_model import DraftModel
from decodax.algorithms.speculative.drafts.text.prompt_lookup import PromptLookup
from decodax.algorithms.speculative.fixed_trees import Chain
from decodax.algorithms.speculative.heads import TrainedHead, drafting_source
from decodax.bench.comparison import PLAIN, Comparison
from decodax.bench.plan.front import Plan, abstract, plan
from decodax.common.axes import MODEL, by_axes
from decodax.io.drafters import TrainedDrafter
from decodax.io.load import LM
from decodax.models.drafters.block import BlockHead
from decodax.models.drafters.parallel import ParallelHead
from decodax.models.drafters.specs import head_shardings
from decodax.models.packed import Packed
from decodax.train.drafting.systems import SYSTEMS, objective_of

LENGTHS = (1, 2, 4, 7)
"""Draft lengths to predict for."""


@dataclasses.dataclass(frozen=True)
class LengthCosts:
    """The prediction for one method on one task and batch size.

    Attributes:
        task: the task on which acceptance was measured.
        batch: the batch size on the slice.
        system: the name of the method.
        plain: minimum seconds of a round of plain decoding.
        lengths: draft lengths.
        tokens: expected tokens of a row and round, for each length.
        seconds: minimum seconds of a round, for each length.
        reason: why nothing is predicted, or None.
    """

    task: str
    batch: int
    system: str
    plain: float = math.nan
    lengths: tuple[int, ...] = ()
    tokens: tuple[float, ...] = ()
    seconds: tuple[float, ...] = ()
    reason: str | None = None

    @property
    def speedups(self) -> tuple[float, ...]:
        """The speedup over plain decoding, for each length."""
        return tuple(n * self.plain / s for n, s in zip(self.tokens, self.seconds, strict=True))

    @property
    def pays(self) -> tuple[int, float]:
        """The draft length with the largest speedup, and that; (0, 1.0) if no length pays."""
        return max(((0, 1.0), *zip(self.lengths, self.speedups, strict=True)), key=lambda x: x[1])

    def cells(self, lengths: Sequence[int]) -> tuple[str, ...]:
        """Returns the row of a table, see `columns`."""
        if self.reason is not None:
            return str(self.batch), self.system, self.reason, *[""] * (len(lengths) + 1)
        known = {k: f"{1e3 * s:.2f} ms, {x:.2f}" for k, s, x in zip(self.lengths, self.seconds, self.speedups,
                                                                   strict=True)}
        length, speedup = self.pays
        return (str(self.batch), self.system, f"{1e3 * self.plain:.2f} ms", *(known.get(k, "") for k in lengths),
                f"{length} draft{'s' * (length > 1)}, {speedup:.2f}" if length else "plain, 1.00")

    def json(self) -> dict[str, Any]:
        """Returns the prediction as plain data for JSON."""
        return {**dataclasses.asdict(self), "speedups": self.speedups, "pays": self.pays}


def columns(lengths: Sequence[int]) -> tuple[str, ...]:
    """Returns the headings of the table for some draft lengths."""
    return ("batch", "system", "plain round", *(f"{k} draft{'s' * (k > 1)}" for k in lengths), "pays")


def windows(found: Comparison, methods: Mapping[str, tuple[str, Any]], topology: str, model: str | LM, *,
            batch: Sequence[int] = (1, 64, 256), lengths: Sequence[int] = LENGTHS, capacity: int = 2048,
            live: int | None = None, draft_share: float | None = None, compile: bool | None = None,
            report: Callable[[int, int, str], None] | None = None,
            **options: Any) -> tuple[list[LengthCosts], list[str]]:
    """Predicts the speedup of each draft length for a large model on a slice, at some batch sizes.

    Args:
        found: the measurements, of which the acceptance by depth at the smallest batch size is used.
        methods: for each contender of `found`, the name of the decoding method and the algorithm. Those that draft with
            trained heads, with a draft model or from the text are predicted.
        topology: the slice, as in `decodax.bench.plan.plan`.
        model: the large model, as in `decodax.bench.plan.plan`.
        batch: batch sizes there.
        lengths: draft lengths.
        capacity: number of slots of a row.
        live: number of slots that are in use; None: half of them.
        draft_share: bytes of the draft model relative to those of its target; a step of it is taken to cost that part
            of a plain round.
        compile: whether to use XLA's compiler; by default for TPUs if libtpu is installed.
        report: called before each round is compiled, with the number of compiled ones, that of all, and a description.
        options: further arguments of `plan`: weights, dtype, cache.

    Returns:
        The predictions, and the assumptions as sentences.
    """
    lm = model if isinstance(model, LM) else abstract(model, options.get("dtype", "bfloat16"))
    lengths, live = sorted(set(lengths)), capacity // 2 if live is None else live
    rows = [row for row in found.rows if row.system != PLAIN and row.batch == min(x.batch for x in found.rows)]
    kinds = {row.system: _kind(methods[row.system][1]) for row in rows}
    # Methods that draft from the text or with a draft model share the rounds of their windows.
    apart = {name if kind == "head" else kind and "window" for name, kind in kinds.items()} - {None}
    known: dict[Any, tuple[Plan, float]] = {}
    seen: dict[str, str] = {}

    def cost(size: int, system: str, algorithm: Any, mesh: Any, extra: float = 0.0) -> float:
        """Returns the seconds of a round; `extra` are floating-point operations of a drafter on a device."""
        key = size, system, None if algorithm is None else algorithm.traits.emits
        if key not in known:
            if report:
                report(len(known), len(batch) * (1 + len(lengths) * len(apart)), f"batch {size}: {system}")
            made = plan(lm, topology, batch=size, capacity=capacity, live=live, mesh=mesh, algorithm=algorithm,
                        compile=compile, **options)[0]
            known[key] = made, extra
        made, extra = known[key]
        device, plain = made.slice.device, known[size, PLAIN, None][0]
        own, base, across = made.compiled, plain.compiled, made.mesh[1]
        more = 0.0      # the planner counts the target's collectives, not a drafter's
        if system not in (PLAIN, "window") and own and base and own.collectives and base.collectives:
            each = plain.counts.hops * device.hop / base.collectives
            sent = (own.exchanged or 0) - made.width * (base.exchanged or 0)
            more = max(0, own.collectives - base.collectives) * each
            more += max(0, sent) * (across - 1) / across / device.link
        return max(made.memory, made.arithmetic + extra / device.flops) + made.network + more

    out = []
    for size in batch:
        base = plan(lm, topology, batch=size, capacity=capacity, live=live, compile=False, **options)[0]
        seen[f"batch {size}"] = f"mesh {by_axes(base.mesh)}"
        for row in rows:
            own = LengthCosts(row.task, size, row.system)
            name, algorithm = methods[row.system]
            kind = kinds[row.system]
            reason = (f"{size} rows do not fit" if not base.fits else row.error if row.error else
                      "chooses drafts in another way" if kind is None else
                      f"no network of {name!r} is known for another model" if kind == "head" and _system(name) is None
                      else None)
            if reason is not None:
                out.append(dataclasses.replace(own, reason=reason))
                continue
            plain, fits = cost(size, PLAIN, None, [base.mesh]), []
            for k in (k for k in lengths if k < algorithm.traits.emits):
                if kind == "head":
                    there = _head_there(algorithm, _system(name) or "", lm, k)
                    seconds = cost(size, row.system, there, [base.mesh],
                                   head_flops(there, k, size // base.mesh[0], base.mesh[1]))
                else:
                    there = Speculative(PromptLookup(k), shape=Chain(k))
                    seconds = cost(size, "window", there, [base.mesh])
                    seconds += plain * (draft_share or 0.0) * k if kind == "model" else 0.0
                fits.append((k, 1 + float(np.sum(row.accepted_by_depth[:k])), seconds))
            columns_ = tuple(zip(*fits, strict=True)) or ((), (), ())
            out.append(dataclasses.replace(own, plain=plain, lengths=columns_[0], tokens=columns_[1],
                                           seconds=columns_[2]))
    compiled = any(one.compiled is not None and one.compiled.fits for one, _ in known.values())
    said = [f"drafts hold as often as those of {found.facts.get('model', 'the small model')} here, of the same chains "
            "cut to each length; another model's differ",
            f"each row holds {live:,} of {capacity:,} tokens",
            "a round takes the larger of the time of its memory traffic, " + (
                "as XLA compiled it" if compiled else "counted from shapes without what heads read") + (
                ", and that of its matrix products, at peak speed, plus collectives, and nothing else"),
            "trained drafters are networks of the same method for the large model, divided over the mesh as it is"]
    if draft_share is not None:
        said.append(f"a draft model's step costs {draft_share:.3f} of a plain round, its share of the bytes here")
    return out, said + [f"{size}: {mesh}" for size, mesh in seen.items()]


def _kind(algorithm: Any) -> str | None:
    """Returns how a method drafts: with a trained "head", a draft "model", or from the "text"; None: in other ways."""
    draft = algorithm.draft if isinstance(algorithm, Speculative) else None
    if isinstance(draft, TrainedHead):
        return "head"
    return "model" if type(draft) is DraftModel else "text" if draft is not None and draft.free else None


def _system(name: str) -> str | None:
    """Returns the name in `SYSTEMS` of a method's drafter, or None."""
    from decodax.common.registry import ALGORITHMS

    names = (*ALGORITHMS[name].systems, name, "fastmtp" if name == "mtp" else None)
    return next((one for one in names if one in SYSTEMS), None)


def _head_there(algorithm: Any, system: str, lm: LM, length: int) -> Speculative:
    """Returns the method with the head that its system has for another model, with weights as shapes."""
    head, weights = algorithm.draft.head, algorithm.draft.weights
    share = 1.0 if weights.ids is None else head.vocab / algorithm.draft.model.config.vocab
    count = round(share * lm.vocab_size)
    drafts = head.longest if isinstance(head, (BlockHead, ParallelHead)) else None
    there: Any = objective_of(system, lm, None if weights.ids is None else np.arange(count), drafts).head
    ids = None if weights.ids is None else jax.ShapeDtypeStruct((count,), np.int32)
    source = drafting_source(lm, TrainedDrafter(system, there, there.abstract_params("bfloat16"), ids))   # type: ignore[arg-type]
    return Speculative(source, shape=Chain(length))


def head_flops(algorithm: Speculative, length: int, rows: int, across: int) -> float:
    """Returns the floating-point operations of a trained head's matrix products in a round on one device.

    The head runs on the newest token and the drafts that may hold, then on the drafts: one after the other, or in one
    pass of a block.

    Args:
        algorithm: the method.
        length: number of drafts.
        rows: number of rows of a replica.
        across: number of devices over which the target and the head are divided.
    """
    source: Any = algorithm.draft
    head, weights = source.head, source.weights.head
    mesh = jax.sharding.AbstractMesh((across,), (MODEL,))
    local = lambda x, where: sum(math.prod(where.shard_shape(a.shape)) for a in jax.tree.leaves(x))
    own = sum(jax.tree.leaves(jax.tree.map(local, weights, head_shardings(head, weights, mesh),
                                           is_leaf=lambda x: isinstance(x, Packed))))
    table = head.vocab * head.target_width // across
    own -= table * head.own_head
    drafted = length + head.offset if isinstance(head, BlockHead) else length - 1
    return 2.0 * rows * (own * (length + 1 + drafted) + table * length)


__all__ = ["LENGTHS", "LengthCosts", "columns", "head_flops", "windows"]
