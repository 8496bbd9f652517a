"""Trains the shipped diffusion models: `python scripts/train_diffusion.py --preset tasks-diffusion`; `--help`.

A Llama-shaped network without the causal mask, or with a mask by blocks: AdamW, warm-up and cosine decay, checkpoints
that a killed run resumes from, held-out accuracy (or a bound on bits per byte) on the way, and an export that `dx.load`
reads. A model may start from an autoregressive one (`--init`), which gets a mask token, as Dream and SDAR did. Two
stages follow on a model's own answers, to problems or as the rest of texts: certainty forcing, which makes it surer,
and a filter for Learn2PD's decoding. `--attention causal-prefix` trains for set block decoding.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusion_data as data
import diffusion_export as export
import diffusion_filter as filters
import diffusion_training as dt
import jax
import jax.numpy as jnp
import lm_training as lm
import numpy as np
import problems
import pycode_data
from diffusion_options import PRESETS, Options, parse
from rich.console import Console
from tokenizers import Tokenizer
from training_run import Cadence, Run, keep_freed_memory

from decodax.io.checkpoint import load_model
from decodax.io.load import ZOO, find
from decodax.models import Diffusion, Transformer, llama

HELD_OUT_EACH, HELD_OUT_SHIPPED = 32, 500
"""Held-out problems of each task in an evaluation on the way, and of what is shipped."""

EVAL_WINDOWS, SHIPPED_WINDOWS = 48, 512
"""Held-out windows of text, likewise."""


@dataclass(frozen=True)
class Setting:
    """What a run trains, on what, and how it is measured.

    Attributes:
        params: the first weights. batches: gives the batch of a step. objective: the loss.
        evaluate: figures of weights; with True as second argument those that are published.
        tokens: the tokens of a batch.
        export: writes what is shipped, from the weights and the facts of the run.
    """

    params: Any
    batches: Any
    objective: Any
    evaluate: Callable[[Any, bool], dict[str, float]]
    tokens: Callable[[Any], int]
    export: Callable[[Path, Any, Mapping[str, Any]], None]


def setting(options: Options, console: Console) -> Setting:
    """What the options ask for."""
    preset = PRESETS[options.preset]
    if options.stage is not None:
        return _stage(options, console)
    if preset.data == "problems":
        tokenizer = problems.tokenizer()
        batches: Any = data.Problems(options.batch or 1, options.seed, options.shares)
        kept = None
    else:
        documents, kept = pycode_data.load_corpus(options.corpus)
        tokenizer = _text_tokenizer(options, documents)
        stream = pycode_data.pack(tokenizer, documents)
        batches = data.Text(stream, options.batch or 1, options.length or preset.length, options.seed)
    model, params = first_weights(options, tokenizer.get_vocab_size())
    mask = tokenizer.get_vocab_size() - 1
    attention: Any = options.attention or ("full" if options.block is None else "block-causal")
    kind = Diffusion(mask, options.shift, attention, options.block)
    dt.check(kind)
    objective = dt.Bound(model, kind, options.dtype, options.apart)
    evaluate = _measure(options, objective, tokenizer, kept)
    write = lambda target, params, facts: export.export(target, model, kind, params, tokenizer, facts)
    return Setting(params, batches, objective, evaluate, lambda batch: int(batch.live.sum()), write)


def _measure(options: Options, objective: dt.Bound, tokenizer: Tokenizer, kept: list[pycode_data.Document] | None
             ) -> Callable[[Any, bool], dict[str, float]]:
    """What held-out data say of weights: accuracy on problems, or bits per byte of the files that were `kept`."""
    def evaluate(params: Any, published: bool) -> dict[str, float]:
        if kept is None:
            count = HELD_OUT_SHIPPED if published else HELD_OUT_EACH
            return accuracy(objective.network, objective.kind, params, count)
        limit = SHIPPED_WINDOWS if published else EVAL_WINDOWS
        length = PRESETS[options.preset].length if options.stage or options.length is None else options.length
        held = pycode_data.pack(tokenizer, kept)
        return {"bits_per_byte": dt.bound_per_byte(objective, params, held, lm.token_bytes(tokenizer), length,
                                                   options.batch or 1, limit)}

    return evaluate


def _stage(options: Options, console: Console) -> Setting:
    """Certainty forcing or the filter, from a finished model and its own answers."""
    source = find(options.init or options.preset)
    model, params = load_model(source, dtype="float32")
    kind = export.diffusion_of(source)
    dt.check(kind)
    text = PRESETS[options.preset].data == "text"
    span = options.span or min(kind.block or options.canvas, options.canvas)
    if options.canvas % span:
        raise ValueError(f"span: got None and a model with blocks of {span}; it takes a divisor of the "
                         f"{options.canvas} tokens of an answer")
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json")) if text else problems.tokenizer()
    documents, kept = pycode_data.load_corpus(options.corpus) if text else ([], [])

    def answered(held: bool) -> dt.Batch:
        if text:
            return own_texts(model, kind, params, tokenizer, kept if held else documents, options, held)
        return own_answers(model, kind, params, options, options.seed, held)

    answers = answered(False)
    console.print(f"{source.name}: {len(answers.tokens):,} of {options.answers:,} answers of its own "
                  f"{'are taken' if text else 'are right'}", soft_wrap=True)
    if options.stage == "certainty":
        objective: Any = dt.CertaintyForcing(model, kind, options.dtype, span)
        write = lambda target, params, facts: export.export(target, model, kind, params, tokenizer, facts)
        held_out = _measure(options, dt.Bound(model, kind, options.dtype), tokenizer, kept if text else None)

        def measure(params: Any, published: bool) -> dict[str, float]:
            if text:
                return held_out(params, published)
            count = HELD_OUT_SHIPPED if published else HELD_OUT_EACH
            at_once = accuracy(model, kind, params, count, at_once=True)
            return {**held_out(params, published), **{f"{name}, all at once": x for name, x in at_once.items()}}

        return Setting(params, data.Chosen(answers, options.batch or 1, options.seed), objective, measure,
                       lambda batch: int(batch.live.sum()), write)
    examples = filters.collect(model, params, answers, kind, span)
    checked = filters.collect(model, params, answered(True), kind, span)
    weights = filters.init_filter(jax.random.key(options.seed), span)
    return Setting(weights, data.Chosen(examples, options.batch or 1, options.seed), filters.FilterLoss(),
                   lambda params, published: filters.figures(params, checked), lambda batch: batch.final.size,
                   export.export_filter)


def own_answers(model: Transformer, kind: Diffusion, params: Any, options: Options, seed: int,
                held: bool = False) -> dt.Batch:
    """Problems with what the model itself answers, one token a forward; those where that is right.

    Raises:
        ValueError: it answers none right.
    """
    each = max(1, (options.answers or 1) // len(problems.TASKS) // (8 if held else 1))
    found = [p for task in problems.TASKS for p in problems.problems(task, each, seed + 1, held)]
    batch = data.rows(found)
    filled = fill(model, kind, params, batch)
    right = np.asarray([p.correct(reply(row[answer]))
                        for p, row, answer in zip(found, filled, batch.answer, strict=True)])
    if not right.any():
        raise ValueError("init: the model answers no problem right; it takes a trained one")
    return dt.Batch(filled[right], batch.answer[right], batch.live[right])


def own_texts(model: Transformer, kind: Diffusion, params: Any, tokenizer: Tokenizer,
              documents: list[pycode_data.Document], options: Options, held: bool = False) -> dt.Batch:
    """Beginnings of texts with what the model itself goes on with, one token a forward; none of it is wrong.

    Raises:
        ValueError: a tokenizer without the token that parts documents.
    """
    if tokenizer.token_to_id(pycode_data.END_OF_TEXT) is None:
        raise ValueError(f"init: {options.init} has a tokenizer without {pycode_data.END_OF_TEXT}, which parts "
                         "documents")
    count = max(1, (options.answers or 1) // (8 if held else 1))
    stream = pycode_data.pack(tokenizer, documents)
    batch = data.beginnings(stream, count, options.length or 2, options.canvas, options.seed + 1)
    return batch.replace(tokens=fill(model, kind, params, batch, min(count, 64)))


def first_weights(options: Options, vocab: int) -> tuple[Transformer, Any]:
    """Fresh weights, or those of `init`; a vocabulary that is larger by the mask gives the mask the mean embedding.

    Raises:
        ValueError: the vocabulary of `init` is another one.
    """
    if options.init is None:
        model = Transformer(llama(vocab=vocab, tied=True, **PRESETS[options.preset].shape))
        return model, dt.widened(model.init_params(jax.random.key(options.seed)), PRESETS[options.preset].spread)
    model, params = load_model(find(options.init), dtype="float32")
    if model.config.vocab == vocab - 1 and model.config.tied:
        embed = params["embed"]
        params = {**params, "embed": jnp.concatenate([embed, embed.mean(0, keepdims=True)])}
        model = Transformer(dt.with_vocab(model.config, vocab))
    if model.config.vocab != vocab:
        raise ValueError(f"init: {options.init} has a vocabulary of {model.config.vocab}, it takes {vocab} entries, or "
                         f"{vocab - 1} and a tied embedding")
    return model, params


def _text_tokenizer(options: Options, documents: list[pycode_data.Document]) -> Tokenizer:
    """The tokenizer of `init`, or a new one, with the mask as its last token."""
    if options.init is not None:
        tokenizer = Tokenizer.from_file(str(find(options.init) / "tokenizer.json"))
    else:
        tokenizer = pycode_data.train_tokenizer(documents, 512)
    if tokenizer.token_to_id(problems.MASK) is None:
        tokenizer.add_special_tokens([problems.MASK])
    return tokenizer


def fill(model: Transformer, kind: Diffusion, params: Any, batch: dt.Batch, size: int = 512,
         at_once: bool = False) -> np.ndarray:
    """The rows with their answers filled greedily, `size` rows at a time."""
    out = []
    for at in range(0, len(batch.tokens), size):
        count = min(size, len(batch.tokens) - at)
        rows = jax.tree.map(lambda x, at=at: jnp.asarray(np.resize(x[at:at + size], (size, x.shape[1]))), batch)
        out.append(np.asarray(dt.fill(model, params, rows, kind, at_once))[:count])
    return np.concatenate(out)


def accuracy(model: Transformer, kind: Diffusion, params: Any, count: int, seed: int = 0,
             at_once: bool = False) -> dict[str, float]:
    """The share of `count` held-out problems of each task that is right when one token is committed a forward, or
    all tokens of a block at once."""
    found = [p for task in problems.TASKS for p in problems.problems(task, count, seed)]
    batch = data.rows(found)
    filled = fill(model, kind, params, batch, len(found) if len(found) < 512 else 512, at_once)
    right = [p.correct(reply(row[answer])) for p, row, answer in zip(found, filled, batch.answer, strict=True)]
    return dict(zip(problems.TASKS, map(float, np.reshape(right, (-1, count)).mean(1)), strict=True))


def reply(canvas: np.ndarray) -> str:
    """The text of a canvas `i32[n]` up to its first end token."""
    words = [problems.vocabulary()[i] for i in canvas]
    return "".join(words[:words.index(problems.END)] if problems.END in words else words)


def train(options: Options, on_step: Callable[[int], None] | None = None, console: Console | None = None) -> Run:
    """Trains to the end of the plan and exports; as `train_lm.train`."""
    console = console or Console()
    options.output.mkdir(parents=True, exist_ok=True)
    made = setting(options, console)
    mesh = lm.make_mesh(1, options.devices)
    if (options.batch or 1) % mesh.shape["data"]:
        raise ValueError(f"batch: got {options.batch}, not a multiple of the {mesh.shape['data']} devices")
    tx = (dt.muon if options.optimizer == "muon" else lm.optimizer)(options.weight_decay)
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    # copies, since a step donates them
    params = jax.tree.map(lambda x: jax.device_put(np.array(x), everywhere), made.params)
    opt = jax.device_put(tx.init(params), everywhere)
    warmup = options.warmup or 0
    decay_from = warmup if options.steps is not None and options.decay_from is None else options.decay_from
    plan = lm.Plan(options.peak or 0.0, warmup, options.steps, decay_from)
    run = Run(options.output, options.identity(), params, opt, plan, options.minutes, options.decay_share)
    key, count = jax.random.key(options.seed), sum(x.size for x in jax.tree.leaves(params))
    console.print(f"{options.preset}{f', {options.stage}' if options.stage else ''}: {count:,} parameters, "
                  f"{mesh.size} devices", soft_wrap=True)

    def advance(run: Run) -> tuple[dict[str, jax.Array], int]:
        batch = made.batches[run.step]
        placed = jax.tree.map(lambda x: lm.place_batch(x, mesh), batch)
        run.params, run.opt, figures = dt.update(made.objective, tx, run.params, run.opt, placed, key,
                                                 jnp.int32(run.step), jnp.float32(run.plan.rate(run.step)))
        return figures, made.tokens(batch)

    cadence = Cadence(options.log_every, options.eval_every, options.save_every)
    run.loop(advance, lambda run: made.evaluate(run.params, False), cadence, resume=options.resume, console=console,
             on_step=on_step)
    finish(run, options, made, console)
    return run


def finish(run: Run, options: Options, made: Setting, console: Console) -> None:
    """Rounds the weights as they are shipped, measures that on more held-out data, and exports it with its card."""
    shipped: Any = jax.tree.map(np.asarray, run.params)
    if options.stage != "filter":
        shipped = jax.tree.map(lambda x: x.astype(jnp.bfloat16), shipped)
    measured = made.evaluate(lm.cast(jax.tree.map(jnp.asarray, shipped), jnp.dtype(jnp.float32)), True)
    corpus = pycode_data.corpus_name() if options.corpus is None else f"the .py files of {options.corpus.name}"
    facts: dict[str, Any] = {
        "preset": options.preset, "stage": options.stage, "init": options.init and Path(options.init).name,
        "data": corpus if PRESETS[options.preset].data == "text" else "problems made by scripts/problems.py",
        "steps": run.step, "tokens": run.tokens, "held_out": {k: round(v, 4) for k, v in measured.items()},
        "held_out_each": SHIPPED_WINDOWS if PRESETS[options.preset].data == "text" else HELD_OUT_SHIPPED,
        "parameters": int(sum(x.size for x in jax.tree.leaves(shipped))),
        "optimizer": {"muon": "Muon", "adamw": "AdamW"}[options.optimizer or "adamw"],
        "hours": round(run.seconds / 3600, 3), "hardware": export.hardware(jax.device_count()),
        "command": options.command(run.step, run.plan.decay_from or 0),
    }
    facts |= earlier_training(options, facts)
    target = options.export or options.output / "model"
    made.export(target, shipped, facts)
    told = ", ".join(f"{k} {v:.3f}" for k, v in measured.items())
    console.print(f"{target}: {facts['parameters']:,} parameters after {run.step} steps: {told}", soft_wrap=True)


def earlier_training(options: Options, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Facts that change where a run goes on from a diffusion model that is not shipped: its card tells of both."""
    source = find(options.init) if options.init and options.stage != "filter" else None
    if source is None or source.parent == ZOO or not (source / "training.json").is_file():
        return {}
    earlier = json.loads((source / "training.json").read_text())
    if "init" not in earlier:                       # an autoregressive one
        return {}
    both = {name: facts[name] + earlier[name] for name in ("steps", "tokens")}
    return {**both, "init": earlier["init"], "hours": round(facts["hours"] + earlier["hours"], 3),
            "command": f"{earlier['command']}\n{facts['command']}"}


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    # The CPU shown as one device a core runs also the element-wise parts of a step on all cores.
    jax.config.update("jax_num_cpu_devices", options.devices or len(os.sched_getaffinity(0)))
    keep_freed_memory()
    try:
        train(options)
    except (ValueError, FileNotFoundError, FloatingPointError) as error:
        print(f"train_diffusion: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
