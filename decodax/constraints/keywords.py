"""Reads the keywords of JSON Schema: which are supported, which raise an error, and which have no effect.

By the specification, a word that no vocabulary defines is an annotation, so `title`, `$comment`, `id`, `x-order` and
`propertyOrder` are ignored. Keywords of any draft that could make a value invalid but are not supported raise an error,
and so do words that are nearly a keyword.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

BY_TYPE: dict[str, frozenset[str]] = {
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "object": frozenset({"properties", "required", "additionalProperties", "minProperties", "maxProperties"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems", "uniqueItems"}),
    "boolean": frozenset(), "null": frozenset()}
"""Supported keywords, by the type that they constrain."""

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
"""The other keywords of drafts 3 to 2020-12 that could make a value invalid: the type that each applies to (None for
all), and a function that is True if the keyword has no effect, given its value and the schema."""

OLDER = tuple(f"http://json-schema.org/draft-0{n}/schema" for n in (3, 4, 5, 6, 7))
"""`$schema` of the drafts in which keywords beside `$ref` are ignored."""

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
"""Formats of the drafts for which there is no automaton. A format that no draft defines is an annotation."""


class Unsupported(ValueError):
    """A schema uses a keyword that no automaton supports. The message begins with its place in the schema."""


def is_older(schema: Any) -> bool:
    """True if a schema declares one of the drafts in `OLDER`."""
    named = schema.get("$schema") if isinstance(schema, Mapping) else None
    return isinstance(named, str) and named.rstrip("#").replace("https:", "http:") in OLDER


def said(schema: Mapping[str, Any], at: str, older: bool = False) -> dict[str, Any]:
    """Returns the keywords of a schema that determine which values are valid, without annotations and keywords for
    other types.

    >>> said({"type": "string", "title": "A name", "id": "#name", "maxLength": 3, "contains": {}}, "#")
    {'type': 'string', 'maxLength': 3}

    Args:
        schema: the schema.
        at: its place, for errors.
        older: True if its draft ignores keywords beside `$ref`.

    Raises:
        Unsupported: a keyword that is not supported, or a word that is nearly a keyword.
    """
    if older and "$ref" in schema:
        return {"$ref": schema["$ref"]}
    kinds = schema.get("type")
    named = {k for k in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(k, str)} or set(BY_TYPE)
    named |= {"number"} if "integer" in named else set()
    for name in sorted(schema.keys() - HONOURED):
        kind, silent = OTHERS.get(name, (None, None))
        if silent is not None and (kind is None or kind in named) and not silent(schema[name], schema):
            raise Unsupported(f"json_schema: {at}/{name}: this keyword is not supported")
        if silent is None and not name.startswith("x-") and (near := _nearly(name)):
            raise Unsupported(f"json_schema: {at}/{name}: no such keyword; did you mean {near!r}?")
    return {k: v for k, v in schema.items() if k in HONOURED}


def _nearly(name: str) -> str | None:
    """Returns the keyword that differs from a word by a letter or two, or None."""
    known = {word.lower(): word for word in (*HONOURED, *OTHERS)}
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.88)
    return known[near[0]] if near else None


def canonical(schema: Any) -> str:
    """Returns a schema as JSON text; takes a dictionary, JSON text, True or False, or a class with `model_json_schema`
    (Pydantic).

    Raises:
        ValueError: it is not a schema.
    """
    if hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"json_schema: not JSON ({error})") from error
    if not isinstance(schema, (Mapping, bool)):
        raise ValueError(f"json_schema: got {type(schema).__name__}, takes a dictionary, its JSON, or a Pydantic class")
    try:
        _finite(schema, "#")
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        text.encode()           # raises ValueError for a lone surrogate
        return text
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"json_schema: {error}") from error


def _finite(schema: Any, at: str) -> None:
    """Raises ValueError, with its place, for a number that is not finite, which JSON cannot represent."""
    if isinstance(schema, float) and not math.isfinite(schema):
        raise ValueError(f"{at}: got {schema!r}, takes finite numbers")
    inner = schema.items() if isinstance(schema, Mapping) else enumerate(schema) if isinstance(schema, (list, tuple)) \
        else ()
    for name, value in inner:
        _finite(value, f"{at}/{name}")


def bounds(schema: Mapping[str, Any], name: str, at: str) -> tuple[int, int | None]:
    """Returns the values of the keywords `min{name}` (0 by default) and `max{name}` (None by default)."""
    found = []
    for key in (f"min{name}", f"max{name}"):
        x = schema.get(key)
        if x is not None and (isinstance(x, bool) or not isinstance(x, (int, float)) or x != int(x) or x < 0):
            raise ValueError(f"json_schema: {at}/{key}: got {x!r}, takes a whole number from 0 on")
        found.append(None if x is None else int(x))
    least, most = found
    if least is not None and most is not None and least > most:
        raise ValueError(f"json_schema: {at}: min{name} {least} is above max{name} {most}; takes bounds with "
                         "something between them")
    return least or 0, most


def number_range(schema: Mapping[str, Any], at: str) -> tuple[Any, bool, Any, bool]:
    """Returns the lower bound, True if it is excluded, the upper bound, and True if it is excluded; None for no bound.
    """
    limits = {}
    for key, inclusive in (("minimum", None), ("maximum", None), ("exclusiveMinimum", "minimum"),
                           ("exclusiveMaximum", "maximum")):
        x = schema.get(key)
        if isinstance(x, bool) and inclusive:           # as in draft 4
            x = schema.get(inclusive) if x else None
        if x is not None and (isinstance(x, bool) or not isinstance(x, (int, float))):
            raise Unsupported(f"json_schema: {at}/{key}: got {x!r}, takes a number")
        limits[key] = x
    low, high = limits["minimum"], limits["maximum"]
    out_low = limits["exclusiveMinimum"] is not None and (low is None or limits["exclusiveMinimum"] >= low)
    out_high = limits["exclusiveMaximum"] is not None and (high is None or limits["exclusiveMaximum"] <= high)
    low = limits["exclusiveMinimum"] if out_low else low
    high = limits["exclusiveMaximum"] if out_high else high
    if low is not None and high is not None and (low > high or (low == high and (out_low or out_high))):
        names = "exclusiveMinimum" if out_low else "minimum", "exclusiveMaximum" if out_high else "maximum"
        raise ValueError(f"json_schema: {at}: no number lies between {names[0]} {low} and {names[1]} {high}; takes "
                         "bounds with something between them")
    return low, out_low, high, out_high


def joined(rest: Mapping[str, Any], other: Any, at: str) -> Any:
    """Returns one schema that requires both `rest` and `other`."""
    if other is True or other is False:
        return dict(rest) if other else False
    if not isinstance(other, Mapping):
        raise ValueError(f"json_schema: {at}: got {other!r}, takes a schema")
    out = dict(rest)
    for key, value in other.items():
        old = out.get(key)
        if old is None or same(old, value):
            out[key] = value
        elif key == "required":
            out[key] = [*old, *[name for name in value if name not in old]]
        elif key == "properties":
            clash = [name for name in old.keys() & value.keys() if not same(old[name], value[name])]
            if clash:
                raise Unsupported(f"json_schema: {at}/properties/{clash[0]}: defined twice, differently")
            out[key] = {**old, **value}
        elif key in ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"):
            out[key] = max(old, value)
        elif key in ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"):
            out[key] = min(old, value)
        else:
            raise Unsupported(f"json_schema: {at}/{key}: defined twice, differently")
    return out


def same(a: Any, b: Any) -> bool:
    """True if two values have the same JSON text, apart from the order of keys."""
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def is_type(value: Any, kind: str) -> bool:
    """True if a value has the given JSON type."""
    if kind in ("integer", "number"):
        return isinstance(value, (int, float)) and not isinstance(value, bool) and (
            kind == "number" or value == int(value))
    types: dict[str, type] = {"string": str, "boolean": bool, "null": type(None), "object": dict, "array": list}
    return isinstance(value, types[kind])
