"""The benchmark program on small shapes: kernels give equal results in every form, caches give a table."""

import itertools
from pathlib import Path

import benchmark
import pytest


@pytest.mark.wide
def test_every_form_is_timed_and_no_implementation_is_off(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--batch 2 --window 2 --heads 4 --kv-heads 2 --width 16 --capacity 256 --live 77 --page 64 "
               "--dtype float32 --inner 2 --repeats 1")
    assert benchmark.main(["kernels", *options.split()]) == 0
    lines = [[x.strip() for x in line.strip("|").split("|")] for line in capsys.readouterr().out.splitlines()
             if line.startswith("|")][2:]
    assert [tuple(line[:2]) for line in lines] == [*itertools.product(benchmark.FORMS, ("einsum", "xla"))]
    for _, _, ms, speed, ratio, off in lines:
        assert float(ms) > 0 and float(ratio) > 0 and float(off) < 1e-4
        # of arrays of some kB: the reading of them all in the time that is printed
        assert 0 <= float(speed) < 100, speed


def test_a_capacity_that_does_not_divide_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark.main(["kernels", "--capacity", "200"]) == 2
    assert "--capacity: got 200, takes a multiple of 128" in capsys.readouterr().err


def test_an_unknown_preset_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark.main(["presets", "phi-5"]) == 2
    assert "names: got 'phi-5', takes presets (near ones: phi-4" in capsys.readouterr().err


@pytest.mark.wide
def test_presets_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark.main(["presets", "lfm2-1.2b", "--counted"]) == 0
    assert "| lfm2-1.2b | v5e:2x4 | 1x8 | yes | " in capsys.readouterr().out


@pytest.mark.full
def test_cache_policies_are_timed(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--layers 1 --prompt 64 --held 48 --new 8 --batch 2 --repeats 1 --policies snapkv:budget=40"
    assert benchmark.main(["caches", *options.split()]) == 0
    assert "snapkv:budget=40" in capsys.readouterr().out


@pytest.mark.wide
def test_loading_is_timed_against_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--size 0.05 --width 256 --repeats 1 --scratch"
    assert benchmark.main(["load", *options.split(), str(tmp_path)]) == 0
    assert 'dtype="bfloat16"' in capsys.readouterr().out and not list(tmp_path.iterdir())
