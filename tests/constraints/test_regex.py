"""Automata of regular expressions and schemas against Python's `re` and the `jsonschema` package."""

import datetime
import itertools
import json
import random
import re
from typing import Any

import jsonschema
import pytest

from decodax.constraints import Dfa, TokenDfa, Unsupported
from decodax.constraints.builder import Builder, literals
from decodax.constraints.expressions import regex, search
from decodax.constraints.schema import json_schema
from decodax.constraints.tokens import TokenTrie
from tests.constraints.formats import FORMATS, simple, valid

PATTERNS = [
    r"(ab)*c?é?", r"[a-z]{2,3}é?(foo|bar)*", r"[^a]+", r".", r"\d+(\.\d+)?", r"[\w.]+@[\w]+\.(com|org)",
    r"(?:a|b){0,3}c+?", r"[а-яё]{2}", r"\S\s\W", r"[\U00010000-\U0010ffff😀]", r"^ab$", r"(?s).x", r"a{3}|b{2,}",
    r"[^\x00-\x7f]", r"[^\D5-7]", r"(?s:.)b.(?s:(?-s:.).)", "", r"x{2}", r"(a|ab)(c|bcd)(d*)",
    r"[^a-xb]+", r"[^\wc-e@]"]        # of ranges that overlap


def walk(language: Dfa, rng: random.Random, longest: int = 40) -> bytes:
    """A text of a language, of about so many bytes at most."""
    far, state, text = language.distance(), 0, b""
    while True:
        moves = [b for b in range(256) if language.next[state, b] >= 0]
        if language.final[state] and (not moves or rng.random() < 0.3 or len(text) > longest):
            return text
        byte = min(moves, key=lambda b: far[language.next[state, b]]) if len(text) > longest else rng.choice(moves)
        text, state = text + bytes([byte]), int(language.next[state, byte])


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_regular_expression_matches_what_python_matches(pattern: str) -> None:
    rng, whole, part = random.Random(1), regex(pattern), search(pattern)
    for _ in range(100):
        assert re.fullmatch(pattern, walk(whole, rng).decode(), re.ASCII)
    for _ in range(800):
        text = "".join(rng.choice("abcd é15.@xё😀\n") for _ in range(rng.randint(0, 5)))
        assert bool(re.fullmatch(pattern, text, re.ASCII)) == whole.accepts(text.encode())
        assert bool(re.search(pattern.replace("$", r"\Z"), text, re.ASCII)) == part.accepts(text.encode())


@pytest.mark.parametrize(("pattern", "what"), [
    (r"(a)\1", "a reference to a group"), (r"a(?=b)", "a look-around"), (r"a\bb", "a word boundary"),
    (r"(?i)a", "got the flags"), (r"a(", r"missing \)"), (r"(?>a)b", "an atomic group"), (r"a^b", "matches nothing")])
def test_patterns_beyond_automata_are_refused(pattern: str, what: str) -> None:
    with pytest.raises(ValueError, match=f"^regex: .*{what}"):
        regex(pattern)


def test_languages_are_cut_and_joined() -> None:
    words, with_ab = regex("[a-z]{2,4}"), regex(".*ab.*")
    both, rest = words & with_ab, words - with_ab
    for letters in itertools.chain.from_iterable(itertools.product("abz", repeat=n) for n in range(6)):
        text = "".join(letters)
        assert both.accepts(text.encode()) == (2 <= len(text) <= 4 and "ab" in text)
        assert rest.accepts(text.encode()) == (2 <= len(text) <= 4 and "ab" not in text)
    assert (words & regex("[0-9]+")).empty
    b = Builder()
    twice = b.build(b.repeat(lambda: b.bytes(b"xy"), 1, 2))
    assert [twice.accepts(b"xy" * n) for n in range(4)] == [False, True, True, False] and len(twice) == 5


