"""A training loop that resumes after it was killed: learning-rate schedule, optimizer step, checkpoints, log.

The caller supplies a loss and the batches. The loop is deterministic: a batch is a function of the step, and a run that
is resumed from a checkpoint ends with the same weights as one that was never interrupted. Needs the extra `train`
(optax).
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from optax import contrib
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

Tree = Any


class Objective(Protocol):
    """A loss function for training. It must be hashable, because it is static under `jax.jit`."""

    def __call__(self, params: Tree, batch: Any, extra: Any) -> tuple[Array, dict[str, Array]]:
        """Returns the loss and scalars to log, "loss" among them. `extra` is a random key, a teacher's weights, or
        None."""
        ...


@dataclass(frozen=True)
class Schedule:
    """The learning rate by step: linear warm-up, plateau, half-cosine down to `floor * peak`.

    Attributes:
        peak: the highest learning rate.
        warmup: number of steps of the warm-up.
        steps: number of steps of the run. None at the start of a run with a time budget: `TrainingRun.settle` sets it
            and `decay_from` from the measured speed when the decay has to begin. Runs with the same two numbers have
            the same result.
        decay_from: the step at which the cosine begins; `warmup` gives the usual cosine schedule.
        floor: the rate at the end of the cosine, relative to `peak`.
        horizon: the step at which the cosine would end, if that is not `steps`.
        cooldown: number of steps at the end in which the rate falls linearly to 0.
    """

    peak: float
    warmup: int
    steps: int | None = None
    decay_from: int | None = None
    floor: float = 0.02
    horizon: int | None = None
    cooldown: int = 0

    def rate(self, step: int) -> float:
        """Returns the learning rate of `step` (0-based).

        >>> [round(Schedule(1.0, 2, 6, 2, floor=0.0).rate(s), 3) for s in range(6)]
        [0.5, 1.0, 1.0, 0.854, 0.5, 0.146]
        """
        warm = min(1.0, (step + 1) / max(self.warmup, 1))
        if self.steps is None or self.decay_from is None:
            return self.peak * warm
        end = self.horizon or self.steps
        done = min(max((step - self.decay_from) / max(end - self.decay_from, 1), 0.0), 1.0)
        warm *= min(1.0, (self.steps - step) / self.cooldown) if self.cooldown else 1.0
        return self.peak * warm * (self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * done)))


def _chain(direction: optax.GradientTransformation, weight_decay: float) -> optax.GradientTransformation:
    """Returns an optimizer: gradient clipping, then `direction`, then weight decay on matrices; norm scales do not
    decay."""
    return optax.chain(
        optax.clip_by_global_norm(1.0), direction,
        optax.add_decayed_weights(weight_decay, mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params)))


@cache
def adamw(weight_decay: float) -> optax.GradientTransformation:
    """Returns AdamW (Loshchilov and Hutter, 2019) with gradients clipped to a global norm of 1, and weight decay on
    arrays of two or more axes only.

    The learning rate is not applied, and the sign not changed: `update` in this module subtracts the rate of the
    schedule times the result. The same arguments give the same object, so that a second run in a process compiles
    nothing.
    """
    return _chain(optax.scale_by_adam(b1=0.9, b2=0.98, eps=1e-9), weight_decay)


@cache
def scaled(tx: optax.GradientTransformation, rates: Any) -> optax.GradientTransformation:
    """Returns an optimizer whose learning rate has a factor for each part of the weights.

    The same arguments give the same object, so that a second run in a process compiles nothing.

    Args:
        tx: the optimizer.
        rates: the factors, a tuple with one for each entry of the weights, which are a tuple, too.
    """
    def scale(moves: Any, _: Any) -> Any:
        return tuple(jax.tree.map(lambda x, rate=rate: rate * x, part) for rate, part in zip(rates, moves, strict=True))

    return optax.chain(tx, optax.stateless(scale))


@cache
def muon(weight_decay: float) -> optax.GradientTransformation:
    """Returns Muon (Jordan et al., 2024) for kernels with Adam for embeddings and norms, at a unit learning rate.

    A kernel moves by its orthogonalised momentum times `0.2 sqrt(max(in, out))`, which gives the moves the size of
    AdamW's (Liu et al., 2025), so that one learning rate serves both.
    """
    plain = lambda tree: jax.tree.map(lambda x: contrib.MuonDimensionNumbers(0, 1), tree)
    size = optax.stateless(lambda tree, _: jax.tree.map(lambda x: 0.2 * max(x.shape) ** 0.5 * x, tree))
    kinds = lambda tree: jax.tree_util.tree_map_with_path(
        lambda path, x: "kernel" if getattr(path[-1], "key", None) == "kernel" else "rest", tree)
    return _chain(optax.partition(
        {"kernel": optax.chain(contrib.scale_by_muon(weight_dimension_numbers=plain), size),
         "rest": optax.scale_by_adam(b1=0.9, b2=0.98, eps=1e-9)}, kinds), weight_decay)


def cast(params: Tree, dtype: Any) -> Tree:
    """Returns a pytree whose floating-point arrays have the given dtype; others do not change. Master weights stay
    float32, and bfloat16 copies are for computing only."""
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, params)


@partial(jax.jit, static_argnames=("objective", "tx"), donate_argnames=("params", "opt"))
def update(objective: Objective, tx: optax.GradientTransformation, params: Tree, opt: Tree, batch: Any, extra: Any,
           rate: Array) -> tuple[Tree, Tree, dict[str, Array]]:
    """Does one optimizer step.

    Args:
        objective: maps (params, batch, extra) to (loss, scalars).
        tx: the optimizer, without a learning rate.
        params: the weights; donated.
        opt: state of the optimizer; donated.
        batch: the examples.
        extra: other inputs of the objective.
        rate: the learning rate, `f32[]`.

    Returns:
        The new weights, the new state of the optimizer, and the scalars of the objective.
    """
    (_, scalars), grads = jax.value_and_grad(objective, has_aux=True)(params, batch, extra)
    moves, opt = tx.update(grads, opt, params)
    return jax.tree.map(lambda p, m: p - rate * m, params, moves), opt, scalars


def make_mesh(model_parallel: int, count: int | None = None) -> Mesh:
    """Returns a (data, model) mesh over the first `count` devices (None: all).

    Raises:
        ValueError: there are fewer devices, or `model_parallel` does not divide their number.
    """
    count = jax.device_count() if count is None else count
    if not 1 <= count <= jax.device_count():
        raise ValueError(f"devices: got {count}, takes 1 to {jax.device_count()}")
    if model_parallel < 1 or count % model_parallel:
        raise ValueError(f"model_parallel: got {model_parallel}, takes a divisor of the {count} devices")
    shape, kinds = (count // model_parallel, model_parallel), (AxisType.Auto, AxisType.Auto)
    return jax.make_mesh(shape, ("data", "model"), axis_types=kinds, devices=jax.devices()[:count])


def place_batch(batch: Tree, mesh: Mesh) -> Tree:
    """Splits the first axis of every array over the `data` axis of the mesh.

    Raises:
        ValueError: the rows do not divide among the devices.
    """
    rows, ways = len(jax.tree.leaves(batch)[0]), mesh.shape["data"]
    if rows % ways:
        raise ValueError(f"batch: got {rows} rows in a step, takes a multiple of the {ways} devices")
    return jax.device_put(batch, NamedSharding(mesh, P("data")))


def place_state(params: Tree, tx: optax.GradientTransformation, mesh: Mesh,
                shardings: Tree | None) -> tuple[Tree, Tree]:
    """Places copies of the weights and a fresh optimizer state on a mesh; moments are placed like their parameters.

    Args:
        params: the weights.
        tx: the optimizer.
        mesh: the mesh.
        shardings: shardings of the parameters; None replicates everything.
    """
    everywhere = NamedSharding(mesh, P())
    params = jax.tree.map(np.array, params)         # copies, because a step donates them
    if shardings is None:
        params = jax.device_put(params, everywhere)
        return params, jax.device_put(tx.init(params), everywhere)
    params = jax.device_put(params, shardings)
    opt = tx.init(params)
    return params, jax.device_put(opt, optax.tree_map_params(
        tx, lambda _, s: s, opt, shardings, transform_non_params=lambda _: everywhere))


@dataclass
class TrainingRun:
    """A training run in progress.

    Attributes:
        output: directory of checkpoints and metrics.jsonl.
        identity: the options that determine the weights, as JSON values; a run is only resumed if they are equal.
        params: the weights.
        opt: the optimizer state.
        schedule: the learning rate; with a time budget its end is set during the run.
        minutes: the time budget, or None if the schedule has `steps`.
        decay_share: share of the time budget for the decay.
        decay_pace: duration of a step in the decay relative to a step before it.
        step: index of the next step.
        seconds: training time, including earlier sessions that were interrupted.
        tokens: number of tokens seen.
        pace: pairs of step and seconds, from which the speed is measured.
    """

    output: Path
    identity: dict[str, Any]
    params: Tree
    opt: Tree
    schedule: Schedule
    minutes: float | None = None
    decay_share: float = 0.4
    decay_pace: float = 1.0
    step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    pace: list[tuple[int, float]] = dataclasses.field(default_factory=list)

    @property
    def finished(self) -> bool:
        """True if all steps are done."""
        return self.schedule.steps is not None and self.step >= self.schedule.steps

    @property
    def decaying(self) -> bool:
        """True if the next step belongs to the decay of the learning rate."""
        return self.schedule.decay_from is not None and self.step >= self.schedule.decay_from

    @property
    def share(self) -> float:
        """Share of the run that is done, 0 to 1."""
        if self.schedule.steps is not None:
            return self.step / self.schedule.steps
        return min(1.0, self.seconds / ((self.minutes or 1.0) * 60))

    @property
    def metrics(self) -> Path:
        """Path of the log, which has one JSON object in each line."""
        return self.output / "metrics.jsonl"

    def settle(self) -> None:
        """Sets the number of steps of a run with a time budget once the decay of the learning rate has to begin, from
        the time that is left and the speed in the later half of `pace`. Before, and in other runs, nothing changes."""
        if self.schedule.steps is not None or self.minutes is None or len(self.pace) < 2:
            return
        left = self.minutes * 60 - self.seconds
        if left > self.decay_share * self.minutes * 60:
            return
        (first, began), (last, ended) = self.pace[len(self.pace) // 2 - 1], self.pace[-1]
        steps = max(1, int(left / ((ended - began) / max(last - first, 1) * self.decay_pace)))
        self.schedule = dataclasses.replace(self.schedule, decay_from=self.step, steps=self.step + steps)

    def save(self, manager: ocp.CheckpointManager) -> None:
        """Writes a checkpoint of the weights, the optimizer and the position in the data."""
        facts = {"identity": self.identity, "schedule": dataclasses.asdict(self.schedule), "seconds": self.seconds,
                 "tokens": self.tokens, "pace": self.pace}
        state = ocp.args.StandardSave({"params": self.params, "opt": self.opt})
        manager.save(self.step, args=ocp.args.Composite(state=state, facts=ocp.args.JsonSave(facts)))
        manager.wait_until_finished()

    def restore(self, manager: ocp.CheckpointManager) -> None:
        """Continues from the latest checkpoint, if there is one.

        Raises:
            ValueError: the checkpoint is of a run with other options; the message names them.
        """
        step = manager.latest_step()
        if step is None:
            return
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, {"params": self.params, "opt": self.opt})
        found = manager.restore(step, args=ocp.args.Composite(facts=ocp.args.JsonRestore()))
        facts, then = found["facts"], found["facts"]["identity"]
        pairs = {k: (then.get(k), self.identity.get(k)) for k in {**self.identity, **then}}
        changed = "; ".join(f"{k}: {a!r} then, {b!r} now" for k, (a, b) in pairs.items() if a != b)
        if changed:
            raise ValueError(f"output: {self.output} holds a run with other options ({changed}); "
                             "use another --output, or --no-resume to start again")
        found = manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(shapes)))
        self.params, self.opt, self.step = found["state"]["params"], found["state"]["opt"], step
        self.schedule, self.seconds, self.tokens = Schedule(**facts["schedule"]), facts["seconds"], facts["tokens"]
        self.pace = [(int(s), float(t)) for s, t in facts["pace"]]

    def loop(self, advance: Callable[[TrainingRun], tuple[dict[str, Array], int]],
             evaluate: Callable[[TrainingRun], Mapping[str, float]], *, log_every: int = 20, eval_every: int = 250,
             save_every: int = 250, resume: bool = True, console: Console | None = None,
             on_step: Callable[[int], None] | None = None) -> None:
        """Trains to the end of the schedule, with a progress bar.

        Args:
            advance: runs the next step (sets `params` and `opt`); returns scalars to log, "loss" among them, and the
                number of tokens seen.
            evaluate: returns held-out figures of the current weights.
            log_every: steps between lines of metrics.jsonl.
            eval_every: steps between evaluations.
            save_every: steps between checkpoints.
            resume: whether to continue from the latest checkpoint.
            console: where to print.
            on_step: called after each step with the number of finished steps.

        Raises:
            FloatingPointError: the loss is not finite.
            ValueError: see `restore`.
        """
        console = console or Console()
        checkpoints = (self.output / "checkpoints").absolute()
        if not resume:
            shutil.rmtree(checkpoints, ignore_errors=True)
        keep = ocp.CheckpointManagerOptions(max_to_keep=2)
        percent, note = TextColumn("{task.percentage:>4.1f}%"), TextColumn("{task.fields[note]}")
        with (ocp.CheckpointManager(checkpoints, options=keep) as manager,
              Progress(BarColumn(), percent, note, console=console) as progress):
            self.restore(manager)
            self._keep_metrics()
            if self.finished:
                console.print(f"{self.output}: this run ended with step {self.step}; nothing is left to train")
            bar = progress.add_task("", total=1.0, note="")
            progress.update(bar, completed=self.share)
            began, waiting = time.monotonic() - self.seconds, list[dict[str, Array]]()
            self.settle()
            while not self.finished:
                scalars, tokens = advance(self)
                waiting.append(scalars)
                self.step, self.tokens = self.step + 1, self.tokens + tokens
                if self.step % log_every == 0 or self.finished:
                    progress.update(bar, completed=self.share, note=self._log(waiting, began))
                    waiting = []
                    self.settle()
                if self.step % eval_every == 0:
                    figures = dict(evaluate(self))
                    self._append({"step": self.step, "tokens": self.tokens, **figures})
                    shown = ", ".join(f"{k.replace('_', ' ')} {v:.4f}" for k, v in figures.items())
                    console.print(f"step {self.step} of {self.schedule.steps or '?'}: held-out {shown}", soft_wrap=True)
                if self.step % save_every == 0 or self.finished:
                    self.seconds = time.monotonic() - began
                    self.save(manager)
                if on_step is not None:
                    on_step(self.step)

    def _log(self, waiting: list[dict[str, Array]], began: float) -> str:
        """Writes the means of the scalars since the last entry, and returns a summary. This waits for the device."""
        means = {k: float(np.mean([np.asarray(x[k]) for x in waiting])) for k in waiting[0]}
        if not np.isfinite(means["loss"]):
            raise FloatingPointError(f"the loss is {means['loss']} at step {self.step}: try a lower --peak")
        self.seconds = time.monotonic() - began
        last, then = self.pace[-1] if self.pace else (0, 0.0)
        speed = self.tokens / max(self.step, 1) * (self.step - last) / max(self.seconds - then, 1e-9)
        self.pace.append((self.step, self.seconds))
        self._append({"step": self.step, "tokens": self.tokens, "seconds": round(self.seconds, 2), **means,
                      "rate": self.schedule.rate(self.step - 1), "tokens_per_second": round(speed, 1)})
        left = self.seconds * (1 / max(self.share, 1e-9) - 1)
        return f"loss {means['loss']:.3f}  {speed:,.0f} tokens/s  {left / 60:.0f} min left"

    def _append(self, entry: dict[str, float]) -> None:
        with self.metrics.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def _keep_metrics(self) -> None:
        """Removes the log entries that a killed session wrote after its last checkpoint."""
        lines = self.metrics.read_text().splitlines() if self.metrics.is_file() else []
        self.metrics.write_text("".join(f"{line}\n" for line in lines if json.loads(line)["step"] <= self.step))


def keep_freed_memory() -> None:
    """Makes glibc keep freed memory: returning it to the system after each step costs a fifth of a CPU step in page
    faults.

    The settings (mallopt, malloc.h): M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX, M_ARENA_MAX.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        for setting, value in ((-1, 2**31 - 1), (-2, 2**28), (-4, 0), (-8, 1)):
            libc.mallopt(setting, value)
