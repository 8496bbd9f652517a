"""Constraints: the languages that texts are held to, as objects and as the names of data."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from decodax.common.arguments import shown, text, unicode, wrong
from decodax.common.options import InFile
from decodax.common.registry import CONSTRAINTS
from decodax.constraints import expressions
from decodax.constraints.automata import TAGS, frozen_tools
from decodax.constraints.ebnf import check_rules
from decodax.constraints.keywords import canonical
from decodax.constraints.matching import Key, hosted
from decodax.constraints.schema import checked

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


InAFile = Annotated[Any, InFile()]


@CONSTRAINTS.register("regex", "Efficient Guided Generation for Large Language Models", "Willard and Louf 2023",
                      family="text", guarantee="exact")
def regex(pattern: str) -> Constraint:
    """Text that matches a regular expression as a whole.

    Args:
        pattern: regular expression, in Python's notation without look-around, back references and anchors inside.

    Raises:
        ValueError: it is no regular expression, or has what an automaton cannot do.

    >>> regex("[0-9]{3}").key
    ('regex', '[0-9]{3}')
    """
    expressions.check(_text("regex", pattern))
    return Constraint(("regex", pattern))


@CONSTRAINTS.register("json-schema", family="text", guarantee="exact")
def json_schema(schema: InAFile) -> Constraint:
    """JSON that is valid under a schema.

    Args:
        schema: JSON Schema as a dictionary, or its text. Keywords that are not supported are refused by name. The
            string form takes a file, too: `"json-schema:schema.json"`.

    Raises:
        ValueError: it is no JSON Schema, or has what is not supported; says where.

    >>> json_schema({"type": "integer"}).key
    ('json_schema', '{"type": "integer"}')
    """
    text = canonical(schema)
    checked(text)
    return Constraint(("json_schema", text))


@CONSTRAINTS.register("choices", family="text", guarantee="exact")
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


@CONSTRAINTS.register("grammar", "Grammar-Constrained Decoding for Structured NLP Tasks without Finetuning",
                      "Geng et al. 2023", family="text", guarantee="exact")
def grammar(rules: Annotated[str, InFile()]) -> Constraint:
    """Text that a context-free grammar makes.

    Args:
        rules: grammar in the notation of Lark, whose rule `start` makes the text. A grammar whose rules refer to
            themselves is followed on the host by llguidance (the extra `grammar`). The string form takes a file, too:
            `"grammar:rules.lark"`.

    Raises:
        ValueError: it is no grammar; says in which line.
    """
    if not _text("grammar", rules).lstrip().startswith("{"):        # as llguidance writes grammars
        check_rules(rules)
    return Constraint(("grammar", rules))


@CONSTRAINTS.register("tools", "Don't Fine-Tune, Decode: Syntax Error-Free Tool Use via Constrained Decoding",
                      "Zhang et al. 2023", family="text", guarantee="exact")
def tools(functions: InAFile, choice: Any = "auto", tags: Sequence[str] | None = None) -> Constraint:
    """Text with calls of tools whose arguments are valid JSON under the tools' schemas.

    Args:
        functions: tools as OpenAI describes them, with a name and a JSON Schema of the parameters; a list, or its JSON.
            The string form takes a file, too: `"tools:tools.json"`.
        choice: "auto" allows a call or plain text, "required" asks for a call, and the name of a tool (or OpenAI's
            object with it) for a call of that tool.
        tags: text before a call and text after it; default `<tool_call>` and `</tool_call>`.
    """
    if isinstance(functions, str):
        try:
            functions = json.loads(functions)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"tools: not JSON ({error})") from error
    return Constraint(("tools", (frozen_tools(functions), *_calls(choice, tags))))


@CONSTRAINTS.register("phrases", family="text", guarantee="exact")
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
