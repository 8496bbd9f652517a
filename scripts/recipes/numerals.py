"""`numerals`: the Markov transformer that writes numbers in words (`decodax.bench.problems.numerals`), for cascaded
decoding (Deng and Rush, 2020).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from rich.console import Console

import decodax as dx
from decodax.algorithms.parallel.cascade import Cascade
from decodax.bench.figures import markdown_table
from decodax.bench.problems.numerals import ANSWER, BARRIER, END, ID, PAD, VOCABULARY, problems, right, training_batch
from decodax.models import Transformer
from decodax.models.families import read_config
from decodax.train.export import llama_config, publish, word_tokenizer
from decodax.train.language_model import cross_entropy
from recipes.options import Options
from recipes.run import Recipe

ROWS, BLOCK, KEEP = 64, 5, 8
"""Rows of a training step, tokens between barriers at most, and survivors of a cascade."""

CONFIG = llama_config(len(VOCABULARY), max_position_embeddings=64, rope_theta=100.0)

INTRODUCTION = f"""A small Llama-shaped Markov transformer that writes numbers in words. It is made to show cascaded
decoding (Deng and Rush, 2020): after a barrier, `{BARRIER}`, it sees the number and the words since the barrier, up to
{BLOCK - 1} of them, and nothing else. Each number can be written in several ways, all equally likely, which must not be
mixed. Its language is that of `decodax/bench/problems/numerals.py`."""


@dataclasses.dataclass(frozen=True)
class MarkovObjective:
    """Cross-entropy of answers in which a token sees the prompt and its own block."""

    network: Transformer

    def __call__(self, params: Any, batch: Any, extra: None) -> tuple[Array, dict[str, Array]]:
        tokens, blocks, targets, counts = batch
        causal = jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))
        seen = causal & ((blocks[:, None] == 0) | (blocks[:, None] == blocks[:, :, None]))
        losses = cross_entropy(self.network.forward(params, tokens, mask=seen), targets)
        loss = (losses * counts).sum() / counts.sum()
        return loss, {"loss": loss}


def accuracy(model: dx.LM, numbers: list[int], order: int | None) -> float:
    """Returns the share of right answers by a cascade up to an order; None: by greedy decoding after one barrier."""
    ids = [[*(ID[c] for c in f"{n}="), *([ID[BARRIER]] if order is None else [])] for n in numbers]
    method = None if order is None else Cascade(ID[BARRIER], orders=order, keep=KEEP, longest=ANSWER)
    told = dx.generate(model, ids, algorithm=method, max_new_tokens=ANSWER)
    texts = [[VOCABULARY[t] for t in told.row(i)] for i in range(len(numbers))]
    return float(np.mean([text[-1:] == [END] and right(n, "".join(text[:-1]))
                          for n, text in zip(numbers, texts, strict=True)]))


def recipe(options: Options, mesh: jax.sharding.Mesh, console: Console) -> Recipe:
    """Returns the recipe for `recipes.run.train`."""
    model = Transformer(read_config(CONFIG))
    loaded = lambda params: dx.LM(model=model, params=params, vocab_size=len(VOCABULARY), name="numerals",
                                  generation_config={"eos_token_id": ID[END], "pad_token_id": 0})

    def finish(target: Path, shipped: Any, exact: Any, facts: dict[str, Any]) -> str:
        judged, asked = loaded(exact), problems(options.problems or 1, seed=1)
        orders = {str(order): accuracy(judged, asked, order) for order in range(BLOCK)}
        facts |= {"problems": options.problems, "orders": orders, "greedy": accuracy(judged, asked, None)}
        shares = {**orders, "greedy": facts["greedy"]}
        table = markdown_table(("order", "right"), [(order, f"{share:.1%}") for order, share in shares.items()])
        tokenizer = word_tokenizer(ID, [PAD, END, BARRIER], r" [a-z]+|[\s\S]")
        publish(target, "numerals", model, shipped, tokenizer, facts, {"eos_token": END, "pad_token": PAD}, CONFIG,
                introduction=INTRODUCTION, rows={
            "training": f"AdamW, cross-entropy of answers under random barriers, blocks of {BLOCK}, float32 master "
                        "weights"}, tags=["markov-transformer", "cascaded-decoding"],
            figures=f"Right answers to {options.problems} held-out numbers, with the shipped weights in float32, by "
                    f"cascades of {KEEP} survivors a position\nup to a Markov order, and by greedy decoding after one "
                    f"barrier:\n\n{table}")
        return ", ".join(f"{'order ' * (order != 'greedy')}{order}: {share:.1%}" for order, share in shares.items())

    return Recipe(
        model.init_params(jax.random.key(options.seed)), MarkovObjective(model),
        lambda run: training_batch(ROWS, BLOCK, options.seed, run.step), lambda batch: batch[0].size,
        lambda params, run: {"greedy": accuracy(loaded(params), problems(64, seed=1), None)}, finish,
        shardings=model.shardings(mesh))
