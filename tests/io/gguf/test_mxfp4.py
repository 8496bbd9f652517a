"""Tensors of GGUF files in MXFP4 stay packed, in the form in which directories of gpt-oss are read."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import decodax as dx
from decodax.models.formats.mxfp4 import Mxfp4Blocks, unpack
from decodax.models.names import flatten
from decodax.models.packed import Packed
from tests.io.gguf.converting import converted
from tests.io.gguf.converting_more import MORE
from tests.io.gguf.writing import Type, network, restored, write
from tests.models import tiny
from tests.models.families.gpt_oss import as_released

IDS = jnp.asarray(np.arange(3, 23)[None] * 7 % 90)


def test_weights_are_those_that_gguf_decodes() -> None:
    draw = np.random.default_rng(0)
    raw = draw.integers(0, 256, (6, 3, 17), dtype=np.uint8)
    raw[..., 0] = draw.integers(100, 140, raw.shape[:2])
    wanted = gguf.quants.dequantize(raw.reshape(6, -1), Type.MXFP4)
    np.testing.assert_array_equal(jax.tree.map(jnp.asarray, unpack(raw)).values(jnp.float32), wanted)


def test_experts_are_those_of_the_released_directory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kind = MORE["gpt-oss-mxfp4"]
    model = tiny.build(kind.case, **kind.more)
    model.save_pretrained(tmp_path)
    as_released(tmp_path)
    wanted: Any = dx.load(tmp_path)
    tensors, parts = load_file(tmp_path / "model.safetensors"), flatten(wanted.params)
    for i, config in enumerate(wanted.model.config.layers):     # the file is made of the same weights
        width, path = config.experts.width, f"layers.{i}.mlp"
        gate, up, down = (np.swapaxes(parts[f"{path}.{part}.kernel"].values(jnp.float32), 1, 2)
                          for part in ("gate", "up", "down"))
        name = f"model.layers.{i}.mlp.experts"
        tensors[f"{name}.gate_up_proj"] = np.stack([gate, up], -1).reshape(*gate.shape[:2], 2 * width)
        tensors[f"{name}.down_proj"] = np.ascontiguousarray(down)
    inside = tmp_path / "wide"
    inside.mkdir()
    save_file({name: x for name, x in tensors.items() if not name.endswith(("_blocks", "_scales"))},
              inside / "model.safetensors")
    lm: Any = dx.load(converted(inside, kind, json.loads((tmp_path / "config.json").read_text())), tokenizer=None)
    ours = flatten(lm.params)
    packed = [path for path, leaf in ours.items() if isinstance(leaf, Packed)]
    assert packed == [path for path in ours if ".mlp." in path and path.endswith("kernel") and "router" not in path]
    for path, leaf in parts.items():
        assert type(ours[path]) is type(leaf)
        if isinstance(leaf, Mxfp4Blocks):
            np.testing.assert_array_equal(ours[path].values(jnp.float32), leaf.values(jnp.float32))
        else:
            np.testing.assert_array_equal(ours[path], leaf)
    run = jax.jit(lm.model.forward)
    np.testing.assert_allclose(run(lm.params, IDS), run(wanted.params, IDS), atol=1e-4)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.wide
def test_any_kernel_and_the_table_of_embeddings_stay_packed(tmp_path: Path) -> None:
    model, weights = network("qwen3moe")
    kept = write(tmp_path / "m.gguf", "qwen3moe", weights, lambda tensor: Type.MXFP4)
    lm: Any = dx.load(tmp_path / "m.gguf")
    packed = {path for path, leaf in flatten(lm.params).items() if isinstance(leaf, Mxfp4Blocks)}
    assert packed == {path for path in weights if path == "embed" or (
        path.endswith("kernel") and "router" not in path)}
    wanted = model.forward(restored(model, kept), IDS)
    np.testing.assert_allclose(lm.model.forward(lm.params, IDS), wanted, atol=2e-4 * float(jnp.abs(wanted).max()))
