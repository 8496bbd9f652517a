"""Fine-tuning of any model on texts, or on pairs of prompts and targets, for decoding methods that need a tuned model.

All weights change, but those of the model beside AutoDeco's heads. The objectives are those of `decodax.train.tuning`;
those for diffusion models are in `recipes.own_answers`.
"""

from __future__ import annotations

import runpy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console

import decodax as dx
from decodax.models.drafters.hamburger import HamburgerHead
from decodax.train import tuning
from decodax.train.language_model import WeightedAnswers
from decodax.train.loop import Objective, TrainingRun, place_batch
from decodax.train.tuning.examples import Example, ExampleBatches, ExampleRows, prompts_of, read_examples
from decodax.train.tuning.hamburger import RATES
from decodax.train.tuning.mbr import selected_answers
from decodax.train.tuning.scheduled_sampling import corrections, own_targets
from decodax.train.tuning.soft import sorted_depths
from decodax.train.tuning.tuned import (
    Tuned,
    TunedAnySubset,
    TunedBlocks,
    TunedBranches,
    TunedDrafts,
    TunedEnd,
    TunedGroups,
    TunedHeads,
    TunedStudent,
    checked,
)
from recipes.cards import changes, files_of, write_card, write_facts
from recipes.options import OWN_ANSWERS, Options
from recipes.own_answers import recipe as own_answers_recipe
from recipes.run import Recipe, files_of_examples, target_of

EVERY, MOST = 20, 96
"""One of `EVERY` rows is held out, and at most `MOST` of these are measured."""

DRAFTING = ("cllm", "msn", "space", "s3d")
"""Objectives for models that draft for themselves."""

MASKED = ("space", "s3d", "any-subset", "sbd", "sdlm")
"""Objectives with a mask token that no text may have."""

PROMPTS, NEW = 16, 64
"""Held-out prompts that decoding is measured on for some objectives, and the tokens that are decoded."""

TOGETHER = 32
"""Prompts that are continued together before the training."""

SPAN, GROUP = 5, 4
"""Inputs that noise replaces, and masks in a row; and tokens of a group, if no option says it."""


def ends_of(lm: Any) -> tuple[int, ...]:
    """Returns the ids that end a text of the model."""
    return tuple(i for i in lm.eos if isinstance(i, int))


def rule_of(options: Options) -> Any:
    """Returns the rule that selects answers: `--select`, or the best by the function that `--quality` names.

    Raises:
        ValueError: `--quality` names no function of a file.
    """
    if options.quality is None:
        return options.select
    file, _, name = options.quality.rpartition(":")
    if not Path(file).is_file():
        raise ValueError(f"quality: got {options.quality!r}, takes FILE.py:NAME of a function")
    found = runpy.run_path(file).get(name)
    if not callable(found):
        raise ValueError(f"quality: {file} has no function {name!r}")
    return dx.select.best_of_n(reward=found)


def tuned_of(options: Options, lm: Any, objective: Objective, rows: ExampleRows, key: jax.Array,
             guides: tuple[Any, ...]) -> Tuned:
    """Returns what is trained; `guides` are the weights of teacher and reference."""
    match objective:
        case tuning.SelfTerminatingLoss():
            return TunedEnd(lm, objective, rows)
        case tuning.AnySubsetLoss():
            return TunedAnySubset(lm, objective, key)
        case tuning.SetBlockLoss():
            return TunedBlocks(lm, objective, key)
        case tuning.HamburgerLoss():
            return TunedGroups(lm, objective, key)
        case tuning.DecodingHeadsLoss():
            return TunedHeads(lm, objective, key, options.target)
        case tuning.DistilledAnswers():
            return TunedStudent(lm, objective, guides[0])
    if options.objective in DRAFTING:
        jacobi = options.block if options.objective in ("cllm", "msn") else None
        return TunedDrafts(lm, objective, jacobi - 1 if jacobi else options.span or SPAN)
    return Tuned(lm, options.objective in ("layerskip", "soft"))


