"""GPT-OSS on 8 devices: heads, sinks and experts in MXFP4 are divided."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.io.saving import save_model
from decodax.models import Transformer
from decodax.models.families import read_config
from tests.meshes import mesh_of, same_tokens
from tests.models.families.gpt_oss import as_released

pytestmark = pytest.mark.mesh

CONFIG: dict[str, Any] = {
    "model_type": "gpt_oss", "vocab_size": 97, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4,
    "num_experts_per_tok": 2, "sliding_window": 5, "max_position_embeddings": 64, "swiglu_limit": 1.5}
PROMPTS = [[5, 6, 7, 8, 5, 6], [9, 10, 11], [1, 2], [3, 4, 5, 6, 7]]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, model = tmp_path_factory.mktemp("gpt-oss"), Transformer(read_config(CONFIG))
    draw = np.random.default_rng(0)
    params = jax.tree.map(lambda x: jnp.asarray(draw.normal(x.ndim == 1, 0.2, x.shape), jnp.float32),
                          model.init_params(jax.random.key(0)))
    save_model(root, model, params, config=CONFIG)
    as_released(root, **CONFIG)
    return root


@pytest.mark.wide
def test_eight_devices_give_the_tokens_of_one(home: Path) -> None:
    alone, parted = dx.load(home), dx.load(home, mesh=mesh_of(data=2, model=2, expert=2))
    layer = parted.params["layers"]["0"]
    for array, parts in ((layer["mlp"]["gate"]["kernel"].codes, 4), (layer["attn"]["sinks"], 2)):
        assert array.addressable_shards[0].data.size * parts == array.size
    same_tokens(alone, parted, PROMPTS, 9)
