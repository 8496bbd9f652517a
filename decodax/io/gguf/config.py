"""Turns the metadata of a GGUF file into the entries of a `config.json`, which the families' readers take.

Names and meanings of the metadata are those of llama.cpp, which writes some numbers into tensors and leaves others out
where they follow from the architecture.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from decodax.io.files import CheckpointError
from decodax.io.gguf.reader import GgufFile

Factors = Mapping[str, np.ndarray]
"""Tensors of rope factors by name, as numbers."""


@dataclasses.dataclass(frozen=True)
class Architecture:
    """How an architecture of llama.cpp is read.

    Attributes:
        entries: adds the family's own entries to those that all families share.
        permuted: True if rows of queries and keys are stored in pairs of neighbours, for a rotation of neighbours; they
            are put back into halves.
        shifted: True if norms are stored with 1 added to their scales.
    """

    entries: Callable[[Metadata, dict[str, Any]], dict[str, Any]]
    permuted: bool = False
    shifted: bool = False


class Metadata:
    """The metadata of one architecture.

    Attributes:
        file: the file.
        name: name of the architecture.
    """

    def __init__(self, file: GgufFile):
        self.file, self.name = file, str(file.metadata.get("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        """Returns an entry of the architecture; of one number for each layer the one that they all are."""
        full = f"{self.name}.{key}"
        found = self.file.metadata.get(full, default)
        if isinstance(found, np.ndarray):
            if len(set(found.tolist())) != 1:
                raise CheckpointError(f"{self.file.path}: {full}: got {found.tolist()[:8]}, takes the same number for "
                                      "all layers")
            found = found[0].item()
        # Files hold 32-bit floats: 1e-5 is read as written in the configuration, not as 9.999999747378752e-06.
        return float(f"{found:.7g}") if isinstance(found, float) else found

    def need(self, key: str) -> Any:
        """Returns an entry of the architecture that the file must have."""
        found = self.get(key)
        if found is None:
            raise CheckpointError(f"{self.file.path}: lacks {self.name}.{key}, which the architecture requires")
        return found

    def count(self, key: str, default: int | None = None) -> int:
        """Returns an entry that is a whole number of at least 1. Without a default the file must have it."""
        found = self.need(key) if default is None else self.get(key, default)
        if not isinstance(found, int) or isinstance(found, bool) or found < 1:
            without = ": layers without attention are not supported" if found == 0 and "head_count" in key else ""
            raise CheckpointError(f"{self.file.path}: {self.name}.{key}: got {found!r}, takes a whole number of at "
                                  f"least 1{without}")
        return found

    @property
    def biased(self) -> bool:
        """True if queries have a bias."""
        return self.has("attn_q.bias") or self.has("attn_qkv.bias")

    def has(self, tensor: str) -> bool:
        """True if the first layer has a tensor of this name."""
        return f"blk.0.{tensor}" in self.file.tensors


def read_entries(file: GgufFile, factors: Factors) -> dict[str, Any]:
    """Returns the entries of a `config.json`.

    Args:
        file: the file.
        factors: its tensors named in `ROPE`, as numbers.

    Raises:
        CheckpointError: the architecture is not supported (the message names similar ones), or an entry is missing or
            not supported.
    """
    m = Metadata(file)
    if m.name not in ARCHITECTURES:
        near = difflib.get_close_matches(m.name, ARCHITECTURES, n=3, cutoff=0.4)
        raise CheckpointError(f"{file.path}: general.architecture: got {m.name!r}, "
                              f"{'near to ' + ', '.join(near) + '; ' if near else ''}supported are "
                              f"{', '.join(sorted(ARCHITECTURES))}")
    table = file.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise CheckpointError(f"{file.path}: lacks tensor token_embd.weight, or its shape is not that of a table")
    heads, width = m.count("attention.head_count"), m.count("embedding_length")
    head = m.count("attention.key_length", max(width // heads, 1))
    if (values := m.count("attention.value_length", head)) != head:
        raise CheckpointError(f"{file.path}: {m.name}.attention.value_length: got {values}, takes that of the keys, "
                              f"{head}")
    shared: dict[str, Any] = {
        "vocab_size": table.shape[0], "hidden_size": width, "intermediate_size": m.count("feed_forward_length"),
        "num_hidden_layers": m.count("block_count"), "num_attention_heads": heads,
        "num_key_value_heads": m.count("attention.head_count_kv", heads), "head_dim": head,
        "max_position_embeddings": m.count("context_length"), "rope_theta": m.get("rope.freq_base", 10_000.0),
        "tie_word_embeddings": "output.weight" not in file.tensors}
    for key, name in (("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
                      ("attention.layer_norm_epsilon", "layer_norm_eps")):
        if (eps := m.get(key)) is not None:
            shared[name] = eps
    turned = m.count("rope.dimension_count", head)
    if turned != head:
        shared["partial_rotary_factor"] = turned / head
    if (scaling := _scaling(m, factors)) is not None:
        shared["rope_scaling"] = scaling
    return ARCHITECTURES[m.name].entries(m, shared)


ROPE = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors with divisors of the rotary frequencies."""