def objective_of(options: Options, lm: Any, texts: Iterable[int], teachers: list[Any]) -> Objective:
    """Returns the loss. `texts` are the tokens of all examples; `teachers` are the teacher and the reference, if there
    are any."""
    network, dtype, span = lm.model, options.dtype, options.span or SPAN
    mask = lm.pad if options.mask is None else options.mask
    if options.objective in MASKED:
        mask = tuning.mask_token(lm, texts, options.mask)
    match options.objective:
        case "layerskip":
            return tuning.EarlyExitLoss(network, options.steps, options.layer_dropout, options.exit_scale,
                                        options.curriculum, options.every, dtype=dtype)
        case "soft":
            return tuning.SortedLoss(network, options.depths or sorted_depths(network.depth), dtype)
        case "msn":
            return tuning.NoisyLoss(network, span, dtype)
        case "space" | "lud":
            kind = tuning.SemiAutoregressiveLoss if options.objective == "space" else tuning.LexicalUnitLoss
            return kind(network, mask, span, dtype=dtype)
        case "s3d":
            return tuning.SkippyLoss(network, mask, span, options.skip, dtype=dtype)
        case "hamburger":
            return tuning.HamburgerLoss(network, HamburgerHead.of(network.config, options.span or GROUP),
                                        distill=options.distill, dtype=dtype)
        case "scheduled-sampling":
            return tuning.ScheduledSamplingLoss(network, options.steps, options.replaced, dtype)
        case "cllm":
            return tuning.ConsistencyLoss(network, options.fixed_weight, dtype=dtype)
        case "nmst":
            return tuning.SelfTerminatingLoss(network, ends_of(lm), options.epsilon, dtype)
        case "any-subset":
            return tuning.AnySubsetLoss(network, mask, dtype=dtype)
        case "sbd" | "sdlm":
            return tuning.SetBlockLoss(options.objective, network, mask, options.block or 0, dtype)
        case "autodeco":
            return tuning.DecodingHeadsLoss(network, dtype)
        case "distillation":
            taught, known = (*(x.model for x in teachers), None)[:2]
            return tuning.DistilledAnswers(network, taught, options.mix, known, options.keep, dtype)
    return WeightedAnswers(network, 0.0, dtype)


