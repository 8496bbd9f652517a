"""Sums with steps: what they are, what trains a model of them, and what measures searches with it."""

import json
import random
from pathlib import Path

import evaluate
import pytest
from rich.console import Console

import decodax as dx
from decodax.bench.problems import sums
from decodax.bench.searches import METHODS, StepVerifier, last
from recipes.options import Options
from recipes.run import train


def test_problems_are_right_different_and_held_out() -> None:
    found = sums.problems(40, 6, seed=2)
    assert found == sums.problems(40, 6, seed=2) and len({p.prompt for p in found}) == 40
    for p in found:
        assert sums.held_out(p.prompt) and len(p.steps) == 5
        # Python works the row out from left to right once it stands in brackets
        value = int(p.prompt[:2])
        for i in range(2, len(p.prompt) - 2, 3):
            sign, other = p.prompt[i], int(p.prompt[i + 1:i + 3])
            value = {"+": value + other, "-": value - other, "*": value * other}[sign] % 100
        assert p.result == f"{value:02}" == last(p.answer)
        assert sums.right_steps(p, p.answer) == (6, 6)
        assert sums.right_steps(p, p.answer[:12]) == (1, 1)
        assert sums.right_steps(p, "x" + p.answer[1:]) == (0, 6)
    tokens, answers = sums.training_batch(8, 0, 3)
    again = sums.training_batch(8, 0, 3)
    assert (tokens == again[0]).all() and answers.any(1).all() and tokens.shape == (8, sums.LENGTH)
    longest = max((sums.draw(sums.LONGEST, random.Random(0)) for _ in range(3)), key=lambda p: len(p.prompt + p.answer))
    assert len(sums.encode(longest.prompt + longest.answer)) + 1 == sums.LENGTH


def test_a_verifier_errs_as_often_as_it_says() -> None:
    found = sums.problems(200, 4)
    judge = StepVerifier(found, 0.1)
    said = [judge(p.prompt, [p.answer])[0] for p in found]
    assert 5 < said.count(0.1) < 40 and said == [judge(p.prompt, [p.answer])[0] for p in found]
    assert StepVerifier(found, 0.0)(found[0].prompt, [found[0].answer, "00+00=01\n"]) == [0.9, 0.1]


@pytest.mark.full
def test_a_run_leaves_a_model_that_searches_run_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(Options(recipe="sums", steps=2, output=tmp_path, problems=2), console=Console(quiet=True))
    lm = dx.load(str(tmp_path / "model"))
    problem = sums.problems(1, 3)[0]
    assert lm.tokenizer is not None and lm.tokenizer.decode(lm.tokenizer.encode(problem.answer)) == problem.answer
    facts = json.loads((tmp_path / "model" / "training.json").read_text())
    assert facts["steps"] == 2 and "--steps 2" in (tmp_path / "model" / "README.md").read_text()
    picture, figures = tmp_path / "search.png", tmp_path / "search.json"
    assert evaluate.main(["search", "--model", str(tmp_path / "model"), "--rows", "1", "4", "--problems", "3",
                          "--numbers", "3", "--plot", str(picture), "--json", str(figures)]) == 0
    table = capsys.readouterr().out
    assert all(f"| {name} |" in table for name in METHODS)
    assert picture.stat().st_size > 1000 and len(json.loads(figures.read_text())) == 2 * len(METHODS) - 2


@pytest.mark.wide
def test_the_shipped_model_errs_now_and_then() -> None:
    lm, asked = dx.load("sums"), sums.problems(24, 4, seed=5)
    out = dx.generate(lm, [p.prompt for p in asked], max_new_tokens=40)
    assert out.text is not None
    right = sum(last(text) == p.result for text, p in zip(out.text, asked, strict=True))
    assert 6 <= right <= 23
