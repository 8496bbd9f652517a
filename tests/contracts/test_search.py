"""The contract of searches: what every entry of the registry does, on a small model with words for tokens."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

import decodax as dx
from decodax import search
from decodax.common.registry import SEARCHES
from decodax.io.load import LM
from decodax.models.diffusion import Diffusion
from tests.laws.cases import MASK
from tests.laws.cases import lm as worded
from tests.matrix import often

PROMPTS = ["abcd", "h", "ga"]
NEW = 9


def reward(prompt: Any, texts: Any) -> list[float]:
    return [(3 * text.count("a") + 2 * text.count("d") + len(prompt)) % 8 / 8 for text in texts]


def act(prompt: Any, text: str) -> str:
    return "ha"


OPTIONS: dict[str, dict[str, Any]] = {
    "step-beams": dict(reward=reward, n=4, width=2), "a-star": dict(reward=reward, n=6, branch=2, expansions=6),
    "apar": dict(fork=5, child=6, threads=6), "dts": dict(reward=reward, n=2, simulations=6),
    "dts-star": dict(reward=reward, n=2, simulations=6), "with-tools": dict(act=act, n=2, rounds=2),
    "trimr": dict(redundant=lambda prompt, texts: True, guidance="fa", n=2),
    "particle-filter": dict(reward=reward, n=3), "smc": dict(potential=reward, n=3),
    "smc-steering": dict(potential=reward, n=2, factor=2), "phi-decoding": dict(beams=2, samples=2, steps=3, first=1),
    "corag": dict(retrieve=act, n=2, rounds=2, nothing="dh"), "treepo": dict(n=4, first=(2, 2), depth=3)}
CANVASES = ("dts", "dts-star")
FED = ("with-tools", "trimr", "corag", "apar")
"""Texts of these are not of the length that was asked for alone: something is put in, or threads are put together."""


def model(name: str) -> LM:
    lm = worded("llama")
    return dataclasses.replace(lm, diffusion=Diffusion(MASK)) if name in CANVASES else lm


def explored(name: str, rows: tuple[int, ...] = (0, 1, 2), **more: Any) -> search.Explored:
    steps = {} if name in CANVASES else dict(step_tokens=3)
    lm = model(name)
    return search.explore(lm, [PROMPTS[i] for i in rows], SEARCHES.make(name, lm, **OPTIONS[name]), request_ids=rows,
                          **{**steps, "max_new_tokens": NEW, "temperature": 0.8, "seed": 3, **more})


whole = functools.cache(explored)


def test_every_search_of_the_registry_has_options_here() -> None:
    assert OPTIONS.keys() == SEARCHES.keys()


OFTEN = ["step-beams", "smc"]


@pytest.mark.wide(but=("smc",))
@pytest.mark.parametrize("name", often(OFTEN, OPTIONS))
def test_a_search_ends_within_its_bounds_and_returns_the_row_that_it_chose(name: str) -> None:
    out = whole(name)
    assert len(out) == len(PROMPTS) and dx.Status.RUNNING not in out.result.status
    assert out.scores.shape[0] == len(out.index) == len(PROMPTS)
    for text, row, scores, i in zip(out.text, out.texts, out.scores, out.index, strict=True):
        assert text == row[i] and len(row) == len(scores) and np.isfinite(scores[i])
    assert name in FED or (out.result.lengths <= NEW).all()
    assert out.weights is None or np.allclose(out.weights.sum(1), 1)
    assert out.log_evidence is None or out.log_evidence.shape == (len(PROMPTS),)
    answers = out.answers()
    assert len(answers) == len(PROMPTS) and answers.text == out.text


@pytest.mark.wide
@pytest.mark.parametrize("name", often(OFTEN, OPTIONS))
def test_a_search_for_a_prompt_does_not_depend_on_the_other_prompts(name: str) -> None:
    back, alone = explored(name, (2, 1, 0)), explored(name, (1,))
    assert back.texts == whole(name).texts[::-1] and back.text == whole(name).text[::-1]
    np.testing.assert_allclose(back.scores, whole(name).scores[::-1], rtol=1e-5)
    assert alone.texts == whole(name).texts[1:2] and alone.text == whole(name).text[1:2]


@pytest.mark.wide
@pytest.mark.parametrize("name", often(OFTEN, [name for name in OPTIONS if name not in CANVASES]))
def test_drafts_and_pages_change_no_text_of_a_search(name: str) -> None:
    for more in (dict(algorithm="prompt-lookup:length=3"), dict(cache="paged:pages=200,page=4")):
        assert explored(name, **more).texts == whole(name).texts


@pytest.mark.wide
@pytest.mark.parametrize("name", often(OFTEN, OPTIONS))
def test_a_search_that_is_repeated_traces_nothing(name: str) -> None:
    whole(name)
    explored(name, seed=4)      # another seed may move other numbers of rows, each of which has a program
    with jax.no_tracing(True):
        explored(name, seed=4)