@pytest.mark.parametrize("pattern", [r"(ab)*c?é?", r"[ab]{2,4}|c", r"(a|é)+bc"])
def test_tokens_move_as_their_bytes_do(pattern: str) -> None:
    """Also tokens that are pieces of a character, that two tokens have in common, and that add nothing."""
    tokens = [b"a", b"b", b"ab", b"c", b"", b"abc", "é".encode(), b"\xc3", b"\xa9b", b"a", b"<end>"]
    language, end, barred = regex(pattern), 10, 5
    found = TokenDfa.build([literals([b"zz"]), language], TokenTrie.build(tokens), [end], [barred])
    shortest = None
    for n in range(5):
        for sequence in itertools.product([t for t in range(len(tokens)) if t not in (4, end)], repeat=n):
            state = int(found.starts[1])
            for token in (*sequence, end):
                state = int(found.next[state, found.classes[token]]) if state >= 0 else -1
            allowed = barred not in sequence and language.accepts(b"".join(tokens[t] for t in sequence))
            assert (state == len(found.next) - 1) == allowed
            if allowed and shortest is None:
                shortest = n + 1
    assert found.distance[found.starts[1]] == shortest
    follows = language.next >= 0
    for state, token in enumerate(found.forced[found.starts[1]:-1].tolist()):
        alone = follows[state].sum() == 1 and not language.final[state]
        assert token < 0 or (alone and token != barred and language.next[state, tokens[token][0]] >= 0)
    without = TokenDfa.build([language], TokenTrie.build(tokens), [])
    assert shortest is not None and without.distance[0] <= shortest - 1


SCHEMAS: list[Any] = [
    {"type": "object", "properties": {
        "name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 3}},
     "required": ["name", "age"]},
    {"type": "integer", "minimum": -37, "exclusiveMaximum": 1205}, {"type": "number", "minimum": -2, "maximum": 3},
    {"type": "number", "exclusiveMinimum": 0}, {"type": "number"},
    {"type": "number", "exclusiveMinimum": 2, "exclusiveMaximum": 3}, {"type": "number", "maximum": -4},
    {"type": "string", "pattern": "^[a-z\"\\\\]+$", "minLength": 3, "maxLength": 6},
    {"type": "string", "format": "date-time"}, {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"}, {"type": "string", "pattern": r"^\w.\D$"},
    {"type": "string", "minLength": 2, "maxLength": 4}, {"enum": ["a", 1, None, {"x": [1, 2]}]}, {"const": "é\n"},
    {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    {"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": {"type": "integer"}},
    {"type": "object", "additionalProperties": {"type": "boolean"}},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "null"}], "items": False},
    {"type": "array", "prefixItems": [{"type": "integer"}], "items": {"type": "null"}, "minItems": 2},
    {"type": "object", "properties": {x: {"type": "null"} for x in "abc"}, "minProperties": 1, "maxProperties": 2,
     "additionalProperties": False},
    {"$defs": {"p": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}}, "type": "array",
     "items": {"$ref": "#/$defs/p"}, "minItems": 1},
    {"oneOf": [{"type": "integer"}, {"type": "string"}]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]},
    {"type": ["string", "null"], "minLength": 2}]


@FORMATS.checks("time", raises=ValueError)
@FORMATS.checks("date-time", raises=ValueError)
def _is_time(value: Any) -> bool:
    if isinstance(value, str):
        datetime.datetime.fromisoformat(value if "T" in value else f"2000-01-01T{value}")       # raises ValueError
    return True


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda s: json.dumps(s)[:40])
def test_texts_of_a_schema_are_valid(schema: Any) -> None:
    rng, language = random.Random(2), json_schema(schema)
    for _ in range(30):
        valid(schema, walk(language, rng))


