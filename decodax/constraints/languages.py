"""Constraints: the languages that texts are held to, and how they become a transform of logits."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from decodax.common.arguments import shown, text, unicode, wrong
from decodax.common.registry import CONSTRAINTS
from decodax.constraints import automata, expressions, schema
from decodax.constraints.automata import TAGS, anything, frozen_tools
from decodax.constraints.dfa import Dfa, TooLarge, literals
from decodax.constraints.ebnf import Elsewhere, Recursive, ebnf
from decodax.constraints.hosted import Hosted, Matcher
from decodax.constraints.schema import canonical
from decodax.constraints.tokens import TokenDfa, trie_of
from decodax.constraints.transform import Constrained, TokenTable

Key = tuple[str, Any]
"""Kind and value of a constraint, hashable."""

TAKES = "a constraint, such as decodax.constraints.regex('[0-9]+'), or a list of one for each prompt, in which None " \
    "leaves a prompt free"


@dataclasses.dataclass(frozen=True)
class Constraint:
    """A language that a whole text has to belong to, for `decodax.generate(..., constraint=...)`.

    Made by `regex`, `json_schema`, `choices`, `grammar`, `tools` and `phrases`. Each text closes within its budget,
    unless it is held to a grammar whose rules refer to themselves.

    Attributes:
        key: kind and value.
    """

    key: Key

    def after(self, marker: str) -> Constraint:
        """Returns the constraint that begins where the text has `marker`, such as the end of a reasoning; what comes
        before it is free.

        Raises:
            ValueError, TypeError: `marker` is no text, or the constraint is a grammar whose rules refer to themselves.
        """
        return Constraint(("after", (_regular(self.key, "after"), text("after", marker))))

    def __repr__(self) -> str:
        return f"Constraint({shown(self.key)})"


@CONSTRAINTS.register("regex", family="text")
def regex(pattern: str) -> Constraint:
    """Text that matches a regular expression as a whole.

    Args:
        pattern: regular expression, in Python's notation without look-around, back references and anchors inside.

    >>> regex("[0-9]{3}").key
    ('regex', '[0-9]{3}')
    """
    return Constraint(("regex", _text("regex", pattern)))


@CONSTRAINTS.register("json-schema", family="text")
def json_schema(schema: Any) -> Constraint:
    """JSON that is valid under a schema.

    Args:
        schema: JSON Schema as a dictionary, or its text. Keywords that are not supported are refused by name.
    """
    return Constraint(("json_schema", canonical(schema)))


@CONSTRAINTS.register("choices", family="text")
def choices(texts: Sequence[str]) -> Constraint:
    """Text that is one of several.

    Args:
        texts: one or more, none of them empty.
    """
    if isinstance(texts, str) or not isinstance(texts, Sequence) or not texts or not all(
            isinstance(t, str) for t in texts):
        raise ValueError(f"choices: got {shown(texts)}, takes a list of one text or more")
    if "" in texts:
        raise ValueError("choices: got an empty text, which would be no answer")
    return Constraint(("choices", tuple(unicode("choices", t) for t in texts)))


@CONSTRAINTS.register("grammar", family="text")
def grammar(rules: str) -> Constraint:
    """Text that a context-free grammar makes.

    Args:
        rules: grammar in the notation of Lark, whose rule `start` makes the text. A grammar whose rules refer to
            themselves is followed on the host by llguidance (the extra `grammar`).
    """
    return Constraint(("grammar", _text("grammar", rules)))


@CONSTRAINTS.register("tools", family="text")
def tools(functions: Sequence[Any], choice: Any = "auto", tags: Sequence[str] | None = None) -> Constraint:
    """Text with calls of tools whose arguments are valid JSON under the tools' schemas.

    Args:
        functions: tools as OpenAI describes them, with a name and a JSON Schema of the parameters.
        choice: "auto" allows a call or plain text, "required" asks for a call, and the name of a tool (or OpenAI's
            object with it) for a call of that tool.
        tags: text before a call and text after it; default `<tool_call>` and `</tool_call>`.
    """
    return Constraint(("tools", (frozen_tools(functions), *_calls(choice, tags))))


@CONSTRAINTS.register("phrases", family="text")
def phrases(required: Sequence[str] = (), banned: Sequence[str] = (), within: Constraint | None = None) -> Constraint:
    """Text that has some phrases and does not have others.

    Args:
        required: phrases that occur, in any order. banned: phrases that do not occur. within: a constraint that the
            text satisfies as well.
    """
    some, none = _phrases("required_phrases", required), _phrases("banned_phrases", banned)
    if not some and not none:
        raise ValueError("phrases: got neither required nor banned ones")
    inner = None if within is None else _regular(within.key, "required_phrases" if some else "banned_phrases")
    return Constraint(("phrases", (inner, some, none)))


NAMES = {"regex": regex, "json_schema": json_schema, "choices": choices, "grammar": grammar, "tools": tools}
"""Constraints by the names of data: lines of jobs, items of `serve`, flags of the command line."""

ARGUMENTS = (*NAMES, "tool_choice", "tool_tags", "required_phrases", "banned_phrases", "constraint_after")
"""Names of data that `from_names` reads."""


def from_names(given: Mapping[str, Any]) -> Constraint | None:
    """Returns the constraint that data asks for: the line of a job, or an item of `serve`.

    Args:
        given: values by the names in `ARGUMENTS`; None asks for nothing.

    Raises:
        ValueError, TypeError: by name a value that is none, two constraints, or one without what it belongs to.
    """
    asked = {name: given[name] for name in ARGUMENTS if given.get(name) is not None}
    if len(several := [name for name in NAMES if name in asked]) > 1:
        raise ValueError(f"{several[0]} and {several[1]}: got both, takes one of them")
    if "tools" not in asked and (lone := [name for name in ("tool_choice", "tool_tags") if name in asked]):
        _calls(asked.get("tool_choice", "auto"), asked.get("tool_tags"))       # names a value of the wrong kind
        raise ValueError(f"{lone[0]}: got {shown(asked[lone[0]])} without tools")
    found: Constraint | None = None
    if several:
        more = {name.removeprefix("tool_"): asked[name] for name in ("tool_choice", "tool_tags") if name in asked}
        found = NAMES[several[0]](asked[several[0]], **(more if several[0] == "tools" else {}))
    some = {name: asked[name] for name in ("required_phrases", "banned_phrases") if not _empty(asked.get(name))}
    if some:
        found = phrases(some.get("required_phrases", ()), some.get("banned_phrases", ()), found)
    if "constraint_after" in asked:
        if found is None:
            raise ValueError(f"constraint_after: got {shown(asked['constraint_after'])} without a constraint that "
                             "begins there")
        found = found.after(text("constraint_after", asked["constraint_after"]))
    return found


def read(given: Any, prompts: int) -> list[Key | None] | None:
    """Returns kind and value of the constraint of each prompt; None: no prompt has one.

    Args:
        given: constraint, string of one, or one for each prompt, in which None leaves a prompt free.

    Raises:
        ValueError, TypeError: it is none, or there are not as many as prompts.
    """
    if given is None:
        return None
    rows = list(given) if isinstance(given, (list, tuple)) else [given] * prompts
    if len(rows) != prompts:
        raise ValueError(f"constraint: got {len(rows)} for {prompts} prompts, takes one, or one for each")
    found = []
    for row in rows:
        row = CONSTRAINTS.object(row)
        if row is not None and not isinstance(row, Constraint):
            raise TypeError(f"constraint: got {shown(given)}, takes {TAKES}")
        found.append(None if row is None else row.key)
    return found if any(key is not None for key in found) else None


def _calls(choice: Any, tags: Any) -> tuple[str, tuple[str, str]]:
    named = choice
    if isinstance(choice, Mapping):
        inner = choice.get("function")
        named = inner.get("name") if isinstance(inner, Mapping) else None
    if not isinstance(named, str) or not named:
        raise wrong("tool_choice", choice, "'auto', 'required' or a tool's name")
    if tags is not None and (not isinstance(tags, (list, tuple)) or len(tags) != 2
                             or not all(isinstance(t, str) for t in tags)):
        raise wrong("tool_tags", tags, "two texts, before a call and after it")
    return named, TAGS if tags is None else (unicode("tool_tags", tags[0]), unicode("tool_tags", tags[1]))


def _regular(key: Key, name: str) -> Key:
    if key[0] == "grammar" and hosted(key[1]):
        raise ValueError(f"{name}: got some beside a grammar whose rules refer to themselves; takes one that needs no "
                         "stack")
    return key


def _empty(value: Any) -> bool:
    return value is None or (isinstance(value, (list, tuple)) and not value)


def _text(name: str, x: Any) -> str:
    if not isinstance(x, str):
        raise TypeError(f"{name}: got {shown(x)}, takes a string")
    return unicode(name, x)


def _phrases(name: str, value: Any) -> tuple[str, ...]:
    rows = [value] if isinstance(value, str) else value
    if not isinstance(rows, (list, tuple)):
        raise wrong(name, value, "a list of texts")
    return tuple(text(name, t) for t in rows)


@functools.lru_cache(maxsize=256)
def language(key: Key) -> Dfa:
    """The texts that a constraint allows.

    Raises:
        ValueError: there is none, or its automaton is too large; by the name of the argument.
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
    """Whether a grammar needs the matcher on the host: it refers to itself, or has what is not read here."""
    if grammar.lstrip().startswith("{"):        # as llguidance writes grammars
        return True
    try:
        ebnf(grammar)
    except (Recursive, Elsewhere, TooLarge):
        return True
    return False


