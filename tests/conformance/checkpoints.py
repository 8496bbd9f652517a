"""Tiny checkpoints in the layouts of released ones, the same on every machine: what the authors' code and decodax are
both run on.

    python -m tests.conformance.checkpoints DIRECTORY           # writes all of them, DIRECTORY/llada, ...

The weights come from NumPy's `RandomState`, whose streams are frozen, and are spread so that some predictions are
nearly certain and others are not: confidences from 0.1 to 0.999, which thresholds and entropy bounds tell apart.
"""

import dataclasses
import functools
import hashlib
import sys
import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np

from decodax.io.saving import save_model
from decodax.models.families import read_config
from decodax.models.names import flatten
from decodax.models.transformer import Transformer

MASK, EOS, VOCABULARY = 3, 2, 97
"""Ids that all of the diffusion checkpoints share."""

SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "rope_theta": 1e4,
         "hidden_act": "silu"}
QWEN = {**SIZES, "rms_norm_eps": 1e-6, "bos_token_id": EOS, "eos_token_id": EOS, "pad_token_id": EOS,
        "attention_dropout": 0.0, "rope_scaling": None, "max_window_layers": 2, "sliding_window": None,
        "use_sliding_window": False, "tie_word_embeddings": False, "torch_dtype": "float32"}


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """`config`: its config.json. `seed`: of its weights. `spread`: their standard deviation. `peak`: that of the
    output head, on which the confidences depend. `near`: another one, whose weights these are but for so much of their
    own."""

    config: dict[str, Any]
    seed: int = 0
    spread: float = 0.3
    peak: float = 0.8
    near: tuple[str, float] | None = None


CHECKPOINTS = {
    "llada": Checkpoint({
        "activation_type": "silu", "alibi": False, "architectures": ["LLaDAModelLM"], "attention_dropout": 0.0,
        "attention_layer_norm": False, "bias_for_layer_norm": False, "block_group_size": 1, "block_type": "llama",
        "d_model": 32, "embedding_dropout": 0.0, "embedding_size": VOCABULARY, "eos_token_id": EOS,
        "include_bias": False, "include_qkv_bias": False, "init_device": "cpu", "input_emb_norm": False,
        "layer_norm_type": "rms", "layer_norm_with_affine": True, "mask_token_id": MASK, "max_sequence_length": 256,
        "mlp_hidden_size": 48, "mlp_ratio": 4, "model_type": "llada", "multi_query_attention": None, "n_heads": 4,
        "n_kv_heads": 4, "n_layers": 2, "pad_token_id": EOS, "residual_dropout": 0.0, "rms_norm_eps": 1e-5,
        "rope": True, "rope_full_precision": True, "rope_theta": 1e4, "scale_logits": False, "torch_dtype": "float32",
        "use_cache": False, "vocab_size": VOCABULARY, "weight_tying": False}),
    "dream": Checkpoint({**QWEN, "architectures": ["DreamModel"], "model_type": "Dream", "mask_token_id": MASK,
                         "use_mrope": False}, seed=1),
    "fast-dllm-2": Checkpoint({**QWEN, "architectures": ["Fast_dLLM_QwenForCausalLM"], "model_type": "Fast_dLLM_Qwen",
                               "bd_size": 8, "mask_token_id": MASK, "layer_types": ["full_attention"] * 2}, seed=2),
    "sdlm": Checkpoint({**QWEN, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "block_size": 4,
                        "causal_attn": False, "text_mask_token_id": MASK, "text_mask_token": "<text_mask>"}, seed=3),
    "sdar": Checkpoint({**QWEN, "architectures": ["SDARForCausalLM"], "model_type": "sdar", "attention_bias": False,
                        "block_size": 4, "mask_token_id": MASK, "head_dim": 8, "fuse_cross_entropy": False}, seed=4),
    "sdar-8": Checkpoint({**QWEN, "architectures": ["SDARForCausalLM"], "model_type": "sdar", "attention_bias": False,
                          "block_size": 8, "mask_token_id": MASK, "head_dim": 8, "fuse_cross_entropy": False}, seed=7),
    "sdlm-causal": Checkpoint({**QWEN, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "block_size": 4,
                               "causal_attn": True, "text_mask_token_id": MASK, "text_mask_token": "<text_mask>"},
                              seed=8),
    "canvas": Checkpoint({**QWEN, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False,
                          "mlp_bias": False, "diffusion": {"mask": MASK, "attention": "causal-prefix", "block": 8}},
                         seed=9),
    "any-subset": Checkpoint({
        **QWEN, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False,
        "mlp_bias": False, "diffusion": {"mask": MASK, "attention": "any-subset"}}, seed=14),
    "llada2": Checkpoint({
        **SIZES, "architectures": ["LLaDA2MoeModelLM"], "attention_dropout": 0.0, "block_size": 8,
        "embedding_dropout": 0.0, "eos_token_id": EOS, "first_k_dense_replace": 1, "head_dim": 8,
        "mask_token_id": MASK, "model_type": "llada2_moe", "moe_intermediate_size": 24, "n_group": 4,
        "norm_head": False, "norm_topk_prob": True, "num_experts": 8, "num_experts_per_tok": 3,
        "num_shared_experts": 1, "output_dropout": 0.0, "pad_token_id": EOS, "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-6, "rope_scaling": None, "routed_scaling_factor": 2.5, "score_function": "sigmoid",
        "tie_word_embeddings": False, "topk_group": 2, "torch_dtype": "float32", "use_bias": False, "use_cache": False,
        "use_qk_norm": True, "use_qkv_bias": False}, seed=12),
    "llada-moe": Checkpoint({
        **{key: size for key, size in SIZES.items() if key != "intermediate_size"},
        "architectures": ["LLaDAMoEModelLM"], "attention_bias": False, "attention_dropout": 0.0, "clip_qkv": None,
        "dense_intermediate_size": 48, "eos_token_id": EOS, "expert_intermediate_size": 24, "mask_token_id": MASK,
        "model_type": "llada", "moe_layer_freq": [0, 1], "moe_router_enable_expert_bias": False,
        "moe_router_score_function": "softmax", "norm_topk_prob": None, "num_experts": 4, "num_experts_per_tok": 2,
        "output_router_logits": False, "pad_token_id": EOS, "partial_rotary_factor": 1.0, "qk_layernorm": True,
        "rms_norm_eps": 1e-5, "rope_scaling": None, "routed_scaling_factor": 1, "router_aux_loss_coef": 0.01,
        "shared_expert_intermediate_size": 20, "tie_word_embeddings": False, "torch_dtype": "float32",
        "use_cache": False}, seed=13),
    # dream's weights as an autoregressive model: one that agrees with it now and then
    "dream-causal": Checkpoint({**QWEN, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}, seed=1),
    "llama": Checkpoint({**QWEN, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False,
                         "mlp_bias": False}, seed=5),
    "llama-draft": Checkpoint({**QWEN, "architectures": ["LlamaForCausalLM"], "model_type": "llama",
                               "attention_bias": False, "mlp_bias": False, "num_hidden_layers": 1}, seed=6),
}
CHECKPOINTS["llada-shifted"] = Checkpoint({
    **CHECKPOINTS["llada"].config, "diffusion": {"mask": MASK, "shift": True}}, seed=10)
