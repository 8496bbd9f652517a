"""Random schemas by every way to decode: at temperature 1, each text is valid JSON of its own schema, cut at every
budget from the shortest possible on.

With JSON_SCHEMA_TEST_SUITE, a directory such as `JSON-Schema-Test-Suite/tests/draft2020-12`, the schemas of that suite
are decoded as well.
"""

import dataclasses
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import decodax as dx
import tests.scripts  # noqa: F401, which says where the programs are
from decodax.algorithms.beams import BeamSearch
from decodax.algorithms.speculative import Rejection, Speculative, drafts, trees
from decodax.common.registry import ALGORITHMS
from decodax.constraints.languages import read
from decodax.constraints.matching import constrain
from decodax.io.load import LM
from decodax.models.diffusion import Diffusion
from tests.constraints.formats import simple, valid
from tests.matrix import often

pytestmark = pytest.mark.wide

MASK = 1        # a special token of the tokenizer
PROMPTS = ['{"a": [1, true], "name": "x"}\n', "one", "def f("]
BUDGETS = [*range(8), 12, 20]
"""Tokens beyond the shortest text of a row."""


@pytest.fixture(scope="module")
def lm(tiny_model: Path) -> LM:
    return dataclasses.replace(dx.load(tiny_model), diffusion=None)


def lookup(**options: Any) -> Callable[[LM], dict[str, Any]]:
    return lambda lm: dict(algorithm=Speculative(drafts.PromptLookup(4), **options))


def filled(name: str, **options: Any) -> Callable[[LM], dict[str, Any]]:
    return lambda lm: dict(algorithm=ALGORITHMS[name].make(lm, **options))


WAYS: dict[str, Callable[[LM], dict[str, Any]]] = {
    "plain": lambda lm: {}, "speculative": lookup(), "rejection": lookup(verify=Rejection()),
    "forced": lambda lm: dict(algorithm=Speculative(drafts.Forced(6, drafts.PromptLookup(4)))),
    "draft model": lambda lm: dict(algorithm=Speculative(drafts.DraftModel(lm), shape=trees.Fixed.balanced(2, 2, 1))),
    "beam search": lambda lm: dict(algorithm=BeamSearch(3), temperature=0.0),
    "blocks": filled("llada", block_length=8, steps=2), "canvas": filled("mdlm", steps=3, size=64)}
CANVAS = ("blocks", "canvas")


def shortest(lm: LM, schemas: Sequence[Any]) -> np.ndarray:
    """The fewest tokens of a text of each schema, with the end of the sequence."""
    asked = read([dx.constraints.json_schema(schema) for schema in schemas], len(schemas))
    assert asked is not None
    n, banned = len(schemas), () if lm.diffusion is None else (MASK,)
    link, table = constrain(asked, lm.tokenizer, lm.vocab_size, np.zeros((n, 1), np.int64), np.full(n, 1 << 20),
                            np.full(n, 1 << 20), 1, banned)
    return np.asarray(table.distance)[np.asarray(link.start)]


def whole(lm: LM, way: str, schemas: Sequence[Any], more: Sequence[int], seed: int = 0) -> None:
    """Decodes a row of each schema, with room for so many tokens beyond its shortest text, and checks the texts."""
    if way in CANVAS:
        lm = dataclasses.replace(lm, diffusion=Diffusion(MASK))
    least = shortest(lm, schemas)
    budgets = (least + np.array(more)).tolist()
    given: dict[str, Any] = dict(constraint=[dx.constraints.json_schema(schema) for schema in schemas],
                                 max_new_tokens=budgets,
                                 temperature=1.0, seed=seed)
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(schemas))]
    out = dx.generate(lm, prompts, **{**given, **WAYS[way](lm)})
    assert out.text is not None
    for i, (schema, text) in enumerate(zip(schemas, out.text, strict=True)):
        assert out.status[i] == dx.Status.EOS, (way, schema, budgets[i], out.status[i], text)
        assert least[i] <= out.lengths[i] <= budgets[i], (way, schema, budgets[i], text)
        valid(schema, text.encode())
    if way in ("speculative", "forced", "draft model"):
        assert out.tokens.tolist() == dx.generate(lm, prompts, **given).tokens.tolist()


def schema(i: int) -> Any:
    return simple(random.Random(i))


@pytest.mark.parametrize("way", often(["blocks"], WAYS))
def test_texts_are_valid_at_every_budget(lm: LM, way: str) -> None:
    """From the shortest possible on, for a few schemas."""
    few = [schema(i) for i in (1, 3, 6, 19)]
    whole(lm, way, [s for s in few for _ in range(4)], [*range(4)] * len(few))


@pytest.mark.full
@pytest.mark.parametrize("first", range(0, 1000, 40))
@pytest.mark.parametrize("way", WAYS)
def test_texts_of_a_thousand_schemas_are_valid(lm: LM, way: str, first: int) -> None:
    """Each one cut at every budget from the shortest possible on, to seven tokens more, and at some larger ones."""
    rows = 8 if way in CANVAS else 40           # a canvas goes through the whole automaton of a batch
    for begin in range(first, first + 40, rows):
        some = range(begin, begin + rows)
        whole(lm, way, [schema(i) for i in some for _ in BUDGETS], [more for _ in some for more in BUDGETS], seed=begin)


@pytest.mark.full
@pytest.mark.skipif("JSON_SCHEMA_TEST_SUITE" not in os.environ, reason="JSON_SCHEMA_TEST_SUITE is not set")
@pytest.mark.parametrize("way", WAYS)
def test_texts_of_the_test_suites_schemas_are_valid(lm: LM, way: str) -> None:
    from schema_suite import read as suite

    found = suite(Path(os.environ["JSON_SCHEMA_TEST_SUITE"]))
    assert found.taken and not found.wrong
    schemas = [case["schema"] for case in found.taken.values()]
    rows = 8 if way in CANVAS else 32
    for begin in range(0, len(schemas), rows):
        some = schemas[begin:begin + rows]
        whole(lm, way, [schema for schema in some for _ in BUDGETS], BUDGETS * len(some), seed=begin)
