"""Tuning of any diffusion model on its own answers to your prompts: certainty forcing (dParallel: Chen et al., 2025) of
all weights or of a LoRA adapter, and the filter of Learn2PD (Bao et al., 2025).

The objectives are those of the stages in `recipes.diffusion`, which is for the shipped models and their data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console

import decodax as dx
from decodax.train import masked_diffusion as md
from decodax.train import unmask_filter as filters
from decodax.train.lora import AdapterLoss
from decodax.train.own_answers import chosen, fill, unanswered
from recipes.cards import changes, files_of, write_card, write_facts
from recipes.diffusion import shown
from recipes.options import Options
from recipes.run import Recipe

TARGETS = ("q", "k", "v", "o")
"""Projections that an adapter changes."""

TOGETHER = 16
"""Prompts that are answered together."""


def recipe(options: Options, lm: Any, prompts: Sequence[Sequence[int]], held_prompts: Sequence[Sequence[int]],
           mesh: jax.sharding.Mesh, console: Console) -> Recipe:
    """Returns the recipe for `recipes.run.train`; answers to `held_prompts` are measured."""
    o, network, kind = options, lm.model, lm.diffusion
    md.check(kind)
    length, count = min(o.length or 256, network.trained_positions or 1 << 30), o.batch or 8
    canvas, key = length // 2, jax.random.key(o.seed)
    span = o.span or min(kind.block or 32, canvas)
    if canvas % span:
        raise ValueError(f"span: got {span}; it takes a divisor of the {canvas} tokens of an answer")
    # in the blocks in which they are learned, as the authors of both methods make them
    answers, held = (batch.replace(tokens=fill(network, kind, lm.params, batch, min(len(given), TOGETHER), span=span))
                     for given in (prompts, held_prompts) for batch in [unanswered(given, length, canvas)])
    console.print(f"{len(prompts)} answers of {canvas} tokens", soft_wrap=True)
    lora, filtered = o.lora is not None, o.objective == "learn2pd"

    def finish(target: Path, exact: Any, facts: dict[str, Any], before: Any, after: Any, what: str) -> str:
        told, figures = changes(before, after)
        write_facts(o, target, facts | told)
        write_card(o, target, facts, f"{what} of `{o.target}`. The license is that of `{o.target}`.",
                   f"{len(prompts):,} of its own answers of {canvas} tokens to prompts of {files_of(o)}", figures,
                   f"Figures before and after the training, on {len(held_prompts)} answers that were held out.",
                   ", diffusion")
        return shown(after)

    if filtered:
        examples, checked = (filters.collect(network, lm.params, batch, kind, span) for batch in (answers, held))
        start = filters.init_filter(key, span)

        def write_filter(target: Path, shipped: Any, exact: Any, facts: dict[str, Any]) -> str:
            filters.save_filter(target / "filter.safetensors", shipped)
            return finish(target, exact, facts, filters.figures(start, checked), filters.figures(exact, checked),
                          f"A filter for Learn2PD with blocks of {span} tokens")

        return Recipe(start, filters.FilterLoss(), lambda run: chosen(examples, count, o.seed, run.step),
                      lambda batch: batch.final.size, lambda params, run: filters.figures(params, checked),
                      write_filter, lambda run: jax.random.fold_in(key, run.step), rounded=False)

    whole = jax.device_put(lm.params, NamedSharding(mesh, PartitionSpec()))
    weights_of = lambda params: dx.adapters.apply(whole, params) if lora else params
    objective: Any = md.CertaintyForcing(network, kind, o.dtype, span)

    def agreement(weights: Any) -> dict[str, float]:
        made = fill(network, kind, weights, held, min(len(held_prompts), TOGETHER), at_once=True, span=span)
        return {"own_tokens_all_at_once": float((made == held.tokens)[held.answer].mean())}

    def write(target: Path, shipped: Any, exact: Any, facts: dict[str, Any]) -> str:
        if lora:
            dx.adapters.save(target, shipped, network, str(lm.config_entries.get("model_type", "llama")), o.target)
        else:
            dx.save(lm.with_params(jax.tree.map(np.asarray, shipped)), target)
        return finish(target, exact, facts, agreement(whole), agreement(weights_of(exact)),
                      f"{'An adapter' if lora else 'All weights'} by certainty forcing (dParallel)")

    made = Recipe(lm.params, objective, lambda run: chosen(answers, count, o.seed, run.step),
                  lambda batch: int(batch.live.sum()), lambda params, run: agreement(weights_of(params)), write,
                  lambda run: jax.random.fold_in(key, run.step), rounded=False)
    if not lora:
        return made
    return dataclasses.replace(made, params=dx.adapters.init(lm.params, key, o.lora, TARGETS),
                               objective=AdapterLoss(objective),
                               extra=lambda run: (jax.random.fold_in(key, run.step), whole))
