"""Models that also see images: their language model, from the files and under the names that they are released with."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

import decodax as dx
from decodax.io.checkpoint import CheckpointError
from decodax.io.saving import save_model
from decodax.models.families import read_config
from tests.models.tiny import COMMON, DELTA, GEMMA4, SHARED, SMALL_WINDOW

TOKENS = np.random.default_rng(0).integers(3, 80, (2, 11)).astype(np.int32)
SIGHT = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 16,
         "patch_size": 8}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]}}
MROPE_NEXT = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 2, 2],
                                  "mrope_interleaved": True}}
MROPE_YARN = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mrope_section": [1, 1, 2],
                                  "original_max_position_embeddings": 16}}
DEEPSTACK = {"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2, "out_hidden_size": 32,
             "deepstack_visual_indexes": [0]}
EYE = {key: size for key, size in DEEPSTACK.items() if key != "deepstack_visual_indexes"}
EYES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "position_embedding_size": 16}
PLACES = {"image_token_id": 96, "video_token_id": 95, "vision_start_token_id": 94, "vision_end_token_id": 93}

# model_type, text_config on top of COMMON, vision_config, further entries; where the tensors of the layers are
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any], str]] = {
    "gemma3": ("gemma3", {**SMALL_WINDOW, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]},
               SIGHT, {"mm_tokens_per_image": 4, "image_token_index": 96}, "language_model.model.layers."),
    "mistral3": ("mistral3", {"model_type": "mistral", "head_dim": 8, "sliding_window": None},
                 {**SIGHT, "model_type": "pixtral", "head_dim": 8}, {"image_token_index": 96,
                                                                     "tie_word_embeddings": False},
                 "language_model.model.layers."),
    "mistral3-tied": ("mistral3", {"model_type": "mistral", "head_dim": 8, "sliding_window": None},
                      {**SIGHT, "model_type": "pixtral", "head_dim": 8}, {"image_token_index": 96},
                      "language_model.model.layers."),
    "qwen2-vl": ("qwen2_vl", MROPE, {"embed_dim": 16, "depth": 1, "num_heads": 2, "hidden_size": 32}, PLACES,
                 "model.layers."),
    "qwen2.5-vl": ("qwen2_5_vl", MROPE, {"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2,
                                         "out_hidden_size": 32, "fullatt_block_indexes": [0]}, PLACES, "model.layers."),
    "qwen2.5-vl-yarn": ("qwen2_5_vl", MROPE_YARN, {
        "hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2, "out_hidden_size": 32,
        "fullatt_block_indexes": [0]}, PLACES, "model.layers."),
    "qwen3-vl": ("qwen3_vl", {**MROPE_NEXT, "head_dim": 16}, DEEPSTACK, PLACES, "model.language_model.layers."),
    "qwen3-vl-moe": ("qwen3_vl_moe", {**MROPE_NEXT, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
                                      "moe_intermediate_size": 24, "mlp_only_layers": [1]}, DEEPSTACK, PLACES,
                     "model.language_model.layers."),
    "qwen3.5": ("qwen3_5", {**DELTA, **MROPE_NEXT, "head_dim": 16}, EYE, PLACES, "model.language_model.layers."),
    "qwen3.5-moe": ("qwen3_5_moe", {**DELTA, **SHARED, **MROPE_NEXT, "head_dim": 16, "num_hidden_layers": 2,
                                    "layer_types": DELTA["layer_types"][:2]}, EYE, PLACES,
                    "model.language_model.layers."),
    "ministral3": ("mistral3", {"model_type": "ministral3", "head_dim": 8, "sliding_window": None, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 8, "mscale": 1.0,
        "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}}, {**SIGHT, "model_type": "pixtral", "head_dim": 8},
                   {"image_token_index": 96, "tie_word_embeddings": False}, "language_model.model.layers."),
    "gemma4": ("gemma4", {**GEMMA4, "attention_k_eq_v": True, "use_bidirectional_attention": "vision",
                          "hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 4,
                          "top_k_experts": 2, "moe_intermediate_size": 24}, EYES, {
        "audio_config": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 16,
                         "subsampling_conv_channels": [4, 4]}, "image_token_id": 96, "video_token_id": 95,
        "audio_token_id": 94}, "model.language_model.layers."),
    "gemma4-unified": ("gemma4_unified", {**GEMMA4, "num_hidden_layers": 2, "layer_types": GEMMA4["layer_types"][:2]},
                       {"patch_size": 4, "mm_embed_dim": 32, "mm_posemb_size": 8, "output_proj_dims": 32}, {
                           "image_token_id": 96, "video_token_id": 95, "audio_token_id": 94},
                       "model.language_model.layers."),
    "llama4": ("llama4", {"head_dim": 16, "num_local_experts": 4, "intermediate_size_mlp": 40, "floor_scale": 6,
                          "attention_chunk_size": 5, "no_rope_layers": [1, 0], "interleave_moe_layer_step": 2},
               {**SIGHT, "intermediate_size": 16, "vision_output_dim": 16, "projector_input_dim": 16,
                "projector_output_dim": 16}, {"image_token_index": 96}, "language_model.model.layers."),
}


def saved(name: str, directory: Path) -> Any:
    kind, text, sight, more, _ = CASES[name]
    config = transformers.AutoConfig.for_model(kind, text_config={**COMMON, **text}, vision_config=sight, **more)
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight) * 0.2 + (1.0 if weight.ndim == 1 else 0.0))
    model.save_pretrained(directory)
    return model


@pytest.mark.wide(but=("gemma3", "mistral3", "qwen2-vl", "qwen2.5-vl", "qwen2.5-vl-yarn", "qwen3-vl"))
@pytest.mark.parametrize("name", CASES)
def test_the_language_model_of_one_that_sees_images(name: str, tmp_path: Path) -> None:
    reference = saved(name, tmp_path / "in")
    assert any(tensor.startswith(CASES[name][4]) for tensor in load_file(tmp_path / "in" / "model.safetensors"))
    lm = dx.load(tmp_path / "in")
    # transformers 5.24 cannot run the whole Llama 4.
    reference = reference.language_model if name == "llama4" else reference
    with torch.no_grad():
        expected = reference(torch.tensor(TOKENS, dtype=torch.long)).logits.numpy()
    np.testing.assert_allclose(jax.jit(lm.model.forward)(lm.params, TOKENS), expected, atol=1e-4)
    assert (lm.eos, lm.bos) == ([2], 1)

    save_model(tmp_path / "out", lm.model, lm.params, json.loads((tmp_path / "in" / "config.json").read_text()))
    again = dx.load(tmp_path / "out")
    assert again.model == lm.model
    jax.tree.map(np.testing.assert_array_equal, again.params, lm.params)
    if name == "qwen3-vl-moe":
        return      # transformers has no class for its language model alone
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    with torch.no_grad():
        np.testing.assert_allclose(theirs(torch.tensor(TOKENS, dtype=torch.long)).logits.numpy(), expected, atol=1e-4)


def test_the_names_that_newer_and_older_files_have(tmp_path: Path) -> None:
    saved("gemma3", tmp_path)
    lm, file = dx.load(tmp_path), tmp_path / "model.safetensors"
    tensors = load_file(file)
    # as in the model itself, where the language model is inside
    save_file({f"model.{k}".replace("language_model.model.", "language_model."): v for k, v in tensors.items()}, file)
    jax.tree.map(np.testing.assert_array_equal, dx.load(tmp_path).params, lm.params)
    save_file({**tensors, "taste_tower.x": np.ones(1, np.float32)}, file)
    with pytest.raises(CheckpointError, match=r"holds tensor taste_tower\.x"):
        dx.load(tmp_path)


def test_defaults_of_released_text_configs() -> None:
    """gemma-3-4b-it names six entries of its text_config, Qwen2.5-VL-7B has its own beside that of its vision."""
    gemma = read_config({"model_type": "gemma3", "vision_config": {}, "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}})
    theirs = transformers.Gemma3TextConfig(hidden_size=2560, intermediate_size=10240, num_hidden_layers=34,
                                           rope_scaling={"factor": 8.0, "rope_type": "linear"}, sliding_window=1024)
    assert gemma == read_config(theirs.to_dict())
    assert (gemma.vocab, gemma.heads, gemma.kv_heads, gemma.head_dim, gemma.tied) == (262_208, 8, 4, 256, True)
    flat = {"model_type": "qwen2_5_vl", "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
            "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "rope_theta": 1e6,
            "max_position_embeddings": 128000, "sliding_window": 32768, "use_sliding_window": False,
            "max_window_layers": 28, "tie_word_embeddings": False, "vision_config": {"hidden_size": 1280},
            "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}
    assert read_config(flat) == read_config({**flat, "model_type": "qwen2", "rope_scaling": None})
    yarn = {"factor": 4.0, "original_max_position_embeddings": 32768}
    sections = {"type": "yarn", "mrope_section": [16, 24, 24], **yarn}
    assert read_config({**flat, "rope_scaling": sections}) == read_config(
        {**flat, "model_type": "qwen2", "rope_scaling": {"rope_type": "yarn", **yarn}})
