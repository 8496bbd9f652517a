"""Quality of trained predictors of attention: the share of attention that goes to the tokens that are read.

The predictor of `token-butler` and the network of `attention-predictor` are trained on texts of the shipped `recall`.
On other texts, at the tokens of answers, the table gives the share of full attention (of all layers but the first) that
goes to the tokens that a policy reads: tokens chosen for each head by these two and by the largest weights (the upper
bound), for a group of heads by Quest's bounds, and by a window.
"""

from __future__ import annotations

import argparse
import functools
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from rich.console import Console
from rich.progress import track

import decodax as dx
from decodax.bench.figures import show_table
from decodax.caches import Butler
from decodax.caches.sparse.quest import KeyBounds
from decodax.core.window import causal
from decodax.train import fit_attention_predictor, fit_token_butler
from decodax.train.attention_predictor import attention_maps, scores_before
from decodax.train.token_butler import Scored, estimated
from recipes.recall import problems, training_text

TASKS = ("recall", "needle", "values", "copy")
BLOCK, HISTORY, BUDGET, NEAR = 16, 64, 128, 16
"""Tokens of a block, of the history of the predictor, that are read, and that are always read at both ends."""


def best(worth: Array, count: int) -> Array:
    """Returns True for the `count` largest finite values, `bool[..., n]`."""
    found, at = jax.lax.top_k(worth, count)
    return jax.nn.one_hot(jnp.where(found > -jnp.inf, at, -1), worth.shape[-1], dtype=bool).any(-2)


@functools.partial(jax.jit, static_argnums=0)
def shares(model: Any, params: Any, net: Any, butler: Butler, tokens: Array, at: Array) -> dict[str, Array]:
    """Returns the share of attention `f32[L - 1, H]` of the token at `at` (`i32[]`) that goes to the tokens read, by
    the way to choose them."""
    maps, images = attention_maps(model, BLOCK, params, tokens)
    maps, images = maps[1:], images[1:]
    (L, H, T, _), n = maps.shape, images.shape[3]
    row, token = maps[:, :, at], jnp.arange(T)
    worth, free = scores_before(net, images.reshape(L * H, T, n), at, -(-at // BLOCK), HISTORY, NEAR // BLOCK,
                                NEAR // BLOCK)
    blocks = best(jnp.where(free, worth, -jnp.inf), (BUDGET - 2 * NEAR) // BLOCK).reshape(L, H, n)
    always = (token < NEAR) | ((token > at - NEAR) & (token <= at))
    reads = {"attention-predictor": blocks.repeat(BLOCK, -1)[..., :T] | always}
    found, _ = estimated(model, params, butler, tokens[None])
    guess = jnp.where((token <= at) & (token >= 4), found[:, 0, :, at], -jnp.inf)
    reads["token-butler"] = best(guess, BUDGET - 4) | (token < 4)
    entries = model.apply(params, causal(tokens[None], jnp.zeros(1, jnp.int32)), Scored()).entries[1:]
    rule, start = KeyBounds(), jnp.maximum(at - NEAR, 0) // BLOCK
    quest = []
    for q, k in entries:
        keys = k[0].swapaxes(0, 1).astype(jnp.float32)
        pages = rule.digest(keys[:, :T // BLOCK * BLOCK].reshape(len(keys), -1, BLOCK, keys.shape[-1]))
        bound = rule(q[0, at].astype(jnp.float32).reshape(len(keys), -1, keys.shape[-1]), pages).max(1)
        bound = jnp.where(jnp.arange(bound.shape[1]) < start, bound, -jnp.inf)
        taken = best(bound, (BUDGET - NEAR - BLOCK) // BLOCK).repeat(BLOCK, -1)
        taken = jnp.pad(taken, ((0, 0), (0, T - taken.shape[1]))) | ((token >= start * BLOCK) & (token <= at))
        quest.append(taken.repeat(H // len(keys), 0))
    reads["quest"] = jnp.stack(quest)
    reads["the latest"] = jnp.broadcast_to((token < 4) | (token > at - BUDGET + 4), row.shape)
    reads["the largest weights"] = best(row, BUDGET)
    return {name: jnp.where(some & (token <= at), row, 0).sum(-1) for name, some in reads.items()}


def main(args: argparse.Namespace) -> None:
    """Trains both predictors on 48 texts of 1,024 words and prints the table."""
    lm, drawn, size = dx.load("recall"), random.Random(1), 1024
    texts = [np.asarray(training_text(size, drawn)[0]).tolist()[:size] for _ in range(48)]
    net = fit_attention_predictor(lm, texts, steps=args.steps, batch=2, sinks=NEAR, recent=NEAR, skip=(0,))
    butler = fit_token_butler(lm, texts, steps=args.butler_steps, reduce=4)
    found: dict[str, list[Any]] = {}
    asked = [problem for task in TASKS for problem in problems(task, 4, size - 100, seed=7)]
    for problem in track(asked, "measuring", console=Console(stderr=True)):
        ids = [lm.tokenizer.encode(text) for text in (problem.context, problem.question, problem.answer)]
        end, before = sum(map(len, ids)), len(ids[0]) + len(ids[1])
        text = np.zeros(-(-end // 64) * 64, np.int32)
        text[:end] = np.concatenate(ids)
        for at in range(before - 1, end - 1)[:4]:
            for name, x in shares(lm.model, lm.params, net.arrays, butler, jnp.asarray(text), jnp.int32(at)).items():
                found.setdefault(name, []).append(np.asarray(x).mean(-1))
    show_table(("", f"layers 1 to {lm.model.depth - 1}", "mean"),
               [(name, " ".join(map(str, np.mean(x, 0).round(3).tolist())),
                 f"{np.mean(x):.3f} ± {np.std(np.mean(x, -1)) / len(x) ** 0.5:.3f}") for name, x in found.items()],
               "share of attention to tokens read")
