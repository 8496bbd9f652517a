"""Trains the shipped model that works out sums: `python scripts/train_sums.py`; `--help` lists the options.

A small Llama-shaped decoder on the problems of `scripts/sums.py`: AdamW, warm-up and cosine decay, checkpoints that a
killed run resumes from, accuracy on held-out problems, and an export that decodax and transformers both load.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import lm_training as lm
import numpy as np
import sums
from lm_export import hardware
from rich.console import Console
from train_recall import RecallObjective
from training_run import Cadence, Run, keep_freed_memory

from decodax.io.checkpoint import save_model
from decodax.models import Transformer
from decodax.models.families import read_config

CARD = """---
license: apache-2.0
tags: [reasoning, jax, decodax]
---
# sums

A small Llama-shaped model that works out sums step by step, and errs now and then. It is made to measure what samples,
votes and searches make of a model that is right at most steps: `python scripts/evaluate_search.py`. Its language is
that of `scripts/sums.py`.

| | |
|---|---|
| parameters | {parameters:,} |
| shape | width {width}, {layers} layers, {heads} heads, MLP {mlp}, tied embedding |
| vocabulary | {vocab} characters |
| weights | bfloat16 |
| training tokens | {tokens:,} in {steps:,} steps |
| training | AdamW, cross-entropy, tokens of prompts at {outside:g} of an answer's weight, float32 master weights |
| hardware | {hardware} |
| training time | {minutes:.0f} minutes |

On {problems} held-out sums of {numbers} numbers, with the shipped weights in float32 and the steps before given:
{step:.1%} of steps are right, and {whole:.0%} of sums.

**Reproduce** with CPython {python}, from the root of the repository:

```
{command}
```

