r"""Sums with steps, whose answers a program can check: what searches over steps are measured on.

A problem is a row of numbers and signs, worked out from left to right, modulo 100. An answer writes each step on a line
of its own, and then the result:

    prompt  `23+58-07*06=`
    answer  `23+58=81 81-07=74 74*06=44 44`, with line ends for the spaces

The shipped `sums` is trained on them by `scripts/train_sums.py`; it makes a mistake in one of some ten steps, so that a
long sum comes out wrong more often than not. `scripts/evaluate_search.py` measures what samples, votes and searches
make of that. A seed decides what the problems are; one in 16, by a checksum, is kept from training.

>>> problem = problems(1, 3, seed=0)[0]
>>> len(problem.answer.splitlines()), problem.result == problem.answer.splitlines()[-1]
(3, True)
>>> right_steps(problem, problem.answer), right_steps(problem, "11+11=22\n")
((3, 3), (0, 1))
"""

from __future__ import annotations

import dataclasses
import random
import zlib

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

END, PAD = "<|end|>", "<|pad|>"
VOCABULARY = [PAD, END, *"0123456789+-*=\n"]
ID = {word: i for i, word in enumerate(VOCABULARY)}
LONGEST = 8
"""Numbers of the longest sum in training."""

LENGTH = 3 * LONGEST + 1 + 9 * (LONGEST - 1) + 3
"""Tokens of the longest problem with its answer."""


@dataclasses.dataclass(frozen=True)
class Sum:
    """A problem. `answer` ends without its end token; `result` is its last line."""

    prompt: str
    answer: str

    @property
    def result(self) -> str:
        return self.answer.rsplit("\n", 1)[-1]

    @property
    def steps(self) -> list[str]:
        return self.answer.split("\n")[:-1]


def worked(a: int, sign: str, b: int) -> int:
    return (a + b if sign == "+" else a - b if sign == "-" else a * b) % 100


def draw(numbers: int, rng: random.Random) -> Sum:
    """A problem with so many numbers."""
    value = rng.randrange(100)
    prompt, lines = f"{value:02}", []
    for _ in range(numbers - 1):
        sign = rng.choice("+-*")
        other = rng.randrange(2, 10) if sign == "*" else rng.randrange(100)
        after = worked(value, sign, other)
        prompt += f"{sign}{other:02}"
        lines.append(f"{value:02}{sign}{other:02}={after:02}")
        value = after
    return Sum(f"{prompt}=\n", "\n".join([*lines, f"{value:02}"]))


def held_out(prompt: str) -> bool:
    return zlib.crc32(prompt.encode()) % 16 == 0


def problems(count: int, numbers: int, seed: int = 0) -> list[Sum]:
    """Held-out problems, all different."""
    rng, found = random.Random(f"sums {numbers} {seed}"), {}
    while len(found) < count:
        problem = draw(numbers, rng)
        if held_out(problem.prompt):
            found[problem.prompt] = problem
    return list(found.values())


def right_steps(problem: Sum, text: str) -> tuple[int, int]:
    """How many of a text's first lines are right one after the other, and how many lines are complete. The result,
    which has no line end behind it, counts as one if the text has it."""
    wanted = [*problem.steps, problem.result]
    lines = text.split("\n")
    done = lines if len(lines) == len(wanted) and len(lines[-1]) == 2 else lines[:-1]
    right = 0
    for line, want in zip(done, wanted, strict=False):
        if line != want:
            break
        right += 1
    return right, len(done)


def encode(text: str) -> list[int]:
    return [ID[c] for c in text]


def training_batch(rows: int, seed: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Texts of a training step, `i32[rows, LENGTH]`, and which of their tokens belong to answers."""
    rng = random.Random(f"train {seed} {step}")
    tokens, answers = np.zeros((rows, LENGTH), np.int32), np.zeros((rows, LENGTH), bool)
    for i in range(rows):
        problem = draw(rng.randrange(2, LONGEST + 1), rng)
        while held_out(problem.prompt):
            problem = draw(rng.randrange(2, LONGEST + 1), rng)
        prompt, answer = encode(problem.prompt), [*encode(problem.answer), ID[END]]
        tokens[i, :len(prompt) + len(answer)] = prompt + answer
        answers[i, len(prompt):len(prompt) + len(answer)] = True
    return tokens, answers


def tokenizer() -> Tokenizer:
    """One token a character."""
    found = Tokenizer(models.WordLevel(ID, unk_token=PAD))
    found.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    found.decoder = decoders.Fuse()
    found.add_special_tokens([PAD, END])
    return found