def _scaling(m: Metadata, factors: Factors) -> dict[str, Any] | None:
    """Returns the entry `rope_scaling`, or None."""
    kind, attention = m.get("rope.scaling.type"), m.get("rope.scaling.attn_factor")
    context = m.count("context_length")
    trained = m.get("rope.scaling.original_context_length") or context
    listed = lambda name: [float(x) for x in factors[name]]
    if ROPE[0] in factors:      # Llama 3.1's scaling, as the divisors that it amounts to
        return {"rope_type": "longrope", "short_factor": listed(ROPE[0]), "long_factor": listed(ROPE[0]),
                "attention_factor": attention or 1.0, "original_max_position_embeddings": context}
    if ROPE[1] in factors and ROPE[2] in factors:
        return {"rope_type": "longrope", "long_factor": listed(ROPE[1]), "short_factor": listed(ROPE[2]),
                "attention_factor": attention or 1.0, "original_max_position_embeddings": trained}
    if kind == "yarn":
        for key, takes in (("yarn_ext_factor", 1), ("yarn_log_multiplier", 0)):
            if (given := m.get(f"rope.scaling.{key}", takes)) != takes:
                raise CheckpointError(f"{m.file.path}: {m.name}.rope.scaling.{key}: got {given}, takes {takes}")
        # Converters write the factor of cosine and sine under either name.
        own = {"attention_factor": m.get("rope.scaling.yarn_attn_factor", attention),
               "beta_fast": m.get("rope.scaling.yarn_beta_fast"), "beta_slow": m.get("rope.scaling.yarn_beta_slow")}
        return {"rope_type": "yarn", "factor": m.need("rope.scaling.factor"),
                "original_max_position_embeddings": trained} | {k: v for k, v in own.items() if v is not None}
    if kind == "linear" or (kind is None and m.get("rope.scale_linear")):
        factor = m.get("rope.scaling.factor") or m.get("rope.scale_linear") or m.need("rope.scaling.factor")
        return {"rope_type": "linear", "factor": factor}
    if kind in (None, "none"):
        return None
    raise CheckpointError(f"{m.file.path}: {m.name}.rope.scaling.type: got {kind!r}, supported are none, linear and "
                          "yarn, and longrope with its factors")


