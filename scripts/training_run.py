"""A training run that survives being killed: what its checkpoint holds, its time budget, its log, its loop.

What is trained, on what and how it is measured is the caller's: `Run.loop` asks for a step and for an evaluation.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import lm_training as lm
import numpy as np
import orbax.checkpoint as ocp
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

Tree = Any


@dataclass(frozen=True)
class Cadence:
    """Steps between lines of metrics.jsonl, between evaluations, and between checkpoints."""

    log: int = 20
    evaluate: int = 250
    save: int = 250


@dataclass
class Run:
    """A run in progress.

    Attributes:
        output: where checkpoints and metrics.jsonl lie.
        identity: what decides the weights, as JSON values; a run is only resumed where it is equal.
        params, opt: weights and optimizer state.
        plan: the learning rate; with a time budget its end is settled on the way.
        minutes: the time budget, or None where the plan says the steps. decay_share: share of it spent in the decay.
        decay_pace: how much longer a step takes in the decay than before.
        step: the next step to do. seconds: training time over all sittings. tokens: seen.
        pace: pairs of (step, seconds).
    """

    output: Path
    identity: dict[str, Any]
    params: Tree
    opt: Tree
    plan: lm.Plan
    minutes: float | None = None
    decay_share: float = 0.4
    decay_pace: float = 1.0
    step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    pace: list[tuple[int, float]] = dataclasses.field(default_factory=list)

    @property
    def finished(self) -> bool:
        return self.plan.steps is not None and self.step >= self.plan.steps

    @property
    def decaying(self) -> bool:
        return self.plan.decay_from is not None and self.step >= self.plan.decay_from

    @property
    def share(self) -> float:
        """How much of the run is done, 0 to 1."""
        if self.plan.steps is not None:
            return self.step / self.plan.steps
        return min(1.0, self.seconds / ((self.minutes or 1.0) * 60))

    @property
    def metrics(self) -> Path:
        return self.output / "metrics.jsonl"

    def settle(self) -> None:
        """Fixes the end of a run with a time budget once the decay has to begin, from the speed of its second half."""
        if self.plan.steps is not None or self.minutes is None or len(self.pace) < 2:
            return
        left = self.minutes * 60 - self.seconds
        if left > self.decay_share * self.minutes * 60:
            return
        (first, began), (last, ended) = self.pace[len(self.pace) // 2 - 1], self.pace[-1]
        steps = max(1, int(left / ((ended - began) / max(last - first, 1) * self.decay_pace)))
        self.plan = dataclasses.replace(self.plan, decay_from=self.step, steps=self.step + steps)

    def save(self, manager: ocp.CheckpointManager) -> None:
        """Writes a checkpoint of the weights, the optimizer and the place in the data."""
        facts = {"identity": self.identity, "plan": dataclasses.asdict(self.plan), "seconds": self.seconds,
                 "tokens": self.tokens, "pace": self.pace}
        state = ocp.args.StandardSave({"params": self.params, "opt": self.opt})
        manager.save(self.step, args=ocp.args.Composite(state=state, facts=ocp.args.JsonSave(facts)))
        manager.wait_until_finished()

    def restore(self, manager: ocp.CheckpointManager) -> None:
        """Goes on from the latest checkpoint, if there is one.

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
                             "give another --output, or --no-resume to begin anew")
        found = manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(shapes)))
        self.params, self.opt, self.step = found["state"]["params"], found["state"]["opt"], step
        self.plan, self.seconds, self.tokens = lm.Plan(**facts["plan"]), facts["seconds"], facts["tokens"]
        self.pace = [(int(s), float(t)) for s, t in facts["pace"]]

    def loop(self, advance: Callable[[Run], tuple[dict[str, jax.Array], int]],
             evaluate: Callable[[Run], Mapping[str, float]], cadence: Cadence, *, resume: bool = True,
             console: Console | None = None, on_step: Callable[[int], None] | None = None) -> None:
        """Runs to the end of the plan.

        Args:
            advance: does the run's next step (sets `params` and `opt`); returns scalars to log, "loss" among them,
                and the tokens seen.
            evaluate: figures of the present weights.
            on_step: called with the number of steps done, after each of them.

        Raises:
            FloatingPointError: the loss is not finite.
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
            bar = progress.add_task("", total=1.0, completed=self.share, note="")
            began, waiting = time.monotonic() - self.seconds, list[dict[str, jax.Array]]()
            self.settle()
            while not self.finished:
                scalars, tokens = advance(self)
                waiting.append(scalars)
                self.step, self.tokens = self.step + 1, self.tokens + tokens
                if self.step % cadence.log == 0 or self.finished:
                    progress.update(bar, completed=self.share, note=self._log(waiting, began))
                    waiting = []
                    self.settle()
                if self.step % cadence.evaluate == 0:
                    figures = dict(evaluate(self))
                    self._append({"step": self.step, "tokens": self.tokens, **figures})
                    told = ", ".join(f"{k.replace('_', ' ')} {v:.4f}" for k, v in figures.items())
                    console.print(f"step {self.step} of {self.plan.steps or '?'}: held-out {told}", soft_wrap=True)
                if self.step % cadence.save == 0 or self.finished:
                    self.seconds = time.monotonic() - began
                    self.save(manager)
                if on_step is not None:
                    on_step(self.step)

    def _log(self, waiting: list[dict[str, jax.Array]], began: float) -> str:
        """Writes the metrics of the steps since the last entry; waits for the device."""
        means = {k: float(np.mean([np.asarray(x[k]) for x in waiting])) for k in waiting[0]}
        if not np.isfinite(means["loss"]):
            raise FloatingPointError(f"the loss is {means['loss']} at step {self.step}: try a lower --peak")
        self.seconds = time.monotonic() - began
        last, then = self.pace[-1] if self.pace else (0, 0.0)
        speed = self.tokens / max(self.step, 1) * (self.step - last) / max(self.seconds - then, 1e-9)
        self.pace.append((self.step, self.seconds))
        self._append({"step": self.step, "tokens": self.tokens, "seconds": round(self.seconds, 2), **means,
                      "rate": self.plan.rate(self.step - 1), "tokens_per_second": round(speed, 1)})
        left = self.seconds * (1 / max(self.share, 1e-9) - 1)
        return f"loss {means['loss']:.3f}  {speed:,.0f} tokens/s  {left / 60:.0f} min left"

    def _append(self, entry: dict[str, float]) -> None:
        with self.metrics.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def _keep_metrics(self) -> None:
        """Drops the entries that a killed sitting wrote after its last checkpoint."""
        lines = self.metrics.read_text().splitlines() if self.metrics.is_file() else []
        self.metrics.write_text("".join(f"{line}\n" for line in lines if json.loads(line)["step"] <= self.step))


def keep_freed_memory() -> None:
    """Has glibc keep freed memory: handed back after each step, it costs a fifth of a CPU step in page faults.

    The settings (mallopt, malloc.h): M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX, M_ARENA_MAX.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        for setting, value in ((-1, 2**31 - 1), (-2, 2**28), (-4, 0), (-8, 1)):
            libc.mallopt(setting, value)
