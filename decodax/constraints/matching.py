"""Makes the logit transform for the constraints of a batch: their automata over bytes, converted to one automaton over
tokens."""

from __future__ import annotations

import functools
import json
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from decodax.constraints import automata, expressions, schema
from decodax.constraints.automata import anything
from decodax.constraints.builder import literals
from decodax.constraints.dfa import Dfa, TooLarge
from decodax.constraints.ebnf import Elsewhere, Recursive, ebnf
from decodax.constraints.hosted import Hosted, Matcher
from decodax.constraints.tokens import TokenDfa, trie_of
from decodax.constraints.transform import Constrained, TokenTable

Key = tuple[str, Any]
"""Kind and value of a constraint, hashable."""


@functools.lru_cache(maxsize=256)
def language(key: Key) -> Dfa:
    """Returns the automaton over bytes of the texts that a constraint allows.

    Raises:
        ValueError: there is no such text, or the automaton is too large; the message begins with the name of the
            argument.
    """
    name, value = key
    if name == "regex":
        return expressions.regex(value)
    if name == "grammar":
        return ebnf(value)
    if name == "json_schema":
        return schema.json_schema(value)
    inner = language(value[0]) if name in ("phrases", "after") and value[0] is not None else anything()
    try:
        if name == "tools":
            return automata.tools(json.loads(value[0]), *value[1:])
        if name == "phrases":
            return automata.phrases(inner, *value[1:])
        return automata.after(value[1], inner) if name == "after" else literals(text.encode() for text in value)
    except TooLarge as error:
        title = {"phrases": "required_phrases, banned_phrases", "after": "constraint_after"}.get(name, name)
        raise TooLarge(f"{title}: {error}") from None


@functools.lru_cache(maxsize=256)
def hosted(grammar: str) -> bool:
    """True if a grammar needs the matcher on the host: its rules refer to themselves, its automaton is too large, or it
    uses features that only llguidance supports."""
    if grammar.lstrip().startswith("{"):        # as llguidance writes grammars
        return True
    try:
        ebnf(grammar)
    except (Recursive, Elsewhere, TooLarge):
        return True
    return False


def markers_of(key: Key | None) -> tuple[str, ...]:
    """Returns the texts that a constraint may require and that may be names of special tokens, such as the tags of tool
    calls."""
    if key is None:
        return ()
    if key[0] == "after":
        return (key[1][1], *markers_of(key[1][0]))
    if key[0] == "phrases":
        return markers_of(key[1][0])
    return tuple(key[1][2]) if key[0] == "tools" else ()


class VocabularyBytes:
    """The bytes of the tokens of a vocabulary, compared by the tokenizer. Special tokens have no bytes, except those
    whose names are in `markers`."""

    def __init__(self, tokenizer: Any, size: int, markers: tuple[str, ...] = ()):
        self.tokenizer, self.size, self.markers = tokenizer, size, markers

    def __eq__(self, other: object) -> bool:
        return isinstance(other, VocabularyBytes) and (other.tokenizer, other.size, other.markers) == (
            self.tokenizer, self.size, self.markers)

    def __hash__(self) -> int:
        return hash((id(self.tokenizer), self.size, self.markers))

    def all(self) -> tuple[bytes, ...]:
        found = list(self.tokenizer.token_bytes(True))[:self.size]
        if self.markers:
            wanted = [m.encode() for m in self.markers]
            for i, own in enumerate(self.tokenizer.token_bytes(False)[:self.size]):
                if not found[i] and own and any(own in m for m in wanted):
                    found[i] = own
        return tuple(found) + (b"",) * (self.size - len(found))


@functools.lru_cache(maxsize=32)
def _table(keys: tuple[Key, ...], vocabulary: VocabularyBytes, eos: tuple[int, ...],
           banned: tuple[int, ...]) -> tuple[TokenDfa, TokenTable]:
    trie = trie_of(vocabulary.all())
    found = TokenDfa.build([language(key) for key in keys], trie, eos, banned)
    return found, TokenTable.of(found)


