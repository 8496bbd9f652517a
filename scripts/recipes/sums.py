"""`sums`: the model that works out sums step by step (`decodax.bench.problems.sums`); searches over steps are measured
on it (`scripts/evaluate.py search`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from decodax.bench.problems.sums import END, ID, LENGTH, PAD, VOCABULARY, encode, problems, training_batch
from decodax.models import Transformer
from decodax.models.families import read_config
from decodax.train.export import llama_config, publish, word_tokenizer
from decodax.train.language_model import WeightedAnswers, likeliest
from recipes.options import Options
from recipes.run import Recipe

ROWS, NUMBERS = 64, 6
"""Rows of a training step, and the count of numbers of the sums that are measured."""

CONFIG = llama_config(len(VOCABULARY))

INTRODUCTION = """A small Llama-shaped model that works out sums step by step, and errs now and then. It is made to
measure what samples, votes and searches make of a model that is right at most steps: `python scripts/evaluate.py
search`. Its language is that of `decodax/bench/problems/sums.py`."""


def accuracy(model: Transformer, params: Any, count: int, numbers: int = NUMBERS) -> tuple[float, float]:
    """Returns the share of right steps, each after right ones, and the share of sums in which all steps are right."""
    asked = problems(count, numbers, seed=1)
    tokens = np.zeros((count, LENGTH), np.int32)
    for row, problem in zip(tokens, asked, strict=True):
        ids = encode(problem.prompt + problem.answer)
        row[:len(ids)] = ids
    lines, whole = 0, 0
    for row, told, problem in zip(tokens, np.asarray(likeliest(model, params, tokens)), asked, strict=True):
        at = len(problem.prompt) + 9 * np.arange(len(problem.steps))[:, None] + np.arange(8)
        right = (told[at - 1] == row[at]).all(1).sum()
        lines += right
        whole += right == len(problem.steps)
    return lines / (count * (numbers - 1)), whole / count


def recipe(options: Options, mesh: jax.sharding.Mesh, console: Console) -> Recipe:
    """Returns the recipe for `recipes.run.train`."""
    model = Transformer(read_config(CONFIG))

    def finish(target: Path, shipped: Any, exact: Any, facts: dict[str, Any]) -> str:
        step, whole = accuracy(model, exact, options.problems or 1)
        facts |= {"numbers": NUMBERS, "problems": options.problems, "step": step, "whole": whole}
        told = f"{step:.1%} of steps are right, and {whole:.0%} of sums"
        tokenizer = word_tokenizer(ID, [PAD, END], r"[\s\S]")
        publish(target, "sums", model, shipped, tokenizer, facts, {"eos_token": END, "pad_token": PAD}, CONFIG,
                introduction=INTRODUCTION, tags=["reasoning"], rows={
            "training": f"AdamW, cross-entropy, tokens of prompts at {WeightedAnswers.outside:g} of an answer's "
                        "weight, float32 master weights"},
            figures=f"On {options.problems} held-out sums of {NUMBERS} numbers, with the shipped weights in float32 "
                    f"and the steps before given:\n{told}.")
        return told

    return Recipe(
        model.init_params(jax.random.key(options.seed)), WeightedAnswers(model),
        lambda run: training_batch(ROWS, options.seed, run.step), lambda batch: ROWS * LENGTH,
        lambda params, run: dict(zip(("steps", "sums"), accuracy(model, params, 64), strict=True)), finish,
        shardings=model.shardings(mesh))
