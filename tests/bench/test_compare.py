import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import decodax as dx
from decodax.algorithms.plain import Autoregressive
from decodax.bench import compare, tasks
from decodax.bench.comparison import Comparison
from decodax.cli import commands as cli
from decodax.cli import contenders
from decodax.common.registry import ALGORITHMS, Entry
from decodax.core.algorithm import Traits
from decodax.core.state import Status
from decodax.engine.result import Result, Statistics
from decodax.train.corpus import load_corpus


@pytest.fixture(scope="module")
def pycode() -> dx.LM:
    return dx.load("pycode")


# the prompts

@pytest.mark.wide
def test_the_held_out_files_are_those_of_the_training_of_pycode() -> None:
    assert tasks.held_out_files() == [(d.path, d.text) for d in load_corpus()[1]]


def test_prompts_are_the_same_at_every_call_and_more_begin_with_fewer(pycode: dx.LM) -> None:
    few, many = (tasks.completion(pycode, n, 64, 0) for n in (4, 32))
    assert many[:4] == few
    assert len({tuple(row) for row in many}) == 32
    assert all(tasks.SHORTEST <= len(row) <= tasks.LONGEST for row in many)
    assert tasks.completion(pycode, 4, 64, 1) != few


def test_functions_come_from_each_file_in_turn() -> None:
    files = [("a.py", "def one():\n    pass\n\nclass C:\n    def two(self):\n        return 2\n"),
             ("b.py", "async def three():\n    pass\n"), ("broken.py", "def (")]
    found = tasks.functions(files, 0)
    assert set(found) == {"def one():\n    pass", "def two(self):\n    return 2", "async def three():\n    pass"}
    assert "async def three():\n    pass" in found[:2]


def test_a_task_that_does_not_fit_the_model_says_what_does(pycode: dx.LM) -> None:
    with pytest.raises(ValueError, match="new_tokens: got 300, takes at most 224"):
        tasks.copy_edit(pycode, 1, 300, 0)
    with pytest.raises(ValueError, match="prompts: got 10000, the held-out files"):
        tasks.completion(pycode, 10000, 64, 0)
    with pytest.raises(ValueError, match="has no tokenizer"):
        tasks.completion(dataclasses.replace(pycode, tokenizer=None), 1, 64, 0)


@pytest.mark.full
def test_a_copy_edit_is_copied_and_prompt_lookup_drafts_it(pycode: dx.LM) -> None:
    lookup = dx.Speculative(dx.drafts.PromptLookup(length=5))
    found = compare.compare(pycode, {"lookup": lookup}, tasks=["copy-edit"], batch=[2], prompts=2, new_tokens=32,
                            repeats=1)
    plain, row = found.rows
    assert plain.copied is not None and plain.copied > 0.9
    assert row.equal == 1 and row.copied == plain.copied
    assert row.mean_accepted_length is not None and row.mean_accepted_length > 3
    assert row.tokens == plain.tokens == 2 * 32
    assert plain.forwards == 32 and row.forwards is not None and row.forwards < 16


# the comparison, on results made up here

@dataclasses.dataclass(frozen=True)
class Fake:
    """Accepts as many drafts in each of 4 rounds of a row, takes these seconds, adds `off` to the last token."""

    seconds: tuple[float, ...]
    accepted: int = 1
    guarantee: str = "seed-exact"
    off: int = 0

    @property
    def traits(self) -> Traits:
        return Traits(guarantee=self.guarantee)        # type: ignore[arg-type]


