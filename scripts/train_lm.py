"""Trains the shipped language models: `python scripts/train_lm.py --preset pycode`; `--help` lists the options.

A Llama-shaped decoder on the source of the Python standard library: AdamW, warm-up and cosine decay, orbax checkpoints
that a killed run resumes from, optional distillation from a teacher, bits per byte on held-out files, and an export
that decodax and transformers both load. It runs on CPU, on one accelerator, or on all of a host's as a data x model
mesh.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import lm_export
import lm_training as lm
import numpy as np
import optax
import orbax.checkpoint as ocp
import pycode_data as data
from lm_options import PRESETS, Options, parse
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from tokenizers import Tokenizer

from decodax.models import Transformer, llama

EVAL_WINDOWS = 96


@dataclass
class Run:
    """A run in progress: what a checkpoint holds, and what follows from the options.

    `step` is the next step to do; `seconds` the training time over all sittings; `pace` pairs of (step, seconds).
    """

    options: Options
    tokenizer: Tokenizer
    model: Transformer
    mesh: jax.sharding.Mesh
    tx: optax.GradientTransformation
    params: Any
    opt: Any
    plan: lm.Plan
    teacher: Transformer | None = None
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

    def settle(self) -> None:
        """Fixes the end of a run with a time budget once the decay has to begin, from the speed of its second half."""
        if self.plan.steps is not None or self.options.minutes is None or len(self.pace) < 2:
            return
        left = self.options.minutes * 60 - self.seconds
        if left > self.options.decay_share * self.options.minutes * 60:
            return
        (first, began), (last, ended) = self.pace[len(self.pace) // 2 - 1], self.pace[-1]
        # Windows of the whole context, which the decay uses, take about a fifth longer for the same number of tokens.
        steps = max(1, int(left / ((ended - began) / max(last - first, 1) * 1.2)))
        self.plan = dataclasses.replace(self.plan, decay_from=self.step, steps=self.step + steps)


def start(options: Options, train: list[data.Document]) -> Run:
    """A run at step 0: tokenizer, fresh weights and optimizer state on the mesh, and the plan.

    Raises:
        ValueError: a batch does not divide among the devices.
    """
    preset = PRESETS[options.preset]
    if options.teacher is not None:
        tokenizer = Tokenizer.from_file(str(options.teacher / "tokenizer.json"))
    elif options.resume and (options.output / "tokenizer.json").is_file():
        tokenizer = Tokenizer.from_file(str(options.output / "tokenizer.json"))
    else:
        tokenizer = data.train_tokenizer(train, preset.vocab)
    options.output.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(options.output / "tokenizer.json"))

    model = Transformer(llama(vocab=tokenizer.get_vocab_size(), tied=True, **preset.shape))
    mesh = lm.make_mesh(options.model_parallel, options.devices)
    ways = mesh.shape["data"]
    for rows in batch_shape(options, model, False)[0], batch_shape(options, model, True)[0]:
        if rows % ways:
            raise ValueError(f"batch: got {options.batch}, {rows} windows a step, not a multiple of the {ways} devices")
    tx = lm.optimizer(options.weight_decay)
    shardings = model.shardings(mesh)
    params = jax.device_put(model.init_params(jax.random.key(options.seed)), shardings)
    opt = jax.device_put(tx.init(params), lm.optimizer_shardings(tx, tx.init(params), shardings, mesh))
    warmup, peak = options.warmup or 0, options.peak or 0.0
    decay_from = warmup if options.steps is not None and options.decay_from is None else options.decay_from
    return Run(options, tokenizer, model, mesh, tx, params, opt, lm.Plan(peak, warmup, options.steps, decay_from))


def save(run: Run, manager: ocp.CheckpointManager) -> None:
    """Writes a checkpoint of the weights, the optimizer and the place in the data."""
    facts = {
        "identity": run.options.identity(), "plan": dataclasses.asdict(run.plan), "seconds": run.seconds,
        "tokens": run.tokens, "pace": run.pace,
    }  # fmt: skip
    state = ocp.args.StandardSave({"params": run.params, "opt": run.opt})
    manager.save(run.step, args=ocp.args.Composite(state=state, facts=ocp.args.JsonSave(facts)))
    manager.wait_until_finished()


def restore(run: Run, manager: ocp.CheckpointManager) -> None:
    """Goes on from the latest checkpoint, if there is one.

    Raises:
        ValueError: the checkpoint is of a run with other options; the message names them.
    """
    step = manager.latest_step()
    if step is None:
        return
    shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, {"params": run.params, "opt": run.opt})
    args = ocp.args.Composite(state=ocp.args.StandardRestore(shapes), facts=ocp.args.JsonRestore())
    found = manager.restore(step, args=args)
    facts, mine = found["facts"], run.options.identity()
    then = facts["identity"]
    if changed := "; ".join(f"{k}: {then[k]!r} then, {v!r} now" for k, v in mine.items() if then[k] != v):
        raise ValueError(f"output: {run.options.output} holds a run with other options ({changed}); "
                         "give another --output, or --no-resume to begin anew")
    run.params, run.opt, run.step = found["state"]["params"], found["state"]["opt"], step
    run.plan, run.seconds, run.tokens = lm.Plan(**facts["plan"]), facts["seconds"], facts["tokens"]
    run.pace = [(int(s), float(t)) for s, t in facts["pace"]]


def batch_shape(options: Options, model: Transformer, decaying: bool) -> tuple[int, int]:
    """(windows, tokens in a window) of a step: short windows on the plateau, whole contexts in the decay."""
    context = model.config.context
    batch, length = options.batch or 1, min(options.length or context, context)
    return (max(1, batch * length // context), context) if decaying else (batch, length)


def batch_at(run: Run, stream: np.ndarray) -> np.ndarray:
    """The batch of the run's next step."""
    batch, length = batch_shape(run.options, run.model, run.decaying)
    # The decay reads the data from the start again, in another order.
    seed, since = (run.options.seed + 1, run.plan.decay_from or 0) if run.decaying else (run.options.seed, 0)
    return data.Batches(stream, batch, length, seed)[run.step - since]


