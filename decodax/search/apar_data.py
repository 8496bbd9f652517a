"""Converts structured texts to training examples of models that write `[Fork]` (APAR; Liu et al., 2024)."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence

CONFUSING = "```", "$$", ">", "<", "=", "---", "http"
"""Texts with one of these are not used for training: code, formulas, tables, markup, links."""

_HEAD = re.compile(r"^[ \t]*\d+\.[ \t]+[^\n]*?[:\uff1a]", re.MULTILINE)
_NUMBER = re.compile(r"\n\s*\d+\.\s+")
_TITLES = "mr.", "mrs.", "dr."


@dataclasses.dataclass(frozen=True)
class Tuning:
    """A training example of APAR: the model is to answer `prompt` with `target`.

    Attributes:
        prompt: the prompt.
        target: the text after the prompt, with control tokens.
        trained: number of first characters of `target` that are context only. The loss covers the tokens of
            `target[trained:]` and an end-of-sequence token after them.
    """

    prompt: str
    target: str
    trained: int


def outline(text: str) -> tuple[list[str], list[str]] | None:
    """Splits a text into `n + 1` main pieces and the `n` details that lie between them.

    The text is a numbered list, whose details begin after the first colon of each item, or else a sequence of
    paragraphs, whose details are all sentences but the first. Returns None for a text with fewer than three details, or
    with one of the strings in `CONFUSING`. The rules are those of the authors' code, except that all white space is
    kept: the pieces and details, joined in turn, are the text.

    >>> outline("Three:\\n1. Red: warm as the sun.\\n2. Blue: cold as the sea.\\n3. Grey: neither of them.")
    (['Three:\\n1. Red:', '\\n2. Blue:', '\\n3. Grey:', ''], \
    [' warm as the sun.', ' cold as the sea.', ' neither of them.'])
    """
    if any(mark in text for mark in CONFUSING):
        return None
    spans = _items(text) or _paragraphs(text)
    if not spans:
        return None
    ends = [0, *(end for _, end in spans)]
    starts = [*(start for start, _ in spans), len(text)]
    return [text[a:b] for a, b in zip(ends, starts, strict=True)], [text[a:b] for a, b in spans]


def _items(text: str) -> list[tuple[int, int]]:
    heads = list(_HEAD.finditer(text))
    spans = []
    for head, after in itertools.zip_longest(heads, heads[1:]):
        # The last item ends with its paragraph.
        blank = text.find("\n\n", head.end())
        end = after.start() if after else len(text) if blank < 0 else blank
        details = text[head.end():end].rstrip("\n")
        if len(details) < 10 or _NUMBER.search(details):
            return []
        spans.append((head.end(), head.end() + len(details)))
    return spans if len(spans) >= 3 else []


def _paragraphs(text: str) -> list[tuple[int, int]]:
    if any(title in text.lower() for title in _TITLES):
        return []                       # the ends of sentences cannot be found
    end = "\u3002" if "\u3002" in text else ". "
    spans, at, paragraphs = [], 0, text.split("\n\n")
    if sum(bool(p.strip()) for p in paragraphs) <= 2:
        return []
    for paragraph in paragraphs:
        first = paragraph.find(end)
        details = paragraph[first + len(end):].rstrip() if first >= 0 else ""
        introduction = paragraph[:first + len(end)] if details else paragraph
        if paragraph.strip() and len(introduction.strip()) + (len("[Fork]") if details else 0) < 20:
            return []                   # possibly not a sentence
        if details:
            spans.append((at + first + len(end), at + first + len(end) + len(details)))
        at += len(paragraph) + 2
    return spans if len(spans) >= 3 else []


def to_apar(prompt: str, text: str, *, fork: str = "[Fork]", child: str = "[Child]") -> list[Tuning]:
    """Returns the training examples of a prompt and its answer for APAR.

    The first example is the main thread: the text with `fork` in place of each detail. Then there is one example for
    each detail; it contains the main thread up to that detail, `child`, and the detail. The list is empty for an answer
    in which `outline` finds no details; train on such an answer unchanged.

    Args:
        prompt: the prompt.
        text: its answer.
        fork: the control token at which a thread forks.
        child: the control token at which a child thread begins.

    >>> text = "Three:\\n1. Red: warm as the sun.\\n2. Blue: cold as the sea.\\n3. Grey: neither of them."
    >>> [x.target for x in to_apar("Name three colours.", text)][:2]
    ['Three:\\n1. Red:[Fork]\\n2. Blue:[Fork]\\n3. Grey:[Fork]', 'Three:\\n1. Red:[Fork][Child] warm as the sun.']

    Raises:
        ValueError: the answer contains one of the control tokens.
    """
    for token in (fork, child):
        if not token or token in text:
            raise ValueError(f"text: got one with the control token {token!r}, takes one without it")
    found = outline(text)
    if found is None:
        return []
    pieces, details = found
    examples = [Tuning(prompt, fork.join(pieces), 0)]
    for i, detail in enumerate(details):
        before = fork.join(pieces[:i + 1]) + fork + child
        examples.append(Tuning(prompt, before + detail, len(before)))
    return examples


def from_apar(examples: Sequence[Tuning], *, fork: str = "[Fork]") -> str:
    """Joins the examples of `to_apar` to the original answer, as `dx.search.explore(..., "apar")` joins generated
    threads.

    Raises:
        ValueError: the number of details differs from the number of `fork` tokens in the main thread.
    """
    details = [example.target[example.trained:] for example in examples if example.trained]
    main = next(example.target for example in examples if not example.trained)
    pieces = main.split(fork)
    if len(pieces) != len(details) + 1:
        raise ValueError(f"examples: got {len(details)} details for {len(pieces) - 1} places, takes one for each")
    return "".join(x + y for x, y in zip(pieces, [*details, ""], strict=True))
