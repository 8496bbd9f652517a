"""The decoding loop of Llama shapes, compiled by XLA's TPU compiler without a TPU: what a round costs may not grow.

docs/results/tpu.md has the figures and what they mean. By default a few layers of a few programs are compiled; the
bounds of whole models, on every mesh and chip, are marked `full`.
"""

import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.matrix import often

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmark.py"

pytestmark = [
    pytest.mark.xdist_group("tpu"),     # one worker, so that each program is compiled once
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None,
                       reason="libtpu is not installed (Linux on x86-64 only): pip install 'decodax[tpu-aot]'"),
]

V5E, V5P, V6E = "v5e:2x4", "v5p:2x2x2", "v6e:2x4"
WHOLE = [(chip, shape, mesh) for chip in (V5E, V6E, V5P) for shape in ("8b", "1b") for mesh in ("1x1", "1x8", "2x4")
         if (chip, shape, mesh) != (V5E, "8b", "1x1")]      # it has 16 GB


@functools.cache
def report(topology: str, *options: str) -> list[dict[str, Any]]:
    """A report for each combination of the options."""
    # the compiler sets its own platform, and the eight CPU devices of the other tests would only slow it down
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "TPU_"))}
    done = subprocess.run([sys.executable, SCRIPT, "tpu", "--json", "--topology", topology, *options], env=inherited,
                          capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def few(topology: str) -> list[dict[str, Any]]:
    """Two programs of four layers: one chip with small heads, and a slice with one head a device."""
    return report(topology, "--layers", "4", "--shape", "1b", "--mesh", "1x1", "2x4", "--policy", "top-p")


def bounds(r: dict[str, Any], most: float, temporaries: float = 0.05) -> None:
    """What holds of every program: the most that it moves over what it must, and temporaries over arguments."""
    assert 1 <= r["moved_over_needed"] <= most, r["options"]
    assert r["cache_copies"] == r["callbacks"] == r["collectives_in_sampling_loops"] == 0, r["options"]
    assert r["temporary_bytes"] < temporaries * r["argument_bytes"], r["options"]
    assert r["donated_bytes"] > r["cache_bytes"] and r["output_bytes"] - r["donated_bytes"] < 8192, r["options"]


@pytest.mark.wide
@pytest.mark.parametrize("topology", often([V5E], [V5E, V6E, V5P]))
def test_a_round_moves_what_it_must_and_copies_no_cache(topology: str) -> None:
    for r in few(topology):
        bounds(r, 1.10)


def packed(topology: str, *options: str) -> None:
    """Greedy rounds with packed weights: these are all that is read, and no kernel is written as it is multiplied."""
    for r in report(topology, "--policy", "greedy", *options):
        bounds(r, 1.10, 0.08)       # of arguments that are smaller
        assert r["converted_kernels"] == 0, r["options"]
        assert r["largest_collective_bytes"] <= 2 * r["options"]["batch"] * 4096, r["options"]


@pytest.mark.wide
def test_packed_weights_are_multiplied_as_they_lie() -> None:
    packed(V5E, "--layers", "2", "--shape", "1b", "--mesh", "1x1", "--weights", "int4")


@pytest.mark.full
@pytest.mark.parametrize("topology", [V5E, V6E, V5P])
@pytest.mark.parametrize("shape", ["8b", "1b"])
@pytest.mark.parametrize("mesh", ["1x1", "1x8", "2x4"])
def test_packed_weights_of_whole_models_are_multiplied_as_they_lie(topology: str, shape: str, mesh: str) -> None:
    packed(topology, "--shape", shape, "--mesh", mesh, "--weights", "int8", "int4", "fp8")


@pytest.mark.full
@pytest.mark.parametrize(("topology", "shape", "mesh"), WHOLE)
def test_whole_models_move_what_they_must(topology: str, shape: str, mesh: str) -> None:
    greedy, drawn = report(topology, "--shape", shape, "--mesh", mesh, "--policy", "greedy", "top-p")
    bounds(greedy, 1.10)
    bounds(drawn, 1.10)
    assert drawn["cycles"] <= 1.15 * greedy["cycles"]


@pytest.mark.full
@pytest.mark.parametrize(("shape", "mesh"), [("1b", "1x1"), ("1b", "1x8"), ("8b", "1x8"), ("1b", "2x4"), ("8b", "2x4")])
def test_a_window_of_8_moves_little_more(shape: str, mesh: str) -> None:
    for r in report(V5E, "--shape", shape, "--mesh", mesh, "--policy", "greedy", "top-p", "--window", "8"):
        bounds(r, 1.20)


@pytest.mark.full
@pytest.mark.parametrize(("shape", "mesh"), [("1b", "1x1"), ("1b", "1x8"), ("8b", "1x8"), ("1b", "2x4"), ("8b", "2x4")])
def test_a_tree_of_32_moves_little_more(shape: str, mesh: str) -> None:
    for r in report(V5E, "--shape", shape, "--mesh", mesh, "--policy", "greedy", "top-p", "--window", "--tree", "32"):
        bounds(r, 1.50)


@pytest.mark.full
@pytest.mark.parametrize(("shape", "mesh"), [("1b", "1x8"), ("8b", "1x8"), ("1b", "2x4"), ("8b", "2x4")])
def test_bounds_hold_on_several_v6e(shape: str, mesh: str) -> None:
    options = ("--shape", shape, "--mesh", mesh, "--policy", "greedy", "--window", "--tree", "32", "--dumped")
    for r in report(V6E, *options):
        bounds(r, 1.50)


@pytest.mark.wide
def test_the_compilers_own_form_is_the_same_program() -> None:
    options = ("--shape", "1b", "--layers", "1", "--mesh", "1x8", "--policy", "greedy", "--window", "--tree", "32")
    printed, dumped = (report(V5E, *options, *more)[0] for more in ((), ("--dumped",)))
    assert printed.pop("cycles") > 0 and dumped.pop("cycles") is None
    for r in (printed, dumped):
        del r["compile_seconds"]
    assert printed == dumped


@pytest.mark.wide
def test_a_round_is_few_operations() -> None:
    one, many = few(V5E)
    assert one["loops"]["walks of the cache"] == many["loops"]["walks of the cache"] == 0       # the kernel's part
    assert one["collectives"] == 0
    assert many["collectives"] <= 24                # 18: two a layer, and those of the embedding, logits and sampling
    assert many["operations"] < 900                 # of four layers
    assert many["largest_collective_bytes"] <= 8 * 128_256 * 4
