"""Laguna under the names of its files: those of a release, which transformers writes, and those inside the model."""

from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from decodax.io.checkpoint import load_model
from tests.models.tiny import saved


@pytest.mark.wide
def test_the_names_of_a_release_and_those_inside_the_model(tmp_path: Path) -> None:
    saved("laguna", tmp_path)
    file, (_, released) = tmp_path / "model.safetensors", load_model(tmp_path)
    tensors = load_file(file)
    assert "model.layers.1.mlp.experts.e_score_correction_bias" in tensors
    moved = {name.replace("experts.e_score", "gate.e_score"): x for name, x in tensors.items()}
    save_file(moved, file)
    jax.tree.map(np.testing.assert_array_equal, load_model(tmp_path)[1], released)
    for i in (1, 2):
        inside = f"model.layers.{i}.mlp.experts"
        each = [[moved.pop(f"{inside}.{e}.{part}_proj.weight") for part in ("gate", "up", "down")] for e in range(4)]
        moved[f"{inside}.gate_up_proj"] = np.stack([np.concatenate(own[:2]) for own in each])
        moved[f"{inside}.down_proj"] = np.stack([own[2] for own in each])
    save_file(moved, file)
    jax.tree.map(np.testing.assert_array_equal, load_model(tmp_path)[1], released)
