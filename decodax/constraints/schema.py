"""JSON Schema as automata over bytes.

The language of a schema consists of the JSON texts that are valid under it, with the properties of an object in the
order of the schema. A keyword that an automaton cannot support raises an error with its place in the schema.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

from decodax.constraints.builder import Builder, Part, literals
from decodax.constraints.dfa import Dfa, TooLarge
from decodax.constraints.expressions import TOP, characters, regex, search
from decodax.constraints.json_text import DIGITS, escaped, integers, numbers, written
from decodax.constraints.keywords import (
    BY_TYPE,
    FORMATS,
    FORMATS_ELSEWHERE,
    Unsupported,
    bounds,
    canonical,
    is_older,
    is_type,
    joined,
    number_range,
    said,
    same,
)


def json_schema(schema: Any, whitespace: str = "[ ]?") -> Dfa:
    """Returns the automaton of the JSON texts that are valid under a schema.

    Objects have the properties that the schema lists, in its order, and others only if `additionalProperties` is a
    schema. Integers have at most 15 digits; other numbers have at most 15 digits before and 15 after the point, and no
    exponent.

    Args:
        schema: a dictionary, JSON text, or a class with `model_json_schema` (Pydantic).
        whitespace: a regular expression for the white space between JSON tokens.

    Raises:
        Unsupported: the schema has a keyword that is not supported, or is recursive; the message names the place.
        ValueError: the schema is invalid, no text is valid under it, or its automaton is too large.
    """
    return _compiled(canonical(schema), whitespace)


@functools.lru_cache(maxsize=256)
def checked(schema: str) -> None:
    """Checks that a schema, as JSON, can be a constraint, without building its automaton.

    Raises:
        ValueError: as in `json_schema`, but not for a schema under which no text is valid.
    """
    Compiler(json.loads(schema), "[ ]?").check()


@functools.lru_cache(maxsize=64)
def _compiled(schema: str, whitespace: str) -> Dfa:
    found = Compiler(json.loads(schema), whitespace).language()
    if found.empty:
        raise ValueError("json_schema: no text is valid under it; takes a schema that allows some value")
    return found


class Compiler:
    """Compiles one JSON Schema to an automaton: adds parts for its valid JSON texts to a `Builder`."""

    def __init__(self, schema: Any, whitespace: str):
        self.b, self.root = Builder(), schema
        self.older = is_older(schema)
        self.space = regex(whitespace) if whitespace else literals([b""])

    def language(self) -> Dfa:
        return self._named(lambda: self.b.build(self.value(self.root, "#", ())))

    def check(self) -> None:
        """Processes the whole schema without building its automaton, to raise the errors that it has."""
        self._named(lambda: self.value(self.root, "#", ()))

    @staticmethod
    def _named(build: Callable[[], Any]) -> Any:
        try:
            return build()
        except TooLarge as error:
            raise ValueError(f"json_schema: {error}; long bounds (maxLength, maxItems) make it large") from None
        except RecursionError:
            raise Unsupported("json_schema: #: nested too deeply or recursive; takes a schema without "
                              "recursion") from None

    def dfa(self, schema: Any, at: str, seen: tuple[str, ...]) -> Dfa:
        """Returns the automaton of the JSON texts valid under a sub-schema. `at` is its place in the whole schema, for
        errors, and `seen` the references (`$ref`) that lead to it, by which recursion is recognized."""
        part = Compiler(self.root, "")
        part.space = self.space
        return part.b.build(part.value(schema, at, seen))

    def gap(self) -> Part:
        return self.b.dfa(self.space)

    def value(self, schema: Any, at: str, seen: tuple[str, ...]) -> Part:
        if schema is False:
            return self.b.state(), self.b.state()
        if schema is True or not isinstance(schema, Mapping):
            raise Unsupported(f"json_schema: {at}: allows any value, with unbounded nesting; takes a schema with a "
                              "type")
        schema = self._said(schema, at)
        if schema.get("nullable"):
            rest = {k: v for k, v in schema.items() if k != "nullable"}
            return self.b.any_of(self.value(rest, at, seen), self.b.bytes(b"null"))
        schema.pop("nullable", None)
        if "$ref" in schema:
            return self._alone(schema, "$ref", at, lambda ref: self._reference(ref, at, seen))
        if "enum" in schema or "const" in schema:
            return self._listed(schema, at, seen)
        if "allOf" in schema:
            return self.value(self._merged(schema, at, seen), at, seen)
        for name in ("anyOf", "oneOf"):
            if name in schema:
                return self._some(schema, name, at, seen)
        return self._typed(schema, at, seen)

    def _said(self, schema: Mapping[str, Any], at: str) -> dict[str, Any]:
        return said(schema, at, self.older)

    def _alone(self, schema: Mapping[str, Any], name: str, at: str, read: Callable[[Any], Part]) -> Part:
        if beside := sorted(schema.keys() - {name}):
            raise Unsupported(f"json_schema: {at}: {name} beside {beside[0]}")
        return read(schema[name])

    def _resolve(self, ref: Any, at: str) -> Any:
        if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
            raise Unsupported(f"json_schema: {at}/$ref: got {ref!r}, takes a reference into the schema itself (#/...)")
        found = self.root
        for name in unquote(ref[1:]).split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(name)] if isinstance(found, list) else found[name]
            except (KeyError, IndexError, ValueError, TypeError):
                raise ValueError(f"json_schema: {at}/$ref: nothing at {ref!r}") from None
        return found

    def _followed(self, schema: Any, at: str) -> Any:
        """Returns the schema, or, if it is only a reference, the schema that it finally refers to."""
        met: list[Any] = []
        while isinstance(schema, Mapping) and (schema := self._said(schema, at)).keys() == {"$ref"}:
            if (ref := schema["$ref"]) in met:
                raise Unsupported(f"json_schema: {at}/$ref: {ref!r} leads back to itself")
            met.append(ref)
            schema = self._resolve(ref, at)
        return schema

    def _reference(self, ref: Any, at: str, seen: tuple[str, ...]) -> Part:
        found = self._resolve(ref, at)
        if ref in seen:
            raise Unsupported(f"json_schema: {at}/$ref: {ref!r} is recursive; takes a schema without recursion")
        return self.value(found, ref, (*seen, ref))

    def _listed(self, schema: Mapping[str, Any], at: str, seen: tuple[str, ...]) -> Part:
        """Adds the values of `enum` or `const` that are valid under the other keywords, each in one spelling."""
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        if not isinstance(values, list):
            raise ValueError(f"json_schema: {at}/enum: got {values!r}, takes a list")
        rest = {k: v for k, v in schema.items() if k not in ("enum", "const")}
        if "enum" in schema and "const" in schema:
            values = [v for v in values if same(v, schema["const"])]
        kinds = rest.pop("type", None)
        if kinds is not None:
            values = [v for v in values if any(is_type(v, k) for k in (kinds if isinstance(kinds, list) else [kinds]))]
        texts = [json.dumps(v, ensure_ascii=False).encode() for v in values]
        if rest:
            allowed = self.dfa({**rest, **({} if kinds is None else {"type": kinds})}, at, seen)
            texts = [t for t in texts if allowed.accepts(t)]
        return self.b.any_of(*map(self.b.bytes, texts))

    def _some(self, schema: Mapping[str, Any], name: str, at: str, seen: tuple[str, ...]) -> Part:
        """Adds the alternatives of `anyOf` or `oneOf`, each joined with the other keywords."""
        options = schema[name]
        if not isinstance(options, list) or not options:
            raise ValueError(f"json_schema: {at}/{name}: takes a list of schemas")
        rest = {k: v for k, v in schema.items() if k != name}
        each = [self._joined(rest, option, f"{at}/{name}/{i}") if rest else option for i, option in enumerate(options)]
        places = [f"{at}/{name}/{i}" for i in range(len(each))]
        if name == "oneOf" and len(each) > 1:
            languages = [self.dfa(x, place, seen) for x, place in zip(each, places, strict=True)]
            kinds = [_kinds(x, self) for x in each]
            for i in range(len(each)):
                for j in range(i):
                    # The automata of objects and arrays allow one order of properties only, so disjoint languages prove
                    # nothing.
                    both = (kinds[i] or set(BY_TYPE)) & (kinds[j] or set(BY_TYPE))
                    if both and not (not both & {"object", "array"} and (languages[i] & languages[j]).empty):
                        raise Unsupported(f"json_schema: {at}/oneOf: {i} and {j} may both allow one value; takes "
                                          "anyOf, or alternatives of different types or values")
            return self.b.any_of(*map(self.b.dfa, languages))
        return self.b.any_of(*[self.value(x, place, seen) for x, place in zip(each, places, strict=True)])

    def _joined(self, rest: Mapping[str, Any], other: Any, at: str) -> Any:
        return joined(rest, self._followed(other, at), at)

    def _merged(self, schema: Mapping[str, Any], at: str, seen: tuple[str, ...]) -> Any:
        """Returns one schema for `allOf` together with the keywords beside it."""
        parts = schema["allOf"]
        if not isinstance(parts, list) or not parts:
            raise ValueError(f"json_schema: {at}/allOf: takes a list of schemas")
        closed = [p for p in (schema, *parts) if isinstance(p, Mapping) and "additionalProperties" in p]
        if closed and len(parts) + len(schema) > 2:
            raise Unsupported(f"json_schema: {at}/allOf: additionalProperties beside other parts")
        out: Any = {k: v for k, v in schema.items() if k != "allOf"}
        for i, part in enumerate(parts):
            if out is False:
                return False
            out = self._joined(out, part, f"{at}/allOf/{i}")
        return out

    def _typed(self, schema: Mapping[str, Any], at: str, seen: tuple[str, ...]) -> Part:
        kinds = schema.get("type")
        if kinds is None:
            # Keywords of one type constrain only values of that type, so values of the other types would all be
            # allowed.
            raise Unsupported(f"json_schema: {at}: without a type, any value of other types is valid, with unbounded "
                              "nesting; takes a schema with a type")
        kinds = kinds if isinstance(kinds, list) else [kinds]
        if not kinds or not all(isinstance(k, str) and k in BY_TYPE for k in kinds):
            raise ValueError(f"json_schema: {at}/type: got {schema['type']!r}, takes {', '.join(BY_TYPE)}")
        if "number" in kinds:       # integers are numbers
            kinds = [k for k in kinds if k != "integer"]
        return self.b.any_of(*[getattr(self, f"_{kind}")(schema, at, seen) for kind in kinds])

    def _null(self, schema: Any, at: str, seen: Any) -> Part:
        return self.b.bytes(b"null")

    def _boolean(self, schema: Any, at: str, seen: Any) -> Part:
        return self.b.any_of(self.b.bytes(b"true"), self.b.bytes(b"false"))

    def _string(self, schema: Mapping[str, Any], at: str, seen: Any = ()) -> Part:
        least, most = bounds(schema, "Length", at)
        pattern, form = schema.get("pattern"), schema.get("format")
        if isinstance(form, str) and form in FORMATS_ELSEWHERE:
            raise Unsupported(f"json_schema: {at}/format: got {form!r}, takes {', '.join(sorted(FORMATS))}")
        form = form if isinstance(form, str) and form in FORMATS else None
        quote = lambda: self.b.bytes(b'"')
        if pattern is None and form is None:
            return self.b.seq(quote(), self.b.repeat(lambda: written(self.b), least, most), quote())
        texts: Dfa | None = None
        try:
            if pattern is not None:
                texts = search(pattern)
            if form is not None:
                own = regex(FORMATS[form])
                texts = own if texts is None else texts & own
        except (ValueError, TypeError) as error:
            raise Unsupported(f"json_schema: {at}/pattern: {error}") from None
        assert texts is not None
        if least or most is not None:
            b = Builder()
            texts = texts & b.build(b.repeat(lambda: characters(b, [(0, TOP)]), least, most))
        return self.b.seq(quote(), escaped(self.b, texts), quote())

    def _integer(self, schema: Mapping[str, Any], at: str, seen: Any = ()) -> Part:
        step = schema.get("multipleOf", 1)
        if step != 1:
            raise Unsupported(f"json_schema: {at}/multipleOf: got {step!r}, takes 1")
        low, out_low, high, out_high = number_range(schema, at)
        top = 10 ** DIGITS - 1
        first = -top if low is None else math.floor(low) + 1 if out_low else math.ceil(low)
        last = top if high is None else math.ceil(high) - 1 if out_high else math.floor(high)
        if max(abs(first), abs(last)) > top:
            raise Unsupported(f"json_schema: {at}: bounds beyond {DIGITS} digits")
        return integers(self.b, first, last)

    def _number(self, schema: Mapping[str, Any], at: str, seen: Any = ()) -> Part:
        if "multipleOf" in schema:
            raise Unsupported(f"json_schema: {at}/multipleOf: not supported for numbers; takes integers")
        low, out_low, high, out_high = number_range(schema, at)
        if any(x is not None and (x != int(x) or abs(x) >= 10 ** DIGITS) for x in (low, high)):
            raise Unsupported(f"json_schema: {at}: got bounds of a number that are not whole or beyond {DIGITS} digits")
        top = 10 ** DIGITS - 1
        return numbers(self.b, -top if low is None else int(low), low is not None and out_low,
                       top if high is None else int(high), high is not None and out_high)

    def _array(self, schema: Mapping[str, Any], at: str, seen: tuple[str, ...]) -> Part:
        if schema.get("uniqueItems"):
            raise Unsupported(f"json_schema: {at}/uniqueItems: this keyword is not supported")
        least, most = bounds(schema, "Items", at)
        front, items = schema.get("prefixItems", []), schema.get("items", True)
        if isinstance(items, list):     # before draft 2020-12
            raise Unsupported(f"json_schema: {at}/items: a list; takes prefixItems")
        if items is False:
            most = len(front) if most is None else min(most, len(front))
        if most is not None and most < least:
            return self.b.state(), self.b.state()
        comma = lambda: self.b.seq(self.gap(), self.b.bytes(b","), self.gap())
        item = lambda i: self.value(front[i], f"{at}/prefixItems/{i}", seen) if i < len(front) else \
            self.value(items, f"{at}/items", seen)
        # States count the items written; any item from `least` on may be the last.
        end, here = self.b.state(), self.b.state()
        begin = here
        fixed = max(least, len(front)) if most is None else most
        for i in range(fixed):
            if i >= least:
                self.b.join(here, end)
            used = len(self.b.free)
            part = item(i) if i == 0 else self.b.seq(comma(), item(i))
            if i >= len(front):
                self.b.room(fixed - i, used)
            self.b.join(here, part[0])
            here = part[1]
        if most is None:
            if fixed == 0:
                self.b.join(here, end)
                part = item(0)
                self.b.join(here, part[0])
                here = part[1]
            again = self.b.star(self.b.seq(comma(), item(fixed)))
            self.b.join(here, again[0])
            here = again[1]
        self.b.join(here, end)
        return self.b.seq(self.b.bytes(b"["), self.gap(), (begin, end), self.gap(), self.b.bytes(b"]"))

    def _object(self, schema: Mapping[str, Any], at: str, seen: tuple[str, ...]) -> Part:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            raise ValueError(f"json_schema: {at}: takes a dictionary of properties and a list of required ones")
        others = schema.get("additionalProperties", False)
        least, most = bounds(schema, "Properties", at)
        unknown = [name for name in required if name not in properties]
        if unknown:
            if others is False and "additionalProperties" in schema:
                return self.b.state(), self.b.state()
            raise Unsupported(f"json_schema: {at}/required: {unknown[0]!r} is not among the properties")
        if others is True or (not properties and "additionalProperties" not in schema):
            raise Unsupported(f"json_schema: {at}/additionalProperties: allows any value, with unbounded nesting; "
                              "takes False or a schema with a type")
        if (least or most is not None) and others is not False:
            raise Unsupported(f"json_schema: {at}: minProperties or maxProperties beside additionalProperties")
        if least > len(properties):
            raise Unsupported(f"json_schema: {at}/minProperties: got {least}, but only {len(properties)} are listed")
        most = None if most is None or most >= len(properties) else most
        top = len(properties) if most is None else most
        comma = lambda: self.b.seq(self.gap(), self.b.bytes(b","), self.gap())
        # States are pairs: the number of listed properties passed, and the number written, up to the largest that
        # matters.
        count = max(least, 1) if most is None else max(most, least, 1)
        grid: list[list[int]] = [[self.b.state() for _ in range(count + 1)] for _ in range(len(properties) + 1)]
        for i, (name, inner) in enumerate(properties.items()):
            key, part = json.dumps(name, ensure_ascii=False).encode(), None
            for n in range(count + 1):
                here = grid[i][n]
                if name not in required:
                    self.b.join(here, grid[i + 1][n])
                if inner is False or (most is not None and n >= top):
                    continue
                if part is None or count > 1:       # one part serves the first property and later ones
                    part = self.b.seq(self.b.bytes(key), self.gap(), self.b.bytes(b":"), self.gap(),
                                      self.value(inner, f"{at}/properties/{name}", seen))
                    self.b.join(part[1], grid[i + 1][min(n + 1, count)])
                self.b.join(here, self.b.seq(comma(), part)[0] if n else part[0])
        end = self.b.state()
        for n in range(least if least else 0, count + 1):
            self.b.join(grid[-1][n], end)
        if others is not False:
            free = self._free_names(properties)
            more = lambda: self.b.seq(self.b.dfa(free), self.gap(), self.b.bytes(b":"), self.gap(),
                                      self.value(others, f"{at}/additionalProperties", seen))
            further = self.b.star(self.b.seq(comma(), more()))
            alone = more()
            self.b.join(grid[-1][0], alone[0])
            self.b.join(alone[1], further[0])
            for n in range(1, count + 1):
                self.b.join(grid[-1][n], further[0])
            self.b.join(further[1], end)
        return self.b.seq(self.b.bytes(b"{"), self.gap(), (grid[0][0], end), self.gap(), self.b.bytes(b"}"))

    def _free_names(self, properties: Mapping[str, Any]) -> Dfa:
        """Returns the automaton of quoted names of letters, digits and some signs, without those that are listed as
        properties."""
        names = regex(r'"[A-Za-z0-9_ .$/-]{0,64}"')
        return names - literals([json.dumps(name).encode() for name in properties]) if properties else names


def _kinds(schema: Any, of: Compiler) -> set[str] | None:
    """Returns the types that a schema allows, or None if it does not name them."""
    schema = of._followed(schema, "#")
    if not isinstance(schema, Mapping):
        return None
    kinds = schema.get("type")
    if kinds is None:
        return None
    found = set(kinds if isinstance(kinds, list) else [kinds])
    return found | {"number"} if "integer" in found else found
