"""Tiny masked-diffusion checkpoints in the layouts of the released ones, and transformers models that hold the same
weights: none of these families is in transformers, but each is a Qwen or a Llama with another mask or other names."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

MASK, EOS = 3, 2
SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 64, "rope_theta": 1e6, "hidden_act": "silu"}
QWEN = {**SIZES, "rms_norm_eps": 1e-6, "bos_token_id": EOS, "eos_token_id": EOS, "pad_token_id": EOS,
        "attention_dropout": 0.0, "rope_scaling": None, "max_window_layers": 2, "sliding_window": None,
        "use_sliding_window": False, "use_cache": False, "torch_dtype": "float32"}
TIED = {**QWEN, "tie_word_embeddings": True}

# name: what the family's config.json holds (the values of the released files but for the sizes), and the reference
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "llada": ({
        "activation_type": "silu", "alibi": False, "alibi_bias_max": 8.0, "architectures": ["LLaDAModelLM"],
        "attention_dropout": 0.0, "attention_layer_norm": False, "attention_layer_norm_with_affine": True,
        "bias_for_layer_norm": False, "block_group_size": 1, "block_type": "llama", "d_model": 32,
        "embedding_dropout": 0.0, "embedding_size": 112, "eos_token_id": EOS, "flash_attention": False,
        "include_bias": False, "include_qkv_bias": False, "init_cutoff_factor": None, "init_device": "meta",
        "init_fn": "mitchell", "init_std": 0.02, "input_emb_norm": False, "layer_norm_type": "rms",
        "layer_norm_with_affine": True, "mask_token_id": MASK, "max_sequence_length": 64, "mlp_hidden_size": 48,
        "mlp_ratio": 4, "model_type": "llada", "multi_query_attention": None, "n_heads": 4, "n_kv_heads": 2,
        "n_layers": 2, "pad_token_id": EOS, "precision": "amp_bf16", "residual_dropout": 0.0, "rms_norm_eps": 1e-5,
        "rope": True, "rope_full_precision": True, "rope_theta": 500000.0, "scale_logits": False,
        "torch_dtype": "float32", "use_cache": False, "vocab_size": 97, "weight_tying": False}, "llama"),
    "dream": ({**QWEN, "architectures": ["DreamModel"], "model_type": "Dream", "mask_token_id": MASK,
               "tie_word_embeddings": False, "use_mrope": False}, "qwen2"),
    "fast-dllm": ({**TIED, "architectures": ["Fast_dLLM_QwenForCausalLM"], "model_type": "Fast_dLLM_Qwen", "bd_size": 8,
                   "mask_token_id": MASK, "layer_types": ["full_attention"] * 2}, "qwen2"),
    "sdlm": ({**TIED, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "block_size": 4,
              "causal_attn": False, "text_mask_token_id": MASK, "text_mask_token": "<text_mask>"}, "qwen2"),
    "sdar": ({**QWEN, "architectures": ["SDARForCausalLM"], "model_type": "sdar", "attention_bias": False,
              "block_size": 4, "mask_token_id": MASK, "head_dim": 16, "tie_word_embeddings": False,
              "fuse_cross_entropy": True}, "qwen3"),
}

LLADA = {"model.embed_tokens": "model.transformer.wte", "model.norm": "model.transformer.ln_f",
         "lm_head": "model.transformer.ff_out", "model.layers": "model.transformer.blocks",
         "input_layernorm": "attn_norm", "post_attention_layernorm": "ff_norm", "self_attn.o_proj": "attn_out",
         "self_attn.": "", "mlp.gate_proj": "ff_proj", "mlp.up_proj": "up_proj", "mlp.down_proj": "ff_out"}


def saved(name: str, directory: Path, **changes: Any) -> transformers.PreTrainedModel:
    """Writes a case's directory, with `changes` to its config.json, and returns the reference of the same weights."""
    entries, kind = CASES[name]
    sizes = {k: v for k, v in entries.items() if k in {*SIZES, "head_dim", "rms_norm_eps", "tie_word_embeddings"}}
    if kind == "llama":
        sizes = {**SIZES, "vocab_size": 112, "rms_norm_eps": 1e-5, "rope_theta": 5e5}
    theta = {"rope_type": "default", "rope_theta": sizes.pop("rope_theta")}
    config = transformers.AutoConfig.for_model(kind, rope_parameters=theta, pad_token_id=0, **sizes)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight) * 0.2 + (1.0 if weight.ndim == 1 else 0.0))
    tensors = {k: v.contiguous() for k, v in model.state_dict().items()
               if not (entries.get("tie_word_embeddings") and k == "lm_head.weight")}
    if kind == "llama":
        tensors = {renamed(k): v for k, v in tensors.items()}
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps({**entries, **changes}))
    return model


def renamed(tensor: str) -> str:
    for old, new in LLADA.items():
        tensor = tensor.replace(old, new)
    return tensor
