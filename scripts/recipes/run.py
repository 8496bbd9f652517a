"""Runs a recipe: places its weights, trains to the end of the schedule, rounds the weights, measures and exports."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console

from decodax.train.export import hardware
from decodax.train.loop import (
    Objective,
    Schedule,
    TrainingRun,
    adamw,
    cast,
    keep_freed_memory,
    make_mesh,
    muon,
    place_batch,
    place_state,
    update,
)
from recipes.options import Options

Tree = Any


@dataclass(frozen=True)
class Recipe:
    """What a run trains, on what, and how it is measured.

    Attributes:
        params: the first weights.
        objective: the loss. batch: returns the batch of the run's next step. tokens: counts the tokens of a batch.
        evaluate: returns held-out figures of weights on the way.
        finish: writes what is shipped into a directory, from the weights as they are shipped, the same in float32, and
            the facts of the run; returns a line that says how good they are.
        extra: returns the third argument of the objective for a step. shardings: of the weights; None: replicated.
        decay_pace: see `TrainingRun`. rounded: whether weights are shipped in bfloat16.
    """

    params: Tree
    objective: Objective
    batch: Callable[[TrainingRun], Any]
    tokens: Callable[[Any], int]
    evaluate: Callable[[Tree, TrainingRun], Mapping[str, float]]
    finish: Callable[[Path, Tree, Tree, dict[str, Any]], str]
    extra: Callable[[int], Any] = lambda step: None
    shardings: Tree | None = None
    decay_pace: float = 1.0
    rounded: bool = True


def train(options: Options, on_step: Callable[[int], None] | None = None,
          console: Console | None = None) -> TrainingRun:
    """Trains to the end of the schedule and exports.

    Args:
        on_step: called with the number of steps done, after each of them.
        console: where progress is printed; None: the terminal.

    Returns:
        The finished run.

    Raises:
        ValueError: options that do not fit the devices, the checkpoint or the model to start from.
    """
    console = console or Console()
    options.output.mkdir(parents=True, exist_ok=True)
    # math.gcd(n, 0) is n
    mesh = make_mesh(options.model_parallel, options.devices or math.gcd(jax.device_count(), options.settings.rows))
    made: Recipe = importlib.import_module(f"recipes.{options.recipe}").recipe(options, mesh, console)
    tx = (muon if options.optimizer == "muon" else adamw)(options.weight_decay)
    params, opt = place_state(made.params, tx, mesh, made.shardings)
    decay_from = options.warmup if options.steps is not None and options.decay_from is None else options.decay_from
    schedule = Schedule(**{"peak": options.peak, "warmup": options.warmup, "steps": options.steps,
                           "decay_from": decay_from, **options.settings.schedule})
    run = TrainingRun(options.output, options.identity(), params, opt, schedule, options.minutes, options.decay_share,
                      made.decay_pace)
    count = sum(x.size for x in jax.tree.leaves(params))
    console.print(f"{options.output.name}: {count:,} parameters, {mesh.size} devices", soft_wrap=True)

    def advance(run: TrainingRun) -> tuple[dict[str, jax.Array], int]:
        batch = made.batch(run)
        run.params, run.opt, scalars = update(made.objective, tx, run.params, run.opt, place_batch(batch, mesh),
                                              made.extra(run.step), jnp.float32(run.schedule.rate(run.step)))
        return scalars, made.tokens(batch)

    run.loop(advance, lambda run: made.evaluate(run.params, run), log_every=options.log_every,
             eval_every=options.eval_every, save_every=options.save_every, resume=options.resume, console=console,
             on_step=on_step)
    shipped = jax.tree.map(lambda x: np.asarray(x.astype(jnp.bfloat16) if made.rounded else x), run.params)
    exact = jax.device_put(cast(shipped, jnp.float32), made.shardings or NamedSharding(mesh, PartitionSpec()))
    target = options.export or options.output / "model"
    target.mkdir(parents=True, exist_ok=True)
    facts = {"preset": options.preset, "steps": run.step, "tokens": run.tokens, "parameters": int(count),
             "hours": round(run.seconds / 3600, 3), "hardware": hardware(mesh.size),
             "command": options.command(run.step, run.schedule.decay_from)}
    told = made.finish(target, shipped, exact, facts)
    console.print(f"{target}: {count:,} parameters after {run.step} steps: {told}", soft_wrap=True, highlight=False)
    return run


def main(options: Options) -> None:
    """Trains on all devices. A CPU is shown as one device a core: its element-wise operations then use all cores."""
    jax.config.update("jax_num_cpu_devices", options.devices or len(os.sched_getaffinity(0)))
    keep_freed_memory()
    train(options)
