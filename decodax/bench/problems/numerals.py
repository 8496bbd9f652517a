r"""Numbers written in words, which the shipped `numerals` does, a Markov transformer for cascaded decoding (Deng and
Rush, 2020).

    prompt  `1207=`
    answer  ` one thousand two hundred seven`, with or without "and" after "hundred", or ` twelve hundred and seven`

All ways of writing a number are equally likely, and a text that mixes the words of several is wrong. A model that
says every word without looking at the others (Markov order 0) does mix them, and errs less the more words it looks
back at.

>>> sorted(variants(1207))[:2]
[' one thousand two hundred and seven', ' one thousand two hundred seven']
>>> right(1207, " twelve hundred seven"), right(1207, " twelve thousand seven")
(True, False)
"""

from __future__ import annotations

import itertools
import random
import zlib

import numpy as np

from decodax.bench.problems.distinct import distinct

END, PAD, BARRIER = "<|end|>", "<|pad|>", "<|barrier|>"
SMALL = ("one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
         "eighteen nineteen").split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
SCALES = ("", "thousand", "million")
VOCABULARY = [PAD, END, BARRIER, *"0123456789=", *(f" {w}" for w in (*SMALL, *TENS, "hundred", "and", *SCALES[1:]))]
ID = {word: i for i, word in enumerate(VOCABULARY)}
DIGITS, ANSWER = 9, 18
"""Digits of the longest number, and tokens of the longest answer: three times five words, two scales between them, and
the end."""


def variants(number: int) -> list[str]:
    """Returns all texts that spell a number in English words, such as " twelve hundred" and " one thousand two
    hundred", each once."""
    groups = [(number // 1000 ** i % 1000, SCALES[i]) for i in (2, 1, 0)]
    parts = [[[*way, scale] if scale else way for way in _group(n, after=i == 2 and number >= 1000)]
             for i, (n, scale) in enumerate(groups) if n]
    found = [list(itertools.chain(*way)) for way in itertools.product(*parts)]
    if 1100 <= number < 10_000 and number % 1000 >= 100:
        found += [[*_two(number // 100), "hundred", *way] for way in _rest(number % 100)]
    return ["".join(f" {word}" for word in way) for way in found]


def _group(number: int, after: bool) -> list[list[str]]:
    """Returns the ways of writing a number below 1000, `after` a larger part or not."""
    if number >= 100:
        return [[SMALL[number // 100 - 1], "hundred", *way] for way in _rest(number % 100)]
    return _rest(number) if after else [_two(number)]


def _rest(number: int) -> list[list[str]]:
    """Returns the ways of writing a number below 100 after a larger one."""
    return [_two(number), ["and", *_two(number)]] if number else [[]]


def _two(number: int) -> list[str]:
    if number < 20:
        return [SMALL[number - 1]]
    return [TENS[number // 10 - 2], *([SMALL[number % 10 - 1]] if number % 10 else [])]


def right(number: int, text: str) -> bool:
    return text in variants(number)


def draw(rng: random.Random) -> int:
    """Returns a random number from 1 on, of which first the number of digits is drawn and then the digits."""
    digits = rng.randint(1, DIGITS)
    return rng.randrange(10 ** (digits - 1), 10 ** digits)


def held_out(number: int) -> bool:
    return number >= 100 and zlib.crc32(str(number).encode()) % 16 == 0


def problems(count: int, seed: int = 0, digits: int | None = None) -> list[int]:
    """Returns `count` different numbers to be written in words. They are held out of training, and the same at every
    call with these arguments; a larger `count` only appends numbers.

    Args:
        count: how many.
        seed: seed of the draw.
        digits: number of their digits, 3 to 9; None: drawn for each number.

    Raises:
        ValueError: there are fewer such numbers.
    """
    rng = random.Random(f"numerals {digits} {seed}")

    def one() -> int | None:
        number = draw(rng)
        return number if held_out(number) and digits in (None, len(str(number))) else None

    return distinct(count, one, lambda number: number)


words = lambda text: [ID[f" {word}"] for word in text.split()]
"""Returns the tokens of an answer, without its end."""


LENGTH = DIGITS + 1 + ANSWER
"""Tokens of a row: a prompt, a barrier before the answer, and the answer without its last token."""


def training_batch(rows: int, block: int, seed: int, step: int) -> tuple[np.ndarray, ...]:
    """Returns the texts of a training step under random barriers.

    A barrier precedes the answer. In three quarters of the rows a barrier also replaces every `block`-th token of the
    answer, from a random one on; tokens after it do not see those before it, except the prompt. So all Markov orders
    below `block` are trained. The other rows have no more barriers. Returns tokens, block numbers with 0 for the
    prompt, next tokens (each `i32[rows, LENGTH]`), and True where these count in the loss (`bool[rows, LENGTH]`).
    """
    rng = random.Random(f"train {seed} {step}")
    tokens, blocks, targets = (np.zeros((rows, LENGTH), np.int32) for _ in range(3))
    counts = np.zeros((rows, LENGTH), bool)
    for i in range(rows):
        while held_out(number := draw(rng)):
            pass
        prompt = [ID[c] for c in f"{number}="]
        answer = [*words(rng.choice(variants(number))), ID[END]]
        offset, cut = rng.randrange(block), rng.random() < 0.75
        begins = [j == 0 or (cut and j % block == offset) for j in range(len(answer))]
        at = slice(len(prompt), len(prompt) + len(answer))
        tokens[i, :len(prompt)] = prompt
        tokens[i, at] = [ID[BARRIER] if begin else before for begin, before in zip(begins, [0, *answer], strict=False)]
        blocks[i, len(prompt):] = ANSWER + 1
        blocks[i, at] = np.cumsum(begins)
        targets[i, at], counts[i, at] = answer, True
    return tokens, blocks, targets, counts
