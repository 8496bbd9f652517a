"""Trains the shipped long-context model: `python scripts/train_recall.py`; `--help` lists the options.

A Qwen2-shaped decoder on the texts of `scripts/recall.py`: AdamW, warm-up and cosine decay, texts that become longer
on the way, checkpoints that a killed run resumes from, accuracy on held-out problems, and an export that decodax and
transformers both load. To find a name again a model has to know which token stood before another; the biases of
queries and keys, which Qwen2 has, begin in the first layer as attention to the tokens just before (`looking_back`).
Without that, tens of millions of tokens pass before anything is recalled.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
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
import recall
from lm_export import hardware
from rich.console import Console
from training_run import Cadence, Run, keep_freed_memory

from decodax.io.checkpoint import save_model
from decodax.models import Transformer
from decodax.models.families import read_config

CARD = """---
license: apache-2.0
tags: [long-context, jax, decodax]
---
# recall

A small Qwen2-shaped model that answers questions on long texts, in the manner of RULER (Hsieh et al. 2024). It is made
to measure what cache policies lose: `python scripts/evaluate.py --caches`. Its language is that of `scripts/recall.py`.

| | |
|---|---|
| parameters | {parameters:,} |
| shape | width {width}, {layers} layers, {heads} query and {kv_heads} key/value heads, MLP {mlp}, tied embedding |
| vocabulary | {vocab} words |
| context | {context} tokens |
| weights | bfloat16 |
| training tokens | {tokens:,} in {steps:,} steps, at lengths {lengths} |
| training | AdamW, cross-entropy, context tokens at {outside:g} of an answer's weight, float32 master weights |
| hardware | {hardware} |
| training time | {minutes:.0f} minutes |

Right answers on {problems} held-out problems a task, greedy, with the shipped weights in float32:

{table}

**Reproduce** with CPython {python}, from the root of the repository:

```
{command}
```

