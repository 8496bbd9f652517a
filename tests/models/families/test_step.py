"""Step 3.5 and 3.7: layouts of files, entries of released files, clipped activations, and what is refused. Logits,
drafts and trees of a small case are in `test_families`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file, save_file

from decodax.io.checkpoint import load_model
from decodax.models.blocks.options import OutputGate
from decodax.models.families import read_config
from decodax.models.routing import ClippedSwiGLU
from tests.models.families.tiny_seeing import STEP
from tests.models.tiny import COMMON, saved

CONFIG: dict[str, Any] = {"model_type": "step3p5", **COMMON, **STEP}

RELEASED: dict[str, Any] = {
    "model_type": "step3p5", "vocab_size": 128_896, "hidden_size": 4096, "intermediate_size": 11_264,
    "num_hidden_layers": 45, "num_attention_heads": 64, "num_attention_groups": 8, "head_dim": 128,
    "max_position_embeddings": 262_144, "moe_layers_enum": ",".join(map(str, range(3, 45))), "use_moe": True,
    "moe_num_experts": 288, "moe_top_k": 8, "moe_intermediate_size": 1280, "share_expert_dim": 1280,
    "moe_router_activation": "sigmoid", "moe_router_scaling_factor": 3.0, "norm_expert_weight": True,
    "use_moe_router_bias": True, "att_impl_type": "GQA", "use_head_wise_attn_gate": True, "use_qk_norm": True,
    "layer_types": ["sliding_attention" if i % 4 else "full_attention" for i in range(48)], "sliding_window": 512,
    "rope_theta": [1e4 if i % 4 else 5e6 for i in range(48)], "zero_centered": True,
    "partial_rotary_factors": [1.0 if i % 4 else 0.5 for i in range(48)], "yarn_only_types": ["full_attention"],
    "rope_scaling": {"rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 131_072,
                     "low_freq_factor": 1.0, "high_freq_factor": 32.0},
    "attention_other_setting": {"attention_type": "sliding_attention", "num_attention_heads": 96,
                                "num_attention_groups": 8, "head_dim": 128, "true_head_dim": 128},
    "swiglu_limits": [0.0] * 43 + [7.0, 7.0] + [0.0] * 3, "use_rope_layers": [], "num_nextn_predict_layers": 3,
    "swiglu_limits_shared": [0.0] * 43 + [16.0, 16.0] + [0.0] * 3}
"""Entries under the names that released files have."""


@pytest.mark.filterwarnings("ignore:.*skips 23 tensors of images")
def test_layouts_of_releases_and_of_classes_are_the_same(tmp_path: Path) -> None:
    reference = saved("step3p7", tmp_path / "released")
    tensors = load_file(tmp_path / "released" / "model.safetensors")
    assert {"model.layers.1.moe.gate_proj.weight", "model.layers.1.moe.router_bias", "vit_large_projector.weight",
            "model.layers.3.share_expert.up_proj.weight", "model.layers.0.self_attn.g_proj.weight"} < tensors.keys()
    reference.save_pretrained(tmp_path / "classes", save_original_format=False)
    assert "model.language_model.layers.1.mlp.experts.gate_up_proj" in load_file(
        tmp_path / "classes" / "model.safetensors")
    (model, params), (again, same) = (load_model(tmp_path / place) for place in ("released", "classes"))
    assert model == again
    jax.tree.map(np.testing.assert_array_equal, params, same)
    # Step 3.5 has no part that sees images.
    entries = json.loads((tmp_path / "released" / "config.json").read_text())["text_config"]
    text = {name: x for name, x in tensors.items() if not name.startswith("vi")}
    save_file(text, tmp_path / "released" / "model.safetensors")
    (tmp_path / "released" / "config.json").write_text(json.dumps(entries))
    again, same = load_model(tmp_path / "released")
    assert model == again
    jax.tree.map(np.testing.assert_array_equal, params, same)


@pytest.mark.filterwarnings("ignore:.*rope")
def test_entries_of_released_files_are_read_as_transformers_reads_them() -> None:
    found = read_config(RELEASED)
    theirs = transformers.AutoConfig.for_model("step3p5", **{
        key: value for key, value in RELEASED.items() if key != "model_type"}).to_dict()
    assert found == read_config(json.loads(json.dumps(theirs)))
    whole = {"model_type": "step3p7", "text_config": {**RELEASED, "model_type": "step3p7_text"}, "vision_config": {}}
    assert found == read_config(whole)
    near, far = found.layers[43], found.layers[44]
    assert (near.heads, near.sliding, far.heads, far.sliding) == (96, 512, None, None)
    assert near.rope is not None and far.rope is not None and near.experts is not None
    assert (near.rope.width, near.rope.theta, near.rope.scaling) == (128, 1e4, None)
    assert (far.rope.width, far.rope.theta) == (64, 5e6) and far.rope.scaling is not None
    assert near.experts.glu == ClippedSwiGLU(1.0, 7.0, 0.0, True) and near.glu == ClippedSwiGLU(1.0, 16.0, 0.0, True)
    assert found.layers[2].experts is None and found.layers[3].glu is None
    assert {layer.output_gate for layer in found.layers} == {OutputGate("heads")}


def test_missing_entries_have_the_values_of_transformers() -> None:
    theirs = transformers.AutoConfig.for_model("step3p5").to_dict()
    assert read_config({"model_type": "step3p5"}) == read_config(theirs)


def test_the_gate_is_clipped_after_its_activation() -> None:
    glu, x = ClippedSwiGLU(1.0, 2.0, 0.0, after=True), jnp.array([2.1, 9.0, -9.0])
    np.testing.assert_allclose(glu(x, x), [2.1 / (1 + np.exp(-2.1)) * 2, 4.0, 9 / (1 + np.exp(9.0)) * 2], rtol=1e-5)


@pytest.mark.parametrize(("entries", "message"), [
    ({"mlp_bias": True}, "mlp_bias: got True, supported is False"),
    ({"hidden_act": "gelu"}, "hidden_act: got 'gelu', supported is 'silu'"),
    ({"gating": "per-element"}, "gating: got 'per-element', supported is 'per-head'"),
    ({"sliding_window": None}, "sliding_window: got None with layers of type"),
    ({"layer_types": ["full_attention"]}, "layer_types: got 1 entries for num_hidden_layers = 4"),
    ({"swiglu_limits": [1.0]}, "swiglu_limits: got 1 entries"),
    ({"swiglu_limits": [-1.0] * 4}, "swiglu_limits: got .*, takes a list of numbers from 0, or null"),
    ({"swiglu_limits_shared": [0.0] * 4 + [2.0]}, "swiglu_limits_shared: got .2.0. for layers that predict further"),
    ({"num_sliding_attention_heads": 5}, "num_sliding_attention_heads: got .*, takes multiples of num_key_value_heads"),
    ({"per_layer_config": {"1": {"head_dim": 8}}}, "per_layer_config.1: got .*, takes a number of num_attention_heads"),
    ({"per_layer_config": {"1": {"num_attention_heads": 8}}}, "per_layer_config.1: got 8 heads with num_sliding_atten"),
    ({"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters: got ..rope_theta.., takes an object for each of"),
    ({"rope_parameters": None, "rope_theta": [1e4, 1e4, 2e4, 1e4]}, "rope_theta: got .*, takes the same for all"),
    ({"use_bidirectional_attention": True}, "use_bidirectional_attention: got True, which a step3p5 model does not"),
    ({"attention_other_setting": {"head_dim": 8}}, "attention_other_setting.head_dim: got 8, supported is 16"),
    ({"n_routed_experts": 6, "moe_num_experts": 8},
     "moe_num_experts: got .*n_routed_experts = 6, moe_num_experts = 8.*, takes the same"),
    ({"moe_router_activation": "softmax"}, "moe_router_activation: got 'softmax', supported is 'sigmoid'"),
])
def test_other_entries_are_refused(entries: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_config({**CONFIG, **entries})
