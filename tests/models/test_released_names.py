"""Families whose released files have other tensor names than the classes of transformers, which writes either."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import decodax as dx
from decodax.io.checkpoint import load_model
from tests.models.tiny import saved

NAMES = {"mistral-large4": (
    {"tok_embeddings.weight", "lerope.alpha", "layers.0.attention.wkv_a_with_mqa.weight", "output.weight",
     "layers.1.experts.0.w1.weight", "vision_language_adapter.w_in.weight"}, "model.language_model.rotary_emb.alpha"),
    "glm5-next": (
        {"model.language_model.layers.0.self_attn.A_log", "model.language_model.layers.0.self_attn.q_conv1d.weight",
         "model.language_model.layers.1.hc_ffn_base", "model.language_model.layers.3.self_attn.f_b_proj.weight",
         "model.language_model.layers.2.mlp.experts.7.up_proj.weight", "lm_head.weight",
         "model.language_model.layers.1.self_attn.indexer.index_kpool_compress_ape"},
        "model.language_model.layers.0.self_attn.forget_gate.A_log"),
    "ling3": ({"model.word_embeddings.weight", "model.layers.0.attention.q_conv1d.weight", "lm_head.weight",
               "model.layers.1.attention.dense.bias", "model.layers.2.mlp.experts.7.up_proj.weight"},
              "model.layers.0.self_attn.forget_gate.A_log"),
    "hy4-vl": ({"model.layers.0.self_attn.learnable_sink_param", "vit.perceive.proj.0.weight", "lm_head.weight"},
               "model.language_model.hc_head.hc_fn")}
"""By case some names of released files, and one of the classes."""


@pytest.mark.filterwarnings("ignore:.*skips (15|25) tensors of images")
@pytest.mark.parametrize("name", NAMES)
def test_files_under_either_names_are_the_same(name: str, tmp_path: Path) -> None:
    reference, (some, other) = saved(name, tmp_path / "released"), NAMES[name]
    tensors = load_file(tmp_path / "released" / "model.safetensors")
    assert some < tensors.keys()
    reference.save_pretrained(tmp_path / "classes", save_original_format=False)
    assert other in load_file(tmp_path / "classes" / "model.safetensors")
    (model, params), (again, same) = (load_model(tmp_path / place) for place in ("released", "classes"))
    assert model == again
    jax.tree.map(np.testing.assert_array_equal, params, same)
    # Saved as an attribute of another module.
    save_file({f"student.{key}": value for key, value in tensors.items()}, tmp_path / "released" / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, load_model(tmp_path / "released")[1], params)


def test_layers_of_ling_that_predict_further_tokens_are_skipped(tmp_path: Path) -> None:
    saved("ling3", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    more = {"model.layers.3.eh_proj.weight": np.zeros((32, 64), np.float32)}
    save_file({**tensors, **more}, tmp_path / "model.safetensors")
    with pytest.warns(UserWarning, match="skips 1 tensors of layers that predict further tokens, such as model.layers"):
        dx.load(tmp_path)