The figures on this page are also in `training.json`.
"""

SHAPE = {"width": 96, "layers": 3, "heads": 4, "mlp": 256}
NUMBERS = 6
"""Numbers of the sums that are measured."""

ROWS = 64
CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": len(sums.VOCABULARY),
          "hidden_size": SHAPE["width"], "num_hidden_layers": SHAPE["layers"], "num_attention_heads": SHAPE["heads"],
          "num_key_value_heads": SHAPE["heads"], "intermediate_size": SHAPE["mlp"], "max_position_embeddings": 256,
          "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": True}
OUTSIDE = 0.02


@dataclasses.dataclass(frozen=True)
class SumsOptions:
    """One run. Fields before `output` decide the weights."""

    steps: int = 900
    peak: float = 3e-3
    warmup: int = 200
    weight_decay: float = 0.05
    seed: int = 0
    output: Path = Path("runs/sums")
    export: Path | None = None
    problems: int = 300
    resume: bool = True

    def identity(self) -> dict[str, Any]:
        return {k: v for k, v in dataclasses.asdict(self).items() if k in _IDENTITY}

    def command(self) -> str:
        plain = SumsOptions()
        changed = {k: v for k, v in self.identity().items() if v != getattr(plain, k)}
        return shlex.join(["python", "scripts/train_sums.py", *(
            word for k, v in changed.items() for word in (f"--{k.replace('_', '-')}", str(v)))])


_IDENTITY = ("steps", "peak", "warmup", "weight_decay", "seed")


@partial(jax.jit, static_argnames=("network",))
def guesses(network: Transformer, params: Any, tokens: jax.Array) -> jax.Array:
    """The likeliest next token at each place."""
    return network.forward(params, tokens).argmax(-1)


def accuracy(model: Transformer, params: Any, count: int, numbers: int = NUMBERS) -> tuple[float, float]:
    """The shares of right steps, each behind right ones, and of sums in which all are."""
    asked = sums.problems(count, numbers, seed=1)
    tokens = np.zeros((count, sums.LENGTH), np.int32)
    lines, whole = 0, 0
    for row, problem in zip(tokens, asked, strict=True):
        ids = sums.encode(problem.prompt + problem.answer)
        row[:len(ids)] = ids
    got = np.asarray(guesses(model, params, tokens))
    for row, told, problem in zip(tokens, got, asked, strict=True):
        at, right = len(problem.prompt), 0
        for step in problem.steps:
            right += bool((told[at - 1:at - 1 + len(step)] == row[at:at + len(step)]).all())
            at += len(step) + 1
        lines += right
        whole += right == len(problem.steps)
    return lines / (count * (numbers - 1)), whole / count


def train(options: SumsOptions, on_step: Callable[[int], None] | None = None, console: Console | None = None) -> Run:
    """Trains to the end and exports. Arguments as of `train_recall.train`."""
    console = console or Console()
    model = Transformer(read_config(CONFIG))
    mesh = lm.make_mesh(1)
    tx, shardings = lm.optimizer(options.weight_decay), model.shardings(mesh)
    params = jax.device_put(model.init_params(jax.random.key(options.seed)), shardings)
    opt = jax.device_put(tx.init(params), lm.optimizer_shardings(tx, tx.init(params), shardings, mesh))
    run = Run(output=options.output, identity=options.identity(), params=params, opt=opt,
              plan=lm.Plan(options.peak, options.warmup, options.steps, 2500, horizon=options.steps, cooldown=400))
    options.output.mkdir(parents=True, exist_ok=True)
    objective = RecallObjective(model)

    def advance(_: Run) -> tuple[dict[str, jax.Array], int]:
        batch = jax.tree.map(lambda x: lm.place_batch(x, mesh), sums.training_batch(ROWS, options.seed, run.step))
        run.params, run.opt, loss, answers = lm.update(objective, tx, run.params, run.opt, None, batch,
                                                       jnp.float32(run.plan.rate(run.step)))
        return {"loss": loss, "answers": answers}, ROWS * sums.LENGTH

    def measure(_: Run) -> dict[str, float]:
        step, whole = accuracy(model, run.params, 64)
        return {"steps": step, "sums": whole}

    run.loop(advance, measure, Cadence(), resume=options.resume, console=console, on_step=on_step)
    finish(run, model, options, console)
    return run


def finish(run: Run, model: Transformer, options: SumsOptions, console: Console) -> None:
    """Rounds the weights to bfloat16, measures what is shipped, and exports it with its card."""
    target = options.export or options.output / "model"
    shipped = jax.tree.map(lambda x: np.asarray(x.astype(jnp.bfloat16)), run.params)
    step, whole = accuracy(model, lm.cast(shipped, jnp.dtype(jnp.float32)), options.problems)
    facts = {"parameters": int(sum(x.size for x in jax.tree.leaves(shipped))), "steps": run.step, "tokens": run.tokens,
             "minutes": round(run.seconds / 60, 1), "hardware": hardware(jax.device_count()), "numbers": NUMBERS,
             "problems": options.problems, "step": step, "whole": whole, "command": options.command()}
    end = sums.ID[sums.END]
    save_model(target, model, shipped, config={**CONFIG, "eos_token_id": end, "pad_token_id": 0}, dtype="bfloat16")
    sums.tokenizer().save(str(target / "tokenizer.json"))
    (target / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": sums.END, "pad_token": sums.PAD,
        "clean_up_tokenization_spaces": False, "model_max_length": 256}, indent=2) + "\n")
    generation = {"eos_token_id": end, "pad_token_id": 0, "do_sample": False}
    (target / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    (target / "README.md").write_text(CARD.format(
        **facts, **SHAPE, python=platform.python_version(), vocab=len(sums.VOCABULARY), outside=OUTSIDE))
    (target / "training.json").write_text(json.dumps(facts, indent=2) + "\n")
    console.print(f"{target}: {facts['parameters']:,} parameters, {step:.1%} of steps, {whole:.0%} of sums")


def parse(argv: list[str] | None = None) -> SumsOptions:
    """Options from a command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    plain = SumsOptions()
    p.add_argument("--steps", type=int, default=plain.steps, help="training steps")
    p.add_argument("--peak", type=float, default=plain.peak, help="highest learning rate")
    p.add_argument("--warmup", type=int, default=plain.warmup, help="steps of linear warm-up")
    p.add_argument("--weight-decay", type=float, default=plain.weight_decay, help="of AdamW, on matrices")
    p.add_argument("--seed", type=int, default=plain.seed, help="of the initial weights and of the problems")
    p.add_argument("--output", type=Path, default=plain.output, help="checkpoints and metrics.jsonl")
    p.add_argument("--export", type=Path, help="where the finished model goes (default: OUTPUT/model)")
    p.add_argument("--problems", type=int, default=plain.problems, help="held-out problems at the end")
    p.add_argument("--resume", action=argparse.BooleanOptionalAction, default=True, help="go on from a checkpoint")
    return SumsOptions(**vars(p.parse_args(argv)))


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    keep_freed_memory()
    try:
        train(options)
    except (ValueError, FileNotFoundError, FloatingPointError) as error:
        print(f"train_sums: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