def constrain(asked: list[Key | None], tokenizer: Any, vocab_size: int, eos: np.ndarray, ends: np.ndarray,
              budgets: np.ndarray, samples: int, banned: tuple[int, ...] = (), fewest: Sequence[int] = (),
              until: float = math.inf) -> tuple[Constrained, TokenTable]:
    """Returns the transform that constrains all rows, `samples` adjacent rows for each prompt, and the table that they
    share.

    Args:
        asked: key of the constraint of each prompt, or None.
        tokenizer: the tokenizer.
        vocab_size: number of logits.
        eos: `i32[B, E]`, end-of-sequence tokens, -1 for none.
        ends: `i64[B]`, the index after the last token that a row may have.
        budgets: `i64[P]`, maximum number of new tokens of each prompt.
        samples: number of rows of a prompt.
        banned: tokens that no row may have.
        fewest: minimum number of new tokens of each prompt; empty: 0.
        until: time at which the construction is stopped, by `time.monotonic`; checked between constraints.

    Raises:
        ValueError: there is no tokenizer, prompts have different end-of-sequence tokens, or no text of a constraint
            fits the minimum and maximum length.
        TimeoutError: the time was over before all automata were built.
    """
    name = next(x[0] for x in asked if x is not None)
    if tokenizer is None:
        raise ValueError(f"{name}: constraints need a tokenizer, and this model has none")
    ways = {tuple(sorted({int(x) for x in row if x >= 0})) for row in eos}
    if len(ways) > 1:
        raise ValueError(f"{name}: prompts with different eos_token_id cannot be constrained together")
    keys = tuple(dict.fromkeys(x for x in asked if x is not None))
    marked = tuple(sorted({m for x in keys for m in markers_of(x)}))
    for i, key in enumerate(keys):
        in_time(until, i, len(keys))
        language(key)       # is kept for the table
    in_time(until, len(keys), len(keys))
    found, table = _table(keys, VocabularyBytes(tokenizer, vocab_size, marked), ways.pop(), tuple(sorted(banned)))
    starts = np.array([-1 if x is None else found.starts[keys.index(x)] for x in asked], np.int32)
    for i, start in enumerate(starts.tolist()):
        if start >= 0 and 0 < budgets[i] < (least := int(found.distance[start])):
            texts = "no text that it allows can be written with this vocabulary" if least >= len(found.distance) + 1 \
                else f"the shortest text that it allows takes {least} tokens, with the end of the sequence"
            raise ValueError(f"{asked[i][0]}: prompt {i} has room for {budgets[i]} new tokens; {texts}")  # type: ignore[index]
    longest = functools.cache(found.longest)
    for i, (start, least) in enumerate(zip(starts.tolist(), fewest, strict=False)):
        if start >= 0 and least and budgets[i] and (most := longest(start)) is not None and most < least:
            name = asked[i][0]      # type: ignore[index]
            raise ValueError(f"min_new_tokens: got {least} for prompt {i}, and the longest text that {name} allows "
                             f"takes {most} tokens, without the end of the sequence")
    start, end = np.repeat(starts, samples), ends.astype(np.int32)
    return Constrained(start=start, end=end), table    # type: ignore[arg-type]


def in_time(until: float, built: int, of: int) -> None:
    """Checks the clock.

    Args:
        until: the time limit, by `time.monotonic`.
        built: number of constraints that are built.
        of: number of all constraints.

    Raises:
        TimeoutError: the time is over.
    """
    if time.monotonic() > until:
        raise TimeoutError(f"max_time: was out when {built} of {of} constraints had been built")


@functools.lru_cache(maxsize=16)
def _matcher(grammars: tuple[str, ...], vocabulary: VocabularyBytes, eos: tuple[int, ...]) -> Matcher:
    encode = functools.partial(vocabulary.tokenizer.encode, add_special_tokens=False)
    return Matcher(grammars, vocabulary.all(), eos, encode)


def match(asked: list[Key | None], tokenizer: Any, vocab_size: int, eos: np.ndarray, samples: int) -> Hosted | None:
    """Returns the transform of the rows whose grammars need the matcher on the host; None if there are none.

    Raises:
        ImportError: llguidance is not installed.
        ValueError: a grammar is invalid, there is no tokenizer, or prompts have different end-of-sequence tokens.
    """
    stacked = [x[1] if x is not None and x[0] == "grammar" and hosted(x[1]) else None for x in asked]
    if not any(x is not None for x in stacked):
        return None
    if tokenizer is None:
        raise ValueError("grammar: constraints need a tokenizer, and this model has none")
    ways = {tuple(sorted({int(x) for x in row if x >= 0})) for row in eos}
    if len(ways) > 1:
        raise ValueError("grammar: prompts with different eos_token_id cannot be constrained together")
    grammars = tuple(dict.fromkeys(x for x in stacked if x is not None))
    which: Any = np.repeat(np.array([-1 if x is None else grammars.index(x) for x in stacked], np.int32), samples)
    return Hosted(which, _matcher(grammars, VocabularyBytes(tokenizer, vocab_size), ways.pop()))
