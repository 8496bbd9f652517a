"""Tokenizes text that continues existing tokens.

A tokenizer encodes whole texts. Encoded by itself, a text that continues a word gets other tokens than within the whole
text: SentencePiece and Metaspace begin every text with a space, so that "def fi" and "b(n)" would become "def fi b(n)".
In addition, the tokens before it can no longer change, although a token of the whole text may cover both the old and
the new text.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Sequence
from typing import Any

CONTEXT = 64
"""Number of tokens before the text that are encoded again with it. No tokenizer merges over such a distance."""


def appended(tokenizer: Any, ids: Sequence[int] | None, text: str) -> list[int]:
    """Returns the token ids that add exactly `text` to the text of `ids`.

    The text is tokenized together with the last tokens before it, so it gets the same tokens as within the whole text.
    If one of these tokens covers both the old and the new text, the new part of it is replaced by as few tokens as
    possible. If the vocabulary cannot represent the text exactly, for example because a character has no token, the
    result is what the tokenizer gives, which may read differently.

    Args:
        tokenizer: the tokenizer.
        ids: the tokens before `text`, such as the prompt and the tokens generated so far. An empty list: `text` begins
            the whole text. None: it continues a text that is not known.
        text: the text to add; names of special tokens in it become these tokens.

    Raises:
        ValueError: as in `Tokenizer.encode`.
    """
    spelling, data = _spelling(tokenizer), text.encode(errors="surrogatepass")
    started = ids is None or tokenizer.pieces().join(ids)[1]
    tail = spelling.tail(ids or ())
    # If the tokens before are unknown, a line break before the text keeps its first word unchanged.
    contexts = [tail] if tail else ["", "\n"] if started else [""]
    spanning: list[tuple[bytes, list[int]]] = []
    for context in contexts:
        whole = tokenizer.encode(context + text, add_special_tokens=False)
        parts = spelling.parts(whole, started)
        ends = list(itertools.accumulate(map(len, parts), initial=0))
        border = ends[-1] - len(data)
        if b"".join(parts)[max(border, 0):] != data:
            continue
        first = next(i for i, end in enumerate(ends) if end >= border)
        if ends[first] == border:
            return whole[first:]
        spanning.append((b"".join(parts)[border:ends[first]], whole[first:]))
    if started:
        for fragment, rest in [*spanning, (data, [])]:
            if (found := spelling.spell(fragment)) is not None:
                return found + rest
    # Some character has no token: the text up to the first such word is spelled, and the rest is encoded.
    for cut in (0, *(match.start() for match in re.finditer(r"\s+", text) if match.start())):
        head = spelling.spell(text[:cut].encode()) if started or not cut else None
        before, whole = (tokenizer.encode(tail + x, add_special_tokens=False) for x in (text[:cut], text))
        if head is not None and whole[:len(before)] == before:
            return head + whole[len(before):]
    return tokenizer.encode(text, add_special_tokens=False)


@dataclasses.dataclass(frozen=True, eq=False)
class _Spelling:
    """A vocabulary indexed by the bytes that its tokens add to a text.

    Attributes:
        first: bytes of each token at the beginning of a text; the names of special tokens.
        rest: bytes of each token elsewhere in a text.
        special: ids of tokens that add nothing to a text.
        ids: the id of a token for each byte string.
        longest: number of bytes of the longest token.
    """

    first: tuple[bytes, ...]
    rest: tuple[bytes, ...]
    special: frozenset[int]
    ids: dict[bytes, int]
    longest: int

    def tail(self, ids: Sequence[int]) -> str:
        """Returns the text of the last `CONTEXT` tokens of `ids`, after the last special token among them."""
        taken = list(itertools.takewhile(lambda t: t < len(self.rest) and t not in self.special,
                                         itertools.islice(reversed(ids), CONTEXT)))
        return b"".join(self.rest[t] for t in reversed(taken)).decode(errors="ignore")

    def parts(self, ids: Sequence[int], started: bool) -> list[bytes]:
        """Returns the bytes that each token adds to a text; `started` is True if the text before is not empty."""
        out = []
        for t in ids:
            out.append(self.rest[t] if started or t in self.special else self.first[t])
            started = started or t not in self.special
        return out

    def spell(self, data: bytes) -> list[int] | None:
        """Returns the fewest tokens that have these bytes within a text, the longest ones first; None if no tokens have
        them."""
        most = len(data) + 1
        cost, step = [*[most] * len(data), 0], [0] * len(data)
        for i in reversed(range(len(data))):
            for end in range(min(i + self.longest, len(data)), i, -1):
                if cost[end] + 1 < cost[i] and data[i:end] in self.ids:
                    cost[i], step[i] = cost[end] + 1, end
        if cost[0] >= most:
            return None
        out, at = [], 0
        while at < len(data):
            out.append(self.ids[data[at:step[at]]])
            at = step[at]
        return out


@functools.lru_cache(maxsize=4)
def _spelling(tokenizer: Any) -> _Spelling:
    named, special = tokenizer.pieces(False), frozenset(tokenizer.pieces().skipped)
    names = {i: name for name, i in tokenizer.backend.get_vocab(with_added_tokens=True).items()}
    # A fallback byte is taken only if no other token has these bytes.
    fallback = lambda i: bool(re.fullmatch("<0x[0-9A-F]{2}>", names.get(i, "")))
    order = sorted(range(len(named.rest)), key=lambda i: (i not in special, not fallback(i), -i))
    ids = {named.rest[i]: i for i in order if named.rest[i]}
    return _Spelling(named.first, named.rest, special, ids, max(map(len, ids), default=0))
