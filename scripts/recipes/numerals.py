r"""`numerals`: a Markov transformer that writes numbers in words, which shows cascaded decoding (Deng and Rush, 2020).

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

import dataclasses
import itertools
import random
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from rich.console import Console
from tokenizers import Tokenizer

import decodax as dx
from decodax.algorithms.parallel.cascade import Cascade
from decodax.bench.figures import markdown_table
from decodax.models import Transformer
from decodax.models.families import read_config
from decodax.train.language_model import cross_entropy
from recipes.options import Options
from recipes.run import Recipe, llama_config, publish, word_tokenizer

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
LENGTH = DIGITS + 1 + ANSWER
"""Tokens of a row: a prompt, a barrier before the answer, and the answer without its last token."""
ROWS, BLOCK, KEEP = 64, 5, 8
"""Rows of a training step, tokens between barriers at most, and survivors of a cascade."""

CONFIG = llama_config(len(VOCABULARY), max_position_embeddings=64, rope_theta=100.0)

INTRODUCTION = f"""A small Llama-shaped Markov transformer that writes numbers in words. It is made to show cascaded
decoding (Deng and Rush, 2020): behind a barrier, `{BARRIER}`, it sees the number and the words since the barrier, up to
{BLOCK - 1} of them, and nothing else. Each number can be written in several ways, all equally likely, which must not be
mixed. Its language is that of `scripts/recipes/numerals.py`."""


def variants(number: int) -> list[str]:
    """Returns all ways of writing a number from 1 on, each once."""
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
    """Returns a number of a random length."""
    digits = rng.randint(1, DIGITS)
    return rng.randrange(10 ** (digits - 1), 10 ** digits)


def held_out(number: int) -> bool:
    return number >= 100 and zlib.crc32(str(number).encode()) % 16 == 0


def problems(count: int, seed: int = 0, digits: int | None = None) -> list[int]:
    """Returns held-out numbers, all different, with `digits` digits."""
    rng, found = random.Random(f"numerals {digits} {seed}"), dict[int, None]()
    while len(found) < count:
        number = draw(rng)
        if held_out(number) and digits in (None, len(str(number))):
            found[number] = None
    return list(found)


words = lambda text: [ID[f" {word}"] for word in text.split()]
"""Returns the tokens of an answer, without its end."""


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


def tokenizer() -> Tokenizer:
    """Returns the tokenizer, with one token for each digit and each word, whose space it includes."""
    return word_tokenizer(ID, [PAD, END, BARRIER], r" [a-z]+|[\s\S]")


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
        publish(target, "numerals", model, shipped, tokenizer(), facts, {"eos_token": END, "pad_token": PAD}, CONFIG,
                introduction=INTRODUCTION, rows={
            "training": f"AdamW, cross-entropy of answers under random barriers, blocks of {BLOCK}, float32 master "
                        "weights"}, tags=["markov-transformer", "cascaded-decoding"],
            figures=f"Right answers to {options.problems} held-out numbers, with the shipped weights in float32, by "
                    f"cascades of {KEEP} survivors a position\nup to a Markov order, and by greedy decoding after one "
                    f"barrier:\n\n{table}")
        return ", ".join(f"{'order ' * (order != 'greedy')}{order}: {share:.1%}" for order, share in shares.items())

    return Recipe(
        model.init_params(jax.random.key(options.seed)), MarkovObjective(model),
        lambda run: training_batch(ROWS, BLOCK, options.seed, run.step), lambda batch: ROWS * LENGTH,
        lambda params, run: {"greedy": accuracy(loaded(params), problems(64, seed=1), None)}, finish,
        shardings=model.shardings(mesh))
