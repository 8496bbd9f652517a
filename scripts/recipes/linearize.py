"""Linearizes a shipped model by a short distillation, and says what held-out text costs before and after.

    python scripts/train.py linearize --layers 0 2
    python scripts/train.py linearize --layers 0 1 2 3

Layers get the linear attention of Linearized-LLM (You et al., 2024). All weights are then trained on the corpus of the
model towards the distributions of the original model (Hinton et al., 2015), on texts of the model's length. Held-out
files are cut into texts of the same length and scored.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.progress import track

import decodax as dx
from decodax.bench.figures import show_table
from decodax.train.corpus import load_corpus, pack
from decodax.train.language_model import token_losses


def costs(model: Any, params: Any, rows: np.ndarray, split: int) -> list[str]:
    """Returns nats a token of all tokens, the first `split` and the rest, with the standard error over texts."""
    each = np.concatenate([np.asarray(token_losses(model, params, rows[i:i + 8])) for i in range(0, len(rows), 8)])
    parts = [part.mean(1) for part in (each, each[:, :split], each[:, split:])]
    return [f"{x.mean():.3f} ± {x.std(ddof=1) / len(x) ** 0.5:.3f}" for x in parts]


def main(args: argparse.Namespace) -> None:
    """Distils and prints the table."""
    teacher = dx.load(args.model)
    assert teacher.tokenizer is not None
    lm = teacher.with_linear_attention(args.layers, args.group, args.kernel)
    params = jax.tree.map(lambda x: jnp.array(x, jnp.float32), lm.params)       # copies: they are donated
    cut = lambda ids, size: np.array([ids[i:i + size] for i in range(0, len(ids) - size + 1, size)], np.int32)
    seen, unseen = (pack(teacher.tokenizer.backend, documents) for documents in load_corpus())
    held, rows = cut(unseen, args.size + 1)[:args.texts], cut(seen, args.size)

    schedule = optax.cosine_decay_schedule(args.rate, args.steps)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.0))

    @partial(jax.jit, donate_argnums=(0, 1))
    def update(params: Any, opt: Any, was: Any, batch: Any) -> tuple[Any, Any, Any]:
        aim = jax.nn.softmax(teacher.model.forward(was, batch))
        loss = lambda params: optax.softmax_cross_entropy(lm.model.forward(params, batch), aim).mean()
        value, grads = jax.value_and_grad(loss)(params)
        changes, opt = tx.update(grads, opt, params)
        return optax.apply_updates(params, changes), opt, value

    table = [["original", *costs(teacher.model, teacher.params, held, args.group)],
             ["linearized", *costs(lm.model, params, held, args.group)]]
    opt, order, console = tx.init(params), np.random.default_rng(args.seed), Console(stderr=True)
    for step in track(range(args.steps), "distilling", console=console):
        batch = rows[order.integers(0, len(rows), args.batch)]
        params, opt, value = update(params, opt, teacher.params, batch)
        if step % 25 == 24:
            console.print(f"step {step + 1}: loss {float(value):.3f}", highlight=False)
    table.append(["distilled", *costs(lm.model, params, held, args.group)])
    show_table(["nats a token", "all", f"the first {args.group}", "the rest"], table, f"{len(held)} held-out texts")
    print("factors", [round(float(params["layers"][str(i)]["attn"]["factor"][0]), 3) for i in args.layers])
