"""Questions on long texts: what they are, a model trained on them, and what cache policies lose."""

import doctest
import json
from pathlib import Path

import evaluate
import numpy as np
import pytest
from rich.console import Console

import decodax as dx
from decodax.bench import cache_accuracy as caches
from decodax.bench.cache_accuracy import CacheFigures
from decodax.bench.problems import recall
from recipes import recall as recipe
from recipes.options import Options
from recipes.run import train


def test_examples_of_the_module_run() -> None:
    assert doctest.testmod(recall).failed == 0


@pytest.mark.parametrize("task", recall.TASKS)
def test_an_answer_follows_from_its_text(task: str) -> None:
    """Read off the words by the rule that the task states."""
    for problem in recall.problems(task, 8, 200, seed=3):
        words, asked = problem.context.split(), problem.question.split()
        assert len(words) == 200 and problem.correct(problem.answer + " ") and not problem.correct("no")
        assert set(words) <= recall.ID.keys()
        facts: dict[str, list[list[str]]] = {}
        for at, word in enumerate(words):
            if word in recall.NAMES and words[at - 1] not in recall.NAMES and words[at + 1] != recall.PERIOD:
                close = recall.CLOSE if words[at + 1] == recall.OPEN else recall.PERIOD
                facts.setdefault(word, []).append(words[at + 1:words.index(close, at) + (close == recall.CLOSE)])
        aliases = {words[at]: words[at + 1] for at in range(len(words) - 2) if words[at + 2] == recall.PERIOD
                   and words[at] in recall.NAMES and words[at + 1] in recall.NAMES}
        name, path = asked[1], []
        while name in aliases:
            name = aliases[name]
            path.append(name)
        assert problem.answer.split() == path + [word for fact in facts[name] for word in fact]
        assert bool(path) == (task == "track")


