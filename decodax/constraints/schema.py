"""JSON Schema as automata over bytes.

What the language of a schema is here: JSON texts that are valid under it, with the properties of an object in the order
of the schema. What an automaton cannot honour is refused with its place in the schema, never left out.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

from decodax.constraints.dfa import Builder, Dfa, TooLarge, literals
from decodax.constraints.expressions import TOP, characters, regex, search
from decodax.constraints.keywords import BY_TYPE, FORMATS, FORMATS_ELSEWHERE, Unsupported, is_older, said

Part = tuple[int, int]

DIGITS = 15
"""Digits of an integer, and of a fraction, at most: what a float holds."""

def json_schema(schema: Any, whitespace: str = "[ ]?") -> Dfa:
    """The JSON texts that are valid under a schema.

    Objects have the properties that the schema lists, in its order; others where `additionalProperties` is a schema.
    Where it is left out there are none. Whole numbers have at most 15 digits, others at most 15 before and 15 behind
    the point and no exponent.

    Args:
        schema: a dictionary, its JSON, or a class with `model_json_schema` (Pydantic).
        whitespace: a regular expression of what may stand between tokens of JSON.

    Raises:
        Unsupported: it has a keyword that is not honoured, or is recursive; with its place.
        ValueError: it is no schema, nothing is valid under it, or its automaton is too large.
    """
    return _compiled(canonical(schema), whitespace)


def canonical(schema: Any) -> str:
    """A schema as JSON.

    Raises:
        ValueError: it is none.
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
        text.encode()           # raises ValueError for half a surrogate pair
        return text
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"json_schema: {error}") from error


def _finite(schema: Any, at: str) -> None:
    """Raises ValueError with the place of a number that JSON does not have."""
    if isinstance(schema, float) and not math.isfinite(schema):
        raise ValueError(f"{at}: got {schema!r}, takes numbers that are finite")
    inner = schema.items() if isinstance(schema, Mapping) else enumerate(schema) if isinstance(schema, (list, tuple)) \
        else ()
    for name, value in inner:
        _finite(value, f"{at}/{name}")


@functools.lru_cache(maxsize=256)
def checked(schema: str) -> None:
    """Checks that a schema, as JSON, can be a constraint, without its automaton.

    Raises:
        ValueError: as `json_schema`, but for a schema under which nothing is valid.
    """
    Compiler(json.loads(schema), "[ ]?").check()


@functools.lru_cache(maxsize=64)
def _compiled(schema: str, whitespace: str) -> Dfa:
    found = Compiler(json.loads(schema), whitespace).language()
    if found.empty:
        raise ValueError("json_schema: no text is valid under it")
    return found


