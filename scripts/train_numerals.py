"""Trains the shipped Markov transformer: `python scripts/train_numerals.py`; `--help` lists the options.

A small Llama-shaped decoder on the numbers of `scripts/numerals.py`, under random barriers, as cascaded decoding wants
it (Deng and Rush, 2020): AdamW, warm-up and cosine decay, checkpoints that a killed run resumes from, accuracy on
held-out numbers by Markov order, and an export that decodax and transformers both load.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import lm_training as lm
import numerals
import numpy as np
from lm_export import hardware
from rich.console import Console
from training_run import Cadence, Run, keep_freed_memory

import decodax as dx
from decodax.algorithms.parallel.cascade import Cascade
from decodax.io.checkpoint import save_model
from decodax.models import Transformer
from decodax.models.families import read_config

CARD = """---
license: apache-2.0
tags: [markov-transformer, cascaded-decoding, jax, decodax]
---
# numerals

A small Llama-shaped Markov transformer that writes numbers in words. It is made to show cascaded decoding (Deng and
Rush, 2020): behind a barrier, `<|barrier|>`, it sees the number and the words since the barrier, up to {most} of them,
and nothing else. Each number can be written in several ways, all equally likely, which must not be mixed. Its
language is that of `scripts/numerals.py`.

| | |
|---|---|
| parameters | {parameters:,} |
| shape | width {width}, {layers} layers, {heads} heads, MLP {mlp}, tied embedding |
| vocabulary | {vocab} digits and words |
| weights | bfloat16 |
| training tokens | {tokens:,} in {steps:,} steps |
| training | AdamW, cross-entropy of answers under random barriers, blocks of {block}, float32 master weights |
| hardware | {hardware} |
| training time | {minutes:.0f} minutes |

Right answers to {problems} held-out numbers, with the shipped weights in float32, by cascades of {keep} survivors a
place up to a Markov order, and by greedy decoding behind one barrier:

| order | right |
|---|---|
{rows}
| greedy | {greedy:.1%} |

**Reproduce** with CPython {python}, from the root of the repository:

```
{command}
```

