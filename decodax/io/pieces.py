"""The bytes that each token of a vocabulary adds to a text.

A `tokenizers` decoder works on whole lists of tokens. Streams and stop strings need bytes token by token, since one
character may consist of several tokens. So the decoder's description is turned into one rule: a token adds one byte
string at the very start of a text (where SentencePiece drops the leading space) and another one everywhere else.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class TokenBytes:
    """The bytes that each token id adds to a text; b"" for unknown and skipped tokens.

    Attributes:
        first: bytes that each token adds at the beginning of a text.
        rest: bytes that each token adds elsewhere.
        skipped: the text of each skipped token, b"" for unknown ids; stop strings may contain these texts.
    """

    first: tuple[bytes, ...]
    rest: tuple[bytes, ...]
    skipped: Mapping[int, bytes]

    def join(self, ids: Iterable[int], started: bool = False) -> tuple[bytes, bool]:
        """Returns the bytes that `ids` add to a text, and True if the text is not empty afterwards.

        Args:
            ids: token ids.
            started: True if the text before is not empty.
        """
        out = []
        for i in ids:
            if i < 0:
                raise ValueError(f"ids: got {i}, takes token ids of at least 0")
            if i < len(self.rest) and i not in self.skipped:
                out.append(self.rest[i] if started else self.first[i])
                started = True
        return b"".join(out), started


def pieces(tokens: dict[int, str], decoder: dict[str, Any] | None, skipped: frozenset[int]) -> TokenBytes:
    """Returns the table of bytes for a vocabulary.

    Args:
        tokens: text of each token id, including added tokens.
        decoder: the "decoder" entry of a tokenizer.json.
        skipped: ids that add nothing to a text (special tokens). Ids without a token are skipped, too.

    Raises:
        ValueError: the decoder has a step that cannot be applied token by token.
    """
    steps = _steps(decoder)
    ids = range(max(tokens, default=-1) + 1)
    skipped = skipped | {i for i in ids if i not in tokens}
    make = lambda i, first: b"" if i in skipped else _apply(steps, tokens[i], first)
    return TokenBytes(tuple(make(i, True) for i in ids), tuple(make(i, False) for i in ids),
                      {i: tokens.get(i, "").encode() for i in sorted(skipped)})


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Returns the decoder's steps in order. Steps after `Fuse` apply to the whole text and not to single tokens."""
    if decoder is None:
        return [{"type": "Join"}]
    parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    steps: list[dict[str, Any]] = []
    fused = False
    for part in parts:
        kind = part["type"]
        whole = kind == "Strip" and part["content"].isascii() and part["stop"] == 0
        token_wise = kind in ("ByteLevel", "ByteFallback", "Metaspace", "WordPiece", "Strip") or (
            kind == "Replace" and "String" in part["pattern"])
        if kind == "Fuse":
            fused = True
        elif whole if fused else token_wise:
            steps.append({**part, "fused": fused})
            fused |= kind == "ByteLevel"
        else:
            after = " after a part that joins the tokens" if fused else ""
            raise ValueError(f"decoder: got a {kind} part{after} in tokenizer.json, takes ByteLevel, ByteFallback, "
                             f"Metaspace, WordPiece, Strip, Fuse and Replace of a string")
    return steps


def _apply(steps: list[dict[str, Any]], token: str, first: bool) -> bytes:
    """Returns the bytes that one token adds; `first` is True at the beginning of a text."""
    text: str | bytes = token
    for step in steps:
        if isinstance(text, bytes):
            if step["type"] == "Strip" and step["fused"] and first:
                text = _strip(text, step["content"].encode(), step["start"], 0)
            continue
        match step["type"]:
            case "Join":
                text = token if first else " " + token
            case "ByteLevel":
                chars = byte_of_char()
                text = bytes(map(chars.__getitem__, text)) if all(c in chars for c in text) else text.encode()
            case "ByteFallback":
                text = _fallback_byte(text)
            case "Replace":
                text = text.replace(step["pattern"]["String"], step["content"])
            case "Metaspace":
                drops = first and step.get("prepend_scheme", "always") != "never" and step.get("add_prefix_space", True)
                text = text.replace(step["replacement"], "" if drops else " ")
            case "WordPiece":
                prefix = step["prefix"]
                text = text if first else text[len(prefix):] if text.startswith(prefix) else " " + text
                text = _close_up(text) if step["cleanup"] else text
            case "Strip":
                if not step["fused"]:
                    text = _strip(text, step["content"], step["start"], step["stop"])
                elif first:
                    text = _strip(text, step["content"], step["start"], 0)
    return text.encode() if isinstance(text, str) else text


def _strip(text: Any, char: Any, start: int, stop: int) -> Any:
    """Removes at most `start` leading and `stop` trailing occurrences of `char`."""
    for _ in range(start):
        text = text.removeprefix(char)
    for _ in range(stop):
        text = text.removesuffix(char)
    return text


def _fallback_byte(token: str) -> str | bytes:
    """Returns the byte that a token such as <0x0A> stands for, or the token itself."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token


def _close_up(text: str) -> str:
    """Removes the space before punctuation and in English contractions, as WordPiece does."""
    for spaced, close in ((" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"),
                          (" 'm", "'m"), (" do not", " don't"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re")):
        text = text.replace(spaced, close)
    return text


@functools.cache
def byte_of_char() -> dict[str, int]:
    """Returns the byte of each character of GPT-2's byte alphabet, in which bytes that are not printable are mapped to
    characters from U+0100 on (A. Radford et al., 2019).

    >>> byte_of_char()["A"], byte_of_char()["\u0120"]
    (65, 32)
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in set(visible)]
    return {chr(b): b for b in visible} | {chr(0x100 + n): b for n, b in enumerate(hidden)}