TOY = tasks.Task("toy", "", lambda lm, count, new, seed: [[1, 2, 3]] * count, {})
LM: Any = dataclasses.make_dataclass("LM", ["name", "params"])("fake", ())


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was run, in order; plain decoding takes a second for 8 tokens a row."""
    made: list[Any] = []

    def generate(lm: Any, prompts: list[list[int]], *, algorithm: Any, request_ids: range, **rest: Any) -> Result:
        fake = Fake((1.0,) * 99, accepted=0) if isinstance(algorithm, Autoregressive) else algorithm
        if fake == "broken":
            raise RuntimeError("no good")
        if fake == "interrupt" and made.count("interrupt"):
            raise KeyboardInterrupt
        made.append("plain" if isinstance(algorithm, Autoregressive) else algorithm)
        if fake == "interrupt":
            fake = Fake((1.0,))
        B = len(prompts)
        tokens = np.tile(np.arange(8, dtype=np.int32), (B, 1))
        tokens[:, -1] += fake.off
        row = lambda n: np.full(B, n)
        histogram = np.zeros((B, 2 + fake.accepted), int)
        histogram[:, 1 + fake.accepted] = 4
        stats = Statistics(forwards=4, prefill_forwards=1, rounds=row(4), tokens=row(8), drafted=row(4),
                           accepted=row(4 * fake.accepted), histogram=histogram,
                           seconds=fake.seconds[made.count(algorithm) - 1], prefill_seconds=0.0)
        return Result(tokens, row(8), [Status.LENGTH] * B, None, None, stats)

    monkeypatch.setattr(compare, "generate", generate)
    return made


def run(algorithms: dict[str, Any], **options: Any) -> Comparison:
    return compare.compare(LM, algorithms, **{"tasks": [TOY], "batch": [2], "prompts": 2, "repeats": 3, **options})


def test_figures_follow_their_definitions(calls: list[Any]) -> None:
    plain, row = run({"a": Fake((9.0, 0.5, 0.25, 1.0))}).rows
    assert (row.task, row.batch, row.prompts, row.tokens, row.forwards) == ("toy", 2, 2, 16, 4)
    assert row.seconds == (0.5, 0.25, 1.0)                        # the first run does not count
    assert (row.mean_accepted_length, row.tokens_per_forward) == (2.0, 2.0)
    assert (row.speedup, row.spread, row.tokens_per_second) == (2.0, (1.0, 4.0), 32.0)
    assert (row.overhead, row.equal) == (0.0, 1.0)                # 2 / 2 - 1
    assert (row.accepted_by_depth, plain.accepted_by_depth) == ((1.0,), ())
    assert (plain.speedup, plain.overhead, plain.mean_accepted_length) == (1.0, 0.0, 1.0)


def test_methods_run_in_turn_and_each_repeat_begins_with_another(
        calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "crowded", lambda share: False)      # whatever the tests before have compiled
    told: list[tuple[int, int, str]] = []
    a, b = Fake((1.0,) * 9), Fake((2.0,) * 9)
    run({"a": a, "b": b}, repeats=2, report=lambda *what: told.append(what))
    assert calls == ["plain", a, b, a, b, "plain", b, "plain", a]
    assert [done for done, *_ in told] == [0, *range(10)]
    assert {total for _, total, _ in told} == {9}
    assert told[1][2] == "toy, batch 2: plain (warm-up)"


def test_without_room_for_all_programs_groups_run_beside_plain_decoding(
        calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "crowded", lambda share: True)
    monkeypatch.setattr(compare, "drop_programs", lambda share: calls.append("room"))
    told: list[tuple[int, int, str]] = []
    a, b = Fake((1.0,) * 9), Fake((2.0,) * 9)
    rows = run({"a": a, "b": b}, repeats=2, report=lambda *what: told.append(what)).rows
    assert calls == ["plain", a, a, "plain", "plain", a, "room", "plain", b, b, "plain", "plain", b, "room"]
    assert [row.seconds for row in rows] == [(1.0,) * 4, (1.0,) * 2, (2.0,) * 2]
    assert [row.speedup for row in rows] == [1.0, 1.0, 0.5] and told[-1][0] == 9


def test_prompts_come_in_whole_batches(calls: list[Any]) -> None:
    rows = run({"a": Fake((1.0,) * 99)}, batch=[1, 3, 8], prompts=5, repeats=1).rows
    assert [(row.batch, row.prompts) for row in rows if row.system == "a"] == [(1, 5), (3, 3), (8, 8)]


def test_a_function_is_given_the_batch_size(calls: list[Any]) -> None:
    found = run({"a": lambda batch: Fake((1.0,) * 9, accepted=batch)}, batch=[1, 2], prompts=1)
    assert [row.mean_accepted_length for row in found.rows if row.system == "a"] == [2, 3]


def test_only_seed_exact_methods_must_equal_plain_decoding(calls: list[Any]) -> None:
    found = run({"wrong": Fake((1.0,) * 9, off=1), "free": Fake((1.0,) * 9, off=1, guarantee="approximate")})
    assert [row.equal for row in found.rows] == [None, 7 / 8, None]
    assert [row.system for row in found.unequal] == ["wrong"]
    assert [row.cells()[-1] for row in found.rows] == ["-", "87.5%", "-"]


def test_a_method_that_fails_says_so_and_the_others_go_on(calls: list[Any]) -> None:
    found = run({"bad": "broken", "a": Fake((1.0,) * 9)})
    assert [row.error for row in found.rows] == [None, "RuntimeError: no good", None]
    assert found.rows[2].speedup == 1.0
    assert "| bad | failed |" in found.markdown()


def test_an_interrupt_keeps_what_is_there(calls: list[Any]) -> None:
    found = run({"a": Fake((0.5,) * 9), "b": "interrupt"}, repeats=5, batch=[2, 4])
    assert found.interrupted
    assert [(row.batch, row.system) for row in found.rows] == [(2, "plain"), (2, "a"), (2, "b")]
    assert [len(row.seconds) for row in found.rows] == [0, 1, 0]
    assert found.rows[1].tokens_per_second == 32 and found.rows[1].speedup is None
    assert "| a | 4 | 2.00 | 2.00 |  | 32 |  | 100% |" in found.markdown()


def test_a_comparison_goes_on_from_what_was_measured(calls: list[Any], tmp_path: Path) -> None:
    a, kept = Fake((1.0,) * 99), []
    first = run({"a": a}, batch=[1, 2], prompts=2, keep=kept.append)
    assert [sorted({row.batch for row in found.rows}) for found in kept] == [[1], [1, 2]]
    assert [found.interrupted for found in kept] == [True, False] and kept[1] == first
    (tmp_path / "one.json").write_text(json.dumps(kept[0].json()))
    earlier = Comparison.read(tmp_path / "one.json")
    assert earlier == kept[0]
    calls.clear()
    whole = run({"a": a}, batch=[1, 2], prompts=2, earlier=earlier)
    assert len(calls) == 8 and whole.rows[:2] == first.rows[:2]      # 4 runs of each, of both prompts at once
    calls.clear()
    more = run({"a": a, "b": a}, batch=[1], prompts=2, earlier=kept[0])
    assert len(calls) == 24 and [row.system for row in more.rows] == ["plain", "a", "b"]
    later = run({"a": a}, batch=[2], prompts=2)
    partly = run({"a": a}, batch=[1, 2, 4], prompts=2, earlier=later, keep=kept.append)
    assert [sorted({row.batch for row in found.rows}) for found in kept[2:]] == [[1, 2], [1, 2, 4]]   # nothing is lost
    assert partly.rows[2:4] == later.rows and not partly.interrupted
    with pytest.raises(ValueError, match="earlier: got a comparison with 2 prompts on toy at batch 1, this one has 3"):
        run({"a": a}, batch=[1, 2], prompts=3, earlier=first)
    with pytest.raises(ValueError, match="earlier: got a comparison with repeats 3, this one has 4"):
        run({"a": a}, batch=[1, 2], prompts=2, repeats=4, earlier=first)
    with pytest.raises(ValueError, match="earlier: got a comparison with 'plain' on toy at batch 2, which"):
        run({"a": a}, batch=[1], prompts=2, earlier=first)
    with pytest.raises(ValueError, match="earlier: got a comparison with 'a' on toy at batch 1, which"):
        run({"b": a}, batch=[1, 2], prompts=2, earlier=first)
    (tmp_path / "one.json").write_text('{"rows": [{"speed": 1}]}')
    with pytest.raises(ValueError, match=r"one.json: not a comparison \(.*speed"):
        Comparison.read(tmp_path / "one.json")


@pytest.mark.parametrize(("wrong", "message"), [
    ({"batch": [2, 0]}, "batch: got 0"), ({"repeats": 0}, "repeats: got 0"), ({"prompts": 0}, "prompts: got 0"),
    ({"new_tokens": -1}, "new_tokens: got -1"), ({"tasks": ["poem"]}, "tasks: got 'poem', takes copy-edit"),
    ({"algorithms": {"plain": None}}, "algorithms: got one named 'plain'")])
def test_bad_arguments_are_refused_by_name(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(**{"algorithms": {}, **wrong})


def test_the_plot_has_both_panels_and_a_mark_for_each_cell(calls: list[Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = run({"a": Fake((0.5,) * 99), "bad": "broken"}, batch=[1, 2])
    found.plot(tmp_path / "out.svg")
    assert (tmp_path / "out.svg").stat().st_size > 5_000
    run({}).plot(tmp_path / "nothing.png")


# the command line

@pytest.mark.parametrize(("args", "message"), [
    (["list", "--family", "trees"], "--family: got 'trees', takes one of"),
    (["compare", "promt-lookup"], "prompt-lookup"),
    (["compare", "prompt-lookup:lenth=3"], "'prompt-lookup' takes no option 'lenth'; takes length="),
    (["compare", "prompt-lookup:3"], "takes NAME:OPTION=VALUE"),
    (["compare", "prompt-lookup:length=0"], "length: got 0"),
    (["compare", "prompt-lookup", "--batch", "0"], "batch: got 0"),
    (["compare", "automatic", "--draft", "a", "pycode-eagle-3", "b"], "draft: got the models a and b, takes one"),
    (["compare", "prompt-lookup", "--json", "absent/out.json"], "there is no such directory"),
    (["compare", "prompt-lookup", "--resume"], "--resume takes --json"),
])
def test_wrong_usage_is_code_2(capsys: pytest.CaptureFixture[str], args: list[str], message: str) -> None:
    assert cli.main(args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert "Traceback" not in err


@pytest.mark.full
def test_compare_prints_a_table_and_writes_files(tiny_model: Path, tmp_path: Path,
                                                 capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    args = ["compare", "prompt-lookup:length=3", "--model", str(tiny_model), "--task", "sampled", "--batch", "2",
            "--prompts", "2", "--new-tokens", "8", "--repeats", "1", "--json", str(tmp_path / "out.json"), "--plot",
            str(tmp_path / "out.png"), "--markdown"]
    assert cli.main(args) == 0
    out = capsys.readouterr().out
    assert out.startswith("    decodax compare prompt-lookup:length=3 --model")
    assert "| prompt-lookup:length=3 | " in out
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["command"] == ["decodax", *args]
    assert [row["system"] for row in report["rows"]] == ["plain", "prompt-lookup:length=3"]
    assert report["rows"][1]["equal"] == 1
    assert cli.main([*args, "--resume"]) == 0
    assert json.loads((tmp_path / "out.json").read_text())["rows"] == report["rows"]
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_measurements_are_printed_after_an_interrupt(
        calls: list[Any], tiny_model: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    failed = run({"bad": "broken", "off": Fake((1.0,) * 9, off=1)})
    found = run({"a": Fake((0.5,) * 9), "b": "interrupt"})
    monkeypatch.setattr(compare, "compare", lambda *_, **__: found)
    assert cli.main(["compare", "prompt-lookup", "--model", str(tiny_model)]) == cli.INTERRUPTED
    out, err = capsys.readouterr()
    assert "toy, batch 2: 2 prompts" in out
    assert "interrupted" in err
    monkeypatch.setattr(compare, "compare", lambda *_, **__: failed)
    assert cli.main(["compare", "prompt-lookup", "--model", str(tiny_model)]) == cli.FAILURE
    err = capsys.readouterr().err
    assert "bad failed on toy, batch 2: RuntimeError: no good" in err
    assert "off is seed-exact but differs from plain decoding on toy, batch 2" in err


def test_a_system_that_depends_on_the_batch_size_is_made_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(batch: int = 1, length: int = 2) -> Any:
        return batch, length

    entry = Entry("algorithms", "sized", make, "", "", "", guarantee="seed-exact")
    monkeypatch.setitem(ALGORITHMS, "sized", entry)
    contender: Any = contenders.contender_of("sized", {"length": 3}, LM, None)
    assert contender(8) == (8, 3)
    assert contenders.contender_of("sized", {"batch": 4}, LM, None) == (4, 2)
    assert "autoregressive" not in contenders.systems_of(["all"], "pycode")


def test_each_method_gets_the_drafter_that_was_trained_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    takes = {"medusa": "a trained drafter", "plain-drafts": "a draft model", "either": "a model"}
    for name, needs in takes.items():
        make = (lambda lm, draft: (lm, draft)) if name != "either" else (lambda lm, draft=None: (lm, draft))
        entry: Any = Entry("algorithms", name, make, "", "", "", needs=needs, guarantee="seed-exact")  # type: ignore[arg-type]
        monkeypatch.setitem(ALGORITHMS, name, entry)
    drafters = {"hydra": "H", "medusa": "M"}
    made = {name: contenders.contender_of(name, {}, LM, "small", drafters) for name in takes}       # type: ignore[arg-type]
    assert made == {"medusa": (LM, "M"), "plain-drafts": (LM, "small"), "either": (LM, "H")}


def test_methods_that_take_drafters_of_several_trainings_find_them_and_it_is_said_which() -> None:
    one = lambda name: SimpleNamespace(name=name)
    drafters: Any = {"hass": one("runs/h"), "mtp": one("runs/m"), "medusa": one("runs/x")}
    found = {name: contenders.draft_among(name, None, drafters).name for name in ("eagle", "eagle-2", "mtp", "fastmtp")}
    assert found == {"eagle": "runs/h", "eagle-2": "runs/h", "mtp": "runs/m", "fastmtp": "runs/m"}
    assert {"eagle", "eagle-2", "mtp"} <= contenders.systems_of(["all"], "none", drafters).keys()
    chosen = {name: (name, None) for name in ("eagle", "eagle-2", "automatic", "prompt-lookup")}
    assert contenders.drafts_named(chosen, None, {"medusa": one("x"), "hass": one("h")}) == (
        "h for eagle and eagle-2, x for automatic")
    assert contenders.drafts_named({"eagle": ("eagle", None)}, None, drafters) == "runs/h"
    chosen = {name: (name, None) for name in ("eagle-3", "seed-exact")}
    assert contenders.drafts_named(chosen, one("small"), {}, "pycode") == (
        "pycode-eagle-3 for eagle-3, small for seed-exact")
    assert contenders.drafts_named(chosen, one("small"), {}, "other") == "small"
