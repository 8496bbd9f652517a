"""Short convolutions and state-space blocks on a mesh. It imports no torch, beside which collectives on CPU crash."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.cli.common import mesh_shape
from decodax.common.axes import constrain
from decodax.core.mesh import heads
from decodax.core.window import causal
from decodax.io.load import LM
from decodax.models import Transformer
from decodax.models.families import read_config
from tests.caches.small import PROMPTS
from tests.matrix import often
from tests.meshes import mesh_of, spread

pytestmark = pytest.mark.mesh

COMMON = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
          "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
KINDS = ["conv", "full_attention", "conv"]
MAMBA2 = {"mamba_n_heads": 4, "mamba_d_state": 6, "mamba_n_groups": 2, "mamba_chunk_size": 8}
CASES = {
    "lfm2": {"layer_types": KINDS, "block_multiple_of": 8},
    "lfm3": {"layer_types": ["conv", "full_attention", "sliding_attention"], "sliding_window": 5},
    "nemotron_h": {"hybrid_override_pattern": "ME*", "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2,
                   "ssm_state_size": 6, "n_routed_experts": 4, "moe_intermediate_size": 12,
                   "moe_shared_expert_intermediate_size": 10, "moe_latent_size": 8},
    "granitemoehybrid": {**MAMBA2, "num_local_experts": 4, "layer_types": ["mamba", "attention", "mamba"]},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "kv_lora_rank": 8,
                    "num_key_value_heads": 4, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 6,
                    "num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 12, "linear_num_heads": 2,
                    "linear_head_dim": 6},
    "bamba": {**MAMBA2, "attn_layer_indices": [1], "num_hidden_layers": 2},
    "falcon_h1": {**MAMBA2, "mamba_d_ssm": 24, "mamba_n_groups": 1, "mamba_rms_norm": True},
    "jamba": {"attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 4, "mamba_d_state": 6},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "lru_width": 24, "attention_window_size": 16}}

WEIGHTS = {"lfm2": "b c x out", "lfm3": "b c x out", "nemotron_h": "in_z in_x in_b in_c in_dt out",
           "granitemoehybrid": "in_z in_b out", "kimi_linear": "in_q in_v out", "bamba": "in_x in_c out",
           "falcon_h1": "in_z in_x in_dt out",
           "jamba": "in_x in_z low dt out", "recurrent_gemma": "x y out"}
"""Projections of a family's blocks that are divided."""

WHOLE = {"falcon_h1": 2}
"""Arrays of a block's states that are not divided, those of its only group."""


@pytest.mark.wide
@pytest.mark.parametrize("family", often(["lfm2", "nemotron_h"], CASES))
@pytest.mark.parametrize("kind", often(["Auto"], ["Auto", "Explicit"]))
def test_the_same_tokens(family: str, kind: str) -> None:
    """Rows over one axis and heads, channels or experts over the other, with drafts; weights and states are divided."""
    model = Transformer(read_config({"model_type": family, **COMMON, **CASES[family]}))
    params = jax.tree.map(lambda x: 8 * x if x.ndim > 1 else x, model.init_params(jax.random.key(0)))
    alone = LM(model=model, params=params, vocab_size=16)
    parted = spread(alone, mesh_of(kind, data=4, model=2))
    layer = parted.params["layers"]["0"]
    block = layer["beside" if "beside" in layer else "attn"]
    assert [block[name]["kernel"].addressable_shards[0].data.size * 2 - block[name]["kernel"].size
            for name in WEIGHTS[family].split()] == [0] * len(WEIGHTS[family].split())
    prompts = [*PROMPTS, PROMPTS[0][:30]]
    want, got = (dx.generate(each, prompts, max_new_tokens=16, algorithm="prompt-lookup").tokens
                 for each in (alone, parted))
    np.testing.assert_array_equal(got, want)


@pytest.mark.wide
@pytest.mark.parametrize("family", often(["nemotron_h", "jamba"], CASES))
@pytest.mark.parametrize("shape", often(["4x2"], ["4x2", "2x4"]))
def test_logits_and_states_of_a_prompt_and_a_window(family: str, shape: str) -> None:
    """The model axis has 2 or 4 devices: 4 divide the heads, and not the 2 groups of heads."""
    model = Transformer(read_config({"model_type": family, **COMMON, **CASES[family]}))
    params = jax.tree.map(lambda x: 8 * x if x.ndim > 1 else x, model.init_params(jax.random.key(0)))
    data, model_axis = mesh_shape(shape)
    mesh = mesh_of(data=data, model=model_axis)
    tokens = np.random.default_rng(0).integers(0, 16, (4, 20)).astype(np.int32)

    def run(params: Any, tokens: jax.Array) -> Any:
        cache, found = model.init_cache(4, 32), []
        for low, high in ((0, 16), (16, 20)):
            window = causal(tokens[:, low:high], cache.length).replace(is_prefill=low == 0)
            out = model.apply(params, window, cache)
            found.append(out.logits())
            slots = jnp.where(found[-1].max(-1) < jnp.inf, window.positions, -1)
            cache = constrain(cache.commit(out.entries, slots), heads(cache))
        return found, cache

    want, _ = jax.jit(run)(params, tokens)
    with jax.set_mesh(mesh):
        rows = jax.device_put(tokens, jax.NamedSharding(mesh, jax.P("data")))
        got, cache = jax.jit(run)(jax.device_put(params, model.shardings(mesh)), rows)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-5)
    states = [x for x in jax.tree.leaves(cache.linear) if x.ndim > 1]
    whole = [x.shape for x in states if x.addressable_shards[0].data.size * 8 > x.size]
    if shape == "4x2":
        blocks = sum(layer.recurrent is not None for layer in model.config.layers)
        assert len(whole) == WHOLE.get(family, 0) * blocks, whole
