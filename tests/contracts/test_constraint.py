"""The contract of constraints: however a text is decoded, it is of its language, and rows without one are free."""

import itertools
import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import lark
import pytest

import decodax as dx
from decodax.common.registry import CONSTRAINTS
from decodax.io.load import LM
from tests.constraints.languages import EXPR, TIME, WEATHER
from tests.constraints.schemas import CALL, PERSON
from tests.matrix import often


def is_person(text: str) -> bool:
    jsonschema.validate(json.loads(text), PERSON)
    return True


def calls_weather(text: str) -> bool:
    call = json.loads(re.fullmatch(r"<tool_call>\n(.*)\n</tool_call>", text, re.DOTALL)[1])   # type: ignore[index]
    jsonschema.validate(call["arguments"], WEATHER["function"]["parameters"])       # type: ignore[index]
    return call["name"] == "get_weather"


def is_expression(text: str) -> bool:
    lark.Lark(EXPR).parse(text)
    return True


LISTS = 'start: "[" item ("," item)~1..3 "]"\nitem: "a" | "b" "c"?'
CASES: dict[str, tuple[str, Any, Callable[[str], Any]]] = {
    "regex": ("regex", (CALL,), lambda t: re.fullmatch(CALL, t)),
    "choices": ("choices", (["yes", "no", "no way"],), lambda t: t in ("yes", "no", "no way")),
    "json-schema": ("json-schema", (PERSON,), is_person),
    "grammar": ("grammar", (LISTS,), lambda t: re.fullmatch(r"\[(a|bc?)(,(a|bc?)){1,3}\]", t)),
    "grammar that refers to itself": ("grammar", (EXPR,), is_expression),
    "tools": ("tools", ([WEATHER, TIME], dict(function=dict(name="get_weather"))), calls_weather),
    "choices after a mark": ("choices", (["yes", "no"],), lambda t: re.fullmatch(r"(?s).*?##(yes|no)", t)),
    "phrases": ("phrases", (["if", "xyz"], ["e"]), lambda t: "if" in t and "xyz" in t and "e" not in t)}
STACKED = "grammar that refers to itself"
"""Its texts may be cut by their budget; all others close within it."""
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {}, "sampled": dict(temperature=1.0), "samples": dict(temperature=1.5, num_samples=3, top_p=0.9),
    "beams": dict(algorithm=dx.algorithms.beam_search(3), num_samples=2),
    "beam sampling": dict(algorithm=dx.algorithms.beam_search(3), temperature=1.0),
    "drafted": dict(temperature=1.0, algorithm="prompt-lookup:length=4"),
    "places": dict(temperature=1.0, batch_size=1), "penalties": dict(repetition_penalty=1.3, temperature=1.0)}


def constraint(case: str) -> Any:
    name, given, _ = CASES[case]
    made = CONSTRAINTS[name].make(*given)
    return made.after("##") if case == "choices after a mark" else made


def test_every_constraint_of_the_registry_has_a_case_here() -> None:
    assert {name for name, _, _ in CASES.values()} == set(CONSTRAINTS)


@pytest.mark.wide(but=("json-schema-sampled", "choices-sampled"))
@pytest.mark.parametrize(("case", "way"), often([*itertools.product(CASES, ["sampled"]), ("regex", "beams"),
                                                 ("json-schema", "beams"), ("tools", "beams"), ("phrases", "beams")],
                                                itertools.product(CASES, WAYS)))
def test_every_text_is_of_its_language(lm: LM, case: str, way: str) -> None:
    out = dx.generate(lm, ["one", "def f("], max_new_tokens=72, constraint=constraint(case), **WAYS[way])
    assert out.text is not None
    ended = [text for text, status in zip(out.text, out.status, strict=True) if status == dx.Status.EOS]
    assert len(ended) == len(out.text) if case != STACKED else ended, out.status
    assert all(map(CASES[case][2], ended)), out.text


@pytest.mark.parametrize("algorithm", often(["prompt-lookup:length=4"], [
    "prompt-lookup:length=4", "token-recycling", "lookahead", "suffix-decoding", "jacobi"]))
@pytest.mark.parametrize("temperature", often([1.0], [0.0, 1.0]))
def test_speculative_equals_plain_under_every_constraint(lm: LM, algorithm: str, temperature: float) -> None:
    """All in one batch, with a row that has none and is as it is alone."""
    prompts = ['{"name": "x", "n": 3}', *["one"] * (len(CASES) - 1), "def f("]
    given: dict[str, Any] = dict(constraint=[*map(constraint, CASES), None], max_new_tokens=72, temperature=temperature)
    plain, found = dx.generate(lm, prompts, **given), dx.generate(lm, prompts, algorithm=algorithm, **given)
    assert found.tokens.tolist() == plain.tokens.tolist() and found.status == plain.status
    free = dx.generate(lm, ["def f("], request_ids=[len(CASES)], max_new_tokens=72, temperature=temperature)
    assert free.row(0).tolist() == plain.row(len(CASES)).tolist()
