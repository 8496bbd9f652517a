r"""Sums that are worked out step by step, which the shipped `sums` does, erring now and then.

A problem is a row of numbers and signs, worked out from left to right, modulo 100. An answer has a line for each step,
and then the result:

    prompt  `23+58-07*06=`
    answer  `23+58=81 81-07=74 74*06=44 44`, with line ends for the spaces

The shipped model makes a mistake in about one of ten steps, so most long sums come out wrong. One problem in 16, by a
checksum, is kept from training.

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
from typing import NamedTuple

import numpy as np

from decodax.bench.problems.distinct import distinct

END, PAD = "<|end|>", "<|pad|>"
VOCABULARY = [PAD, END, *"0123456789+-*=\n"]
ID = {word: i for i, word in enumerate(VOCABULARY)}
LONGEST = 8
"""Count of numbers of the longest sum in training."""


class Sum(NamedTuple):
    """A chain of operations to compute line by line, as a problem. `prompt` ends with "=" and a line end; `answer` has
    the lines, without an end token, and `result` is the last of them."""

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
    """Returns a random problem with `numbers` numbers, such as "12+34*5=" for three."""
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
    """Returns `count` different problems that are held out of training, each with `numbers` numbers; the same at every
    call with these arguments.

    Raises:
        ValueError: there are fewer such problems.
    """
    rng = random.Random(f"sums {numbers} {seed}")

    def one() -> Sum | None:
        problem = draw(numbers, rng)
        return problem if held_out(problem.prompt) else None

    return distinct(count, one, lambda problem: problem.prompt)


def right_steps(problem: Sum, text: str) -> tuple[int, int]:
    """Returns the number of first lines of `text` that equal those of the right answer, up to the first wrong one, and
    the number of complete lines. The last line of an answer, the result, has no line end; it counts as complete if it
    has its two digits."""
    wanted, lines = problem.answer.split("\n"), text.split("\n")
    done = lines if len(lines) == len(wanted) and len(lines[-1]) == 2 else lines[:-1]
    same = (a == b for a, b in zip(done, wanted, strict=False))
    return sum(itertools.takewhile(bool, same)), len(done)


encode = lambda text: [ID[c] for c in text]


LENGTH = 3 * LONGEST + 1 + 9 * (LONGEST - 1) + 3
"""Tokens of the longest problem with its answer."""


def training_batch(rows: int, seed: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the batch of a training step: prompts with their answers, `i32[rows, LENGTH]`, and True for tokens of
    answers, which have a loss, `bool[rows, LENGTH]`."""
    rng = random.Random(f"train {seed} {step}")
    tokens, answers = np.zeros((rows, LENGTH), np.int32), np.zeros((rows, LENGTH), bool)
    for i in range(rows):
        problem = draw_new(rng)
        prompt, answer = encode(problem.prompt), [*encode(problem.answer), ID[END]]
        tokens[i, :len(prompt) + len(answer)] = prompt + answer
        answers[i, len(prompt):len(prompt) + len(answer)] = True
    return tokens, answers
