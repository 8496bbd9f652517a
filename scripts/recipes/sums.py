r"""`sums`: a model that works out sums step by step, and errs now and then; searches over steps are measured on it.

A problem is a row of numbers and signs, worked out from left to right, modulo 100. An answer has a line for each step,
and then the result:

    prompt  `23+58-07*06=`
    answer  `23+58=81 81-07=74 74*06=44 44`, with line ends for the spaces

The shipped model makes a mistake in about one of ten steps, so most long sums come out wrong. `scripts/evaluate.py
search` measures what samples, votes and searches make of that. A seed decides the problems; one in 16, by a checksum,
is kept from training.

>>> problem = problems(1, 3, seed=0)[0]
>>> len(problem.answer.splitlines()), problem.result == problem.answer.splitlines()[-1]
(3, True)
>>> right_steps(problem, problem.answer), right_steps(problem, "11+11=22\n")
((3, 3), (0, 1))
"""

from __future__ import annotations

import itertools
import operator
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console
from tokenizers import Tokenizer

from decodax.models import Transformer
from decodax.models.families import read_config
from decodax.train.language_model import WeightedAnswers, likeliest
from recipes.options import Options
from recipes.run import Recipe, llama_config, publish, word_tokenizer

END, PAD = "<|end|>", "<|pad|>"
VOCABULARY = [PAD, END, *"0123456789+-*=\n"]
ID = {word: i for i, word in enumerate(VOCABULARY)}
LONGEST = 8
"""Count of numbers of the longest sum in training."""
LENGTH = 3 * LONGEST + 1 + 9 * (LONGEST - 1) + 3
"""Tokens of the longest problem with its answer."""
ROWS, NUMBERS = 64, 6
"""Rows of a training step, and the count of numbers of the sums that are measured."""

CONFIG = llama_config(len(VOCABULARY))

INTRODUCTION = """A small Llama-shaped model that works out sums step by step, and errs now and then. It is made to
measure what samples, votes and searches make of a model that is right at most steps: `python scripts/evaluate.py
search`. Its language is that of `scripts/recipes/sums.py`."""


class Sum(NamedTuple):
    """A problem. `answer` has no end token; `result` is its last line."""

    prompt: str
    answer: str

    @property
    def result(self) -> str:
        return self.answer.rsplit("\n", 1)[-1]

    @property
    def steps(self) -> list[str]:
        return self.answer.split("\n")[:-1]


WORKED: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def draw(numbers: int, rng: random.Random) -> Sum:
    """Returns a problem with this count of numbers."""
    value = rng.randrange(100)
    prompt, lines = f"{value:02}", []
    for _ in range(numbers - 1):
        sign = rng.choice("+-*")
        other = rng.randrange(2, 10) if sign == "*" else rng.randrange(100)
        after = WORKED[sign](value, other) % 100
        prompt += f"{sign}{other:02}"
        lines.append(f"{value:02}{sign}{other:02}={after:02}")
        value = after
    return Sum(f"{prompt}=\n", "\n".join([*lines, f"{value:02}"]))


def held_out(prompt: str) -> bool:
    return zlib.crc32(prompt.encode()) % 16 == 0


def draw_new(rng: random.Random, numbers: int | None = None) -> Sum:
    """Returns a problem that is not held out, with this count of numbers or a random one."""
    while held_out((problem := draw(numbers or rng.randrange(2, LONGEST + 1), rng)).prompt):
        pass
    return problem


def problems(count: int, numbers: int, seed: int = 0) -> list[Sum]:
    """Returns held-out problems, all different."""
    rng, found = random.Random(f"sums {numbers} {seed}"), {}
    while len(found) < count:
        problem = draw(numbers, rng)
        if held_out(problem.prompt):
            found[problem.prompt] = problem
    return list(found.values())


def right_steps(problem: Sum, text: str) -> tuple[int, int]:
    """Returns how many of a text's first lines are right one after the other, and how many lines are complete. The
    result, which has no line end, counts as a line if the text has it."""
    wanted, lines = problem.answer.split("\n"), text.split("\n")
    done = lines if len(lines) == len(wanted) and len(lines[-1]) == 2 else lines[:-1]
    same = (a == b for a, b in zip(done, wanted, strict=False))
    return sum(itertools.takewhile(bool, same)), len(done)


encode = lambda text: [ID[c] for c in text]


def training_batch(rows: int, seed: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the texts of a training step, `i32[rows, LENGTH]`, and True for tokens of answers."""
    rng = random.Random(f"train {seed} {step}")
    tokens, answers = np.zeros((rows, LENGTH), np.int32), np.zeros((rows, LENGTH), bool)
    for i in range(rows):
        problem = draw_new(rng)
        prompt, answer = encode(problem.prompt), [*encode(problem.answer), ID[END]]
        tokens[i, :len(prompt) + len(answer)] = prompt + answer
        answers[i, len(prompt):len(prompt) + len(answer)] = True
    return tokens, answers


def tokenizer() -> Tokenizer:
    """Returns the tokenizer, with one token for each character."""
    return word_tokenizer(ID, [PAD, END], r"[\s\S]")


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
        publish(target, "sums", model, shipped, tokenizer(), facts, {"eos_token": END, "pad_token": PAD}, CONFIG,
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
