"""Linearizes a shipped model by a short distillation, and says what held-out text costs before and after.

    python scripts/linearize.py --layers 0 2
    python scripts/linearize.py --layers 0 1 2 3

Layers take the linear attention of Linearized-LLM (You et al., 2024). All weights are then trained on the corpus that
the model was trained on, towards the distributions of the model as it was (Hinton et al., 2015), on texts of the
model's length. Files that were held out are cut into texts of the same length and scored. Takes `decodax[train]`.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pycode_data as data
from jax import Array

import decodax as dx


def cost(model: Any, params: Any, rows: Array) -> Array:
    """Nats of each token but the first, `f32[B, T - 1]`."""
    logits = model.forward(params, rows[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:])


def held_out(model: Any, params: Any, rows: np.ndarray, split: int) -> str:
    """Nats a token in the first `split` tokens and behind, with the standard error over texts."""
    one = jax.jit(partial(cost, model))
    each = np.concatenate([np.asarray(one(params, rows[i:i + 8])) for i in range(0, len(rows), 8)])
    parts = [part.mean(1) for part in (each, each[:, :split], each[:, split:])]
    return "  ".join(f"{x.mean():.3f} ± {x.std(ddof=1) / len(x) ** 0.5:.3f}" for x in parts)


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--model", default="pycode")
    parse.add_argument("--layers", type=int, nargs="+", default=[0, 2])
    for name, default in dict(group=64, kernel=63, size=512, batch=4, steps=150, texts=64, seed=0).items():
        parse.add_argument(f"--{name}", type=int, default=default)
    parse.add_argument("--rate", type=float, default=1e-3)
    given = parse.parse_args()
    teacher = dx.load(given.model)
    assert teacher.tokenizer is not None
    lm = teacher.with_linear_attention(given.layers, given.group, given.kernel)
    params = jax.tree.map(lambda x: jnp.array(x, jnp.float32), lm.params)       # copies: they are donated
    seen, unseen = data.load_corpus()
    cut = lambda ids, size: np.array([ids[i:i + size] for i in range(0, len(ids) - size + 1, size)], np.int32)
    encode = lambda documents: [0, *(token for d in documents for token in [*teacher.tokenizer.encode(d.text), 0])]
    held = cut(encode(unseen), given.size + 1)[:given.texts]
    rows = cut(encode(seen), given.size)

    schedule = optax.cosine_decay_schedule(given.rate, given.steps)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.0))

    @partial(jax.jit, donate_argnums=(0, 1))
    def update(params: Any, opt: Any, was: Any, batch: Array) -> tuple[Any, Any, Array]:
        aim = jax.nn.softmax(teacher.model.forward(was, batch))
        loss = lambda params: optax.softmax_cross_entropy(lm.model.forward(params, batch), aim).mean()
        value, grads = jax.value_and_grad(loss)(params)
        changes, opt = tx.update(grads, opt, params)
        return optax.apply_updates(params, changes), opt, value

    print(f"{len(held)} held-out texts; nats a token: all, the first {given.group}, and those behind", flush=True)
    print("as it was      ", held_out(teacher.model, teacher.params, held, given.group), flush=True)
    print("linearized     ", held_out(lm.model, params, held, given.group), flush=True)
    opt, start, order = tx.init(params), time.perf_counter(), np.random.default_rng(given.seed)
    for step in range(given.steps):
        batch = rows[order.integers(0, len(rows), given.batch)]
        params, opt, value = update(params, opt, teacher.params, batch)
        if step % 25 == 24:
            print(f"step {step + 1}: loss {float(value):.3f}, {time.perf_counter() - start:.0f} s", flush=True)
    print("distilled      ", held_out(lm.model, params, held, given.group), flush=True)
    print("factors        ", [round(float(params["layers"][str(i)]["attn"]["factor"][0]), 3) for i in given.layers])


if __name__ == "__main__":
    main()
