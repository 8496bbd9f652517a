"""Runs a recipe: places its weights, trains to the end of the schedule, rounds the weights, measures and exports."""

from __future__ import annotations

import dataclasses
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

import decodax as dx
from decodax.bench.figures import check_writable, plot_run
from decodax.jobs.own_chats import write_chats
from decodax.models.formats import unpacked
from decodax.train import loop
from decodax.train.export import hardware
from recipes.options import Options

Tree = Any


@dataclass(frozen=True)
class Recipe:
    """The first weights of a run, its loss, its data, and how it is measured.

    `batch` returns the batch of the run's next step, and `tokens` counts its tokens. `evaluate` returns held-out
    figures on the way. `finish` writes what is shipped into a directory, from the weights as they are shipped, the same
    in float32, and the facts of the run; it returns a line that says how good they are. `extra` returns the third
    argument of the loss for a step. Without `shardings` weights are replicated. `decay_pace` is that of
    `TrainingRun`; `rounded` is True if weights are shipped in bfloat16. `rates` are factors of the learning rate for
    the parts of the weights; None: 1.
    """

    params: Tree
    objective: loop.Objective
    batch: Callable[[loop.TrainingRun], Any]
    tokens: Callable[[Any], int]
    evaluate: Callable[[Tree, loop.TrainingRun], Mapping[str, float]]
    finish: Callable[[Path, Tree, Tree, dict[str, Any]], str]
    extra: Callable[[loop.TrainingRun], Any] = lambda run: None
    shardings: Tree | None = None
    decay_pace: float = 1.0
    rounded: bool = True
    rates: tuple[float, ...] | None = None


def target_of(options: Options) -> Any:
    """Returns the loaded model `options.target` in float32, with arrays in place of packed weights for `widen`."""
    lm = dx.load(options.target, dtype="float32")
    return dataclasses.replace(lm, params=unpacked(lm.params)) if options.widen else lm


def files_of_examples(options: Options, lm: Any, console: Console) -> list[str]:
    """Returns the files of `--data`, and that of the chats which `--own-chats` lets the target write."""
    if not options.own_chats:
        return list(options.data)
    file, of = options.output / "chats.jsonl", options.own_chats
    write_chats(lm, file, of, seed=options.seed, report=lambda done: console.print(
        f"{done:,} of {of:,} chats in {file}", soft_wrap=True))
    return [*options.data, str(file)]


def train(options: Options, on_step: Callable[[int], None] | None = None,
          console: Console | None = None) -> loop.TrainingRun:
    """Trains to the end of the schedule, exports, and returns the finished run.

    `on_step` is called with the number of steps done, after each of them; `console` is the terminal by default.
    """
    o, console = options, console or Console()
    check_writable(o.plot)
    o.output.mkdir(parents=True, exist_ok=True)
    # math.gcd(n, 0) is n
    mesh = loop.make_mesh(o.model_parallel, o.devices or math.gcd(jax.device_count(), o.settings.rows))
    made: Recipe = importlib.import_module(f"recipes.{o.recipe}").recipe(o, mesh, console)
    tx = (loop.muon if o.optimizer == "muon" else loop.adamw)(o.weight_decay)
    tx = tx if made.rates is None else loop.scaled(tx, made.rates)
    params, opt = loop.place_state(made.params, tx, mesh, made.shardings)
    decay_from = o.warmup if o.steps is not None and o.decay_from is None else o.decay_from
    schedule = loop.Schedule(**{"peak": o.peak, "warmup": o.warmup, "steps": o.steps, "decay_from": decay_from,
                                **o.settings.schedule})
    run = loop.TrainingRun(o.output, o.identity(), params, opt, schedule, o.minutes, o.decay_share, made.decay_pace)
    count = sum(x.size for x in jax.tree.leaves(params))
    console.print(f"{o.output.name}: {count:,} parameters, {mesh.size} devices", soft_wrap=True)

    def advance(run: loop.TrainingRun) -> tuple[dict[str, jax.Array], int]:
        batch = made.batch(run)
        run.params, run.opt, scalars = loop.update(
            made.objective, tx, run.params, run.opt, loop.place_batch(batch, mesh), made.extra(run),
            jnp.float32(run.schedule.rate(run.step)))
        return scalars, made.tokens(batch)

    run.loop(advance, lambda run: made.evaluate(run.params, run), log_every=o.log_every, eval_every=o.eval_every,
             save_every=o.save_every, resume=o.resume, console=console, on_step=on_step)
    shipped = jax.tree.map(lambda x: np.asarray(x.astype(jnp.bfloat16) if made.rounded else x), run.params)
    exact = jax.device_put(loop.cast(shipped, jnp.float32), made.shardings or NamedSharding(mesh, PartitionSpec()))
    target = o.export or o.output / "model"
    target.mkdir(parents=True, exist_ok=True)
    told = made.finish(target, shipped, exact, {
        "preset": o.preset, "steps": run.step, "tokens": run.tokens, "parameters": int(count),
        "hours": round(run.seconds / 3600, 3), "hardware": hardware(mesh.size),
        "command": o.command(run.step, run.schedule.decay_from)})
    console.print(f"{target}: {count:,} parameters after {run.step} steps: {told}", soft_wrap=True, highlight=False)
    if o.plot:      # last: the model is written if the plot cannot be
        plot_run(o.plot, run.metrics, o.output.name)
    return run


def main(options: Options) -> None:
    """Trains on all devices. A CPU is shown as one device a core: its element-wise operations then use all cores."""
    jax.config.update("jax_num_cpu_devices", options.devices or len(os.sched_getaffinity(0)))
    loop.keep_freed_memory()
    train(options)
