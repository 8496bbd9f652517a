"""The texts that drafters are trained and measured on: Python files or examples, as tokens of a target."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from decodax.models.drafters.units import frequent_units
from decodax.train import corpus
from decodax.train.drafting.systems import SYSTEMS
from decodax.train.drafting.unrolled import frequent_tokens
from decodax.train.tuning import read_examples

EVERY = 20
"""One of `EVERY` examples is held out."""

PROMPTS, PROMPT = 16, 64
"""Held-out prompts that a drafter is measured on, and their tokens."""

UNITS, LONGEST = 4096, 8
"""Words that a head of MuMo predicts, and the largest number of their tokens."""


@dataclass(frozen=True)
class Text:
    """The text that a drafter is trained and measured on.

    Attributes:
        train: `i32[N]`, the target's tokens.
        held: `i32[M]`, held-out tokens.
        prompts: held-out prompts, as token ids.
        data: what it is, for the card.
        where: what the prompts are, for the card.
        stops: False if decoding goes on after tokens that end an answer, as it should in code.
    """

    train: np.ndarray
    held: np.ndarray
    prompts: list[list[int]]
    data: str
    where: str
    stops: bool = True


def source_code(lm: Any, root: Path | None) -> Text:
    """Returns the training text and held-out prompts of Python files below `root` (None: the standard library), as
    tokens of the model `lm`, with its end-of-text token between files."""
    train, held = (packed(lm, documents) for documents in corpus.load_corpus(root))
    starts = np.linspace(0, len(held) - PROMPT - 1, PROMPTS).astype(int)
    return Text(train, held, [held[start:start + PROMPT].tolist() for start in starts],
                corpus.corpus_name() if root is None else f"the .py files of {root.name}",
                f"{PROMPTS} prompts of {PROMPT} tokens from held-out files", stops=False)


def examples(lm: Any, files: Sequence[str]) -> Text:
    """Returns the training text of the examples in `files` (see `read_examples`), concatenated as tokens of the model
    `lm`, with every 20th example held out. Its prompts are those of held-out examples."""
    found = read_examples([Path(file) for file in files], lm)
    held = found[EVERY - 1::EVERY] or found
    used = [x for i, x in enumerate(found) if i % EVERY != EVERY - 1] if len(found) >= EVERY else found
    joined = lambda some: np.concatenate([np.asarray(x.tokens, np.int32) for x in some])
    prompts = [list(x.tokens[:x.prompt or PROMPT]) for x in held][:PROMPTS]
    return Text(joined(used), joined(held), prompts,
                f"{len(used):,} examples of {', '.join(Path(file).name for file in files)}",
                f"the prompts of {len(prompts)} held-out examples")


def packed(lm: Any, documents: list[corpus.Document]) -> np.ndarray:
    """Returns the tokens of all documents, in the target's tokenizer, as one stream `i32[N]`. The target's end-of-text
    token (0 if it has none) precedes each document and ends the stream.

    Args:
        lm: the target.
        documents: the documents.
    """
    if (Path(lm.directory or "") / "tokenizer.json").is_file():
        tokenizer = Tokenizer.from_file(str(Path(lm.directory) / "tokenizer.json"))
        if tokenizer.token_to_id(corpus.END_OF_TEXT) is not None:
            return corpus.pack(tokenizer, documents)
    end = lm.eos[0] if lm.eos else 0
    pieces = [np.asarray([end, *lm.tokenizer.encode(d.text)], np.int32) for d in documents]
    return np.concatenate([*pieces, np.asarray([end], np.int32)])


def units_of(lm: Any, tokens: np.ndarray, count: int) -> np.ndarray:
    """Returns the most frequent words of several tokens in a text, `i32[U, L]`, padded with -1. A word has the space
    before it."""
    often = Counter(re.findall(r"\s?\S+", lm.tokenizer.decode(tokens.tolist()))).most_common(4 * count)
    pieces = ((tuple(lm.tokenizer.encode(word, add_special_tokens=False)), many) for word, many in often)
    return frequent_units((piece for piece, many in pieces for _ in range(many)), count, LONGEST)


def predicted_tokens(system: str, lm: Any, text: Text, count: int | None = None) -> np.ndarray | None:
    """Returns the tokens that a drafter of the method `system` predicts: `count`, or the method's share, of the tokens
    that are most frequent in a text, `i32[Vd]`; for "mumo" words of several tokens, `i32[U, L]`; None: all tokens."""
    if system == "mumo":
        return units_of(lm, text.train, count or UNITS)
    share = SYSTEMS[system].share if system in SYSTEMS else 1.0
    count = count or (None if share == 1 else int(share * lm.model.config.vocab))
    return None if count is None else frequent_tokens(text.train, count, lm.model.config.vocab)
