"""Converts texts to be scored, in all accepted forms, to token ids and the index of the first scored token."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from decodax.common.arguments import shown, unicode
from decodax.io.text import Tokenizer

Ids = Sequence[int] | np.ndarray
Chat = Sequence[Mapping[str, Any]]
Text = str | Ids | Chat | tuple[str | Chat, str] | tuple[Ids, Ids]
"""A text, token ids, a chat, or a tuple of a prompt and its continuation: two texts, two lists of ids, or a chat and
the text of its answer."""


@dataclasses.dataclass(frozen=True)
class TextSpan:
    """Token ids of a text, whose log-probabilities are computed from index `start` on.

    Attributes:
        ids: the token ids, at least one.
        start: index of the first scored token, at least 1; the tokens before it are context only.
        bytes: number of UTF-8 bytes of the scored part; None without a tokenizer.
    """

    ids: list[int]
    start: int
    bytes: int | None


def spans(texts: Text | Iterable[Text], tokenizer: Tokenizer | None, bos: int | None, vocab: int) -> list[TextSpan]:
    """Returns the token ids of texts to be scored, each with the index of its first scored token.

    A prompt and its continuation are tokenized as one text. The scored part begins at the first token that differs from
    the tokens of the prompt alone, so a token that covers the border belongs to the continuation. White space at the
    end of a prompt counts as part of the continuation, as in lm-evaluation-harness.

    Args:
        texts: one text or several, see `Text`.
        tokenizer: the model's tokenizer, or None.
        bos: the id that is put before a continuation whose prompt has no token, or None.
        vocab: size of the vocabulary.

    Raises:
        ValueError: nothing to score, an empty text, an id outside the vocabulary, text without a tokenizer, or a form
            that is not one of `Text`. The message names the entry.
    """
    whole: Any = texts
    if isinstance(whole, Mapping):
        raise ValueError("texts: got a mapping, takes a list of messages for a chat")
    if isinstance(whole, tuple) and not _is_ids(whole):
        raise ValueError("texts: got a tuple, which is one prompt with its continuation; takes a list of them")
    if isinstance(whole, bytes) or not isinstance(whole, Iterable):
        raise TypeError(f"texts: got {shown(whole)}, takes a text, token ids or a chat, or several")
    rows = [whole] if isinstance(whole, str) or _is_ids(whole) or _is_chat(whole) else list(whole)
    if not rows:
        raise ValueError("texts: got none, takes at least one")
    return [_span(row, f"texts[{i}]", tokenizer, bos, vocab) for i, row in enumerate(rows)]


def _span(row: Any, name: str, tokenizer: Tokenizer | None, bos: int | None, vocab: int) -> TextSpan:
    parts = row if isinstance(row, tuple) and not _is_ids(row) else (row,)
    written = [isinstance(part, str) or _is_chat(part) for part in parts]
    for part in (part for part in parts if isinstance(part, str)):
        unicode(name, part)
    if any(written) and tokenizer is None:
        raise ValueError(f"{name}: got text, but this model has no tokenizer; takes token ids")
    if parts is row:
        if len(parts) != 2 or written[0] != written[1] or _is_chat(parts[1]):
            raise ValueError(f"{name}: got a tuple of {', '.join(map(_kind, parts)) or 'nothing'}; a prompt and its "
                             "continuation are two texts, two lists of token ids, or a chat and the text of its answer")
        ids, start = _pair(parts[0], parts[1], name, tokenizer)
    else:
        ids, start = _ids(row, name, tokenizer), 1
    if not ids:
        raise ValueError(f"{name}: is empty, takes at least one token")
    if start == 0:
        if bos is None:
            raise ValueError(f"{name}: the prompt is empty, and the model has no BOS token to begin with; takes a "
                             "prompt of at least one token")
        ids, start = [bos, *ids], 1
    if bad := [t for t in ids if not 0 <= t < vocab]:
        raise ValueError(f"{name}: token id {bad[0]} is outside the vocabulary of {vocab}")
    if tokenizer is None:
        return TextSpan(ids, start, None)
    decoded = lambda ids: len(tokenizer.pieces().join(ids)[0])
    # The text's own bytes: those of its tokens may differ if the tokenizer normalises.
    whole = len("".join(parts).encode()) if all(isinstance(part, str) for part in parts) else decoded(ids)
    return TextSpan(ids, start, max(whole - decoded(ids[:start]), 0))


def _pair(prompt: Any, continuation: Any, name: str, tokenizer: Tokenizer | None) -> tuple[list[int], int]:
    """Returns the token ids of a prompt with its continuation, and the number of ids of the prompt."""
    if not len(continuation):
        raise ValueError(f"{name}: the continuation is empty, takes at least one token")
    if tokenizer is None or not isinstance(continuation, str):
        before = _ids(prompt, name, tokenizer)
        return before + _ids(continuation, name, tokenizer), len(before)
    if isinstance(prompt, str):
        before, whole = tokenizer.encode(prompt.rstrip()), tokenizer.encode(prompt + continuation)
    else:
        text = tokenizer.chat_text(prompt)         # the template writes the special tokens itself
        before, whole = (tokenizer.encode(x, add_special_tokens=False) for x in (text, text + continuation))
    same = itertools.takewhile(lambda two: two[0] == two[1], zip(before, whole, strict=False))
    return whole, min(sum(1 for _ in same), len(whole) - 1)


def _ids(row: Any, name: str, tokenizer: Tokenizer | None) -> list[int]:
    if tokenizer is not None and isinstance(row, str):
        return tokenizer.encode(row)
    if tokenizer is not None and _is_chat(row):
        return tokenizer.encode_chat(row, add_generation_prompt=False)
    try:
        ids = np.asarray(row)
    except ValueError:                             # rows of several lengths
        ids = np.asarray("ragged")
    if ids.size and (ids.ndim != 1 or ids.dtype.kind not in "iu"):
        raise ValueError(f"{name}: got {_kind(row)}; takes a text, token ids, a chat, or a tuple of a prompt and its "
                         "continuation")
    return [int(t) for t in ids]


def _is_ids(x: Any) -> bool:
    if isinstance(x, (str, bytes, Mapping)) or not hasattr(x, "__len__"):
        return False
    if hasattr(x, "ndim"):
        return x.ndim == 1 and len(x) > 0
    return len(x) > 0 and isinstance(x[0], (int, np.integer)) and not isinstance(x[0], bool)


def _is_chat(x: Any) -> bool:
    return isinstance(x, Sequence) and len(x) > 0 and isinstance(x[0], Mapping)


def _kind(x: Any) -> str:
    return "a text" if isinstance(x, str) else "a chat" if _is_chat(x) else "token ids" if _is_ids(x) else repr(x)[:60]
