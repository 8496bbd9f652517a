"""Prompts with images on 8 devices: rows, heads and vectors are divided."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.io.saving import save_model
from decodax.models import Images, Transformer
from decodax.models.families import read_config
from tests.meshes import mesh_of

pytestmark = pytest.mark.mesh

CONFIG: dict[str, Any] = {
    "model_type": "qwen3_vl", "image_token_id": 96, "vision_config": {"deepstack_visual_indexes": [5]}, "text_config": {
        "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}}}
SIZES = [[6, 2], [4], [], [6]]


@pytest.mark.wide
def test_eight_devices_give_the_tokens_of_one(tmp_path: Path) -> None:
    model, draw = Transformer(read_config(CONFIG)), np.random.default_rng(0)
    params = jax.tree.map(lambda x: jnp.asarray(draw.normal(x.ndim == 1, 0.2, x.shape), jnp.float32),
                          model.init_params(jax.random.key(0)))
    save_model(tmp_path, model, params, config=CONFIG)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    prompts = [[5, 6, *(token for n in row for token in ([96] * n + [7, 8]))] for row in SIZES]
    vectors = [[draw.normal(size=(n, 32)) for n in row] for row in SIZES]
    further = [[draw.normal(size=(1, n, 32)) for n in row] for row in SIZES]
    grids = [[(1, 4, n) for n in row] for row in SIZES]
    made = []
    for lm in (dx.load(tmp_path), dx.load(tmp_path, mesh=mesh_of(data=4, model=2))):
        images = Images.of(lm, prompts, vectors, grids=grids, deepstack=further)
        made.append(dx.generate(lm, prompts, inputs=images, max_new_tokens=9, eos_token_id=[]).tokens.tolist())
        plain = dx.generate(lm, prompts, max_new_tokens=9, eos_token_id=[]).tokens.tolist()
        assert made[-1][2] == plain[2] and made[-1] != plain
    assert made[0] == made[1]
