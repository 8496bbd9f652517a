"""Quantised checkpoints on a mesh. It imports no torch, beside which collectives on CPU crash."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from tests.io.quantised.writer import EXPERTS, KINDS, LLAMA, write_checkpoint
from tests.matrix import often
from tests.meshes import mesh_of

pytestmark = pytest.mark.mesh

OFTEN = [("fp8", "llama"), ("gptq-act-order", "llama"), ("nf4", "experts")]

@pytest.mark.parametrize(("kind", "family"), often(OFTEN, [
    (kind, family) for kind in KINDS for family in ("llama", "experts")]))
@pytest.mark.wide(but=("fp8-llama",))
def test_eight_devices_compute_what_one_does(kind: str, family: str, tmp_path: Path) -> None:
    entries: dict[str, Any] = LLAMA if family == "llama" else EXPERTS
    written = write_checkpoint(tmp_path, kind, {**entries, "num_hidden_layers": 1})
    over = mesh_of(data=4, model=2) if family == "llama" else mesh_of(data=2, model=2, expert=2)
    alone, parted = dx.load(written.quantised), dx.load(written.quantised, mesh=over)
    for one, other in zip(jax.tree.leaves(alone.params), jax.tree.leaves(parted.params), strict=True):
        np.testing.assert_array_equal(one, other)
    up = jax.tree.leaves(parted.params["layers"]["0"]["mlp"]["up"]["kernel"])[0]
    assert up.addressable_shards[0].data.size < up.size
    tokens = jnp.arange(32, dtype=jnp.int32).reshape(4, 8)
    with jax.set_mesh(over):
        logits = jax.jit(parted.model.forward)(parted.params, tokens)
    np.testing.assert_allclose(logits, jax.jit(alone.model.forward)(alone.params, tokens), atol=1e-5)
    dx.save(parted, tmp_path / "saved")
    again = dx.load(tmp_path / "saved", mesh=over)
    for one, other in zip(jax.tree.leaves(alone.params), jax.tree.leaves(again.params), strict=True):
        np.testing.assert_array_equal(one, other)
