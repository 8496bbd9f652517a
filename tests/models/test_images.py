"""Models that also see images: their language model, from the files and under the names that they are released with."""

import json
from pathlib import Path

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
from tests.models.families.tiny_images import CASES, saved

TOKENS = np.random.default_rng(0).integers(3, 80, (2, 11)).astype(np.int32)


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
    if name in ("qwen3-vl-moe", "glm5-next", "hy4-vl", "mistral-large4", "muse-glimmer"):
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


def test_phi_4_multimodal_with_adapters_inside_is_the_decoder_below_them(tmp_path: Path) -> None:
    """Its first release has a LoRA adapter for images and one for sound, which prompts of text do not use."""
    saved("phi4-multimodal", tmp_path)
    lm, file, config = dx.load(tmp_path), tmp_path / "model.safetensors", tmp_path / "config.json"
    tensors = {}
    for name, tensor in load_file(file).items():
        stem = name.removesuffix(".weight")
        if stem.endswith(("qkv_proj", "o_proj", "gate_up_proj", "model.layers.0.mlp.down_proj")):
            tensors[f"{stem}.base_layer.weight"] = tensor
            for kind in ("speech", "vision"):
                tensors[f"{stem}.lora_A.{kind}.weight"] = np.ones((2, tensor.shape[1]), np.float32)
                tensors[f"{stem}.lora_B.{kind}.weight"] = np.ones((tensor.shape[0], 2), np.float32)
        else:
            tensors[name] = tensor
    save_file(tensors, file)
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "phi4mm"}))
    jax.tree.map(np.testing.assert_array_equal, dx.load(tmp_path).params, lm.params)
    save_file({**tensors, "model.layers.0.mlp.down_proj.lora_A.default.weight": np.ones((2, 48), np.float32)}, file)
    with pytest.raises(CheckpointError, match=r"lora_A\.default"):
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
