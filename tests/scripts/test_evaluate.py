"""The evaluation program: grids, figures, accuracy under parallelism, and a whole run on an untrained model."""

from __future__ import annotations

import doctest
import json
import math
import re
from pathlib import Path

import diffusion_export
import evaluate
import jax
import problems
import pytest
from evaluate import Row

import decodax as dx
from decodax.models import Diffusion, Transformer, llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained diffusion model of the problems."""
    path = tmp_path_factory.mktemp("model")
    net = Transformer(llama(vocab=47, width=16, layers=1, heads=2, kv_heads=1, mlp=16, context=64, tied=True))
    facts = {"preset": "tiny", "stage": None, "init": None, "data": "", "steps": 0, "tokens": 0, "held_out_each": 0,
             "held_out": dict.fromkeys(problems.TASKS, 0.0), "parameters": 0, "hours": 0, "hardware": "", "command": "",
             "optimizer": ""}
    # wide enough that what is unmasked first decides what comes next
    params = jax.tree.map(lambda x: x * 8 if x.ndim > 1 else x, net.init_params(jax.random.key(0)))
    diffusion_export.export(path, net, Diffusion(46), params, problems.tokenizer(), facts)
    return path


def row(curve: str, task: str, speed: float, right: float) -> Row:
    return Row(curve, curve, task, 10, right, 1.0, speed, 1 / speed, 1.0, 1.0)


def test_examples_in_the_docstrings_hold():
    assert doctest.testmod(evaluate).failed == 0


def test_accuracy_under_parallelism_is_the_weighted_area_of_d3llm():
    curve = [(4.0, 0.80), (1.0, 0.90), (2.0, 0.88), (8.0, 0.86)]      # 0.80 is more than 5 points below the first
    y, r = [90.0, 88.0, 86.0], [1.0, 2.0, 8.0]
    w = [v * min(1.0, math.exp(-3 * (1 - v / 95))) for v in y]
    expected = r[0] * y[0] + (r[1] - r[0]) * (w[0] + w[1]) / 2 + (r[2] - r[1]) * (w[1] + w[2]) / 2
    assert evaluate.aup(curve, best=0.95) == pytest.approx(expected)
    assert evaluate.aup([], 0.9) == evaluate.aup([(1.0, 0.0)], 0.0) == 0.0


def test_scores_compare_with_the_best_of_all_systems_on_a_task():
    rows = [row("a", "copy", 1, 0.9), row("a", "copy", 2, 0.9), row("b", "copy", 1, 1.0), row("b", "sort", 3, 0.5)]
    found = evaluate.scores([*rows, Row("c", "c", "copy", 10, error="no")])
    weight = math.exp(-3 * 0.1)
    assert found["a"]["copy"] == pytest.approx(90 + 90 * weight)
    assert found["b"] == pytest.approx({"copy": 100, "sort": 150}) and "c" not in found


def test_a_list_of_values_is_a_grid(model):
    lm = dx.load(model)
    grid = evaluate.points(["llada:steps=[16,2],block=[16,8],order='random'", "dream"], lm)
    assert [p.name for p in grid] == [f"llada:steps={s},block={b},order='random'" for s in (16, 2) for b in (16, 8)] + [
        "dream"]
    assert len({p.curve for p in grid}) == 2 and grid[1].build().windows.block == 8


@pytest.mark.parametrize(("given", "message"), [
    ("lladda", "unknown name 'lladda'"), ("llada:pace=3", "takes no option 'pace'"),
    ("llada:3", "takes NAME:OPTION=VALUE"), ("llada:steps=[0,1]", "steps: got 0"), ("apd", "draft="),
])
def test_wrong_systems_are_named_before_anything_runs(model, given, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        evaluate.points([given], dx.load(model))


def test_a_run_counts_right_answers_and_forwards(model, monkeypatch):
    """With a quota of a quarter of the canvas a row takes 4 forwards, less where it ends early."""
    monkeypatch.setattr(problems.Problem, "correct", lambda self, text: self.prompt < "copy H")
    lm, told = dx.load(model), list[str]()
    grid = evaluate.points(["llada:block=16,steps=4"], lm)
    (got,) = evaluate.run(lm, grid, ["copy"], problems=6, batch=4, report=lambda done, total, what: told.append(what))
    expected = [p.prompt < "copy H" for p in problems.problems("copy", 6)]
    assert got.accuracy == sum(expected) / 6 and got.problems == 6 and 0 < got.forwards <= 4
    assert 0 < got.tokens_per_forward <= 16 / got.forwards and told == ["llada:block=16,steps=4 copy"]


@pytest.mark.matrix
def test_the_program_prints_tables_and_writes_figures_and_curves(model, tmp_path, capsys):
    out, picture = tmp_path / "out.json", tmp_path / "curves.png"
    args = ["llada:block=16,steps=[4,1]", "-m", str(model), "--task", "add", "shuffle", "--problems", "4"]
    assert evaluate.main([*args, "--json", str(out), "--plot", str(picture)]) == 0
    shown = capsys.readouterr().out
    facts = json.loads(out.read_text())
    assert len(facts["rows"]) == 4 and set(facts["aup"]) == {"llada:block=16,steps=[4,1]"}
    assert all(f"{r['accuracy']:.1%}" in shown and r["system"] in shown for r in facts["rows"])
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 5000
    assert evaluate.main([*args[:3], "--task", "nope"]) == 2
    assert "--task: got nope" in capsys.readouterr().err


@pytest.mark.matrix
def test_outputs_are_compared_with_those_of_the_first_point(model):
    lm = dx.load(model)
    grid = evaluate.points(["llada:block=16", "freedave:block=16,branches=4", "llada:block=16,steps=1"], lm)
    plain, lossless, hasty = evaluate.run(lm, grid, ["shuffle"], problems=4, batch=4, repeats=1)
    assert plain.same == lossless.same == 1 > hasty.same
    assert lossless.forwards <= plain.forwards


def test_a_system_that_fails_has_its_error_in_its_row(model):
    lm = dx.load(model)

    def broken() -> None:
        raise ValueError("block: got 7")

    (got,) = evaluate.run(lm, [evaluate.Point("x", "x", broken)], ["copy"], problems=2)
    assert got.error == "ValueError: block: got 7" and got.cells()[2] == "failed"
    assert len(got.cells()) == len(evaluate.COLUMNS)
    assert "failed" in evaluate.markdown([got, row("a", "copy", 1, 0.5)], "here")