def test_dates_are_those_of_the_calendar() -> None:
    dates = json_schema({"type": "string", "format": "date"})
    for year in (1, 4, 100, 400, 1900, 1996, 2000, 2023, 2024, 2100, 9996, 9999):
        for month, day in itertools.product(range(14), (0, 1, 28, 29, 30, 31, 32)):
            text = f"{year:04}-{month:02}-{day:02}"
            try:
                right = bool(datetime.date.fromisoformat(text))
            except ValueError:
                right = False
            assert dates.accepts(f'"{text}"'.encode()) == right, text
    assert not dates.accepts(b'"0000-02-29"')


def test_references_are_json_pointers() -> None:
    """With `%`, `~`, `/` and nothing at all as names."""
    defs = {"a%b": 1, "a~b": 2, "a/b": 3, "": 4, '"': 5}
    for ref, value in (("a%25b", 1), ("a~0b", 2), ("a~1b", 3), ("", 4), ("%22", 5)):
        found = json_schema({"$defs": {k: {"const": v} for k, v in defs.items()}, "$ref": f"#/$defs/{ref}"})
        assert found.accepts(str(value).encode()) and not found.accepts(b"9")


def test_valid_values_are_accepted() -> None:
    person = SCHEMAS[0]
    for value, right in (({"name": "Ada \"x\" é", "age": 36, "tags": ["a", "bb"]}, True),
                         ({"name": "x", "age": 151}, False), ({"name": "x", "age": 0, "tags": []}, True),
                         ({"age": 3, "name": "x"}, False)):
        for separators in ((",", ":"), (", ", ": ")):
            text = json.dumps(value, separators=separators).encode()
            assert json_schema(person).accepts(text) == right, text
    assert json_schema({"type": "string"}).accepts(b'"\\ud83d\\ude00\\n\\u00e9"')
    assert not json_schema({"type": "string"}).accepts(b'"\\ud83d"')            # half a character
    for n in range(-40, 1210):
        assert json_schema(SCHEMAS[1]).accepts(str(n).encode()) == (-37 <= n < 1205)


@pytest.mark.parametrize(("schema", "place"), [
    ({"type": "object", "properties": {"a": {"not": {}}}}, "#/properties/a/not"), ({"type": "object"}, "#/additional"),
    ({"type": "array", "items": {"$ref": "#"}}, "#/items/\\$ref.*recursive|#/\\$ref.*recursive"),
    ({"allOf": [{"$ref": "#"}, {"type": "null"}]}, "#: nested too deeply or recursive"),
    *(({"allOf": [{"$ref": "#/$defs/a"}, {"type": "null"}], "$defs": {"a": a, "b": {"$ref": "#/$defs/a"}}},
       r"#/allOf/0/\$ref: '#/\$defs/.' leads back to itself")
      for a in ({"$ref": "#/$defs/a"}, {"title": "a", "$ref": "#/$defs/b"})),
    ({"type": "integer", "multipleOf": 3}, "#/multipleOf"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "#/oneOf"),
    ({"type": "array", "items": {"type": "null"}, "uniqueItems": True}, "#/uniqueItems"), (True, "#: allows any value"),
    ({"type": "string", "format": "iri"}, "#/format"), ({"type": "string", "pattern": "(?=a)"}, "#/pattern"),
    ({"definitions": {"type": "null"}, "$ref": "#definitions"}, "#/\\$ref"),      # an anchor, and no path
    ({"type": "string", "if": {}, "then": {}}, "#/if"), ({"minimum": 3}, "#: without a type"),
    ({"type": "object", "properties": {}, "required": ["x"]}, "#/required: 'x'")])
def test_a_keyword_that_is_not_honoured_is_named(schema: Any, place: str) -> None:
    with pytest.raises(Unsupported, match=f"^json_schema: ({place})"):
        json_schema(schema)


@pytest.mark.parametrize("schema", ["{", 3, {"type": "thing"}, {"$ref": "#/$defs/x"}, {"enum": 3}, {"type": "string",
                                    "minLength": -1}, {"type": "integer", "minimum": 5, "maximum": 2},
                                    {"const": float("inf")}, {"const": "\ud83d"}])
