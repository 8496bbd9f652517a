"""The program that reads JSON Schema's test suite: counts, writings, and that a wrong automaton would show."""

import doctest
import json
from pathlib import Path
from typing import Any

import evaluate
import pytest

from evaluations import schemas
from evaluations.schemas import read, texts

pytestmark = pytest.mark.wide

CASES: list[dict[str, Any]] = [
    {"description": "two members", "schema": {"type": "object", "properties": {
        "a": {"type": "integer"}, "b": {"type": "null"}}},
     "tests": [{"description": "the other order", "data": {"b": None, "a": 1}, "valid": True},
               {"description": "another member", "data": {"a": 1, "c": 2}, "valid": True},
               {"description": "a text", "data": {"a": "1"}, "valid": False}]},
    {"description": "no type", "schema": {"minimum": 3}, "tests": [{"description": "x", "data": 3, "valid": True}]},
    {"description": "not", "schema": {"not": {"type": "null"}}, "tests": []}]


def test_the_reasons_are_doctests() -> None:
    assert doctest.testmod(schemas).failed == 0


def test_a_suite_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.json").write_text(json.dumps(CASES))
    found = read(tmp_path)
    assert (len(found.taken), found.instances, found.valid, found.wrong) == (1, 3, 2, [])
    assert found.missed == ["own.json: two members: another member"]
    assert found.refused == {"not": 1, "without a type": 1}
    typed = read(tmp_path, typed=True)
    assert (len(typed.taken), typed.instances, typed.wrong) == (2, 4, [])
    assert evaluate.main(["schemas", str(tmp_path)]) == 0 and "1 schemas taken, 2 refused" in capsys.readouterr().out
    (tmp_path / "own.json").write_text(json.dumps(CASES).replace("true", "false"))
    assert evaluate.main(["schemas", str(tmp_path)]) == 1


def test_values_are_written_in_many_ways() -> None:
    assert set(texts({"a": "é", "b": 1})) >= {b'{"b": 1, "a": "\\u00e9"}', '{"a":"é","b":1}'.encode()}
