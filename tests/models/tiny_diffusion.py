"""Tiny masked-diffusion checkpoints in the layouts of the released ones, and transformers models that hold the same
weights: none of these families is in transformers, but each is a Qwen, a Llama or a GLM with another mask or other
names.

torch and transformers are imported where they are used: the tests of meshes read the cases alone.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import transformers

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
    "llada-moe": ({
        **{k: v for k, v in SIZES.items() if k != "intermediate_size"}, "architectures": ["LLaDAMoEModelLM"],
        "attention_bias": False, "attention_dropout": 0.0, "clip_qkv": None, "dense_intermediate_size": 48,
        "eos_token_id": EOS, "expert_intermediate_size": 24, "mask_token_id": MASK, "model_type": "llada",
        "moe_layer_freq": [0, 1], "moe_router_enable_expert_bias": False, "moe_router_score_function": "softmax",
        "norm_topk_prob": None, "num_experts": 4, "num_experts_per_tok": 2, "output_router_logits": False,
        "pad_token_id": EOS, "partial_rotary_factor": 1, "qk_layernorm": True, "rms_norm_eps": 1e-5,
        "rope_scaling": None, "routed_scaling_factor": 1, "router_num_group": None, "router_topk_group": None,
        "shared_expert_intermediate_size": None, "tie_word_embeddings": False, "torch_dtype": "float32",
        "use_cache": False}, "qwen3_moe"),
    "llada2": ({
        **SIZES, "architectures": ["LLaDA2MoeModelLM"], "attention_dropout": 0.0, "block_size": 8,
        "embedding_dropout": 0.0, "eos_token_id": EOS, "first_k_dense_replace": 1, "head_dim": 16,
        "mask_token_id": MASK, "max_window_layers": 28, "model_type": "llada2_moe", "moe_intermediate_size": 24,
        "moe_router_enable_expert_bias": True, "n_group": 4, "norm_head": False, "norm_softmax": False,
        "norm_topk_prob": True, "num_experts": 8, "num_experts_per_tok": 3, "num_shared_experts": 2,
        "output_dropout": 0.0, "output_router_logits": False, "pad_token_id": EOS, "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-6, "rope_scaling": None, "rotary_dim": 8, "routed_scaling_factor": 2.5,
        "router_dtype": "fp32", "score_function": "sigmoid", "tie_word_embeddings": False, "topk_group": 2,
        "torch_dtype": "float32", "use_bias": False, "use_cache": False, "use_qk_norm": True, "use_qkv_bias": False,
        "use_rmsnorm": True, "use_sliding_window": False, "using_split_qkv_in_self_attention": False}, "glm4_moe"),
}

LLADA = {"model.embed_tokens": "model.transformer.wte", "model.norm": "model.transformer.ln_f",
         "lm_head": "model.transformer.ff_out", "model.layers": "model.transformer.blocks",
         "input_layernorm": "attn_norm", "post_attention_layernorm": "ff_norm", "self_attn.o_proj": "attn_out",
         "self_attn.": "", "mlp.gate_proj": "ff_proj", "mlp.up_proj": "up_proj", "mlp.down_proj": "ff_out"}
LLADA2 = {"embed_tokens": "word_embeddings", "self_attn.o_proj": "attention.dense",
          "self_attn.q_norm": "attention.query_layernorm", "self_attn.k_norm": "attention.key_layernorm",
          "e_score_correction_bias": "expert_bias"}
MIXTURES = {"qwen3_moe": {"intermediate_size": 48, "moe_intermediate_size": 24, "head_dim": 8, "mlp_only_layers": [0],
                          "norm_topk_prob": False},
            "glm4_moe": {"n_routed_experts": 8, "n_shared_experts": 2, "use_qk_norm": True}}
"""Entries of a reference that the released layout has under other names."""


def saved(name: str, directory: Path, **changes: Any) -> transformers.PreTrainedModel:
    """Writes a case's directory, with `changes` to its config.json, and returns the reference of the same weights."""
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    entries, kind = CASES[name]
    sizes = {k: v for k, v in entries.items() if k in {
        *SIZES, "head_dim", "rms_norm_eps", "tie_word_embeddings", "num_experts", "num_experts_per_tok", "n_group",
        "topk_group", "moe_intermediate_size", "first_k_dense_replace", "routed_scaling_factor"}}
    sizes |= MIXTURES.get(kind, {})
    if kind == "llama":
        sizes = {**SIZES, "vocab_size": 112, "rms_norm_eps": 1e-5, "rope_theta": 5e5}
    theta = {"rope_type": "default", "rope_theta": sizes.pop("rope_theta")}
    theta |= {"partial_rotary_factor": 0.5} if kind == "glm4_moe" else {}
    config = transformers.AutoConfig.for_model(kind, rope_parameters=theta, pad_token_id=0, **sizes)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for tensor, weight in (*model.named_parameters(), *model.named_buffers()):
            if not tensor.endswith("inv_freq"):
                weight.copy_(torch.randn_like(weight) * 0.2 + (1.0 if tensor.endswith("norm.weight") else 0.0))
    with tempfile.TemporaryDirectory() as there:
        model.save_pretrained(there)        # with a tensor for each expert
        tensors = load_file(Path(there) / "model.safetensors")
    if kind == "llama":
        tensors = {renamed(k, LLADA): v for k, v in tensors.items()}
    if kind == "glm4_moe":
        for i in range(sizes["num_hidden_layers"]):
            layer = f"model.layers.{i}."
            tensors[f"{layer}attention.query_key_value.weight"] = torch.cat(
                [tensors.pop(f"{layer}self_attn.{x}_proj.weight") for x in "qkv"])
        tensors = {renamed(k, LLADA2): v for k, v in tensors.items()}
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps({**entries, **changes}))
    return model


def renamed(tensor: str, names: dict[str, str]) -> str:
    for old, new in names.items():
        tensor = tensor.replace(old, new)
    return tensor