def test_a_value_that_is_no_schema_is_an_error(schema: Any) -> None:
    with pytest.raises(ValueError, match=r"^json_schema: "):
        json_schema(schema)


SAYS_NOTHING: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "https://example.com/a", "id": "#a", "title": "t",
    "description": "d", "$comment": "c", "default": 3, "examples": [1], "example": 1, "deprecated": True,
    "$anchor": "q",
    "readOnly": True, "writeOnly": False, "contentMediaType": "text/plain", "contentEncoding": "base64",
    "contentSchema": {"not": {}}, "$vocabulary": {}, "$dynamicAnchor": "z", "x-order": 3, "x-minLength": 2,
    "propertyOrder": 3, "enumNames": ["a"], "tsType": "T", "xml": {}, "externalDocs": {}, "discriminator": {},
    "errorMessage": "no", "then": {"not": {}}, "else": {"not": {}}, "minContains": 3, "dependentSchemas": {},
    "patternProperties": {}, "unevaluatedProperties": True, "additionalItems": False, "definitions": {}}


@pytest.mark.parametrize("name", SAYS_NOTHING)
def test_words_that_say_nothing_are_not_read(name: str) -> None:
    """Anywhere in a schema, and jsonschema finds the same instances valid."""
    one = {name: SAYS_NOTHING[name]}
    for schema in ({"type": "string", "maxLength": 3, **one}, {"anyOf": [{"type": "null", **one}, {"const": 1, **one}]},
                   {"type": "array", "items": {"type": "null", **one}, "maxItems": 2, **one},
                   {"type": "object", "properties": {"a": {"type": "integer", **one}}, "required": ["a"], **one},
                   {"allOf": [{"type": "integer", **one}, {"maximum": 3, **one}], **one},
                   {"$defs": {"a": {"type": "null", **one}}, "$ref": "#/$defs/a", **one},
                   {"oneOf": [{"type": "integer", **one}, {"type": "string", "format": "color", **one}], **one}):
        language, oracle = json_schema(schema), jsonschema.Draft202012Validator(schema)
        for value in ("", "abc", "abcd", None, 1, 4, [], [None], [None] * 3, {"a": 1}, {}, {"a": None}):
            assert language.accepts(json.dumps(value).encode()) == oracle.is_valid(value), (schema, value)


@pytest.mark.parametrize("type_", ["string", "integer", "boolean"])
@pytest.mark.parametrize("name", ["contains", "patternProperties", "propertyNames", "dependentRequired",
                                  "unevaluatedItems"])
def test_a_keyword_of_another_type_says_nothing(type_: str, name: str) -> None:
    assert not json_schema({"type": type_, name: {"a": False}}).empty


@pytest.mark.parametrize("name", ["maxLenght", "minlength", "Pattern", "additionalPropertys", "exclusiveMinimun",
                                  "anyof"])
def test_a_word_that_is_nearly_a_keyword_is_refused(name: str) -> None:
    with pytest.raises(Unsupported, match=f"^json_schema: #/{name}: no such keyword; did you mean"):
        json_schema({"type": "string", name: 3})


def test_beside_a_reference_older_drafts_say_nothing() -> None:
    schema = {"definitions": {"a": {"type": "integer"}}, "$ref": "#/definitions/a", "not": {}}
    assert json_schema({**schema, "$schema": "http://json-schema.org/draft-07/schema#"}).accepts(b"3")
    with pytest.raises(Unsupported, match="#/not"):
        json_schema(schema)


def test_draft_4_says_by_a_switch_that_a_bound_is_left_out() -> None:
    for low, high in itertools.product((True, False), repeat=2):
        schema = {"type": "integer", "minimum": 1, "exclusiveMinimum": low, "maximum": 4, "exclusiveMaximum": high}
        language, oracle = json_schema(schema), jsonschema.Draft4Validator(schema)
        assert all(language.accepts(str(n).encode()) == oracle.is_valid(n) for n in range(7))


