"""Quality of trained predictors of attention: the share of attention that goes to the tokens that are read.

The predictor of `token-butler` and the network of `attention-predictor` are trained on texts of the shipped `recall`.
On other texts, at the tokens of answers, the table gives the share of full attention (of all layers but the first) that
goes to the tokens that a policy reads: tokens chosen for each head by these two and by the largest weights (the upper
bound), for a group of heads by Quest's bounds, and by a window. Then the model answers 4 kinds of questions with each
policy.
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
from decodax.caches import AttentionNet, Butler, make
from decodax.caches.sparse.quest import KeyBounds
from decodax.core.window import causal
from decodax.train import fit_attention_predictor, fit_token_butler
from decodax.train.attention_predictor import attention_maps, scores_before
from decodax.train.token_butler import Scored, estimated
from recipes.recall import problems, training_text

TASKS = ("recall", "needle", "values", "copy")
BLOCK, HISTORY = 16, 64


def best(worth: Array, count: int) -> Array:
    """Returns True for the `count` largest finite values, `bool[..., n]`."""
    found, at = jax.lax.top_k(worth, count)
    return jax.nn.one_hot(jnp.where(found > -jnp.inf, at, -1), worth.shape[-1], dtype=bool).any(-2)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def shares(model: Any, budget: int, near: int, params: Any, net: Any, butler: Butler, tokens: Array,
           at: Array) -> dict[str, Array]:
    """Returns the share of attention `f32[L - 1, H]` of the token at `at` (`i32[]`) that goes to the tokens read with a
    budget, by the way to choose them."""
    maps, images = attention_maps(model, BLOCK, params, tokens)
    maps, images = maps[1:], images[1:]
    (L, H, T, _), n = maps.shape, images.shape[3]
    row, token = maps[:, :, at], jnp.arange(T)
    worth, free = scores_before(net, images.reshape(L * H, T, n), at, -(-at // BLOCK), HISTORY, near // BLOCK,
                                near // BLOCK)
    blocks = best(jnp.where(free, worth, -jnp.inf), (budget - 2 * near) // BLOCK).reshape(L, H, n)
    always = (token < near) | ((token > at - near) & (token <= at))
    reads = {"attention-predictor": blocks.repeat(BLOCK, -1)[..., :T] | always}
    found, _ = estimated(model, params, butler, tokens[None])
    guess = jnp.where((token <= at) & (token >= 4), found[:, 0, :, at], -jnp.inf)
    reads["token-butler"] = best(guess, budget - 4) | (token < 4)
    entries = model.apply(params, causal(tokens[None], jnp.zeros(1, jnp.int32)), Scored()).entries[1:]
    rule, start = KeyBounds(), jnp.maximum(at - near, 0) // BLOCK
    quest = []
    for q, k in entries:
        keys = k[0].swapaxes(0, 1).astype(jnp.float32)
        pages = rule.digest(keys[:, :T // BLOCK * BLOCK].reshape(len(keys), -1, BLOCK, keys.shape[-1]))
        bound = rule(q[0, at].astype(jnp.float32).reshape(len(keys), -1, keys.shape[-1]), pages).max(1)
        bound = jnp.where(jnp.arange(bound.shape[1]) < start, bound, -jnp.inf)
        taken = best(bound, (budget - near - BLOCK) // BLOCK).repeat(BLOCK, -1)
        taken = jnp.pad(taken, ((0, 0), (0, T - taken.shape[1]))) | ((token >= start * BLOCK) & (token <= at))
        quest.append(taken.repeat(H // len(keys), 0))
    reads["quest"] = jnp.stack(quest)
    reads["the latest"] = jnp.broadcast_to((token < 4) | (token > at - budget + 4), row.shape)
    reads["the largest weights"] = best(row, budget)
    return {name: jnp.where(some & (token <= at), row, 0).sum(-1) for name, some in reads.items()}


def main(args: argparse.Namespace) -> None:
    """Trains both predictors and prints the table."""
    lm, drawn = dx.load("recall"), random.Random(1)
    texts = [np.asarray(training_text(args.size, drawn)[0]).tolist()[:args.size] for _ in range(args.texts)]
    near = dict(sinks=args.near, recent=args.near, skip=(0,))
    net: AttentionNet = fit_attention_predictor(lm, texts, steps=args.steps, batch=2, **near)
    butler = fit_token_butler(lm, texts, steps=args.butler_steps, reduce=4)
    asked = [problem for task in TASKS for problem in problems(task, args.problems, args.size - 100, seed=7)]
    share: dict[str, list[Any]] = {}
    for problem in track(asked, "measuring", console=Console(stderr=True)):
        ids = [lm.tokenizer.encode(text) for text in (problem.context, problem.question, problem.answer)]
        before = len(ids[0]) + len(ids[1])
        text = np.zeros(-(-sum(map(len, ids)) // 64) * 64, np.int32)
        text[:sum(map(len, ids))] = np.concatenate(ids)
        for at in range(before - 1, sum(map(len, ids)) - 1)[:4]:
            got = shares(lm.model, args.budget, args.near, lm.params, net.arrays, butler, jnp.asarray(text),
                         jnp.int32(at))
            for name, x in got.items():
                share.setdefault(name, []).append(np.asarray(x).mean(-1))
    kinds = {"token-butler": make("token-butler", butler=butler, budget=args.budget - 4),
             "attention-predictor": make("attention-predictor", net=net, budget=args.budget, **near),
             "the same, full=1": make("attention-predictor", net=net, budget=args.budget, full=1, **near),
             "quest": make("quest", budget=args.budget - args.near - BLOCK, recent=args.near, skip=(0,)),
             "dense": None}
    prompts, rows = [f"{problem.context} {problem.question}" for problem in asked], []
    for name in dict.fromkeys([*share, *kinds]):
        layers = np.mean(share[name], 0).round(3).tolist() if name in share else []
        spread = np.std(np.mean(share[name], -1)) / len(share[name]) ** 0.5 if name in share else 0.0
        right = ""
        if name in kinds:
            out = dx.generate(lm, prompts, cache=kinds[name], temperature=0.0, max_new_tokens=24)
            good = [text.split("<|end|>")[0].split() == problem.answer.split()
                    for text, problem in zip(out.text, asked, strict=True)]
            right = f"{sum(good)} of {len(good)}"
        mean = f"{np.mean(layers):.3f} ± {spread:.3f}" if layers else ""
        rows.append((name, " ".join(map(str, layers)), mean, right))
    show_table(("", f"layers 1 to {lm.model.depth - 1}", "mean", "right"), rows, "share of attention to tokens read")