The figures on this page are also in `training.json`.
"""

SHAPE = {"width": 128, "layers": 4, "heads": 4, "kv_heads": 2, "mlp": 320, "context": 2048}
STAGES = ((400, 64, 64), (350, 64, 64), (500, 128, 32), (1000, 256, 16), (1000, 512, 8), (450, 1024, 4),
          (500, 2048, 2))
"""Steps, with the length and the number of their texts. In the first, texts are spans that come back, without
questions."""

CONFIG = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": len(recall.VOCABULARY),
          "hidden_size": SHAPE["width"], "num_hidden_layers": SHAPE["layers"], "num_attention_heads": SHAPE["heads"],
          "num_key_value_heads": SHAPE["kv_heads"], "intermediate_size": SHAPE["mlp"],
          "max_position_embeddings": SHAPE["context"], "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
          "hidden_act": "silu", "tie_word_embeddings": True}

OUTSIDE = 0.02
"""The weight of a token outside of answers."""


@dataclasses.dataclass(frozen=True)
class RecallOptions:
    """One run. Fields before `output` decide the weights."""

    steps: int = sum(steps for steps, _, _ in STAGES)
    peak: float = 3e-3
    warmup: int = 200
    weight_decay: float = 0.05
    seed: int = 0
    longest: int = 2048
    output: Path = Path("runs/recall")
    export: Path | None = None
    problems: int = 100
    resume: bool = True

    def identity(self) -> dict[str, Any]:
        return {k: v for k, v in dataclasses.asdict(self).items() if k in _IDENTITY}

    def stage(self, step: int) -> tuple[int, int, bool]:
        """The length and the number of the texts of a step, and whether they are those of the first stage."""
        reached = itertools.accumulate(steps for steps, _, _ in STAGES)
        ahead = sum(step >= end for end in reached)
        _, length, rows = STAGES[min(ahead, len(STAGES) - 1)]
        return min(length, self.longest), rows, ahead == 0

    def command(self) -> str:
        plain = RecallOptions()
        changed = {k: v for k, v in self.identity().items() if v != getattr(plain, k)}
        return shlex.join(["python", "scripts/train_recall.py", *(
            word for k, v in changed.items() for word in (f"--{k.replace('_', '-')}", str(v)))])


_IDENTITY = ("steps", "peak", "warmup", "weight_decay", "seed", "longest")


@dataclasses.dataclass(frozen=True)
class RecallObjective:
    """Cross-entropy of a batch, where tokens outside of answers count little."""

    network: Transformer

    def __call__(self, params: Any, _: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        tokens, answers = batch
        losses = lm.cross_entropy(self.network.forward(params, tokens[:, :-1]), tokens[:, 1:])
        weights = jnp.where(answers[:, 1:], 1.0, OUTSIDE)
        of_answers = (losses * answers[:, 1:]).sum() / answers[:, 1:].sum()
        return (losses * weights).sum() / weights.sum(), of_answers


def looking_back(model: Transformer, params: Any, strength: float = 6.0) -> Any:
    """With biases of queries and keys in the first layer by which head `i` attends to the token `1 + i % 3` before."""
    c = model.config
    turn = 10_000.0 ** (-np.arange(c.head_dim // 2) * 2 / c.head_dim)
    keys = np.concatenate([np.ones(c.head_dim // 2), np.zeros(c.head_dim // 2)])
    queries = [np.concatenate([np.cos(back * turn), -np.sin(back * turn)]) for back in
               (1 + head % 3 for head in range(c.heads))]
    own = params["layers"]["0"]["attn"]
    own["q"]["bias"] = jnp.asarray(strength * np.concatenate(queries), jnp.float32)
    own["k"]["bias"] = jnp.asarray(strength * np.tile(keys, c.kv_heads), jnp.float32)
    return params


@partial(jax.jit, static_argnames=("network",))
def guesses(network: Transformer, params: Any, tokens: jax.Array) -> jax.Array:
    """The likeliest next token at each place: `i32[B, T]` to `i32[B, T]`."""
    return network.forward(params, tokens).argmax(-1)


def accuracy(model: Transformer, params: Any, task: str, count: int, length: int, seed: int = 1) -> float:
    """The share of held-out problems of a task whose answers a model gives as a whole, greedily."""
    asked = recall.problems(task, count, length, seed)
    right = 0
    for problem in asked:
        prompt = [recall.ID[word] for word in problem.prompt.split()]
        answer = [*(recall.ID[word] for word in problem.answer.split()), recall.ID[recall.END]]
        padded = np.zeros((1, -(-(length + 40) // 64) * 64), np.int32)
        padded[0, :len(prompt) + len(answer)] = [*prompt, *answer]
        got = np.asarray(guesses(model, params, padded))[0, len(prompt) - 1:len(prompt) - 1 + len(answer)]
        right += got.tolist() == answer
    return right / count


def train(options: RecallOptions, on_step: Callable[[int], None] | None = None, console: Console | None = None) -> Run:
    """Trains to the end and exports.

    Args:
        on_step: called with the number of steps done, after each of them.
        console: where progress goes; None: the terminal.
    """
    console = console or Console()
    model = Transformer(read_config(CONFIG))
    mesh = lm.make_mesh(1)
    tx, shardings = lm.optimizer(options.weight_decay), model.shardings(mesh)
    params = jax.device_put(looking_back(model, model.init_params(jax.random.key(options.seed))), shardings)
    opt = jax.device_put(tx.init(params), lm.optimizer_shardings(tx, tx.init(params), shardings, mesh))
    run = Run(output=options.output, identity=options.identity(), params=params, opt=opt,
              plan=lm.Plan(options.peak, options.warmup, options.steps, 2500, horizon=5000, cooldown=400))
    options.output.mkdir(parents=True, exist_ok=True)
    objective = RecallObjective(model)

    def advance(_: Run) -> tuple[dict[str, jax.Array], int]:
        length, rows, spans = options.stage(run.step)
        batch = jax.tree.map(lambda x: lm.place_batch(x, mesh),
                             recall.training_batch(rows, length, options.seed, run.step, spans))
        run.params, run.opt, loss, answers = lm.update(objective, tx, run.params, run.opt, None, batch,
                                                       jnp.float32(run.plan.rate(run.step)))
        return {"loss": loss, "answers": answers}, rows * length

    def measure(_: Run) -> dict[str, float]:
        length = options.stage(run.step)[0]
        return {task: accuracy(model, run.params, task, 16, length) for task in recall.TASKS}

    run.loop(advance, measure, Cadence(), resume=options.resume, console=console, on_step=on_step)
    finish(run, model, options, console)
    return run


def finish(run: Run, model: Transformer, options: RecallOptions, console: Console) -> None:
    """Rounds the weights to bfloat16, measures what is shipped, and exports it with its card."""
    target = options.export or options.output / "model"
    shipped = jax.tree.map(lambda x: np.asarray(x.astype(jnp.bfloat16)), run.params)
    exact = lm.cast(shipped, jnp.dtype(jnp.float32))
    lengths = [n for n in (512, 1024, 2000) if n <= options.longest]
    figures = {task: {n: accuracy(model, exact, task, options.problems, n) for n in lengths} for task in recall.TASKS}
    line = lambda cells: "| " + " | ".join(cells) + " |"
    table = "\n".join([line(["task", *(f"{n} tokens" for n in lengths)]), line(["---"] * (len(lengths) + 1)),
                       *(line([task, *(f"{x:.0%}" for x in row.values())]) for task, row in figures.items())])
    stages = dict.fromkeys(min(length, options.longest) for _, length, _ in STAGES)
    facts = {"parameters": int(sum(x.size for x in jax.tree.leaves(shipped))), "steps": run.step,
             "tokens": run.tokens, "minutes": round(run.seconds / 60, 1), "hardware": hardware(jax.device_count()),
             "lengths": ", ".join(map(str, stages)), "accuracy": figures, "command": options.command()}
    end = recall.ID[recall.END]
    save_model(target, model, shipped, config={**CONFIG, "eos_token_id": end, "pad_token_id": 0}, dtype="bfloat16")
    recall.tokenizer().save(str(target / "tokenizer.json"))
    (target / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": recall.END, "pad_token": recall.PAD,
        "clean_up_tokenization_spaces": False, "model_max_length": SHAPE["context"]}, indent=2) + "\n")
    generation = {"eos_token_id": end, "pad_token_id": 0, "do_sample": False}
    (target / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    (target / "README.md").write_text(CARD.format(
        **facts, **SHAPE, python=platform.python_version(), vocab=len(recall.VOCABULARY), outside=OUTSIDE, table=table,
        problems=options.problems))
    (target / "training.json").write_text(json.dumps(facts, indent=2) + "\n")
    console.print(f"{target}: {facts['parameters']:,} parameters\n{table}", soft_wrap=True)


def parse(argv: list[str] | None = None) -> RecallOptions:
    """Options from a command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    plain = RecallOptions()
    p.add_argument("--steps", type=int, default=plain.steps, help="training steps")
    p.add_argument("--peak", type=float, default=plain.peak, help="highest learning rate")
    p.add_argument("--warmup", type=int, default=plain.warmup, help="steps of linear warm-up")
    p.add_argument("--weight-decay", type=float, default=plain.weight_decay, help="of AdamW, on matrices")
    p.add_argument("--seed", type=int, default=plain.seed, help="of the initial weights and of the texts")
    p.add_argument("--longest", type=int, default=plain.longest, help="tokens of the longest texts")
    p.add_argument("--output", type=Path, default=plain.output, help="checkpoints and metrics.jsonl")
    p.add_argument("--export", type=Path, help="where the finished model goes (default: OUTPUT/model)")
    p.add_argument("--problems", type=int, default=plain.problems, help="held-out problems a task at the end")
    p.add_argument("--resume", action=argparse.BooleanOptionalAction, default=True, help="go on from a checkpoint")
    return RecallOptions(**vars(p.parse_args(argv)))


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    jax.config.update("jax_num_cpu_devices", len(os.sched_getaffinity(0)))
    keep_freed_memory()
    try:
        train(options)
    except (ValueError, FileNotFoundError, FloatingPointError) as error:
        print(f"train_recall: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
