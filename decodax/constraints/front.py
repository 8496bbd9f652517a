"""Constraints by the arguments of `generate`."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from decodax.constraints.dfa import Dfa, literals
from decodax.constraints.regex import regex
from decodax.constraints.schema import canonical, json_schema
from decodax.constraints.tokens import TokenDfa, trie_of
from decodax.constraints.transform import Constrained, TokenTable
from decodax.policy.arguments import shown

ARGUMENTS = ("regex", "json_schema", "choices")
"""What `read` takes."""

Key = tuple[str, Any]


def read(given: Mapping[str, Any], prompts: int) -> list[Key | None] | None:
    """What each prompt is held to, by kind and value; None: nothing is.

    Args:
        given: those of `ARGUMENTS` that the caller gave. Each is one for all prompts, or a list of one for each, in
            which None leaves a prompt free.

    Raises:
        ValueError, TypeError: by name one that is none, another number of them than of prompts, or two for a prompt.
    """
    found: list[Key | None] = [None] * prompts
    asked = False
    for name in ARGUMENTS:
        if (value := given.get(name)) is None:
            continue
        asked = True
        many = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
        if name == "choices":
            many = many and any(isinstance(x, Sequence) and not isinstance(x, str) for x in value)
        values = list(value) if many else [value] * prompts
        if len(values) != prompts:
            raise ValueError(f"{name}: got {len(values)} for {prompts} prompts, takes one, or one for each")
        for i, x in enumerate(values):
            if x is None:
                continue
            if (other := found[i]) is not None:
                raise ValueError(f"{other[0]} and {name}: got both for prompt {i}, takes one of them")
            found[i] = (name, _key(name, x))
    return found if asked and any(x is not None for x in found) else None


def _key(name: str, x: Any) -> Any:
    if name == "regex":
        if not isinstance(x, str):
            raise TypeError(f"regex: got {shown(x)}, takes a string")
        return x
    if name == "json_schema":
        return canonical(x)
    if isinstance(x, str) or not isinstance(x, Sequence) or not all(isinstance(t, str) for t in x) or not x:
        raise ValueError(f"choices: got {shown(x)}, takes a list of one text or more")
    if "" in x:
        raise ValueError("choices: got an empty text, which would be no answer")
    return tuple(x)


@functools.lru_cache(maxsize=256)
def language(key: Key) -> Dfa:
    """The texts that a constraint allows."""
    name, value = key
    if name == "regex":
        return regex(value)
    return json_schema(value) if name == "json_schema" else literals(text.encode() for text in value)


class _Bytes:
    """The bytes of a vocabulary, compared by the tokenizer that they are of."""

    def __init__(self, tokenizer: Any, size: int):
        self.tokenizer, self.size = tokenizer, size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bytes) and (other.tokenizer, other.size) == (self.tokenizer, self.size)

    def __hash__(self) -> int:
        return hash((id(self.tokenizer), self.size))

    def all(self) -> tuple[bytes, ...]:
        found = tuple(self.tokenizer.token_bytes(True))[:self.size]
        return found + (b"",) * (self.size - len(found))


@functools.lru_cache(maxsize=32)
def _table(keys: tuple[Key, ...], vocabulary: _Bytes, eos: tuple[int, ...],
           banned: tuple[int, ...]) -> tuple[TokenDfa, TokenTable]:
    trie = trie_of(vocabulary.all())
    found = TokenDfa.build([language(key) for key in keys], trie, eos, banned)
    return found, TokenTable.of(found)


def constrain(asked: list[Key | None], tokenizer: Any, vocab_size: int, eos: np.ndarray, ends: np.ndarray,
              budgets: np.ndarray, samples: int, banned: tuple[int, ...] = ()) -> tuple[Constrained, TokenTable]:
    """The transform of all rows, `samples` of each prompt side by side, and the table that they share.

    Args:
        eos: `i32[B, E]`, -1 for none. ends: `i64[B]`, the index behind the last token that a row may have. budgets:
            `i64[P]`, new tokens of each prompt. banned: tokens that no row may have.

    Raises:
        ValueError: there is no tokenizer, rows end in different ways, or a prompt's budget is too small for any text.
    """
    name = next(x[0] for x in asked if x is not None)
    if tokenizer is None:
        raise ValueError(f"{name}: constraints need a tokenizer, and this model has none")
    ways = {tuple(sorted({int(x) for x in row if x >= 0})) for row in eos}
    if len(ways) > 1:
        raise ValueError(f"{name}: prompts with different eos_token_id cannot be constrained together")
    keys = tuple(dict.fromkeys(x for x in asked if x is not None))
    found, table = _table(keys, _Bytes(tokenizer, vocab_size), ways.pop(), tuple(sorted(banned)))
    starts = np.array([-1 if x is None else found.starts[keys.index(x)] for x in asked], np.int32)
    for i, start in enumerate(starts.tolist()):
        if start >= 0 and 0 < budgets[i] < (least := int(found.distance[start])):
            texts = "no text that it allows can be written with this vocabulary" if least >= len(found.distance) + 1 \
                else f"the shortest text that it allows takes {least} tokens, with the end of the sequence"
            raise ValueError(f"{asked[i][0]}: prompt {i} has room for {budgets[i]} new tokens; {texts}")  # type: ignore[index]
    start, end = np.repeat(starts, samples), ends.astype(np.int32)
    return Constrained(start=start, end=end), table    # type: ignore[arg-type]