def evaluate(run: Run, params: Any, stream: np.ndarray, length: int, limit: int | None) -> float:
    """Held-out bits per byte in windows of `length` tokens."""
    ways = run.mesh.shape["data"]
    losses = lambda window: np.asarray(lm.token_losses(run.model, params, lm.place_batch(window, run.mesh)))
    lengths = lm.token_bytes(run.tokenizer)
    return lm.bits_per_byte(losses, stream, lengths, length, 8 * ways, limit)


def train(options: Options, on_step: Callable[[int], None] | None = None, console: Console | None = None) -> Run:
    """Trains to the end of the plan and exports.

    Args:
        on_step: called with the number of steps done, after each of them.
        console: where progress goes; None: the terminal.

    Returns:
        The finished run.
    """
    console = console or Console()
    documents, kept = data.load_corpus(options.corpus)
    run = start(options, documents)
    stream, held = data.pack(run.tokenizer, documents), data.pack(run.tokenizer, kept)
    guide = None
    if options.teacher is not None:
        run.teacher, guide = lm_export.load(options.teacher)
        guide = jax.device_put(guide, run.teacher.shardings(run.mesh))
    objective = lm.Objective(run.model, options.dtype, run.teacher, options.mix)
    checkpoints, metrics = (options.output / "checkpoints").absolute(), options.output / "metrics.jsonl"
    if not options.resume:
        shutil.rmtree(checkpoints, ignore_errors=True)
    count = sum(x.size for x in jax.tree.leaves(run.params))
    console.print(f"{options.preset}: {count:,} parameters, {len(stream):,} training tokens, "
                  f"{run.mesh.size} devices", soft_wrap=True)

    keep = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager(checkpoints, options=keep) as manager, _progress(console) as progress:
        restore(run, manager)
        _keep_metrics(metrics, run.step)
        task = progress.add_task("", total=1.0, note="")
        began, losses = time.monotonic() - run.seconds, []
        run.settle()
        while not run.finished:
            rate = jnp.float32(run.plan.rate(run.step))
            batch = lm.place_batch(batch_at(run, stream), run.mesh)
            run.params, run.opt, loss, truth = lm.update(objective, run.tx, run.params, run.opt, guide, batch, rate)
            losses.append((loss, truth))
            run.step, run.tokens = run.step + 1, run.tokens + batch.shape[0] * (batch.shape[1] - 1)
            if run.step % options.log_every == 0 or run.finished:
                entry = _log(run, losses, began)
                _append(metrics, entry)
                progress.update(task, completed=_share(run), note=_note(run, entry))
                losses = []
                run.settle()
            if run.step % options.eval_every == 0:
                # Positions beyond the plateau's windows are untrained until the decay.
                length = batch_shape(options, run.model, run.decaying)[1]
                bits = evaluate(run, run.params, held, length, EVAL_WINDOWS)
                _append(metrics, {"step": run.step, "tokens": run.tokens, "bits_per_byte": bits})
                console.print(f"step {run.step} of {run.plan.steps or '?'}: held-out {bits:.4f} bits per byte, "
                              f"{_note(run, entry) if run.step >= options.log_every else ''}", soft_wrap=True)
            if run.step % options.save_every == 0 or run.finished:
                run.seconds = time.monotonic() - began
                save(run, manager)
            if on_step is not None:
                on_step(run.step)
    lm_export.plot(metrics, options.output / "loss.png")
    finish(run, held, options.export or options.output / "model", console, guide)
    return run


