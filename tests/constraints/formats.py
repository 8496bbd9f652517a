"""Models, data and helpers of `test_regex.py` that other tests use too."""

import json
import random
from typing import Any

import jsonschema

FORMATS = jsonschema.FormatChecker(["date", "uuid", "ipv4", "email"])


def valid(schema: Any, text: bytes) -> None:
    jsonschema.Draft202012Validator(schema, format_checker=FORMATS).validate(json.loads(text))


def simple(rng: random.Random, depth: int = 3) -> Any:
    """A schema of what is honoured."""
    kind = rng.choice(["string", "integer", "number", "boolean", "null", "enum", "pattern", "format",
                       *(["object", "object", "array", "anyOf", "tuple"] if depth else [])])
    low = rng.randint(-50, 50)
    deeper = lambda: simple(rng, depth - 1)
    if kind == "object":
        names = rng.sample(["a", "b", "name", "é", "x y", 'q"'], rng.randint(1, 4))
        more: dict[str, Any] = rng.choice([{}, {"additionalProperties": False}, {"additionalProperties": deeper()}])
        return {"type": "object", "properties": {n: deeper() for n in names},
                "required": rng.sample(names, rng.randint(0, len(names))), **more}
    return {
        "string": lambda: {"type": "string", "minLength": low % 3, **rng.choice([{}, {"maxLength": 3 + low % 4}])},
        "integer": lambda: {"type": "integer", "minimum": low, **rng.choice([{}, {"maximum": low + low % 70}])},
        "number": lambda: {"type": "number", rng.choice(["minimum", "exclusiveMinimum"]): low,
                           rng.choice(["maximum", "exclusiveMaximum"]): low + 1 + low % 9},
        "boolean": lambda: {"type": "boolean"}, "null": lambda: {"type": "null"},
        "enum": lambda: {"enum": rng.sample(["x", 1, None, True, "é", [1, "a"], {"k": 2}], 3)},
        "pattern": lambda: {"type": "string", "pattern": rng.choice(["^[a-z]+$", r"\d", "^x", r'["\\]$', "é|ß"])},
        "format": lambda: {"type": "string", "format": rng.choice(["date", "time", "uuid", "ipv4"])},
        "array": lambda: {"type": "array", "items": deeper(), "minItems": low % 3,
                          **rng.choice([{}, {"maxItems": 3}])},
        "tuple": lambda: {"type": "array", "prefixItems": [deeper(), deeper()], "items": rng.choice([False, deeper()])},
        "anyOf": lambda: {"anyOf": [deeper(), deeper()]}}[kind]()