# a draft model that mostly agrees
CHECKPOINTS["llama-near"] = dataclasses.replace(CHECKPOINTS["llama"], seed=11, near=("llama", 0.06))
"""By name. A checkpoint that has cases must not change; add another one."""


def weights(name: str) -> dict[str, np.ndarray]:
    """The weights by dotted path, `[in, out]`."""
    c = CHECKPOINTS[name]
    leaves = flatten(Transformer(read_config(c.config)).abstract_params())

    def one(path: str, shape: tuple[int, ...]) -> np.ndarray:
        draw = np.random.RandomState((zlib.crc32(path.encode()) + c.seed) % 2**32).standard_normal(shape)
        if path.endswith("scale"):
            return (1 + 0.1 * draw).astype(np.float32)
        return (draw * (c.peak if path.startswith("lm_head") else c.spread)).astype(np.float32)

    own = {path: one(path, leaf.shape) for path, leaf in sorted(leaves.items())}
    if c.near is None:
        return own
    other, share = weights(c.near[0]), np.float32(c.near[1])
    return {path: other[path] + share * x for path, x in own.items()}


@functools.cache
def digest(name: str) -> str:
    """Of a checkpoint's weights, which its cases record."""
    h = hashlib.sha256()
    for path, x in weights(name).items():
        h.update(path.encode() + x.tobytes())
    return h.hexdigest()[:16]


def write(name: str, directory: Path) -> Path:
    """Writes a checkpoint into `directory / name` in its family's layout; returns that path."""
    c = CHECKPOINTS[name]
    model, found = Transformer(read_config(c.config)), weights(name)
    shapes = model.abstract_params()
    tree = jax.tree.unflatten(jax.tree.structure(shapes), [found[path] for path in flatten(shapes)])
    save_model(directory / name, model, tree, config=c.config)
    return directory / name


if __name__ == "__main__":
    for each in CHECKPOINTS:
        print(write(each, Path(sys.argv[1])), digest(each))
