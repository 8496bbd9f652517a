"""The evaluation program: grids, figures, and a whole run on an untrained model."""

import json
import re
from pathlib import Path

import evaluate
import jax
import pytest

import decodax as dx
from decodax.bench import grid as systems
from decodax.bench.cache_accuracy import needles, run
from decodax.bench.problems import prose, recall
from decodax.bench.problems import puzzles as problems
from decodax.models import Transformer, llama
from decodax.train.export import export_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained diffusion model of the problems."""
    path = tmp_path_factory.mktemp("model")
    net = Transformer(llama(vocab=47, width=16, layers=1, heads=2, kv_heads=1, mlp=16, context=64, tied=True))
    # wide enough that the token that is unmasked first decides the next one
    params = jax.tree.map(lambda x: x * 8 if x.ndim > 1 else x, net.init_params(jax.random.key(0)))
    special = dict(eos_token=problems.END, pad_token=problems.END, mask_token=problems.MASK)
    export_model(path, net, params, problems.tokenizer(), special=special, card="", facts={},
                 config={"diffusion": {"shift": False, "attention": "full", "block": None}})
    return path


def test_a_list_of_values_is_a_grid(model):
    lm = dx.load(model)
    grid = systems.points(["llada:steps=[16,2],block_length=[16,8],remasking='random'", "dream"], lm)
    assert [p.name for p in grid] == [
        *[f"llada:steps={s},block_length={b},remasking='random'" for s in (16, 2) for b in (16, 8)], "dream"]
    assert len({p.curve for p in grid}) == 2 and grid[1].build().windows.block == 8


@pytest.mark.parametrize(("given", "message"), [
    ("lladda", "unknown name 'lladda'"), ("llada:pace=3", "takes no option 'pace'"),
    ("llada:3", "takes NAME:OPTION=VALUE"), ("llada:steps=[0,1]", "steps: got 0"), ("apd", "draft="),
])
def test_wrong_systems_are_named_before_anything_runs(model, given, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        systems.points([given], dx.load(model))


def test_a_run_counts_right_answers_and_forwards(model, monkeypatch):
    """With a quota of a quarter of the canvas a row takes 4 forwards, less where it ends early."""
    monkeypatch.setattr(problems.Problem, "correct", lambda self, text: self.prompt < "copy H")
    lm, told = dx.load(model), list[str]()
    grid = systems.points(["llada:block_length=16,steps=4"], lm)
    (got,) = systems.run(lm, grid, ["copy"], problems=6, batch=4, report=lambda done, total, what: told.append(what))
    expected = [p.prompt < "copy H" for p in problems.problems("copy", 6)]
    assert got.accuracy == sum(expected) / 6 and got.problems == 6 and 0 < got.forwards <= 4
    assert 0 < got.tokens_per_forward <= 16 / got.forwards and told == ["llada:block_length=16,steps=4 copy"]


@pytest.mark.full
def test_the_program_prints_tables_and_writes_figures_and_curves(model, tmp_path, capsys):
    out, picture = tmp_path / "out.json", tmp_path / "curves.png"
    args = ["systems", "llada:block_length=16,steps=[4,1]", "--model", str(model), "--task", "add", "shuffle",
            "--problems", "4"]
    assert evaluate.main([*args, "--json", str(out), "--plot", str(picture)]) == 0
    shown = capsys.readouterr().out
    facts = json.loads(out.read_text())
    assert len(facts["rows"]) == 4 and {r["curve"] for r in facts["rows"]} == {"llada:block_length=16,steps=[4,1]"}
    assert all(f"{r['accuracy']:.1%}" in shown and r["system"] in shown for r in facts["rows"])
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 5000
    assert evaluate.main([*args[:4], "--task", "nope"]) == 2
    assert "--task: got nope" in capsys.readouterr().err


@pytest.mark.full
def test_outputs_are_compared_with_those_of_the_first_point(model):
    lm = dx.load(model)
    grid = systems.points(["llada:block_length=16", "freedave:block_length=16,draft_steps=4",
                           "llada:block_length=16,steps=1"], lm)
    plain, lossless, hasty = systems.run(lm, grid, ["shuffle"], problems=4, batch=4, repeats=1)
    assert plain.same == lossless.same == 1 > hasty.same
    assert lossless.forwards <= plain.forwards


def test_a_system_that_fails_has_its_error_in_its_row(model):
    lm = dx.load(model)

    def broken() -> None:
        raise ValueError("block: got 7")

    (got,) = systems.run(lm, [systems.Point("x", "x", broken)], ["copy"], problems=2)
    assert got.error == "ValueError: block: got 7" and got.cells()[2] == "failed"
    assert len(got.cells()) == len(systems.COLUMNS)


def test_questions_in_english_measure_caches_of_any_model():
    lm = dx.load("pycode-draft")
    for probe, problem in zip(needles(lm, "prose", 64, 4), prose.problems(4, 64, 1000), strict=True):
        assert lm.tokenizer.decode(probe.tokens[probe.start:probe.stop]).strip() == problem.answer
        assert lm.tokenizer.decode(probe.tokens[:probe.start]) == problem.context[:problem.context.index(
            f" {problem.answer}")]
    rows = run(lm, ["snapkv"], removed=(0.5,), modes=("aware",), tasks=["prose"], problems=1, length=64, seeds=(0,))
    assert [(row.policy, row.task) for row in rows] == [("dense", "prose"), ("snapkv", "prose")]
    assert rows[0].kept == 1 and 0.2 < rows[1].kept < 0.6
    with pytest.raises(ValueError, match="tasks: got prose, copy; takes"):
        run(lm, [], tasks=["prose", "copy"])


def test_needles_of_the_shipped_model_lie_where_their_words_do():
    for probe, problem in zip(needles(dx.load("recall"), "needle", 64, 4), recall.problems("needle", 4, 64, 1000),
                              strict=True):
        start = problem.context.split().index(problem.question.split()[1]) + 1
        assert list(probe.tokens) == [recall.ID[word] for word in problem.prompt.split()]
        assert (probe.start, probe.stop) == (start, start + 4)