class Compiler:
    """Puts the parts of one schema into a builder."""

    def __init__(self, schema: Any, whitespace: str):
        self.b, self.root = Builder(), schema
        self.older = is_older(schema)
        self.space = regex(whitespace) if whitespace else literals([b""])

    def language(self) -> Dfa:
        return self._named(lambda: self.b.build(self.value(self.root, "#", ())))

    def check(self) -> None:
        """Reads the whole schema, without its automaton."""
        self._named(lambda: self.value(self.root, "#", ()))

    @staticmethod
    def _named(build: Callable[[], Any]) -> Any:
        try:
            return build()
        except TooLarge as error:
            raise ValueError(f"json_schema: {error}; long bounds (maxLength, maxItems) make it large") from None
        except RecursionError:
            raise Unsupported("json_schema: #: is nested too deeply, or holds itself; takes a schema without "
                              "recursion") from None

    def dfa(self, schema: Any, at: str, seen: tuple[str, ...]) -> Dfa:
        """That of a part, by itself."""
        part = Compiler(self.root, "")
        part.space = self.space
        return part.b.build(part.value(schema, at, seen))

    def gap(self) -> Part:
        return self.b.dfa(self.space)

    def value(self, schema: Any, at: str, seen: tuple[str, ...]) -> Part:
        if schema is False:
            return self.b.state(), self.b.state()
        if schema is True or not isinstance(schema, Mapping):
            raise Unsupported(f"json_schema: {at}: any value at all, which may be nested without end; takes a schema "
                              "with a type")
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
            raise Unsupported(f"json_schema: {at}/$ref: got {ref!r}, takes one into the schema itself (#/...)")
        found = self.root
        for name in unquote(ref[1:]).split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(name)] if isinstance(found, list) else found[name]
            except (KeyError, IndexError, ValueError, TypeError):
                raise ValueError(f"json_schema: {at}/$ref: nothing at {ref!r}") from None
        return found

    def _followed(self, schema: Any, at: str) -> Any:
        """What a schema says, or, where it is a reference alone, what the schema says that it leads to."""
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
            raise Unsupported(f"json_schema: {at}/$ref: {ref!r} holds itself, and an automaton does not count; takes a "
                              "schema without recursion")
        return self.value(found, ref, (*seen, ref))

    def _listed(self, schema: Mapping[str, Any], at: str, seen: tuple[str, ...]) -> Part:
        """Of `enum` and `const`: those that are valid under the rest, in one way to write each."""
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        if not isinstance(values, list):
            raise ValueError(f"json_schema: {at}/enum: got {values!r}, takes a list")
        rest = {k: v for k, v in schema.items() if k not in ("enum", "const")}
        if "enum" in schema and "const" in schema:
            values = [v for v in values if _same(v, schema["const"])]
        kinds = rest.pop("type", None)
        if kinds is not None:
            values = [v for v in values if any(_is(v, k) for k in (kinds if isinstance(kinds, list) else [kinds]))]
        texts = [json.dumps(v, ensure_ascii=False).encode() for v in values]
        if rest:
            allowed = self.dfa({**rest, **({} if kinds is None else {"type": kinds})}, at, seen)
            texts = [t for t in texts if allowed.accepts(t)]
        return self.b.any_of(*map(self.b.bytes, texts))

    def _some(self, schema: Mapping[str, Any], name: str, at: str, seen: tuple[str, ...]) -> Part:
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
                    # of objects and arrays a language holds one order, so that apart languages prove nothing
                    both = (kinds[i] or set(BY_TYPE)) & (kinds[j] or set(BY_TYPE))
                    if both and not (not both & {"object", "array"} and (languages[i] & languages[j]).empty):
                        raise Unsupported(f"json_schema: {at}/oneOf: {i} and {j} may hold of one value; takes anyOf, "
                                          "or alternatives of different types or values")
            return self.b.any_of(*map(self.b.dfa, languages))
        return self.b.any_of(*[self.value(x, place, seen) for x, place in zip(each, places, strict=True)])

    def _joined(self, rest: Mapping[str, Any], other: Any, at: str) -> Any:
        """Both schemas as one."""
        other = self._followed(other, at)
        if other is True or other is False:
            return dict(rest) if other else False
        if not isinstance(other, Mapping):
            raise ValueError(f"json_schema: {at}: got {other!r}, takes a schema")
        out = dict(rest)
        for key, value in other.items():
            old = out.get(key)
            if old is None or _same(old, value):
                out[key] = value
            elif key == "required":
                out[key] = [*old, *[name for name in value if name not in old]]
            elif key == "properties":
                clash = [name for name in old.keys() & value.keys() if not _same(old[name], value[name])]
                if clash:
                    raise Unsupported(f"json_schema: {at}/properties/{clash[0]}: said twice")
                out[key] = {**old, **value}
            elif key in ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"):
                out[key] = max(old, value)
            elif key in ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"):
                out[key] = min(old, value)
            else:
                raise Unsupported(f"json_schema: {at}/{key}: said twice, in different ways")
        return out

    def _merged(self, schema: Mapping[str, Any], at: str, seen: tuple[str, ...]) -> Any:
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
            # keywords of one type hold of values of that type alone, so the others would all be allowed
            raise Unsupported(f"json_schema: {at}: without a type any value of the others is valid, nested without "
                              "end; takes a schema with a type")
        kinds = kinds if isinstance(kinds, list) else [kinds]
        if not kinds or not all(isinstance(k, str) and k in BY_TYPE for k in kinds):
            raise ValueError(f"json_schema: {at}/type: got {schema['type']!r}, takes {', '.join(BY_TYPE)}")
        if "number" in kinds:       # which whole numbers are, too
            kinds = [k for k in kinds if k != "integer"]
        return self.b.any_of(*[getattr(self, f"_{kind}")(schema, at, seen) for kind in kinds])

    def _null(self, schema: Any, at: str, seen: Any) -> Part:
        return self.b.bytes(b"null")

    def _boolean(self, schema: Any, at: str, seen: Any) -> Part:
        return self.b.any_of(self.b.bytes(b"true"), self.b.bytes(b"false"))

    def _string(self, schema: Mapping[str, Any], at: str, seen: Any = ()) -> Part:
        least, most = self._bounds(schema, "Length", at)
        pattern, form = schema.get("pattern"), schema.get("format")
        if isinstance(form, str) and form in FORMATS_ELSEWHERE:
            raise Unsupported(f"json_schema: {at}/format: {form!r} is not honoured; takes {', '.join(sorted(FORMATS))}")
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

    def _bounds(self, schema: Mapping[str, Any], name: str, at: str) -> tuple[int, int | None]:
        """`min...` and `max...`."""
        found = []
        for key in (f"min{name}", f"max{name}"):
            x = schema.get(key)
            if x is not None and (isinstance(x, bool) or not isinstance(x, (int, float)) or x != int(x) or x < 0):
                raise ValueError(f"json_schema: {at}/{key}: got {x!r}, takes a whole number from 0 on")
            found.append(None if x is None else int(x))
        least, most = found
        if least is not None and most is not None and least > most:
            raise ValueError(f"json_schema: {at}: min{name} {least} is above max{name} {most}; takes bounds that leave "
                             "something between them")
        return least or 0, most

    def _range(self, schema: Mapping[str, Any], at: str) -> tuple[Any, bool, Any, bool]:
        """The least and the largest number, None where there is none, and whether they are themselves left out."""
        bounds = {}
        for key, inclusive in (("minimum", None), ("maximum", None), ("exclusiveMinimum", "minimum"),
                               ("exclusiveMaximum", "maximum")):
            x = schema.get(key)
            if isinstance(x, bool) and inclusive:           # as draft 4 has it
                x = schema.get(inclusive) if x else None
            if x is not None and (isinstance(x, bool) or not isinstance(x, (int, float))):
                raise Unsupported(f"json_schema: {at}/{key}: got {x!r}, takes a number")
            bounds[key] = x
        low, high = bounds["minimum"], bounds["maximum"]
        out_low = bounds["exclusiveMinimum"] is not None and (low is None or bounds["exclusiveMinimum"] >= low)
        out_high = bounds["exclusiveMaximum"] is not None and (high is None or bounds["exclusiveMaximum"] <= high)
        low = bounds["exclusiveMinimum"] if out_low else low
        high = bounds["exclusiveMaximum"] if out_high else high
        if low is not None and high is not None and (low > high or (low == high and (out_low or out_high))):
            names = "exclusiveMinimum" if out_low else "minimum", "exclusiveMaximum" if out_high else "maximum"
            raise ValueError(f"json_schema: {at}: no number lies between {names[0]} {low} and {names[1]} {high}; takes "
                             "bounds that leave something between them")
        return low, out_low, high, out_high

    def _integer(self, schema: Mapping[str, Any], at: str, seen: Any = ()) -> Part:
        step = schema.get("multipleOf", 1)
        if step != 1:
            raise Unsupported(f"json_schema: {at}/multipleOf: {step!r} is not honoured")
        low, out_low, high, out_high = self._range(schema, at)
        top = 10 ** DIGITS - 1
        first = -top if low is None else math.floor(low) + 1 if out_low else math.ceil(low)
        last = top if high is None else math.ceil(high) - 1 if out_high else math.floor(high)
        if max(abs(first), abs(last)) > top:
            raise Unsupported(f"json_schema: {at}: bounds beyond {DIGITS} digits")
        return integers(self.b, first, last)

    def _number(self, schema: Mapping[str, Any], at: str, seen: Any = ()) -> Part:
        if "multipleOf" in schema:
            raise Unsupported(f"json_schema: {at}/multipleOf: of a number is not honoured")
        low, out_low, high, out_high = self._range(schema, at)
        if any(x is not None and (x != int(x) or abs(x) >= 10 ** DIGITS) for x in (low, high)):
            raise Unsupported(f"json_schema: {at}: bounds of a number that are not whole or beyond {DIGITS} digits")
        top = 10 ** DIGITS - 1
        return numbers(self.b, -top if low is None else int(low), low is not None and out_low,
                       top if high is None else int(high), high is not None and out_high)

    def _array(self, schema: Mapping[str, Any], at: str, seen: tuple[str, ...]) -> Part:
        if schema.get("uniqueItems"):
            raise Unsupported(f"json_schema: {at}/uniqueItems: this keyword is not honoured")
        least, most = self._bounds(schema, "Items", at)
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
        # states: behind so many items; an item may be the last from `least` on
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
            raise ValueError(f"json_schema: {at}: properties are a dictionary and required is a list")
        others = schema.get("additionalProperties", False)
        least, most = self._bounds(schema, "Properties", at)
        unknown = [name for name in required if name not in properties]
        if unknown:
            if others is False and "additionalProperties" in schema:
                return self.b.state(), self.b.state()
            raise Unsupported(f"json_schema: {at}/required: {unknown[0]!r} is not among the properties")
        if others is True or (not properties and "additionalProperties" not in schema):
            raise Unsupported(f"json_schema: {at}/additionalProperties: any value at all, which may be nested without "
                              "end; takes False or a schema with a type")
        if (least or most is not None) and others is not False:
            raise Unsupported(f"json_schema: {at}: minProperties or maxProperties beside additionalProperties")
        if least > len(properties):
            raise Unsupported(f"json_schema: {at}/minProperties: got {least}, and properties lists {len(properties)}")
        most = None if most is None or most >= len(properties) else most
        top = len(properties) if most is None else most
        comma = lambda: self.b.seq(self.gap(), self.b.bytes(b","), self.gap())
        # states: (how many properties of the list are behind it, how many were written, up to what counts)
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
                if part is None or count > 1:       # one part does for the first property and for later ones
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
            behind = self.b.star(self.b.seq(comma(), more()))
            alone = more()
            self.b.join(grid[-1][0], alone[0])
            self.b.join(alone[1], behind[0])
            for n in range(1, count + 1):
                self.b.join(grid[-1][n], behind[0])
            self.b.join(behind[1], end)
        return self.b.seq(self.b.bytes(b"{"), self.gap(), (grid[0][0], end), self.gap(), self.b.bytes(b"}"))

    def _free_names(self, properties: Mapping[str, Any]) -> Dfa:
        """Names of letters, digits and some signs that are not among the properties: they are written in one way."""
        names = regex(r'"[A-Za-z0-9_ .$/-]{0,64}"')
        return names - literals([json.dumps(name).encode() for name in properties]) if properties else names


