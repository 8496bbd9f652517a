"""Trains the shipped language models: `python scripts/train_lm.py --preset pycode`; `--help` lists the options.

A Llama-shaped decoder on the source of the Python standard library: AdamW, warm-up and cosine decay, orbax checkpoints
that a killed run resumes from, optional distillation from a teacher, bits per byte on held-out files, and an export
that decodax and transformers both load. It runs on CPU, on one accelerator, or on all of a host's as a data x model
mesh.
"""

from __future__ import annotations

import os
import sys
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
import pycode_data as data
import training_run
from lm_options import PRESETS, Options, parse
from rich.console import Console
from tokenizers import Tokenizer

from decodax.models import Transformer, llama

EVAL_WINDOWS = 96


@dataclass(kw_only=True)
class Run(training_run.Run):
    """A run in progress: what a checkpoint holds, and what follows from the options."""

    options: Options
    tokenizer: Tokenizer
    model: Transformer
    mesh: jax.sharding.Mesh
    tx: optax.GradientTransformation
    teacher: Transformer | None = None


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
    # Windows of the whole context, which the decay uses, take about a fifth longer for the same number of tokens.
    return Run(output=options.output, identity=options.identity(), params=params, opt=opt,
               plan=lm.Plan(peak, warmup, options.steps, decay_from), minutes=options.minutes,
               decay_share=options.decay_share, decay_pace=1.2, options=options, tokenizer=tokenizer, model=model,
               mesh=mesh, tx=tx)


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
    count = sum(x.size for x in jax.tree.leaves(run.params))
    console.print(f"{options.preset}: {count:,} parameters, {len(stream):,} training tokens, "
                  f"{run.mesh.size} devices", soft_wrap=True)

    def advance(_: training_run.Run) -> tuple[dict[str, jax.Array], int]:
        batch = lm.place_batch(batch_at(run, stream), run.mesh)
        run.params, run.opt, loss, truth = lm.update(objective, run.tx, run.params, run.opt, guide, batch,
                                                     jnp.float32(run.plan.rate(run.step)))
        return {"loss": loss, "cross_entropy": truth}, batch.shape[0] * (batch.shape[1] - 1)

    def measure(_: training_run.Run) -> dict[str, float]:
        # Positions beyond the plateau's windows are untrained until the decay.
        length = batch_shape(options, run.model, run.decaying)[1]
        return {"bits_per_byte": evaluate(run, run.params, held, length, EVAL_WINDOWS)}

    cadence = training_run.Cadence(options.log_every, options.eval_every, options.save_every)
    run.loop(advance, measure, cadence, resume=options.resume, console=console, on_step=on_step)
    lm_export.plot(run.metrics, options.output / "loss.png")
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


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    # The CPU shown as one device a core runs also the element-wise parts of a step on all cores: 1.3 times the speed.
    jax.config.update("jax_num_cpu_devices", options.devices or len(os.sched_getaffinity(0)))
    training_run.keep_freed_memory()
    try:
        train(options)
    except (ValueError, FileNotFoundError, FloatingPointError) as error:
        print(f"train_lm: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