def _llama(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    if experts := m.get("expert_count"):
        return {**c, "model_type": "mixtral", "num_local_experts": experts, "sliding_window": None,
                "num_experts_per_tok": m.need("expert_used_count")}
    if m.biased and not m.has("attn_output.bias"):
        return _qwen2(m, c)                # such as converted Qwen models
    return {**c, "model_type": "llama", "attention_bias": m.biased, "mlp_bias": m.has("ffn_down.bias")}


def _qwen2(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    return {**c, "model_type": "qwen2"}


def _qwen3(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    return {**c, "model_type": "qwen3", "attention_bias": m.biased}


def _qwen3_moe(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    return {**_qwen3(m, c), "model_type": "qwen3_moe", "num_experts": m.need("expert_count"),
            "num_experts_per_tok": m.need("expert_used_count"), "norm_topk_prob": True,
            "moe_intermediate_size": m.need("expert_feed_forward_length")}


def _gemma(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    return {**c, "model_type": "gemma", "hidden_activation": "gelu_pytorch_tanh"}


def _gemma2(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    # The scale is not in the file: that of the 27B model, which has 46 layers, is by the width.
    scale = c["hidden_size"] // c["num_attention_heads"] if c["num_hidden_layers"] == 46 else c["head_dim"]
    return {**_gemma(m, c), "model_type": "gemma2", "query_pre_attn_scalar": scale,
            "sliding_window": m.get("attention.sliding_window", 4096),
            "attn_logit_softcapping": m.get("attn_logit_softcapping", 50.0),
            "final_logit_softcapping": m.get("final_logit_softcapping", 30.0)}


def _gemma3(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    scale = c["hidden_size"] // c["num_attention_heads"] if c["num_hidden_layers"] == 62 else c["head_dim"]
    return {**_gemma(m, c), "model_type": "gemma3_text", "query_pre_attn_scalar": scale,
            "rope_theta": m.get("rope.freq_base", 1e6), "rope_local_base_freq": m.get("rope.freq_base_swa", 1e4),
            "sliding_window": m.need("attention.sliding_window"),
            "sliding_window_pattern": m.get("attention.sliding_window_pattern", 6),
            "final_logit_softcapping": m.get("final_logit_softcapping"), "attn_logit_softcapping": None}


def _phi2(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    return {**c, "model_type": "phi", "hidden_act": "gelu_new"}


def _phi3(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    return {**c, "model_type": "phi3", "sliding_window": m.get("attention.sliding_window") or None}


def _gpt2(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    return {"model_type": "gpt2", "vocab_size": c["vocab_size"], "n_embd": c["hidden_size"],
            "n_head": c["num_attention_heads"], "n_layer": c["num_hidden_layers"],
            "n_inner": c["intermediate_size"], "n_positions": c["max_position_embeddings"],
            "layer_norm_epsilon": c.get("layer_norm_eps", 1e-5), "tie_word_embeddings": c["tie_word_embeddings"]}


def _stablelm(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    return {**c, "model_type": "stablelm", "use_qkv_bias": m.biased,
            "use_parallel_residual": not m.has("ffn_norm.weight"), "qk_layernorm": m.has("attn_q_norm.weight")}


def _granite(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    return {**c, "model_type": "granite", "attention_bias": m.biased,
            "embedding_multiplier": m.get("embedding_scale", 1.0), "residual_multiplier": m.get("residual_scale", 1.0),
            "attention_multiplier": m.get("attention.scale", c["head_dim"] ** -0.5),
            "logits_scaling": m.get("logit_scale", 1.0)}


def _olmo2(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    window = m.get("attention.sliding_window")
    return {**c, "model_type": "olmo3" if window else "olmo2", **({"sliding_window": window} if window else {})}


def _smollm3(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    return {**c, "model_type": "smollm3"}


def _cohere(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    return {**c, "model_type": "cohere", "logit_scale": m.need("logit_scale"),
            "use_qk_norm": m.has("attn_q_norm.weight")}


def _cohere2(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    return {**c, "model_type": "cohere2", "logit_scale": m.need("logit_scale"),
            "sliding_window": m.need("attention.sliding_window")}


def _glm4(m: Metadata, c: dict[str, Any]) -> dict[str, Any]:
    return {**c, "model_type": "glm4", "attention_bias": m.biased}


ARCHITECTURES = {
    "llama": Architecture(_llama, permuted=True), "qwen2": Architecture(_qwen2), "qwen2vl": Architecture(_qwen2),
    "qwen3": Architecture(_qwen3), "qwen3vl": Architecture(_qwen3), "qwen3moe": Architecture(_qwen3_moe),
    "gemma": Architecture(_gemma, shifted=True), "gemma2": Architecture(_gemma2, shifted=True),
    "gemma3": Architecture(_gemma3, shifted=True), "phi2": Architecture(_phi2), "phi3": Architecture(_phi3),
    "gpt2": Architecture(_gpt2), "stablelm": Architecture(_stablelm),
    "granite": Architecture(_granite, permuted=True), "olmo2": Architecture(_olmo2),
    "smollm3": Architecture(_smollm3, permuted=True), "command-r": Architecture(_cohere),
    "cohere2": Architecture(_cohere2), "glm4": Architecture(_glm4)}
"""The architectures that are read, by their names in `general.architecture`."""
