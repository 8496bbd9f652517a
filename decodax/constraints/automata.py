"""Automata for free text: with or without phrases, up to a marker, or with tool calls."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from decodax.common.arguments import shown, unicode
from decodax.constraints.builder import Builder
from decodax.constraints.dfa import Dfa
from decodax.constraints.keywords import Unsupported, canonical
from decodax.constraints.schema import json_schema

TAGS = ("<tool_call>\n", "\n</tool_call>")
"""Texts before and after a tool call in the Hermes format, which Qwen uses too."""


@functools.cache
def anything() -> Dfa:
    """Returns the automaton of all texts."""
    return Dfa(np.zeros((1, 256), np.int32), np.ones(1, bool))


def _around(text: bytes, more: bool) -> Dfa:
    b = Builder()
    parts = [b.dfa(anything()), b.bytes(text), *([b.dfa(anything())] if more else [])]
    return b.build(b.seq(*parts))


@functools.lru_cache(maxsize=256)
def containing(text: bytes) -> Dfa:
    """Returns the automaton of the texts that contain `text`."""
    return _around(text, True)


@functools.lru_cache(maxsize=256)
def without(texts: tuple[bytes, ...]) -> Dfa:
    """Returns the automaton of the texts that contain none of `texts`.

    >>> without((b"ab",)).accepts(b"aab"), without((b"ab",)).accepts(b"ba")
    (False, True)
    """
    found = anything()
    for text in texts:
        found = found - containing(text)
    return found


@functools.lru_cache(maxsize=256)
def up_to(text: bytes) -> Dfa:
    """Returns the automaton of the texts that end with the first occurrence of `text`.

    >>> up_to(b"aa").accepts(b"baa"), up_to(b"aa").accepts(b"aaa")
    (True, False)
    """
    b = Builder()
    any_byte = Dfa(np.stack([np.ones(256, np.int32), np.full(256, -1, np.int32)]), np.array([False, True]))
    twice = b.build(b.seq(b.dfa(_around(text, True)), b.dfa(any_byte)))
    return _around(text, False) - twice


def after(marker: str, language: Dfa) -> Dfa:
    """Returns the automaton of free text up to `marker`, such as the end of a reasoning, followed by a text of
    `language`."""
    b = Builder()
    return b.build(b.seq(b.dfa(up_to(marker.encode())), b.dfa(language)))


def phrases(language: Dfa, required: Sequence[str], banned: Sequence[str]) -> Dfa:
    """Returns the automaton of the texts of a language that contain all `required` phrases and none of the `banned`
    ones.

    Raises:
        ValueError: there is no such text.
    """
    found = language
    if banned:
        found = found & without(tuple(t.encode() for t in banned))
    for text in required:
        found = found & containing(text.encode())
    if found.empty:
        raise ValueError(f"required_phrases: no text has {list(required)!r}" + (
            f" and none of {list(banned)!r}" if banned else ""))
    return found


def tools(signatures: Sequence[Any], choice: str = "auto", tags: tuple[str, str] = TAGS) -> Dfa:
    """Returns the automaton of texts in which tools are called by name, with arguments that are valid under their
    schemas.

    A text goes from free text to a tool's name, to its arguments, and back (ToolDec: Zhang et al., 2023).

    Args:
        signatures: the tools in OpenAI's format: `{"type": "function", "function": {"name", "parameters"}}`, or the
            inner dictionary.
        choice: "auto": free text with any number of calls in it; "required": one or more calls and nothing else; or the
            name of the tool that is called once.
        tags: texts before and after a call's JSON object, which has a `name` and `arguments`.

    Raises:
        ValueError: an invalid signature, or an unknown choice.
        Unsupported: a schema with a keyword that is not supported.
    """
    begin, end = (t.encode() for t in tags)
    if not begin:
        raise ValueError("tool_tags: got an empty opening tag, takes a text that begins a call")
    calls: dict[str, Dfa] = {}
    for i, given in enumerate(signatures):
        inner = given.get("function", given) if isinstance(given, Mapping) else None
        if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
            raise ValueError(f"tools[{i}]: takes a function with a name and parameters, as a dictionary")
        parameters = inner.get("parameters") or {"type": "object", "properties": {}, "additionalProperties": False}
        call = {"type": "object", "properties": {"name": {"const": inner["name"]}, "arguments": parameters},
                "required": ["name", "arguments"], "additionalProperties": False}
        if "$defs" in parameters:
            call["$defs"] = parameters["$defs"]
        try:
            calls[inner["name"]] = json_schema(call)
        except Unsupported as error:
            raise Unsupported(f"tools[{i}]: {error}") from error
    if choice not in ("auto", "required"):
        if choice not in calls:
            raise ValueError(f"tool_choice: got {choice!r}, takes 'auto', 'required' or one of {', '.join(calls)}")
        calls = {choice: calls[choice]}
    b = Builder()
    body = lambda: b.seq(b.any_of(*map(b.dfa, calls.values())), b.bytes(end))
    if choice == "auto":
        return b.build(b.seq(b.star(b.seq(b.dfa(up_to(begin)), body())), b.dfa(without((begin,)))))
    one = b.seq(b.bytes(begin), body())
    if choice != "required":
        return b.build(one)
    return b.build(b.seq(one, b.star(b.seq(b.maybe(b.bytes(b"\n")), b.bytes(begin), body()))))


def frozen_tools(signatures: Any) -> str:
    """Returns the tools as JSON text, a hashable key for caches."""
    if not isinstance(signatures, Sequence) or isinstance(signatures, (str, bytes)) or not signatures:
        raise ValueError(f"tools: got {shown(signatures)}, takes a list of at least one signature")
    plain = []
    for i, given in enumerate(signatures):
        inner = given.get("function", given) if isinstance(given, Mapping) else given
        if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
            raise ValueError(f"tools[{i}]: got {shown(given)}, takes a function with a name and parameters, as a "
                             "dictionary")
        unicode(f"tools[{i}]: name", inner["name"])
        parameters = inner.get("parameters")
        plain.append({"name": inner["name"],
                      "parameters": None if parameters is None else json.loads(canonical(parameters))})
    return json.dumps(plain)