def markers_of(key: Key | None) -> tuple[str, ...]:
    """The texts of special tokens that a constraint may want written."""
    if key is None:
        return ()
    if key[0] == "after":
        return (key[1][1], *markers_of(key[1][0]))
    if key[0] == "phrases":
        return markers_of(key[1][0])
    return tuple(key[1][2]) if key[0] == "tools" else ()


class _Bytes:
    """The bytes of a vocabulary, compared by the tokenizer that they are of. Special tokens have none, but for those
    that stand in `markers`."""

    def __init__(self, tokenizer: Any, size: int, markers: tuple[str, ...] = ()):
        self.tokenizer, self.size, self.markers = tokenizer, size, markers

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bytes) and (other.tokenizer, other.size, other.markers) == (
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
def _table(keys: tuple[Key, ...], vocabulary: _Bytes, eos: tuple[int, ...],
           banned: tuple[int, ...]) -> tuple[TokenDfa, TokenTable]:
    trie = trie_of(vocabulary.all())
    found = TokenDfa.build([language(key) for key in keys], trie, eos, banned)
    return found, TokenTable.of(found)


def constrain(asked: list[Key | None], tokenizer: Any, vocab_size: int, eos: np.ndarray, ends: np.ndarray,
              budgets: np.ndarray, samples: int, banned: tuple[int, ...] = (), fewest: Sequence[int] = (),
              until: float = math.inf) -> tuple[Constrained, TokenTable]:
    """The transform of all rows, `samples` of each prompt side by side, and the table that they share.

    Args:
        eos: `i32[B, E]`, -1 for none. ends: `i64[B]`, the index behind the last token that a row may have. budgets:
            `i64[P]`, new tokens of each prompt. banned: tokens that no row may have. fewest: new tokens that each
            prompt must have before an end counts; default none. until: when the time is out, by `time.monotonic`;
            looked at between constraints.

    Raises:
        ValueError: there is no tokenizer, rows end in different ways, or a prompt's budget is too small for any text,
            or no text is as long as it must be.
        TimeoutError: the time was out before all were built.
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
    found, table = _table(keys, _Bytes(tokenizer, vocab_size, marked), ways.pop(), tuple(sorted(banned)))
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
    """Looks at the clock.

    Raises:
        TimeoutError: the time is out.
    """
    if time.monotonic() > until:
        raise TimeoutError(f"max_time: was out when {built} of {of} constraints had been built")


@functools.lru_cache(maxsize=16)
def _matcher(grammars: tuple[str, ...], vocabulary: _Bytes, eos: tuple[int, ...]) -> Matcher:
    encode = functools.partial(vocabulary.tokenizer.encode, add_special_tokens=False)
    return Matcher(grammars, vocabulary.all(), eos, encode)


def match(asked: list[Key | None], tokenizer: Any, vocab_size: int, eos: np.ndarray, samples: int) -> Hosted | None:
    """The transform of rows whose grammars need a stack; None: there are none.

    Raises:
        ImportError, ValueError: as `Matcher`; there is no tokenizer, or rows end in different ways.
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
    return Hosted(which, _matcher(grammars, _Bytes(tokenizer, vocab_size), ways.pop()))
