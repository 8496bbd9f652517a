"""Short convolutions and state-space blocks on a mesh. It imports no torch, beside which collectives on CPU crash."""

import dataclasses

import jax
import numpy as np
import pytest

import decodax as dx
from decodax.io.load import LM
from decodax.models import Transformer
from decodax.models.families import read_config
from tests.caches.small import PROMPTS
from tests.matrix import often

pytestmark = pytest.mark.mesh

COMMON = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
          "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
KINDS = ["conv", "full_attention", "conv"]
MAMBA2 = {"mamba_n_heads": 4, "mamba_d_state": 6, "mamba_n_groups": 2, "mamba_chunk_size": 8}
CASES = {
    "lfm2": {"layer_types": KINDS, "block_multiple_of": 8},
    "nemotron_h": {"hybrid_override_pattern": "ME*", "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2,
                   "ssm_state_size": 6, "n_routed_experts": 4, "moe_intermediate_size": 12,
                   "moe_shared_expert_intermediate_size": 10, "moe_latent_size": 8},
    "granitemoehybrid": {**MAMBA2, "num_local_experts": 4, "layer_types": ["mamba", "attention", "mamba"]},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "kv_lora_rank": 8,
                    "num_key_value_heads": 4, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 6,
                    "num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 12, "linear_num_heads": 2,
                    "linear_head_dim": 6},
    "falcon_h1": {**MAMBA2, "mamba_d_ssm": 24}, "jamba": {"attn_layer_period": 3, "attn_layer_offset": 1,
                                                         "num_experts": 4, "mamba_d_state": 6}}


@pytest.mark.wide
@pytest.mark.parametrize("family", often(["lfm2", "nemotron_h"], CASES))
@pytest.mark.parametrize("kind", often(["Auto"], ["Auto", "Explicit"]))
def test_the_same_tokens(family: str, kind: str) -> None:
    """Rows over one axis and heads, channels or experts over the other, with drafts."""
    model = Transformer(read_config({"model_type": family, **COMMON, **CASES[family]}))
    params = jax.tree.map(lambda x: 8 * x if x.ndim > 1 else x, model.init_params(jax.random.key(0)))
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(getattr(jax.sharding.AxisType, kind),) * 2)
    alone = LM(model=model, params=params, vocab_size=16)
    spread = dataclasses.replace(alone, mesh=mesh, params=jax.device_put(params, model.shardings(mesh)))
    if family == "lfm2":
        short = spread.params["layers"]["0"]["attn"]
        assert [short[name]["kernel"].sharding.spec[1] for name in "bcx"] == ["model"] * 3
    prompts = [*PROMPTS, PROMPTS[0][:30]]
    want, got = (dx.generate(each, prompts, max_new_tokens=16, algorithm="prompt-lookup").tokens
                 for each in (alone, spread))
    np.testing.assert_array_equal(got, want)
