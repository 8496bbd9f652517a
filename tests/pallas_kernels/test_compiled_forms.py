"""Each form of window attention, of packed products and of draws, compiled by XLA's TPU compiler without a TPU, alone
and on a mesh."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.matrix import often
from tests.pallas_kernels import forms

pytestmark = [
    pytest.mark.xdist_group("tpu"),
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None,
                       reason="libtpu is not installed (Linux on x86-64 only): pip install 'decodax[tpu-aot]'"),
]

FEW = "draw, top-p", "packed, inputs divided", "chunk of 256", "pages of int8", "weights of int8, held", "prefix"


def reports(topology: str, *options: str) -> list[dict[str, object]]:
    # the compiler sets its own platform, and the eight CPU devices of the other tests would only slow it down
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "TPU_"))}
    done = subprocess.run([sys.executable, "-m", "tests.pallas_kernels.forms", topology, *options], env=inherited,
                          capture_output=True, text=True, timeout=900, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.wide
@pytest.mark.parametrize(("topology", "options"), often([("v5e:2x4", ("--form", *FEW, "--mesh", "2x4"))], [
    ("v5e:2x4", ("--form", *FEW, "--mesh", "2x4")), *((chip, ()) for chip in ("v5e:2x4", "v5p:2x2x2", "v6e:2x4"))]))
def test_a_form_is_one_kernel_that_copies_nothing_and_waits_for_no_device(topology: str,
                                                                         options: tuple[str, ...]) -> None:
    """But for heads of 96, whose cache the compiler lays out with slots in lanes where nothing else wants it
    otherwise, and for devices that divide a product's inputs or a vocabulary."""
    found = reports(topology, *options)
    assert len(found) == (len(FEW) if options else 2 * len(forms.forms()))
    for r in found:
        assert r["kernels"] == 1, r
        alone = r["mesh"] == "1x1"
        # a draw exchanges parts of the vocabulary for whole rows, and the tokens and what they won with
        exchanges = 3 if str(r["form"]).startswith("draw") else "inputs divided" in str(r["form"])
        assert r["collectives"] == (0 if alone else exchanges), r
        if exchanges == 3:      # logits are laid out anew for the exchange, or `[B, 1, V]` in front of the program
            assert r["copies"] <= 1, r
        else:
            assert r["copies"] == ("96" in str(r["form"])), r
