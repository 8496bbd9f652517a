r"""Numbers in words, each of which can be written in several ways: what cascaded decoding is shown on.

    prompt  `1207=`
    answer  ` one thousand two hundred seven`, with "and" behind "hundred" or not, or ` twelve hundred and seven`

All ways of writing a number are equally likely, and one of them must be kept to: a text that takes some of its words
from each is wrong. A model that says every word without looking at the others (Markov order 0) does that, and errs
the less the more words behind it it looks at. `scripts/train_numerals.py` trains the shipped `numerals` on them.

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
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

END, PAD, BARRIER = "<|end|>", "<|pad|>", "<|barrier|>"
SMALL = ("one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
         "eighteen nineteen").split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
SCALES = ("", "thousand", "million")
VOCABULARY = [PAD, END, BARRIER, *"0123456789=", *(f" {w}" for w in (*SMALL, *TENS, "hundred", "and", *SCALES[1:]))]
ID = {word: i for i, word in enumerate(VOCABULARY)}
DIGITS = 9
"""Digits of the longest number."""

ANSWER = 18
"""Tokens of the longest answer: three times five words, two scales between them, and the end."""

LENGTH = DIGITS + 1 + ANSWER
"""Tokens of a row: a prompt, a barrier in front of the answer, and the answer without its last token."""


def variants(number: int) -> list[str]:
    """All ways of writing a number from 1 on, each once."""
    groups = [(number // 1000 ** i % 1000, SCALES[i]) for i in (2, 1, 0)]
    parts = [[[*way, scale] if scale else way for way in _group(n, behind=i == 2 and number >= 1000)]
             for i, (n, scale) in enumerate(groups) if n]
    found = [list(itertools.chain(*way)) for way in itertools.product(*parts)]
    if 1100 <= number < 10_000 and number % 1000 >= 100:
        found += [[*_two(number // 100), "hundred", *way] for way in _rest(number % 100)]
    return ["".join(f" {word}" for word in way) for way in found]


def _group(number: int, behind: bool) -> list[list[str]]:
    """Ways of writing a number below 1000, `behind` a larger part or not."""
    if number >= 100:
        return [[SMALL[number // 100 - 1], "hundred", *way] for way in _rest(number % 100)]
    return _rest(number) if behind else [_two(number)]


def _rest(number: int) -> list[list[str]]:
    """Ways of writing a number below 100 behind a larger one."""
    return [_two(number), ["and", *_two(number)]] if number else [[]]


def _two(number: int) -> list[str]:
    if number < 20:
        return [SMALL[number - 1]]
    return [TENS[number // 10 - 2], *([SMALL[number % 10 - 1]] if number % 10 else [])]


def right(number: int, text: str) -> bool:
    return text in variants(number)


def draw(rng: random.Random) -> int:
    """A number of a random length."""
    digits = rng.randint(1, DIGITS)
    return rng.randrange(10 ** (digits - 1), 10 ** digits)


def held_out(number: int) -> bool:
    return number >= 100 and zlib.crc32(str(number).encode()) % 16 == 0


def problems(count: int, seed: int = 0, digits: int | None = None) -> list[int]:
    """Held-out numbers, all different, with so many digits."""
    rng, found = random.Random(f"numerals {digits} {seed}"), dict[int, None]()
    while len(found) < count:
        number = draw(rng)
        if held_out(number) and digits in (None, len(str(number))):
            found[number] = None
    return list(found)


def words(text: str) -> list[int]:
    """The tokens of an answer, without its end."""
    return [ID[f" {word}"] for word in text.split()]


def training_batch(rows: int, block: int, seed: int, step: int) -> tuple[np.ndarray, ...]:
    """Texts of a training step under random barriers.

    Behind the prompt stands a barrier, then the answer. In three quarters of the rows a barrier also stands in place of
    every `block`-th token of the answer, from a random one on; what is behind it does not see what is in front of it,
    but for the prompt. So all Markov orders below `block` are trained. The other rows have no more barriers.

    Returns:
        tokens `i32[rows, LENGTH]`; the number of the block of each, 0 for the prompt, `i32[rows, LENGTH]`; the tokens
        that come next `i32[rows, LENGTH]`, and where they count `bool[rows, LENGTH]`.
    """
    rng = random.Random(f"train {seed} {step}")
    tokens, blocks, targets = (np.zeros((rows, LENGTH), np.int32) for _ in range(3))
    counts = np.zeros((rows, LENGTH), bool)
    for i in range(rows):
        number = draw(rng)
        while held_out(number):
            number = draw(rng)
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


def tokenizer() -> Tokenizer:
    """One token a digit and a word, which has the space in front of it."""
    found = Tokenizer(models.WordLevel(ID, unk_token=PAD))
    found.pre_tokenizer = pre_tokenizers.Split(Regex(r" [a-z]+|[\s\S]"), "isolated")
    found.decoder = decoders.Fuse()
    found.add_special_tokens([PAD, END, BARRIER])
    return found
