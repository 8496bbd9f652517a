"""Encodes text that follows existing tokens.

A tokenizer encodes whole texts. A text that continues a word gets other tokens by itself than in its place:
SentencePiece and Metaspace begin every text with a space, so that "def fi" and "b(n)" would become "def fi b(n)". And
the tokens before it can no longer change, although a token of the whole text may span the border.
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

    The end of the text before is encoded together with `text`, so the ids are those that the tokenizer gives the text
    in its place. If a token spans the border, its part that belongs to `text` is spelled with as few tokens as
    possible. A text that the tokenizer cannot spell, because it has no token for a character or replaces some, is added
    as the tokenizer reads it.

    Args:
        tokenizer: the tokenizer.
        ids: the tokens before the text, such as a prompt and the text generated after it. None: there are some, but
            they are unknown.
        text: may contain special tokens by name.

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
    """The tokens of a vocabulary by their bytes within a text.

    Attributes:
        first: bytes of each token at the beginning of a text; of special tokens their names.
        rest: bytes of each token within a text.
        special: tokens that add nothing to a text.
        ids: a token for each byte string.
        longest: largest number of bytes of a token.
    """

    first: tuple[bytes, ...]
    rest: tuple[bytes, ...]
    special: frozenset[int]
    ids: dict[bytes, int]
    longest: int

    def tail(self, ids: Sequence[int]) -> str:
        """Returns the text of the last tokens, from the last special token on."""
        taken = list(itertools.takewhile(lambda t: t < len(self.rest) and t not in self.special,
                                         itertools.islice(reversed(ids), CONTEXT)))
        return b"".join(self.rest[t] for t in reversed(taken)).decode(errors="ignore")

    def parts(self, ids: Sequence[int], started: bool) -> list[bytes]:
        """Returns the bytes that each token adds to a text."""
        out = []
        for t in ids:
            out.append(self.rest[t] if started or t in self.special else self.first[t])
            started = started or t not in self.special
        return out

    def spell(self, data: bytes) -> list[int] | None:
        """Returns the fewest tokens with these bytes within a text, the longest ones first; None if there are none."""
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
