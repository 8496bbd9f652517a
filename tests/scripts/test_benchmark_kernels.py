"""The benchmark of kernels, on a CPU and small shapes: every form is timed, and each implementation gives the same."""

from __future__ import annotations

import itertools

import benchmark_kernels
import pytest


@pytest.mark.wide
def test_every_form_is_timed_and_no_implementation_is_off(monkeypatch: pytest.MonkeyPatch,
                                                          capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--batch 2 --window 2 --heads 4 --kv-heads 2 --width 16 --capacity 256 --live 77 --page 64 "
               "--dtype float32 --inner 2 --repeats 1")
    monkeypatch.setattr("sys.argv", ["benchmark_kernels.py", *options.split()])
    benchmark_kernels.main()
    lines = [[x.strip() for x in line.strip("|").split("|")] for line in capsys.readouterr().out.splitlines()
             if line.startswith("|")][2:]
    attention = benchmark_kernels.FORMS[:-1]
    assert [tuple(line[:2]) for line in lines] == [*itertools.product(attention, ("einsum", "xla")), ("draw", "sort"),
                                                   ("draw", "xla")]
    for _, _, ms, speed, ratio, off in lines:
        assert float(ms) > 0 and float(ratio) > 0 and float(off) < 1e-4
        # of arrays of some kB: the reading of them all in the time that is printed
        assert 0 <= float(speed) < 100, speed


def test_a_capacity_that_does_not_divide_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["benchmark_kernels.py", "--capacity", "200"])
    with pytest.raises(SystemExit, match="--capacity: got 200, takes a multiple of 128"):
        benchmark_kernels.main()