def test_problems_and_batches_repeat_and_differ_by_seed() -> None:
    problems = [recall.problems("copy", 3, 100, seed) for seed in (1, 1, 2)]
    assert problems[0] == problems[1] != problems[2]
    for spans in (False, True):
        tokens, answers = recall.training_batch(2, 128, 0, 5, spans)
        again, _ = recall.training_batch(2, 128, 0, 5, spans)
        assert tokens.shape == answers.shape == (2, 129) and answers.any(1).all() and (tokens == again).all()
    with pytest.raises(ValueError, match=r"^length: got 12, takes at least 19 for copy"):
        recall.problems("copy", 1, 12)
    with pytest.raises(ValueError, match=r"^task: got 'sing', takes one of recall, needle"):
        recall.problems("sing", 1, 100)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model after two steps, as the program exports it."""
    path = tmp_path_factory.mktemp("recall")
    train(Options(recipe="recall", steps=2, longest=64, output=path, problems=1), console=Console(quiet=True))
    return path / "model"


@pytest.mark.full
def test_a_run_leaves_a_model_that_answers(model: Path) -> None:
    lm = dx.load(str(model))
    problem = recall.problems("recall", 1, 64)[0]
    out = dx.generate(lm, problem.prompt, max_new_tokens=8)
    assert lm.eos == [recall.ID[recall.END]] and out.text is not None
    assert lm.tokenizer is not None and lm.tokenizer.decode(lm.tokenizer.encode(problem.context)) == problem.context
    facts = json.loads((model / "training.json").read_text())
    assert facts["steps"] == 2 and facts["accuracy"].keys() == set(recall.TASKS)
    assert "--steps 2 --longest 64" in (model / "README.md").read_text()


def test_a_first_layer_looks_back() -> None:
    """Its heads attend to the token 1, 2, 3 and again 1 before, whatever the tokens are."""
    from decodax.models import Transformer
    from decodax.models.families import read_config

    model = Transformer(read_config(recipe.CONFIG))
    own = recipe.looking_back(model, {"layers": {"0": {"attn": {"q": {}, "k": {}}}}})["layers"]["0"]["attn"]
    d, turn = 32, 10_000.0 ** (-np.arange(16) * 2 / 32)
    rotate = lambda x, at: np.concatenate([x[:16] * np.cos(at * turn) - x[16:] * np.sin(at * turn),
                                           x[16:] * np.cos(at * turn) + x[:16] * np.sin(at * turn)])
    q, k = (np.asarray(own[name]["bias"]).reshape(-1, d) for name in "qk")
    for head, back in enumerate((1, 2, 3, 1)):
        scores = [rotate(q[head], 9) @ rotate(k[head // 2], at) / d ** 0.5 for at in range(10)]
        assert np.argmax(scores) == 9 - back and np.exp(np.sort(scores)[-2] - np.max(scores)) < 0.05


@pytest.mark.full
def test_policies_are_measured_beside_a_dense_cache(model: Path, tmp_path: Path,
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    plot, figures = tmp_path / "caches.png", tmp_path / "caches.json"
    words = ["caches", "knorm:skip_layers=()", "kivi:group_size=8,residual_length=8",
             "--model", str(model), "--length", "48",
             "--problems", "1", "--seeds", "0", "--removed", "0.5", "--task", "recall", "needle", "--markdown",
             "--plot", str(plot), "--json", str(figures)]
    assert evaluate.main(words) == 0
    printed = capsys.readouterr().out
    assert "| knorm:skip_layers=() |" in printed and "50% removed" in printed and plot.stat().st_size > 1000
    rows = [CacheFigures(**row) for row in json.loads(figures.read_text())["rows"]]
    assert {(row.policy, row.removed, row.mode) for row in rows} == {
        (*case, mode) for mode in caches.MODES
        for case in (("dense", None), ("knorm:skip_layers=()", 0.5), ("kivi:group_size=8,residual_length=8", None))}
    kept = {(row.policy, row.mode): row.kept for row in rows}
    assert kept["dense", "aware"] == 1 and 0.45 < kept["knorm:skip_layers=()", "aware"] < 0.6
    assert kept["kivi:group_size=8,residual_length=8", "agnostic"] < 0.5
    assert evaluate.main([*words[:2], "cur", *words[2:]]) == 0          # what is known is not measured again
    printed, measured = capsys.readouterr()
    assert "cur 50% removed aware" in measured and "dense" in measured and "knorm" not in measured
    assert evaluate.main([*words, "--problems", "2"]) == 2
    assert "holds figures of another setting" in capsys.readouterr().err
    assert evaluate.main(["caches", "snapvk", "--model", str(model)]) == 2
    assert evaluate.main(["caches", "--figures", str(figures), "--markdown"]) == 0
    assert capsys.readouterr().out.endswith(printed[printed.index("| policy |"):])


@pytest.mark.full
def test_drafts_on_smaller_caches_are_counted(model: Path) -> None:
    full, some = caches.run_drafts(dx.load(str(model)), ("full", "magicdec:budget=16"), problems=1, length=48)
    assert full.same == some.same == 1 and some.accepted <= full.accepted
    assert full.per_forward > 1


def test_the_best_have_most_right_answers() -> None:
    rows = [CacheFigures(name, 0.5, "aware", "recall", seed, right, 0.5) for name, right in
            (("a", 0.2), ("b", 0.9), ("c", 0.4), ("d", 0.6)) for seed in (0, 1)]
    assert caches.best(rows, "aware", 0.5) == ["b", "d", "c"]
    assert caches.means(rows)["b", 0.5, "aware"] == (0.9, 0.0, 0.5)


def test_policies_that_do_not_fit_a_size_are_left_out_or_an_error() -> None:
    lm = dx.load("recall")
    left_out: list[str] = []
    found = caches.sizes(lm, ["knorm", "token-butler", "clusterkv", "kvcrush"], (0.25, 0.8), 1024, left_out)
    assert [case[:2] for case in found] == [("dense", None), ("knorm", 0.25), ("knorm", 0.8), ("clusterkv", 0.25),
                                            ("clusterkv", 0.8), ("kvcrush", 0.25)]
    assert [line.partition(": ")[0] for line in left_out] == ["token-butler with 25% removed",
                                                              "token-butler with 80% removed",
                                                              "kvcrush with 80% removed"]
    with pytest.raises(ValueError, match=r"^butler: got none"):
        caches.sizes(lm, ["token-butler"], (0.5,), 1024, None)