def written(b: Builder) -> Part:
    """One character of a JSON string: as it is, or by an escape."""
    digit = lambda: b.ranges((48, 57), (65, 70), (97, 102))
    high = lambda: b.seq(b.ranges((68, 68), (100, 100)), b.ranges((56, 57), (65, 66), (97, 98)), digit(), digit())
    low = lambda: b.seq(b.ranges((68, 68), (100, 100)), b.ranges((67, 70), (99, 102)), digit(), digit())
    plain = b.any_of(b.seq(b.ranges((48, 57), (65, 67), (69, 70), (97, 99), (101, 102)), digit(), digit(), digit()),
                     b.seq(b.ranges((68, 68), (100, 100)), b.ranges((48, 55)), digit(), digit()))
    pair = b.seq(high(), b.bytes(b"\\u"), low())
    escape = b.any_of(b.ranges(*[(x, x) for x in b'"\\/bfnrt']), b.seq(b.bytes(b"u"), b.any_of(plain, pair)))
    return b.any_of(characters(b, [(0x20, 0x21), (0x23, 0x5B), (0x5D, TOP)]), b.seq(b.bytes(b"\\"), escape))


SHORT = {0x22: b'\\"', 0x5C: b"\\\\", 0x08: b"\\b", 0x09: b"\\t", 0x0A: b"\\n", 0x0C: b"\\f", 0x0D: b"\\r"}


