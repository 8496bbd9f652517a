"""The keywords of JSON Schema: which are honoured, which are not, and which say nothing.

By the specification a word that no vocabulary knows is an annotation. So `title`, `$comment`, `id`, `x-order` and
`propertyOrder` are not read; what is refused is a keyword of some draft by which a value may be invalid, and a word
that is nearly one.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

BY_TYPE: dict[str, frozenset[str]] = {
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "object": frozenset({"properties", "required", "additionalProperties", "minProperties", "maxProperties"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems", "uniqueItems"}),
    "boolean": frozenset(), "null": frozenset()}
"""Keywords that are honoured, by the type that they constrain."""

ANY_TYPE = frozenset({"type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "nullable"})

HONOURED = ANY_TYPE.union(*BY_TYPE.values())

OTHERS: dict[str, tuple[str | None, Callable[[Any, Mapping[str, Any]], bool]]] = {
    "not": (None, lambda x, _: x is False),
    "if": (None, lambda _, schema: not {"then", "else"} & schema.keys()),
    "then": (None, lambda *_: True), "else": (None, lambda *_: True),      # without `if`, which is refused
    "$dynamicRef": (None, lambda *_: False), "$recursiveRef": (None, lambda *_: False),
    "extends": (None, lambda x, _: x in ({}, [])), "disallow": (None, lambda x, _: x == []),
    "patternProperties": ("object", lambda x, _: x == {}), "propertyNames": ("object", lambda x, _: x in ({}, True)),
    "unevaluatedProperties": ("object", lambda x, _: x in ({}, True)), "dependencies": ("object", lambda x, _: x == {}),
    "dependentRequired": ("object", lambda x, _: x == {}), "dependentSchemas": ("object", lambda x, _: x == {}),
    "contains": ("array", lambda *_: False), "unevaluatedItems": ("array", lambda x, _: x in ({}, True)),
    "minContains": ("array", lambda _, schema: "contains" not in schema),
    "maxContains": ("array", lambda _, schema: "contains" not in schema),
    "additionalItems": ("array", lambda x, schema: x in ({}, True) or not isinstance(schema.get("items"), list)),
    "divisibleBy": ("number", lambda *_: False)}
"""The other keywords of drafts 3 to 2020-12 by which a value may be invalid: the type that each speaks of, if it is one
alone, and whether it says nothing with its value, beside the others of its schema."""

OLDER = tuple(f"http://json-schema.org/draft-0{n}/schema" for n in (3, 4, 5, 6, 7))
"""`$schema` of the drafts in which `$ref` stands alone: what is beside it is not read."""

YEAR = r"(\d{3}[1-9]|\d{2}[1-9]\d|\d[1-9]\d{2}|[1-9]\d{3})"

LEAP = r"(\d{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"

FORMATS = {
    "date": YEAR + r"-((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8]))|"
            + LEAP + "-02-29",
    "time": r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)",
    "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "ipv4": r"((25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)\.){3}(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)",
    "email": r"[A-Za-z0-9_%+-]+(\.[A-Za-z0-9_%+-]+)*@[A-Za-z0-9]+(-[A-Za-z0-9]+)*(\.[A-Za-z0-9]+(-[A-Za-z0-9]+)*)+"}
FORMATS["date-time"] = f"({FORMATS['date']})T({FORMATS['time']})"


FORMATS_ELSEWHERE = frozenset({
    "duration", "idn-email", "hostname", "idn-hostname", "ipv6", "uri", "uri-reference", "iri", "iri-reference",
    "uri-template", "json-pointer", "relative-json-pointer", "regex", "ip-address", "host-name"})
"""Formats that the drafts define and no automaton is here for. A format that none of them defines is an annotation."""


class Unsupported(ValueError):
    """A schema has what no automaton honours. The message begins with the place."""


def is_older(schema: Any) -> bool:
    """Whether a schema says that it is of one of `OLDER`."""
    named = schema.get("$schema") if isinstance(schema, Mapping) else None
    return isinstance(named, str) and named.rstrip("#").replace("https:", "http:") in OLDER


def said(schema: Mapping[str, Any], at: str, older: bool = False) -> dict[str, Any]:
    """Returns what of a schema decides which values are valid, without annotations or keywords of other types.

    >>> said({"type": "string", "title": "A name", "id": "#name", "maxLength": 3, "contains": {}}, "#")
    {'type': 'string', 'maxLength': 3}

    Args:
        at: its place, for errors. older: whether it is of a draft in which `$ref` stands alone.

    Raises:
        Unsupported: a keyword that is not honoured, or a word that is nearly a keyword.
    """
    if older and "$ref" in schema:
        return {"$ref": schema["$ref"]}
    kinds = schema.get("type")
    named = {k for k in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(k, str)} or set(BY_TYPE)
    named |= {"number"} if "integer" in named else set()
    for name in sorted(schema.keys() - HONOURED):
        kind, silent = OTHERS.get(name, (None, None))
        if silent is not None and (kind is None or kind in named) and not silent(schema[name], schema):
            raise Unsupported(f"json_schema: {at}/{name}: this keyword is not honoured")
        if silent is None and not name.startswith("x-") and (near := _nearly(name)):
            raise Unsupported(f"json_schema: {at}/{name}: no such keyword; did you mean {near!r}?")
    return {k: v for k, v in schema.items() if k in HONOURED}


def _nearly(name: str) -> str | None:
    """The keyword that a word is but for a letter or two, so that it may be meant."""
    known = {word.lower(): word for word in (*HONOURED, *OTHERS)}
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.88)
    return known[near[0]] if near else None
