"""JSON Schema's own test suite against the automata of `json_schema`: what is taken, what is refused, and whether an
instance that is not valid is ever accepted.

    git clone https://github.com/json-schema-org/JSON-Schema-Test-Suite
    python scripts/schema_suite.py JSON-Schema-Test-Suite/tests/draft2020-12

The program exits with 1 if an invalid instance is accepted.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from decodax.constraints import Unsupported
from decodax.constraints.keywords import BY_TYPE, HONOURED, OTHERS
from decodax.constraints.schema import json_schema


@dataclasses.dataclass
class Found:
    """What became of a suite.

    Attributes:
        taken: the cases whose schemas are taken, by place, as they stand in the suite. instances: of those. refused:
            the other schemas, by what they were refused for. valid: valid instances. missed: the valid instances that
            are not accepted, however they are written. wrong: the invalid ones that are accepted.
    """

    taken: dict[str, Any] = dataclasses.field(default_factory=dict)
    refused: Counter[str] = dataclasses.field(default_factory=Counter)
    instances: int = 0
    valid: int = 0
    missed: list[str] = dataclasses.field(default_factory=list)
    wrong: list[str] = dataclasses.field(default_factory=list)


def read(directory: Path, deeper: bool = False, typed: bool = False) -> Found:
    """Tries every case of a directory, and of those below it if `deeper`. If `typed`, schemas with keywords of one type
    alone are given that type, of which the instances must be then; without it values of all others are valid, too."""
    found = Found()
    for path in sorted(directory.rglob("*.json") if deeper else directory.glob("*.json")):
        for case in json.loads(path.read_text()):
            if typed:
                case = with_type(case)
            place = f"{path.relative_to(directory)}: {case['description']}"
            try:
                language = json_schema(case["schema"])
            except Unsupported as error:
                found.refused[reason(str(error))] += 1
                continue
            except ValueError as error:
                found.refused[str(error).removeprefix("json_schema: ")] += 1
                continue
            found.taken[place] = case
            for test in case["tests"]:
                found.instances += 1
                found.valid += test["valid"]
                accepted = any(language.accepts(text) for text in texts(test["data"]))
                if accepted and not test["valid"]:
                    found.wrong.append(f"{place}: {test['description']}")
                elif test["valid"] and not accepted:
                    found.missed.append(f"{place}: {test['description']}")
    return found


KINDS: dict[str, tuple[type, ...]] = {"string": (str,), "number": (int, float), "object": (dict,), "array": (list,)}


def with_type(case: Any) -> Any:
    """A case whose schema says which type its keywords are of, and whose valid instances are of that type."""
    schema = case["schema"]
    said = schema.keys() & {*HONOURED, *OTHERS} if isinstance(schema, dict) else set()
    kinds = [kind for kind in KINDS if said and said <= BY_TYPE[kind]]
    if len(kinds) != 1:
        return case
    own = lambda x: isinstance(x, KINDS[kinds[0]]) and not isinstance(x, bool)
    return {**case, "schema": {**schema, "type": kinds[0]}, "tests": [
        {**test, "valid": test["valid"] and own(test["data"])} for test in case["tests"]]}


def reason(message: str) -> str:
    """The keyword that a schema was refused for, or the text where it is no keyword.

    >>> reason("json_schema: #/properties/a/not: this keyword is not honoured")
    'not'
    >>> reason("json_schema: #: without a type any value of the others is valid")
    'without a type any value of the others is valid'
    """
    at, _, text = message.removeprefix("json_schema: ").partition(": ")
    return at.rpartition("/")[2] if "keyword is not honoured" in text else re.split("[;,] ", text)[0]


def texts(value: Any, orders: int = 120) -> Iterator[bytes]:
    """Ways to write a value: close and with spaces, characters escaped or not, members in up to `orders` orders."""
    for ordered in itertools.islice(_orders(value), orders):
        for separators, escaped in itertools.product(((",", ":"), (", ", ": ")), (False, True)):
            try:
                yield json.dumps(ordered, separators=separators, ensure_ascii=escaped).encode()
            except UnicodeEncodeError:          # half a surrogate pair
                continue


def _orders(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for names in itertools.permutations(value):
            for inner in itertools.product(*[list(_orders(value[name])) for name in names]):
                yield dict(zip(names, inner, strict=True))
    elif isinstance(value, list):
        yield from map(list, itertools.product(*[list(_orders(x)) for x in value]))
    else:
        yield value


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="tests of a draft, such as tests/draft2020-12")
    parser.add_argument("--optional", action="store_true", help="also the directories below it")
    parser.add_argument("--typed", action="store_true", help="give schemas with keywords of one type that type")
    given = parser.parse_args(arguments)
    found = read(given.directory, given.optional, given.typed)
    invalid = found.instances - found.valid
    print(f"{len(found.taken)} schemas taken, {sum(found.refused.values())} refused; of the instances of those taken\n"
          f"  {invalid} are invalid: {len(found.wrong)} accepted\n"
          f"  {found.valid} are valid: {len(found.missed)} not accepted")
    for title, lines in (("accepted though invalid", found.wrong), ("not accepted though valid", found.missed),
                         ("refused for", [f"{n:4} {why}" for why, n in found.refused.most_common()])):
        print(f"\n{title}:" if lines else "", *lines, sep="\n    ")
    return int(bool(found.wrong))


if __name__ == "__main__":
    sys.exit(main())