def recipe(options: Options, mesh: jax.sharding.Mesh, console: Console) -> Recipe:
    """Returns the recipe for `recipes.run.train`."""
    fills = options.objective in OWN_ANSWERS
    if options.lora is not None and options.objective != "dparallel":
        raise ValueError(f"lora: got {options.lora} with {options.objective}, takes None")
    if (options.objective == "distillation") != (options.teacher is not None):
        raise ValueError(f"teacher: got {options.teacher!r} with {options.objective}; distillation takes a model, "
                         "others None")
    if fills and options.own_chats:
        raise ValueError(f"own_chats: got {options.own_chats} with {options.objective}, whose model writes no text "
                         "from left to right; takes None")
    lm = checked(target_of(options), fills)
    room = 2 * (options.block or 0) if options.objective in ("sbd", "sdlm") else 0     # a block may end after it
    length = min(options.length or 256, (lm.model.trained_positions or 1 << 30) - room)
    if length < 1:
        raise ValueError(f"block: got {options.block}; it takes less than half of the {lm.model.trained_positions} "
                         "positions of the model")
    paths = {"teacher": options.teacher, "reference": options.reference}
    teachers = [tuning.check_teacher(dx.load(path, dtype="float32", mesh=mesh), lm, name)
                for name, path in paths.items() if path]
    guides = (*(x.params for x in teachers), None)[:2]
    # a teacher's chat template is that of the texts that are decoded
    files = [Path(file) for file in files_of_examples(options, lm, console)]
    examples = read_examples(files, (*teachers, lm)[0])
    if fills:       # of a target nothing is read, so it takes no room from its prompt
        examples = [Example(x.tokens[:x.prompt + 1], x.prompt) if x.prompt else x for x in examples]
    if options.objective == "mbr":
        examples = selected_answers(lm, examples[:options.answers or 256], rule_of(options), options.candidates,
                                    options.new_tokens, options.seed)
    control = ()
    if options.objective == "apar":
        control = tuning.tokens_to_write(lm, examples, options.fork, options.child)
        examples = tuning.branching_examples(lm, files, *control)
        console.print(f"[Fork] is token {control[0]}, [Child] {control[1]}", soft_wrap=True, markup=False)
    rows = ExampleRows.of(examples, length)
    if rows.cut:
        console.print(f"{rows.cut} of {len(rows)} rows are cut to {length} tokens (--length)", soft_wrap=True)
    out = np.arange(len(rows)) % EVERY == EVERY - 1
    used, held = (rows[~out], rows[out][:MOST]) if out.any() else (rows, rows[:MOST])
    if fills:
        return own_answers_recipe(options, lm, prompts_of(used, options.answers or 256), prompts_of(held, PROMPTS),
                                  mesh, console)
    objective = objective_of(options, lm, (token for x in examples for token in x.tokens), teachers)
    key = jax.random.key(options.seed)
    tuned = TunedBranches(lm, *control, (held, used)) if control else tuned_of(
        options, lm, objective, used, key, guides)
    batch, ways, end = options.batch or 8, mesh.shape["data"], ends_of(lm)
    needs = options.objective == "autodeco" or options.distill
    frozen = jax.device_put(lm.params, NamedSharding(mesh, PartitionSpec())) if needs else ()
    batches: Any = ExampleBatches(tuned.arrays(used), batch, options.seed)
    if options.objective == "lud":
        sure = tuning.sure_tokens(lm, used, options.sure)
        console.print(f"{sure[used.learned].mean():.1%} of the tokens are sure (--sure {options.sure})")
        batches = ExampleBatches((*used.arrays, sure), batch, options.seed)
    if options.objective == "hamburger":
        batches = ExampleBatches(groups := tuning.grouped(lm, used, options.span or GROUP), batch, options.seed)
        console.print(f"{used.learned.sum() / groups[2].sum():.2f} tokens in a group")
    if options.objective == "scheduled-sampling":
        used = used[:options.answers or 256]
        own = own_targets(lm, used, TOGETHER)
        arrays = [(*used.arrays, own)]
        if options.correction:
            more = ExampleRows.of(corrections(used, own, lm.tokenizer.encode(options.correction, False)), length)
            arrays.append((*more.arrays, more.tokens))          # nothing of a correction is replaced
        batches = ExampleBatches(tuple(map(np.concatenate, zip(*arrays, strict=True))), batch, options.seed)
    if options.objective == "cllm":
        prompts, size = prompts_of(used, options.answers or 256), options.block or 16
        found = [one for at in range(0, len(prompts), TOGETHER) for one in tuning.collect_trajectories(
            lm, prompts[at:at + TOGETHER], size, options.blocks, options.seed, end)]
        console.print(f"{len(found)} trajectories of {size} tokens, of {np.mean([len(x.states) for x in found]):.2f} "
                      "iterations", soft_wrap=True)
        batches = tuning.TrajectoryBatches(found, batch, length, options.seed, end)

    def extra(run: TrainingRun) -> Any:
        now, step = jax.random.fold_in(key, run.step), jnp.int32(run.step)
        return {"layerskip": (now, step), "scheduled-sampling": (now, step), "msn": now,
                **dict.fromkeys((*MASKED, "lud"), now), "autodeco": (now, frozen),
                "hamburger": frozen, "distillation": guides}.get(str(options.objective))

    def losses(params: Any) -> dict[str, float]:
        """Returns the held-out losses by their names."""
        total, count = np.zeros(len(tuned.names)), 0
        for at in range(0, len(held), 8 * ways):
            part = held[at:at + 8 * ways]
            more, many = 8 * ways - len(part), int(part.learned[:, 1:].sum())
            arrays = tuple(np.pad(x, [(0, more)] + [(0, 0)] * (x.ndim - 1)) for x in tuned.arrays(part))
            total += many * np.asarray(tuned.measure(params, *place_batch(arrays, mesh)), np.float64)
            count += many
        return dict(zip(tuned.names, map(float, total / count), strict=True))

    def finish(target: Path, shipped: Any, exact: Any, facts: dict[str, Any]) -> str:
        tuned.write(target, shipped)
        after = losses(exact)
        # placed as the trained weights are, which compiles nothing more
        before = losses(jax.device_put(tuned.start, tuned.shardings(mesh)
                                       or NamedSharding(mesh, PartitionSpec())))
        for weights, found in ((tuned.start, before), (exact, after)):
            if (tokens := tuned.tokens_a_forward(weights, prompts_of(held, PROMPTS), NEW)) is not None:
                found["tokens_a_forward"] = tokens
        told, figures = changes(before, after)
        write_facts(options, target, facts | told)
        where = (f"{len(held)} rows that were held out" if out.any() else
                 "rows of the training data, which are too few to hold out some")
        write_card(options, target, facts, f"`{options.target}`, tuned with the objective `{options.objective}`: "
                   f"`{tuned.use}`. The license is that of `{options.target}`.",
                   f"{len(used):,} rows of {length} tokens of {files_of(options)}", figures,
                   f"Figures before and after the training, on {where}.")
        name = list(after)[-1]
        return f"{name.replace('_', ' ')} {told['before'][name]} before, {told['after'][name]} after"

    stored = str(lm.config_entries.get("dtype", lm.config_entries.get("torch_dtype")))
    return Recipe(tuned.start, objective, lambda run: batches[run.step],
                  lambda batch: (int(batch[1].sum()) if isinstance(tuned, TunedGroups) else
                                 batch[0].shape[0] * (batch[0].shape[1] - 1)),
                  lambda params, run: losses(params), finish, extra=extra, shardings=tuned.shardings(mesh),
                  rounded=tuned.rounded and stored != "float32",
                  rates=RATES if isinstance(tuned, TunedGroups) else None)