def finish(run: Run, held: np.ndarray, target: Path, console: Console, guide: Any = None) -> None:
    """Rounds the weights to bfloat16, measures what is shipped on all held-out files, and exports it with its card."""
    shipped = jax.tree.map(lambda x: np.asarray(x.astype(jnp.bfloat16)), run.params)
    exact = jax.device_put(lm.cast(shipped, jnp.dtype(jnp.float32)), run.model.shardings(run.mesh))
    bits = evaluate(run, exact, held, run.model.config.context, None)
    facts = {
        "preset": run.options.preset,
        "data": data.corpus_name() if run.options.corpus is None else f"the .py files of {run.options.corpus.name}",
        "steps": run.step,
        "tokens": run.tokens,
        "held_out_bits_per_byte": round(bits, 4),
        "parameters": int(sum(x.size for x in jax.tree.leaves(shipped))),
        "hours": round(run.seconds / 3600, 3),
        "hardware": lm_export.hardware(run.mesh.size),
        "teacher": run.options.teacher.name if run.options.teacher else None,
        "command": run.options.command(run.step, run.plan.decay_from or 0),
    }
    if run.teacher is not None:
        context, rows = run.model.config.context, 8 * run.mesh.shape["data"]
        window = lm.place_batch(data.Batches(held, rows, context)[0], run.mesh)
        facts["acceptance"] = round(float(lm.overlap(run.teacher, run.model, guide, exact, window).mean()), 4)
    lm_export.export(target, run.model, shipped, run.tokenizer, facts)
    console.print(f"{target}: {facts['parameters']:,} parameters, {bits:.4f} held-out bits per byte "
                  f"after {run.step} steps", soft_wrap=True)


def _log(run: Run, losses: list[tuple[jax.Array, jax.Array]], began: float) -> dict[str, float]:
    """The metrics of the steps since the last entry; waits for the device.

    Raises:
        FloatingPointError: the loss is not finite.
    """
    loss, truth = (float(np.mean([np.asarray(x) for x in column])) for column in zip(*losses, strict=True))
    if not np.isfinite(loss):
        raise FloatingPointError(f"the loss is {loss} at step {run.step}: try a lower --peak")
    run.seconds = time.monotonic() - began
    last, then = run.pace[-1] if run.pace else (0, 0.0)
    speed = run.tokens / max(run.step, 1) * (run.step - last) / max(run.seconds - then, 1e-9)
    run.pace.append((run.step, run.seconds))
    return {
        "step": run.step, "tokens": run.tokens, "seconds": round(run.seconds, 2), "loss": loss, "cross_entropy": truth,
        "rate": run.plan.rate(run.step - 1), "tokens_per_second": round(speed, 1),
    }  # fmt: skip


def _share(run: Run) -> float:
    """How much of the run is done, 0 to 1."""
    if run.plan.steps is not None:
        return run.step / run.plan.steps
    return min(1.0, run.seconds / ((run.options.minutes or 1.0) * 60))


def _note(run: Run, entry: dict[str, float]) -> str:
    left = run.seconds * (1 / max(_share(run), 1e-9) - 1)
    return f"loss {entry['loss']:.3f}  {entry['tokens_per_second']:,.0f} tokens/s  {left / 60:.0f} min left"


def _progress(console: Console) -> Progress:
    percent, note = TextColumn("{task.percentage:>4.1f}%"), TextColumn("{task.fields[note]}")
    return Progress(BarColumn(), percent, note, console=console)


def _append(path: Path, entry: dict[str, float]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(entry) + "\n")


def _keep_metrics(path: Path, step: int) -> None:
    """Drops the entries that a killed sitting wrote after its last checkpoint."""
    lines = path.read_text().splitlines() if path.is_file() else []
    path.write_text("".join(f"{line}\n" for line in lines if json.loads(line)["step"] <= step))


def _keep_freed_memory() -> None:
    """Has glibc keep freed memory: handed back after each step, it costs a fifth of a CPU step in page faults.

    The settings (mallopt, malloc.h): M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX, M_ARENA_MAX.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        for setting, value in ((-1, 2**31 - 1), (-2, 2**28), (-4, 0), (-8, 1)):
            libc.mallopt(setting, value)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    # The CPU shown as one device a core runs also the element-wise parts of a step on all cores: 1.3 times the speed.
    jax.config.update("jax_num_cpu_devices", options.devices or len(os.sched_getaffinity(0)))
    _keep_freed_memory()
    try:
        train(options)
    except (ValueError, FileNotFoundError, FloatingPointError) as error:
        print(f"train_lm: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