@pytest.mark.parametrize(("schema", "message"), [
    ({"type": "string", "minLength": 3, "maxLength": 2}, "#: minLength 3 is above maxLength 2"),
    ({"type": "string", "pattern": "a", "minLength": 1, "maxLength": 0}, "#: minLength 1 is above maxLength 0"),
    ({"type": "string", "format": "date", "minLength": 11, "maxLength": 10}, "#: minLength 11 is above maxLength 10"),
    ({"type": "array", "items": {"type": "null"}, "minItems": 2, "maxItems": 1}, "#: minItems 2 is above maxItems 1"),
    ({"type": "object", "properties": {"a": {"type": "null"}}, "minProperties": 2, "maxProperties": 1},
     "#: minProperties 2 is above maxProperties 1"),
    ({"type": "object", "properties": {"a": {"type": "null"}}, "minProperties": 2}, "#/minProperties: got 2, but"),
    ({"type": "object", "properties": {"a": {"type": "string", "minLength": 3, "maxLength": 2}}},
     "#/properties/a: minLength 3 is above maxLength 2"),
    ({"anyOf": [{"type": "null"}, {"type": "string", "minLength": 3, "maxLength": 2}]},
     "#/anyOf/1: minLength 3 is above maxLength 2"),
    ({"type": "integer", "minimum": 3, "maximum": 2}, "#: no number lies between minimum 3 and maximum 2"),
    ({"type": "number", "minimum": 3, "exclusiveMaximum": 3}, "#: no number lies between minimum 3 and exclusiveMax"),
    ({"type": "string", "maxLength": float("inf")}, "#/maxLength: got inf, takes finite numbers"),
    ({"type": "string", "maxLength": float("nan")}, "#/maxLength: got nan, takes finite numbers"),
    ({"type": "array", "items": {"type": "null"}, "minItems": -float("inf")}, "#/minItems: got -inf"),
    ({"type": "string", "maxLength": 2.5}, "#/maxLength: got 2.5, takes a whole number from 0 on"),
    ({"type": "string", "maxLength": "3"}, "#/maxLength: got '3', takes a whole number from 0 on"),
    ({"type": "string", "minLength": True}, "#/minLength: got True, takes a whole number from 0 on"),
    ({"type": "string", "maxLength": 1e300}, "a repetition of 100000000"),
    ({"type": "string", "minLength": 10 ** 9}, "a repetition of 1000000000 times"),
    ({"type": "array", "items": {"type": "integer"}, "maxItems": 10 ** 9}, "a repetition of 1000000000 times"),
    ({"type": "array", "items": {"type": "integer"}, "minItems": 10 ** 400}, "a repetition of 1000000000"),
    ({"type": "integer", "minimum": 1e300}, "#: bounds beyond 15 digits")])
def test_bounds_that_leave_nothing_or_are_too_wide_are_refused_by_name(schema: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^json_schema: {message}") as error:
        json_schema(schema)
    assert len(str(error.value)) < 250


def test_a_bound_that_says_nothing_is_no_size() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "null"}}, "maxProperties": 10 ** 9}
    assert len(json_schema(schema)) == len(json_schema({k: v for k, v in schema.items() if k != "maxProperties"}))
    schema = {"type": "array", "prefixItems": [{"type": "null"}], "items": False, "maxItems": 1e300}
    assert json_schema(schema).accepts(b"[null]")


@pytest.mark.wide
@pytest.mark.parametrize("first", [0, *[pytest.param(n, marks=pytest.mark.full) for n in range(40, 1000, 40)]])
def test_texts_of_random_schemas_are_valid(first: int) -> None:
    """A thousand of them in all, none refused."""
    for i in range(first, first + 40):
        rng = random.Random(i)
        schema = simple(rng)
        language = json_schema(schema)
        for _ in range(5):
            valid(schema, walk(language, rng))
