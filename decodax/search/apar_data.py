"""Texts with a structure as what a model is tuned on to write `[Fork]` (Liu et al., 2024, APAR)."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence

CONFUSING = "```", "$$", ">", "<", "=", "---", "http"
"""What no text has that becomes a training example: code, formulas, tables, markup, links."""

_HEAD = re.compile(r"^[ \t]*\d+\.[ \t]+[^\n]*?[:\uff1a]", re.MULTILINE)
_NUMBER = re.compile(r"\n\s*\d+\.\s+")
_TITLES = "mr.", "mrs.", "dr."


@dataclasses.dataclass(frozen=True)
class Tuning:
    """An example to tune a model on: it is to answer `prompt` by `target`, and the loss is that of the tokens of
    `target[trained:]`, with an end of sequence behind them."""

    prompt: str
    target: str
    trained: int


def outline(text: str) -> tuple[list[str], list[str]] | None:
    """Introductions and details: `n + 1` pieces of a text, and what stands between them. None for a text that has not
    at least three details, or one of `CONFUSING`.

    Of a list with numbers the details of an item stand behind its first colon. In a text without such a list they are
    what comes behind the first sentence of a paragraph. The rules are those of the authors' code, but that they leave
    all spaces and line ends where they are, so that the pieces put together are the text again.

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
        # the last item ends with its paragraph
        blank = text.find("\n\n", head.end())
        end = after.start() if after else len(text) if blank < 0 else blank
        details = text[head.end():end].rstrip("\n")
        if len(details) < 10 or _NUMBER.search(details):
            return []
        spans.append((head.end(), head.end() + len(details)))
    return spans if len(spans) >= 3 else []


def _paragraphs(text: str) -> list[tuple[int, int]]:
    if any(title in text.lower() for title in _TITLES):
        return []                       # no ends of sentences
    end = "\u3002" if "\u3002" in text else ". "
    spans, at, paragraphs = [], 0, text.split("\n\n")
    if sum(bool(p.strip()) for p in paragraphs) <= 2:
        return []
    for paragraph in paragraphs:
        first = paragraph.find(end)
        details = paragraph[first + len(end):].rstrip() if first >= 0 else ""
        introduction = paragraph[:first + len(end)] if details else paragraph
        if paragraph.strip() and len(introduction.strip()) + (len("[Fork]") if details else 0) < 20:
            return []                   # maybe no sentence
        if details:
            spans.append((at + first + len(end), at + first + len(end) + len(details)))
        at += len(paragraph) + 2
    return spans if len(spans) >= 3 else []


def to_apar(prompt: str, text: str, *, fork: str = "[Fork]", child: str = "[Child]") -> list[Tuning]:
    """The examples that a prompt and its answer make: one of the main thread, with `fork` in place of the details, and
    one of each of the details, behind what stands in front of them in the main thread and `child`. None of an answer
    without structure (see `outline`): it is trained on as it is.

    >>> text = "Three:\\n1. Red: warm as the sun.\\n2. Blue: cold as the sea.\\n3. Grey: neither of them."
    >>> [x.target for x in to_apar("Name three colours.", text)][:2]
    ['Three:\\n1. Red:[Fork]\\n2. Blue:[Fork]\\n3. Grey:[Fork]', 'Three:\\n1. Red:[Fork][Child] warm as the sun.']

    Raises:
        ValueError: the answer has one of the control tokens in it.
    """
    for token in (fork, child):
        if not token or token in text:
            raise ValueError(f"text: has {token!r} in it, which is a control token")
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
    """The text that the examples of `to_apar` say, put together as `dx.search.explore(..., "apar")` does.

    Raises:
        ValueError: there are not as many details as places for them.
    """
    details = [example.target[example.trained:] for example in examples if example.trained]
    main = next(example.target for example in examples if not example.trained)
    pieces = main.split(fork)
    if len(pieces) != len(details) + 1:
        raise ValueError(f"examples: got {len(details)} details for {len(pieces) - 1} places, takes one for each")
    return "".join(x + y for x, y in zip(pieces, [*details, ""], strict=True))
