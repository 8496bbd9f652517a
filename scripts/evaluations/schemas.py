"""JSON Schema's own test suite against the automata of `json_schema`: schemas that are compiled or refused, and
instances that are accepted. The exit status is 1 if an invalid instance is accepted."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from decodax.constraints import Unsupported
from decodax.constraints.keywords import BY_TYPE, HONOURED, OTHERS
from decodax.constraints.schema import json_schema


@dataclasses.dataclass
class Found:
    """Results of a suite: cases whose schemas are compiled, and the number of other schemas by the reason; the number
    of instances of those taken and of valid ones, and the names of those wrongly missed and wrongly accepted."""

    taken: dict[str, Any] = dataclasses.field(default_factory=dict)
    refused: Counter[str] = dataclasses.field(default_factory=Counter)
    instances: int = 0
    valid: int = 0
    missed: list[str] = dataclasses.field(default_factory=list)
    wrong: list[str] = dataclasses.field(default_factory=list)


def read(directory: Path, deeper: bool = False, typed: bool = False) -> Found:
    """Tries every case of a directory, and with `deeper` of those below it. With `typed` a schema with keywords of one
    type alone gets that type, so that values of other types become invalid."""
    found = Found()
    for path in sorted(directory.rglob("*.json") if deeper else directory.glob("*.json")):
        for case in json.loads(path.read_text()):
            if typed:
                case = with_type(case)
            place = f"{path.relative_to(directory)}: {case['description']}"
            try:
                language = json_schema(case["schema"])
            except ValueError as error:
                text = str(error)
                found.refused[reason(text) if isinstance(error, Unsupported) else
                              text.removeprefix("json_schema: ")] += 1
                continue
            found.taken[place] = case
            for test in case["tests"]:
                found.instances += 1
                found.valid += test["valid"]
                accepted = any(language.accepts(text) for text in texts(test["data"]))
                if accepted != test["valid"]:
                    (found.wrong if accepted else found.missed).append(f"{place}: {test['description']}")
    return found


KINDS: dict[str, tuple[type, ...]] = {"string": (str,), "number": (int, float), "object": (dict,), "array": (list,)}


def with_type(case: Any) -> Any:
    """Returns the case with the type of its keywords in the schema; only instances of that type stay valid."""
    schema = case["schema"]
    said = schema.keys() & {*HONOURED, *OTHERS} if isinstance(schema, dict) else set()
    kinds = [kind for kind in KINDS if said and said <= BY_TYPE[kind]]
    if len(kinds) != 1:
        return case
    own = lambda x: isinstance(x, KINDS[kinds[0]]) and not isinstance(x, bool)
    return {**case, "schema": {**schema, "type": kinds[0]}, "tests": [
        {**test, "valid": test["valid"] and own(test["data"])} for test in case["tests"]]}


def reason(message: str) -> str:
    """Returns the keyword that a schema was refused for, or the text if it is no keyword.

    >>> reason("json_schema: #/properties/a/not: this keyword is not supported")
    'not'
    >>> reason("json_schema: #: without a type any value of the others is valid")
    'without a type any value of the others is valid'
    """
    at, _, text = message.removeprefix("json_schema: ").partition(": ")
    return at.rpartition("/")[2] if "keyword is not supported" in text else re.split("[;,] ", text)[0]


def texts(value: Any, orders: int = 120) -> Iterator[bytes]:
    """Yields notations of a value: with and without spaces and escapes, members in up to `orders` orders."""
    for ordered in itertools.islice(_orders(value), orders):
        for separators, escaped in itertools.product(((",", ":"), (", ", ": ")), (False, True)):
            with contextlib.suppress(UnicodeEncodeError):          # half a surrogate pair
                yield json.dumps(ordered, separators=separators, ensure_ascii=escaped).encode()


def _orders(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for names in itertools.permutations(value):
            for inner in itertools.product(*[list(_orders(value[name])) for name in names]):
                yield dict(zip(names, inner, strict=True))
    elif isinstance(value, list):
        yield from map(list, itertools.product(*[list(_orders(x)) for x in value]))
    else:
        yield value


def main(args: argparse.Namespace) -> int:
    """Reads a suite and prints the counts; returns 1 if an invalid instance is accepted."""
    found = read(args.directory, args.optional, args.typed)
    invalid = found.instances - found.valid
    print(f"{len(found.taken)} schemas taken, {sum(found.refused.values())} refused; of the instances of those taken\n"
          f"  {invalid} are invalid: {len(found.wrong)} accepted\n"
          f"  {found.valid} are valid: {len(found.missed)} not accepted")
    for title, lines in (("accepted though invalid", found.wrong), ("not accepted though valid", found.missed),
                         ("refused for", [f"{n:4} {why}" for why, n in found.refused.most_common()])):
        print(f"\n{title}:" if lines else "", *lines, sep="\n    ")
    return int(bool(found.wrong))
