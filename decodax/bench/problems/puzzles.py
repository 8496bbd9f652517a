"""Small problems with checkable answers, which show in seconds and on a CPU what parallel decoding costs.

The problems follow ParallelBench (Kang et al. 2025): operations on lists, arithmetic, brackets and 4x4 sudoku. In some,
each token of the answer follows from the prompt by itself (copy). In others, the tokens depend on one another: in
another order of a list every element is equally likely at every place, so tokens that are drawn at once repeat. The
shipped `tasks-diffusion` is trained on them.

A seed alone decides what the problems are. One in `HELD_OUT` of all prompts, by a checksum of the prompt, is kept from
training.

>>> problem = problems("sort", 1, seed=3)[0]
>>> problem.prompt, problem.answer, problem.correct(problem.answer), problem.correct("A")
('sort IDG=', 'DGI', True, False)
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
import zlib
from collections.abc import Callable, Sequence

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from decodax.bench.problems.distinct import distinct
from decodax.train.masked_diffusion import Batch

SYMBOLS = "ABCDEFGHIJKLMNOP"
DIGITS = "0123456789"
PAIRS = {"(": ")", "[": "]", "{": "}"}
BLANK = "_"
END, MASK = "<|end|>", "<|mask|>"

CANVAS = 16
"""Tokens that every answer has room in, with an end token after those that are shorter."""

LONGEST_PROMPT = 18
"""Tokens of the longest prompt."""

HELD_OUT = 16

_CHARACTERS = [*SYMBOLS, *DIGITS, *"".join(a + b for a, b in PAIRS.items()), BLANK, ":", "+", "="]


@dataclasses.dataclass(frozen=True)
class ProblemTask:
    """A kind of problem.

    Attributes:
        name: word that its prompts begin with. summary: one line, with an example.
        make: draws the body of a prompt, between that word and "=", and one right answer.
        check: returns True if a text is a right answer to a body; there may be several.
    """

    name: str
    summary: str
    make: Callable[[random.Random], tuple[str, str]]
    check: Callable[[str, str], bool]


@dataclasses.dataclass(frozen=True)
class Problem:
    """A prompt such as "sort DACB=", and one right answer."""

    task: str
    prompt: str
    answer: str

    def correct(self, text: str) -> bool:
        """Returns True if `text` answers the prompt, all of it and nothing else."""
        return TASKS[self.task].check(self.prompt.removeprefix(self.task + " ").removesuffix("="), text)


def held_out(prompt: str) -> bool:
    """Returns True if a prompt is kept from training."""
    return zlib.crc32(prompt.encode()) % HELD_OUT == 0


def draw(task: str, rng: random.Random, held: bool = False) -> Problem:
    """Returns the next problem of a task that is (or is not) held out."""
    while True:
        body, answer = TASKS[task].make(rng)
        if held_out(prompt := f"{task} {body}=") == held:
            return Problem(task, prompt, answer)


def problems(task: str, count: int, seed: int = 0, held: bool = True) -> list[Problem]:
    """Returns `count` different problems, the same at every call; a larger count only appends problems.

    Args:
        held: True: problems that the shipped model was not trained on; False: those that training draws from.
    """
    if task not in TASKS:
        raise ValueError(f"task: got {task!r}, takes one of {', '.join(TASKS)}")
    rng = random.Random(f"{seed}:{task}:{held}")
    return distinct(count, lambda: draw(task, rng, held), lambda problem: problem.prompt)


def vocabulary() -> list[str]:
    """Returns the tokens by id: ends first, then task words and characters, the mask last."""
    return [END, *TASKS, *_CHARACTERS, MASK]


@functools.cache
def ids() -> dict[str, int]:
    """Returns the id of each token."""
    return {token: i for i, token in enumerate(vocabulary())}


def encode(text: str) -> list[int]:
    """Returns the token ids of a prompt or an answer; faster than `tokenizer`, with the same result."""
    word, space, rest = text.partition(" ")
    return [ids()[word], *map(ids().__getitem__, rest)] if space else [ids()[c] for c in text]


def tokenizer() -> Tokenizer:
    """Returns a tokenizer with a token for each task word and for each character. Spaces only separate; other
    characters are an error."""
    backend = Tokenizer(models.WordLevel(ids()))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex("[a-z]+|."), "isolated")])
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([END, MASK])
    return backend


def _letters(rng: random.Random) -> str:
    return "".join(rng.choices(SYMBOLS, k=rng.randint(3, 6)))


def _order(rng: random.Random) -> str:
    text = _letters(rng)
    return f"{text}:{''.join(str(i + 1) for i in rng.sample(range(len(text)), len(text)))}"


def _change(rng: random.Random) -> str:
    text = _letters(rng)
    return f"{text}:{rng.choice(text)}{rng.choice(SYMBOLS)}"


def _sum(rng: random.Random) -> str:
    return "+".join([f"{rng.randrange(*rng.choice([(10, 100), (100, 1000)])):03}" for _ in range(2)])


def _shuffle(rng: random.Random) -> tuple[str, str]:
    items = rng.sample(SYMBOLS, rng.randint(3, 6))
    other = items
    while other == items:
        other = rng.sample(items, len(items))
    return "".join(items), "".join(other)


def _brackets(rng: random.Random) -> tuple[str, str]:
    def balanced(pairs: int) -> str:
        if pairs == 0:
            return ""
        inside, kind = rng.randrange(pairs), rng.choice(list(PAIRS))
        return kind + balanced(inside) + PAIRS[kind] + balanced(pairs - 1 - inside)

    text = balanced(rng.randint(2, 4))
    blanks = set(rng.sample(range(len(text)), rng.randint(2, len(text) - 1)))
    return "".join(BLANK if i in blanks else c for i, c in enumerate(text)), text


def _closed(given: str, text: str) -> bool:
    stack: list[str] = []
    for c in text:
        if c in PAIRS:
            stack.append(PAIRS[c])
        elif not stack or stack.pop() != c:
            return False
    return not stack and _fits(given, text)


def _fits(given: str, text: str) -> bool:
    return len(given) == len(text) and all(g in (BLANK, c) for g, c in zip(given, text, strict=True))


@functools.cache
def sudoku_grids() -> tuple[str, ...]:
    """Returns all 288 solved 4x4 sudokus, in which each row, column and 2x2 box has the digits 1 to 4: strings of 16
    digits, row by row."""
    rows = ["".join(p) for p in itertools.permutations("1234")]
    differ = lambda a, b: all(x != y for x, y in zip(a, b, strict=True))
    bands = [(a, b) for a in rows for b in rows if len({*a[:2], *b[:2]}) == 4 and len({*a[2:], *b[2:]}) == 4]
    return tuple("".join((*p, *q)) for p in bands for q in bands if all(differ(a, b) for a in p for b in q))


@functools.cache
def _cells() -> np.ndarray:
    """Returns the grids as `u8[288, 16]`."""
    return np.array([[int(c) for c in grid] for grid in sudoku_grids()], np.uint8)


def _sudoku(rng: random.Random) -> tuple[str, str]:
    while True:
        grid = rng.choice(sudoku_grids())
        blanks = set(rng.sample(range(16), rng.randint(6, 10)))
        clues = [i for i in range(16) if i not in blanks]
        if (_cells()[:, clues] == [int(grid[i]) for i in clues]).all(1).sum() == 1:
            return "".join(BLANK if i in blanks else c for i, c in enumerate(grid)), grid


def _one_answer(name: str, summary: str, body: Callable[[random.Random], str], answer: Callable[..., str]
                ) -> ProblemTask:
    """Returns a task whose bodies, of parts between colons, have one answer."""
    of = lambda body: answer(*body.split(":"))
    return ProblemTask(name, summary, lambda rng: (made := body(rng), of(made)), lambda body, text: text == of(body))


TASKS: dict[str, ProblemTask] = {task.name: task for task in (
    _one_answer("copy", "the same list: BCA to BCA", _letters, lambda items: items),
    _one_answer("reverse", "from the end: BCA to ACB", _letters, lambda items: items[::-1]),
    _one_answer("sort", "in alphabetical order: BCA to ABC", _letters, lambda items: "".join(sorted(items))),
    _one_answer("pick", "by places: BCA:231 to CAB", _order,
                lambda items, order: "".join(items[int(i) - 1] for i in order)),
    _one_answer("replace", "each of one element by another: BCB:BA to ACA", _change,
                lambda items, pair: items.replace(*pair)),
    ProblemTask("shuffle", "any other order: BCA to CBA, or ABC, ...", _shuffle,
                lambda items, text: text != items and sorted(text) == sorted(items)),
    _one_answer("add", "two numbers of 2 or 3 digits, filled up with zeros: 095+917 to 1012", _sum,
                lambda terms: f"{sum(map(int, terms.split('+'))):04}"),
    ProblemTask("brackets", "any balanced text that fits: (__) to ([]), ()(), ...", _brackets, _closed),
    ProblemTask("sudoku", "4x4 with 6 to 10 blanks and one solution", _sudoku,
                lambda given, text: text in sudoku_grids() and _fits(given, text)),
)}
"""By name."""


LENGTH = LONGEST_PROMPT + CANVAS
"""Tokens of a row of a problem."""


def rows_of(found: Sequence[Problem]) -> Batch:
    """Returns problems as a batch of rows of `LENGTH` tokens: prompt, right answer, end tokens up to the fixed size of
    an answer (`CANVAS` tokens), and padding, which is marked as not live."""
    shape = len(found), LENGTH
    tokens, answer, live = np.zeros(shape, np.int32), np.zeros(shape, bool), np.zeros(shape, bool)
    for i, problem in enumerate(found):
        prompt, reply = encode(problem.prompt), encode(problem.answer)
        end = len(prompt) + CANVAS
        tokens[i, :len(prompt) + len(reply)] = prompt + reply
        answer[i, len(prompt):end] = live[i, :end] = True
    return Batch(tokens, answer, live)       # type: ignore[arg-type]  # the end token is 0


def problem_batch(count: int, seed: int, step: int, weights: Sequence[str] = ()) -> Batch:
    """Returns the batch of a training step: `count` problems of random tasks. `weights` are texts TASK=SHARE with the
    relative frequency of tasks for which it is not 1."""
    rng, given = random.Random(f"{seed}:{step}"), dict(item.split("=") for item in weights)
    shares = [float(given.get(task, 1)) for task in TASKS]
    return rows_of([draw(task, rng) for task in rng.choices(list(TASKS), shares, k=count)])