def escaped(b: Builder, texts: Dfa) -> Part:
    """Texts as the inside of a JSON string: what must be escaped is, in one way, and nothing else."""
    states, end = [b.state() for _ in range(len(texts))], b.state()
    for i, row in enumerate(texts.next.tolist()):
        if texts.final[i]:
            b.join(states[i], end)
        for byte, target in enumerate(row):
            if target < 0:
                continue
            if byte in SHORT or byte < 0x20:
                part = b.bytes(SHORT.get(byte, b"\\u%04x" % byte))
                b.join(states[i], part[0])
                b.join(part[1], states[target])
            else:
                b.moves[states[i]].append((byte, byte, states[target]))
    return states[0], end


def integers(b: Builder, first: int, last: int) -> Part:
    """The whole numbers from `first` to `last`."""
    parts = []
    if first < 0:
        parts.append(b.seq(b.bytes(b"-"), _digits(b, max(1, -last), -first)))
    if last >= 0:
        parts.append(_digits(b, max(0, first), last))
    return b.any_of(*parts)


def _digits(b: Builder, first: int, last: int) -> Part:
    """The numbers from `first` to `last`, none of them negative, without leading zeros."""
    parts = []
    for length in range(len(str(first)), len(str(last)) + 1):
        low, high = max(first, 10 ** (length - 1) if length > 1 else 0), min(last, 10 ** length - 1)
        if low <= high:
            parts.append(_between(b, str(low), str(high)))
    return b.any_of(*parts)