The figures on this page are also in `training.json`.
"""

SHAPE = {"width": 96, "layers": 3, "heads": 4, "mlp": 256}
ROWS, BLOCK, KEEP = 64, 5, 8
CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": len(numerals.VOCABULARY),
          "hidden_size": SHAPE["width"], "num_hidden_layers": SHAPE["layers"], "num_attention_heads": SHAPE["heads"],
          "num_key_value_heads": SHAPE["heads"], "intermediate_size": SHAPE["mlp"], "max_position_embeddings": 64,
          "rms_norm_eps": 1e-6, "rope_theta": 100.0, "hidden_act": "silu", "tie_word_embeddings": True}


@dataclasses.dataclass(frozen=True)
class NumeralsOptions:
    """One run. Fields before `output` decide the weights."""

    steps: int = 1500
    peak: float = 3e-3
    warmup: int = 200
    weight_decay: float = 0.05
    seed: int = 0
    output: Path = Path("runs/numerals")
    export: Path | None = None
    problems: int = 200
    resume: bool = True

    def identity(self) -> dict[str, Any]:
        return {k: v for k, v in dataclasses.asdict(self).items() if k in _IDENTITY}

    def command(self) -> str:
        plain = NumeralsOptions()
        changed = {k: v for k, v in self.identity().items() if v != getattr(plain, k)}
        return shlex.join(["python", "scripts/train_numerals.py", *(
            word for k, v in changed.items() for word in (f"--{k.replace('_', '-')}", str(v)))])


_IDENTITY = ("steps", "peak", "warmup", "weight_decay", "seed")


@dataclasses.dataclass(frozen=True)
class MarkovObjective:
    """Cross-entropy of answers where a token sees the prompt and its own block."""

    network: Transformer

    def __call__(self, params: Any, _: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        tokens, blocks, targets, counts = batch
        causal = jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))
        seen = causal & ((blocks[:, None] == 0) | (blocks[:, None] == blocks[:, :, None]))
        losses = lm.cross_entropy(self.network.forward(params, tokens, mask=seen), targets)
        loss = (losses * counts).sum() / counts.sum()
        return loss, loss


def loaded(model: Transformer, params: Any) -> dx.LM:
    """The model as `dx.load` gives it, in float32."""
    return dx.LM(model=model, params=params, vocab_size=len(numerals.VOCABULARY), name="numerals",
                 generation_config={"eos_token_id": numerals.ID[numerals.END], "pad_token_id": 0})


def accuracy(model: dx.LM, numbers: list[int], order: int | None) -> float:
    """The share of right answers by a cascade up to an order; None: by greedy decoding behind one barrier."""
    bar = numerals.ID[numerals.BARRIER]
    ids = [[*(numerals.ID[c] for c in f"{n}="), *([bar] if order is None else [])] for n in numbers]
    method = None if order is None else Cascade(bar, orders=order, keep=KEEP, longest=numerals.ANSWER)
    told = dx.generate(model, ids, algorithm=method, max_new_tokens=numerals.ANSWER)
    texts = [[numerals.VOCABULARY[t] for t in told.row(i)] for i in range(len(numbers))]
    return float(np.mean([text[-1:] == [numerals.END] and numerals.right(n, "".join(text[:-1]))
                          for n, text in zip(numbers, texts, strict=True)]))


def train(options: NumeralsOptions, on_step: Callable[[int], None] | None = None,
          console: Console | None = None) -> Run:
    """Trains to the end and exports. Arguments as of `train_recall.train`."""
    console = console or Console()
    model = Transformer(read_config(CONFIG))
    mesh = lm.make_mesh(1)
    tx, shardings = lm.optimizer(options.weight_decay), model.shardings(mesh)
    params = jax.device_put(model.init_params(jax.random.key(options.seed)), shardings)
    opt = jax.device_put(tx.init(params), lm.optimizer_shardings(tx, tx.init(params), shardings, mesh))
    run = Run(output=options.output, identity=options.identity(), params=params, opt=opt,
              plan=lm.Plan(options.peak, options.warmup, options.steps, options.warmup))
    options.output.mkdir(parents=True, exist_ok=True)
    objective = MarkovObjective(model)

    def advance(_: Run) -> tuple[dict[str, jax.Array], int]:
        batch = numerals.training_batch(ROWS, BLOCK, options.seed, run.step)
        batch = jax.tree.map(lambda x: lm.place_batch(x, mesh), batch)
        run.params, run.opt, loss, _ = lm.update(objective, tx, run.params, run.opt, None, batch,
                                                 jnp.float32(run.plan.rate(run.step)))
        return {"loss": loss}, ROWS * numerals.LENGTH

    def measure(_: Run) -> dict[str, float]:
        return {"greedy": accuracy(loaded(model, run.params), numerals.problems(64, seed=1), None)}

    run.loop(advance, measure, Cadence(), resume=options.resume, console=console, on_step=on_step)
    finish(run, model, options, console)
    return run


def finish(run: Run, model: Transformer, options: NumeralsOptions, console: Console) -> None:
    """Rounds the weights to bfloat16, measures what is shipped, and exports it with its card."""
    target = options.export or options.output / "model"
    shipped = jax.tree.map(lambda x: np.asarray(x.astype(jnp.bfloat16)), run.params)
    judged, asked = loaded(model, lm.cast(shipped, jnp.dtype(jnp.float32))), numerals.problems(options.problems, seed=1)
    orders = {str(order): accuracy(judged, asked, order) for order in range(BLOCK)}
    facts = {"parameters": int(sum(x.size for x in jax.tree.leaves(shipped))), "steps": run.step, "tokens": run.tokens,
             "minutes": round(run.seconds / 60, 1), "hardware": hardware(jax.device_count()),
             "problems": options.problems, "orders": orders, "greedy": accuracy(judged, asked, None),
             "command": options.command()}
    end = numerals.ID[numerals.END]
    save_model(target, model, shipped, config={**CONFIG, "eos_token_id": end, "pad_token_id": 0}, dtype="bfloat16")
    numerals.tokenizer().save(str(target / "tokenizer.json"))
    (target / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": numerals.END, "pad_token": numerals.PAD,
        "clean_up_tokenization_spaces": False, "model_max_length": 64}, indent=2) + "\n")
    generation = {"eos_token_id": end, "pad_token_id": 0, "do_sample": False}
    (target / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    rows = "\n".join(f"| {order} | {share:.1%} |" for order, share in orders.items())
    (target / "README.md").write_text(CARD.format(
        **facts, **SHAPE, rows=rows, python=platform.python_version(), vocab=len(numerals.VOCABULARY), block=BLOCK,
        most=BLOCK - 1, keep=KEEP))
    (target / "training.json").write_text(json.dumps(facts, indent=2) + "\n")
    told = ", ".join(f"order {order}: {share:.1%}" for order, share in orders.items())
    console.print(f"{target}: {facts['parameters']:,} parameters, {told}, greedy: {facts['greedy']:.1%}")


def parse(argv: list[str] | None = None) -> NumeralsOptions:
    """Options from a command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    plain = NumeralsOptions()
    p.add_argument("--steps", type=int, default=plain.steps, help="training steps")
    p.add_argument("--peak", type=float, default=plain.peak, help="highest learning rate")
    p.add_argument("--warmup", type=int, default=plain.warmup, help="steps of linear warm-up")
    p.add_argument("--weight-decay", type=float, default=plain.weight_decay, help="of AdamW, on matrices")
    p.add_argument("--seed", type=int, default=plain.seed, help="of the initial weights and of the numbers")
    p.add_argument("--output", type=Path, default=plain.output, help="checkpoints and metrics.jsonl")
    p.add_argument("--export", type=Path, help="where the finished model goes (default: OUTPUT/model)")
    p.add_argument("--problems", type=int, default=plain.problems, help="held-out numbers at the end")
    p.add_argument("--resume", action=argparse.BooleanOptionalAction, default=True, help="go on from a checkpoint")
    return NumeralsOptions(**vars(p.parse_args(argv)))


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    keep_freed_memory()
    try:
        train(options)
    except (ValueError, FileNotFoundError, FloatingPointError) as error:
        print(f"train_numerals: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
