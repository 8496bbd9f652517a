"""Gemma 4 and 3n on 8 devices: heads of two widths, per-layer embeddings, and experts beside an MLP are divided."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.io.saving import save_model
from decodax.models import Transformer
from decodax.models.families import read_config
from tests.matrix import often
from tests.meshes import mesh_of

pytestmark = pytest.mark.mesh

CONFIG: dict[str, Any] = {
    "model_type": "gemma4_text", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16, "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 80, "attention_k_eq_v": True,
    "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24,
    "max_position_embeddings": 64}
STREAMS = {"model_type": "gemma3n_text", "intermediate_size": [48, 48, 32, 48], "altup_num_inputs": 3, "laurel_rank": 5,
           "activation_sparsity_pattern": [0.6, 0.0, 0.9, 0.0], "attention_k_eq_v": False, "enable_moe_block": False}
PROMPTS = [[5, 6, 7, 8, 5, 6], [9, 10, 11], [1, 2], [3, 4, 5, 6, 7]]


@pytest.mark.wide
@pytest.mark.parametrize("family", often(["gemma4_text"], ["gemma4_text", "gemma3n_text"]))
def test_eight_devices_give_the_tokens_of_one(family: str, tmp_path: Any) -> None:
    config = CONFIG if family == CONFIG["model_type"] else {**CONFIG, **STREAMS}
    model, draw = Transformer(read_config(config)), np.random.default_rng(0)
    params = jax.tree.map(lambda x: jnp.asarray(draw.normal(x.ndim == 1, 0.2, x.shape), jnp.float32),
                          model.init_params(jax.random.key(0)))
    save_model(tmp_path, model, params, config=config)
    alone, parted = dx.load(tmp_path), dx.load(tmp_path, mesh=mesh_of(data=2, model=2, expert=2))
    layer = parted.params["layers"]["1"]
    mlp = layer["mlp"]["shared"] if family == CONFIG["model_type"] else layer["mlp"]
    for array in (mlp["up"]["kernel"], layer["attn"]["k"]["kernel"], parted.params["layer_inputs"]["table"]):
        assert array.addressable_shards[0].data.size * 2 == array.size
    want = dx.generate(alone, PROMPTS, max_new_tokens=9).tokens
    got = dx.generate(parted, PROMPTS, max_new_tokens=9, algorithm="prompt-lookup:length=3").tokens
    np.testing.assert_array_equal(got, want)
