"""Choosing what to run: settings that are measured, systems by their logs, and idealized runtimes."""

import time
import types
from typing import Any

import numpy as np
import pytest

import decodax as dx
from decodax.bench.choose import Runtime, Selector, Workload, tune

pytestmark = pytest.mark.wide


CLOCK = [0.0]


def asleep(lm: Any, prompts: Any, *, batch_size: int, chunk: int, new: int) -> Any:
    """As fast as its options say, by a clock that nothing else moves."""
    if batch_size > 16:
        raise MemoryError("a batch of 32")
    CLOCK[0] += 0.002 * (abs(batch_size - 8) + 1) * chunk
    return types.SimpleNamespace(lengths=np.full(len(prompts), new))


def test_the_fastest_setting_comes_first_and_those_that_fail_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", lambda: CLOCK[0])
    lm: Any = None
    found = tune(lm, [1, 2], dict(batch_size=[4, 8, 16, 32], chunk=[1, 2]), run=asleep, new=5)
    assert found[0].options == dict(batch_size=8, chunk=1) and len(found[0].seconds) == 3
    assert [t.tokens_per_second for t in found] == sorted((t.tokens_per_second for t in found), reverse=True)
    assert [t.error for t in found[-2:]] == ["MemoryError: a batch of 32"] * 2
    with pytest.raises(ValueError, match="'chunk' is also given as an option of all settings"):
        tune(lm, [1], dict(chunk=[1]), run=asleep, chunk=2)
    with pytest.raises(ValueError, match="takes options with values"):
        tune(lm, [1], dict(chunk=[]), run=asleep)


def log(model: str, *runs: tuple[int, float, str, float | None]) -> dict[str, Any]:
    rows = []
    for batch, copied, system, speedup in runs:
        task = f"copies {copied}"
        rows += [dict(task=task, batch=batch, system="plain", speedup=1.0, copied=copied, repeated=0.1),
                 dict(task=task, batch=batch, system=system, speedup=speedup, copied=None, repeated=None)]
    return dict(model=model, device="cpu", rows=rows)


def test_a_system_is_chosen_by_what_it_did_on_workloads_like_this_one() -> None:
    selector = Selector.fit([
        log("m", (1, 0.9, "prompt-lookup", 3.0), (1, 0.1, "prompt-lookup", 1.1), (64, 0.9, "prompt-lookup", 0.6),
            (1, 0.1, "eagle", 2.0), (1, 0.9, "eagle", 2.1), (64, 0.1, "eagle", 0.8), (1, 0.5, "broken", None)),
        log("other", (1, 0.1, "prompt-lookup", 4.0))])
    assert selector.choose(Workload(1, 0.9, 0.1, "m", "cpu")) == "prompt-lookup"
    assert selector.choose(Workload(1, 0.15, 0.1, "m", "cpu")) == "eagle"
    assert selector.choose(Workload(128, 0.1, 0.1, "m", "cpu")) == "plain"
    assert selector.choose(Workload(1, 0.1, 0.1, "other", "cpu")) == "prompt-lookup"
    assert "broken" not in selector.predict(Workload(1, 0.5, 0.1))
    with pytest.raises(ValueError, match="takes those of decodax compare --json"):
        Selector.fit([log("m", (1, 0.5, "broken", None)) | dict(rows=[])])


def test_the_runtime_is_found_again_from_its_runs() -> None:
    r = np.random.default_rng(0)
    true = Runtime(0.05, 2e-4, 3e-8, 0.011)
    runs = [(p, o, true(p, o) * r.uniform(1, 1.01)) for p in (100, 1000, 4000) for o in (1, 50, 200)]
    fit = Runtime.fit(runs)
    for p, o in ((300, 30), (2000, 120)):
        assert abs(fit(p, o) / true(p, o) - 1) < 0.02
    assert fit.cost(300, 30, 0.002, 4) == pytest.approx(0.008 * fit(300, 30))
    with pytest.raises(ValueError, match="three prompt lengths"):
        Runtime.fit(runs[:3])


@pytest.mark.full
def test_this_machine_is_measured() -> None:
    lm = dx.load("pycode")
    fit = Runtime.measure(lm, (32, 96, 200), (1, 32), repeats=2)
    assert fit.per_new_token > 0
    found = tune(lm, [f"def f{i}(" for i in range(12)], dict(batch_size=[4, 12]), repeats=2, max_new_tokens=8)
    assert {t.options["batch_size"] for t in found} == {4, 12} and found[0].tokens_per_second > 0
