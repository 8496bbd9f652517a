"""Architectures of llama.cpp for masked diffusion models. Their files hold the mask token beside the tokenizer, and
whether logits predict the next position."""

from __future__ import annotations

from typing import Any

from decodax.io.files import CheckpointError
from decodax.io.gguf.metadata import Architecture, Metadata
from decodax.io.gguf.shared import experts


def _masked(m: Metadata, kind: str, shift: bool) -> dict[str, Any]:
    """Returns the entries of a family that reads masks; `shift` is whether its logits predict the next position.

    Raises:
        CheckpointError: the file says otherwise.
    """
    # As in llama.cpp, logits predict the next position unless the file denies it.
    if (got := m.file.metadata.get("diffusion.shift_logits", True)) != shift:
        raise CheckpointError(f"{m.file.path}: diffusion.shift_logits: got {got}, takes {shift} for {m.name}")
    mask = m.file.metadata.get("tokenizer.ggml.mask_token_id")
    return {"model_type": kind, **({} if mask is None else {"mask_token_id": int(mask)})}


def _dream(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    return {**c, **_masked(m, "Dream", True)}


def _llada(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    return {**_masked(m, "llada", False), "vocab_size": c["vocab_size"], "d_model": c["hidden_size"],
            "n_heads": c["num_attention_heads"], "n_kv_heads": c["num_key_value_heads"],
            "n_layers": c["num_hidden_layers"], "mlp_hidden_size": c["intermediate_size"],
            "max_sequence_length": c["max_position_embeddings"], "rope_theta": c["rope_theta"], "rope": True,
            "rms_norm_eps": c["rms_norm_eps"], "weight_tying": c["tie_word_embeddings"], "activation_type": "silu",
            "include_qkv_bias": m.biased, "block_type": "llama", "layer_norm_type": "rms"}


def _llada_moe(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    mixture = experts(m)
    width = mixture.pop("moe_intermediate_size")
    return {**c, **_masked(m, "llada", False), **mixture, "expert_intermediate_size": width,
            "dense_intermediate_size": c["intermediate_size"], "qk_layernorm": m.has("attn_q_norm.weight"),
            "moe_layer_freq": list(map(int, m.mixes())), "attention_bias": m.biased}


DIFFUSION: dict[str, Architecture] = {
    "dream": Architecture(_dream), "llada": Architecture(_llada, permuted=True), "llada-moe": Architecture(_llada_moe)}
"""Architectures by their names in `general.architecture`."""