def _between(b: Builder, low: str, high: str) -> Part:
    """Numbers of as many digits as both."""
    a, z = ord(low[0]), ord(high[0])
    if len(low) == 1:
        return b.ranges((a, z))
    rest, nines, zeros = len(low) - 1, "9" * (len(low) - 1), "0" * (len(low) - 1)
    if a == z:
        return b.seq(b.ranges((a, a)), _between(b, low[1:], high[1:]))
    parts = []
    inner_low, inner_high = a, z
    if low[1:] != zeros:
        parts.append(b.seq(b.ranges((a, a)), _between(b, low[1:], nines)))
        inner_low += 1
    if high[1:] != nines:
        parts.append(b.seq(b.ranges((z, z)), _between(b, zeros, high[1:])))
        inner_high -= 1
    if inner_low <= inner_high:
        parts.append(b.seq(b.ranges((inner_low, inner_high)), *[b.ranges((48, 57)) for _ in range(rest)]))
    return b.any_of(*parts)


def numbers(b: Builder, low: int, out_low: bool, high: int, out_high: bool) -> Part:
    """The decimal numbers between whole ones, which are themselves left out where said."""
    def fraction(least: int) -> Part:
        """`.` and digits; with `least` 1 not all of them zero."""
        more = lambda: b.repeat(lambda: b.ranges((48, 57)), 0, DIGITS - 1)
        if not least:
            return b.seq(b.bytes(b"."), b.ranges((48, 57)), more())
        some = regex(rf"\.(?:0{{0,{DIGITS - 1}}}[1-9][0-9]{{0,{DIGITS - 1}}})")
        return b.dfa(some)

    def upwards(first: int, out_first: bool, last: int, out_last: bool) -> list[Part]:
        """Of numbers that are not negative."""
        parts: list[Part] = []
        if first > last:
            return parts
        if first <= last - 1:
            if out_first:
                parts.append(b.seq(b.bytes(str(first).encode()), fraction(1)))
                if first + 1 <= last - 1:
                    parts.append(b.seq(_digits(b, first + 1, last - 1), b.maybe(fraction(0))))
            else:
                parts.append(b.seq(_digits(b, first, last - 1), b.maybe(fraction(0))))
        if not out_last and (first < last or not out_first):
            parts.append(b.seq(_digits(b, last, last), b.maybe(b.seq(b.bytes(b".0")))))
        return parts

    parts = []
    if high >= 0:
        parts += upwards(max(low, 0), out_low and low >= 0, high, out_high)
    if low < 0:
        first, out_first = (-high, out_high) if high < 0 else (0, True)         # there is no -0
        parts += [b.seq(b.bytes(b"-"), x) for x in upwards(first, out_first, -low, out_low)]
    return b.any_of(*parts) if parts else (b.state(), b.state())


def _is(value: Any, kind: str) -> bool:
    """Whether a value has a type."""
    if kind in ("integer", "number"):
        return isinstance(value, (int, float)) and not isinstance(value, bool) and (
            kind == "number" or value == int(value))
    types: dict[str, type] = {"string": str, "boolean": bool, "null": type(None), "object": dict, "array": list}
    return isinstance(value, types[kind])


def _same(a: Any, b: Any) -> bool:
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def _kinds(schema: Any, of: Compiler) -> set[str] | None:
    """The types that a schema lets through, where it says so at once."""
    schema = of._followed(schema, "#")
    if not isinstance(schema, Mapping):
        return None
    kinds = schema.get("type")
    if kinds is None:
        return None
    found = set(kinds if isinstance(kinds, list) else [kinds])
    return found | {"number"} if "integer" in found else found
