"""Examples for fine-tuning: pairs of a prompt and a target, of which the target is learned, and plain text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from decodax.models.inputs import reads_text
from decodax.train.tuning.python_docs import (
    DOCS,
    QUESTIONS,
    SOURCE,
    python_docs,
    python_questions,
    python_source,
)


@dataclass(frozen=True)
class Example:
    """A training text: `tokens`, and the number `prompt` of first tokens, which are given and have no loss."""

    tokens: tuple[int, ...]
    prompt: int


def read_examples(files: Sequence[Path], lm: Any) -> list[Example]:
    """Returns the examples of files, in order.

    A line of a `.jsonl` file is an object with "prompt" and "target", with "messages" of a chat whose last one is
    learned, with "messages" and "text", which is what `decodax batch --keep messages` writes, or with "text" alone; for
    an encoder-decoder of text also with "source" and "text", which `decodax batch --keep source` writes; any other file
    is one text. The path "python-docs" stands for the topics of Python's `help()` as texts, "python-source"
    for the files of the standard library that the shipped models were trained on, and "python-questions" for questions
    on the sections of `help()` with the answers: chats if the model has a chat template, else pairs. The model's own
    template formats a chat. The tokenizer adds its BOS to a text or prompt; the first id that ends a text of the model
    follows a target or a text.

    Args:
        files: paths.
        lm: a result of `decodax.load`, with a tokenizer.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: no files, a model without a tokenizer or without a chat template for a chat, or a line that is no
            example; the message names it.
    """
    end = lm.eos[:1]
    found: list[Example] = []
    for prompt, target in read_pairs(files, lm):
        given = [] if prompt is None else (
            lm.tokenizer.encode(prompt) if isinstance(prompt, str) else lm.tokenizer.encode_chat(prompt))
        own = lm.tokenizer.encode(target, add_special_tokens=prompt is None)
        found.append(Example((*given, *own, *end), len(given)))
    return found


def read_pairs(files: Sequence[Path], lm: Any) -> list[tuple[str | list[dict[str, str]] | None, str]]:
    """Returns the pairs of `read_examples` as texts: a prompt, which is a text, the messages of a chat, or None for a
    text without one; and the text that is learned. Arguments and errors are those of `read_examples`."""
    if not files:
        raise ValueError("data: got no files, takes one or more")
    if lm.tokenizer is None:
        raise ValueError(f"target: got {lm.name!r}, which has no tokenizer; takes a model with one")
    return [pair for file in files for pair in _pairs(file, bool(lm.tokenizer.chat_templates), reads_text(lm.model))]


def _pairs(file: Path, chats: bool, sources: bool) -> Iterator[tuple[str | list[dict[str, str]] | None, str]]:
    """Yields (prompt, target) for each example of a file; the prompt is a text or the messages of a chat, or None for a
    text without one. Questions on Python's documentation are such messages if `chats`. "source" is a prompt if
    `sources`; for a decoder it may be a note on the origin of a text."""
    if str(file) in (DOCS, SOURCE):
        yield from ((None, text) for text in (python_docs() if str(file) == DOCS else python_source()))
        return
    if str(file) == QUESTIONS:
        yield from (([{"role": "user", "content": question}] if chats else f"{question}\n\n", answer)
                    for question, answer in python_questions())
        return
    if file.suffix != ".jsonl":
        yield None, file.read_text("utf-8")
        return
    for number, line in enumerate(file.read_text("utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"data: {file}, line {number}: {error}") from error
        match entry:
            case {"messages": [*before, {"role": "assistant", "content": str(target)}]} if before:
                yield before, target
            case {"messages": [_, *_] as messages, "text": str(target)}:
                yield messages, target
            case {"source": str(prompt), "text": str(target)} if sources:
                yield prompt, target
            case {"text": str(text)}:
                yield None, text
            case {"prompt": str(prompt), "target": str(target)}:
                yield prompt, target
            case _:
                raise ValueError(f'data: {file}, line {number}: got {line[:60]!r}, takes an object with the texts '
                                 '"prompt" and "target", with "messages" that end in an answer, or with "text"; for an '
                                 'encoder-decoder with "source" and "text"')


@dataclass(frozen=True)
class ExampleRows:
    """Examples as rows of one length.

    Attributes:
        tokens: `i32[N, T + 1]`; tokens of the examples; 0 after the end of an example.
        learned: `bool[N, T + 1]`, True for the tokens that are learned.
        cut: number of pairs that were too long and lost the beginning of the prompt, or the end of the target.
        offsets: `i32[N]`, number of learned tokens of a row's example in the rows before it; None: 0.
    """

    tokens: np.ndarray
    learned: np.ndarray
    cut: int = 0
    offsets: np.ndarray | None = None

    @classmethod
    def of(cls, examples: Sequence[Example], length: int) -> ExampleRows:
        """Makes rows of `length` predicted tokens. A pair is one row; a text is as many as it needs, which overlap by
        one token.

        Raises:
            ValueError: there is nothing to predict.
        """
        rows: list[tuple[Sequence[int], int, int]] = []
        cut = 0
        for example in examples:
            tokens, prompt = example.tokens, example.prompt
            if not prompt:
                rows += [(tokens[at:at + length + 1], 1, at) for at in range(0, len(tokens) - 1, length)]
            elif len(tokens) > prompt:
                cut += len(tokens) > length + 1
                # at least one token of the prompt stays, which predicts the first of the target
                drop = min(max(len(tokens) - length - 1, 0), prompt - 1)
                rows.append((tokens[drop:][:length + 1], prompt - drop, 0))
        if not rows:
            raise ValueError(f"data: got {len(examples)} examples, of which none has a token to predict")
        made, learned = np.zeros((len(rows), length + 1), np.int32), np.zeros((len(rows), length + 1), bool)
        for i, (row, given, _) in enumerate(rows):
            made[i, :len(row)] = row
            learned[i, given:len(row)] = True
        return cls(made, learned, cut, np.asarray([before for *_, before in rows], np.int32))

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """The pair `(tokens, learned)`, `i32[N, T + 1]` and `bool[N, T + 1]`, as `ExampleBatches` takes it."""
        return self.tokens, self.learned

    @property
    def before(self) -> np.ndarray:
        """Number of learned tokens of each row's example in the rows before it, `i32[N]`: above 0 in the later rows of
        a text."""
        return np.zeros(len(self), np.int32) if self.offsets is None else self.offsets

    def __len__(self) -> int:
        """Returns the number of rows."""
        return len(self.tokens)

    def __getitem__(self, which: Any) -> ExampleRows:
        """Returns some of the rows."""
        return ExampleRows(self.tokens[which], self.learned[which], offsets=self.before[which])


@dataclass(frozen=True)
class ExampleBatches:
    """Batches of rows: `ExampleBatches(...)[step]` has `batch` rows of each array, the same at every call. Every epoch
    visits each row once, in another random order.

    Attributes:
        arrays: `[N, ...]` each, such as tokens and learned places of `ExampleRows`.
        batch: number of rows of a batch.
        seed: seed of the orders.
    """

    arrays: tuple[np.ndarray, ...]
    batch: int
    seed: int = 0

    def __getitem__(self, step: int) -> tuple[np.ndarray, ...]:
        count, first = len(self.arrays[0]), step * self.batch
        places = range(first, first + self.batch)
        epochs = {e: np.random.default_rng([self.seed, e]).permutation(count) for e in {i // count for i in places}}
        which = [epochs[i // count][i % count] for i in places]
        return tuple(x[which] for x in self.arrays)


def spare_tokens(lm: Any, texts: Iterable[int]) -> list[int]:
    """Returns all tokens of a model that texts do not have and that do not begin, end or pad a text, the last ones of
    the vocabulary first. The arguments are those of `unused_tokens`."""
    ends = [i for end in lm.eos for i in (end if isinstance(end, (list, tuple)) else (end,))]
    template = lm.tokenizer.special_tokens.values()
    known = {i for text in template for i in lm.tokenizer.encode(text, add_special_tokens=False)}
    used = {*ends, lm.pad, lm.bos, *known, *texts}
    return [i for i in reversed(range(lm.vocab_size)) if i not in used]


def unused_tokens(lm: Any, texts: Iterable[int], count: int = 1) -> list[int]:
    """Returns `count` tokens of a model that texts do not have and that do not begin, end or pad a text.

    They are the last ones of the vocabulary, where ids without a text and reserved tokens usually are.

    Args:
        lm: the model, with a tokenizer.
        texts: the tokens of all texts.
        count: number of tokens.

    Raises:
        ValueError: fewer are unused.
    """
    found = spare_tokens(lm, texts)[:count]
    if len(found) < count:
        raise ValueError(f"data: it has all tokens of the vocabulary but {len(found)}, takes {count} unused ones; give "
                         "their ids")
    return found


__all__ = ["Example", "ExampleBatches", "ExampleRows", "read_examples", "read_pairs", "spare_tokens",
           "unused_tokens"]


def prompts_of(rows: ExampleRows, count: int) -> list[list[int]]:
    """Returns the prompts of the first rows, as token ids; of a row of text its first quarter."""
    given = [(row, int(own.argmax()), int(own.sum())) for row, own in zip(rows.tokens[:count], rows.learned[:count],
                                                                          strict=True)]
    return [row[:first if first > 1 else max(size // 4, 1)].tolist() for row, first, size in given]
