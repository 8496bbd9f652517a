"""Writes small GGUF files with random weights, as llama.cpp's converter lays them out."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
from gguf import GGMLQuantizationType as Type

from decodax.io.gguf.architectures import ARCHITECTURES
from decodax.io.gguf.tensors import NAMES, WHOLE
from decodax.io.pieces import byte_of_char
from decodax.models.config import DecoderConfig
from decodax.models.families import read_config
from decodax.models.names import flatten
from decodax.models.transformer import Transformer

WIDTH, HEADS, HEAD, MLP, LAYERS, CONTEXT = 256, 4, 64, 512, 2, 128


@dataclasses.dataclass(frozen=True)
class Shape:
    """A small model of an architecture: its `config.json`, and metadata beside those that all have.

    Attributes:
        entries: the entries of its `config.json`.
        metadata: further metadata.
        permuted, shifted: see `decodax.io.gguf.config.Architecture`.
        fused: names of the tensors that hold several weights.
        tensors: further tensors.
    """

    entries: dict[str, Any]
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
    permuted: bool = False
    shifted: bool = False
    fused: tuple[str, ...] = ()
    tensors: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)


def entries(**more: Any) -> dict[str, Any]:
    return {"vocab_size": 260, "hidden_size": WIDTH, "intermediate_size": MLP, "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS, "num_key_value_heads": 2, "head_dim": HEAD, "rms_norm_eps": 1e-5,
            "max_position_embeddings": CONTEXT, "tie_word_embeddings": False, "rope_theta": 10_000.0, **more}


GEMMA3 = dict(sliding_window=8, sliding_window_pattern=6, rope_local_base_freq=1e4, query_pre_attn_scalar=HEAD,
              tie_word_embeddings=True, rope_theta=1e6)
BOTH = {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
GEMMA4 = {"attention.sliding_window": 8, "attention.key_length_swa": HEAD, "attention.value_length_swa": HEAD,
          "attention.key_length": 2 * HEAD, "attention.value_length": 2 * HEAD, "rope.freq_base": 1e6}
TURNED = {"rope_freqs.weight": np.array([1.0] * (HEAD // 4) + [1e30] * (HEAD * 3 // 4), np.float32)}
SHAPES = {
    "llama": Shape(entries(model_type="llama"), permuted=True),
    "qwen2": Shape(entries(model_type="qwen2")),
    "qwen3": Shape(entries(model_type="qwen3")),
    "gemma3": Shape(entries(model_type="gemma3_text", hidden_activation="gelu_pytorch_tanh", **GEMMA3),
                    {"attention.sliding_window": 8, "rope.freq_base": 1e6}, shifted=True),
    "gemma2": Shape(entries(model_type="gemma2", hidden_activation="gelu_pytorch_tanh", sliding_window=8,
                            query_pre_attn_scalar=HEAD, tie_word_embeddings=True),
                    {"attention.sliding_window": 8, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
                    shifted=True),
    "gemma": Shape(entries(model_type="gemma", hidden_activation="gelu_pytorch_tanh", tie_word_embeddings=True),
                   shifted=True),
    "qwen3moe": Shape(entries(model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2, norm_topk_prob=True,
                              moe_intermediate_size=256),
                      {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 256}),
    "mixtral": Shape(entries(model_type="mixtral", num_local_experts=4, num_experts_per_tok=2),
                     {"expert_count": 4, "expert_used_count": 2}, permuted=True),
    "granite": Shape(entries(model_type="granite", embedding_multiplier=12.0, residual_multiplier=0.25,
                             attention_multiplier=0.0625, logits_scaling=8.0),
                     {"embedding_scale": 12.0, "residual_scale": 0.25, "attention.scale": 0.0625, "logit_scale": 8.0},
                     permuted=True),
    "phi3": Shape(entries(model_type="phi3"), fused=("attn_qkv", "ffn_up")),
    "olmo2": Shape(entries(model_type="olmo2")),
    "smollm3": Shape({**entries(model_type="smollm3", tie_word_embeddings=True), "num_hidden_layers": 4},
                     permuted=True),
    "command-r": Shape(entries(model_type="cohere", logit_scale=0.0625, tie_word_embeddings=True, layer_norm_eps=1e-5),
                       {"logit_scale": 0.0625}),
    "cohere2": Shape(entries(model_type="cohere2", logit_scale=0.0625, sliding_window=8, tie_word_embeddings=True,
                             layer_norm_eps=1e-5), {"logit_scale": 0.0625, "attention.sliding_window": 8}),
    "stablelm": Shape(entries(model_type="stablelm", partial_rotary_factor=0.25, layer_norm_eps=1e-5),
                      {"rope.dimension_count": 16}),
    "glm4": Shape(entries(model_type="glm4", partial_rotary_factor=0.5, attention_bias=True),
                  {"rope.dimension_count": 32}, fused=("ffn_up",)),
    "phi2": Shape({**entries(model_type="phi", partial_rotary_factor=0.5, layer_norm_eps=1e-5, hidden_act="gelu_new"),
                   "num_key_value_heads": HEADS}, {"rope.dimension_count": 32}),
    "qwen2moe": Shape(entries(model_type="qwen2_moe", num_experts=4, num_experts_per_tok=2, norm_topk_prob=False,
                              moe_intermediate_size=256, shared_expert_intermediate_size=256),
                      {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 256,
                       "expert_shared_feed_forward_length": 256}),
    "olmoe": Shape({**entries(model_type="olmoe", num_experts=4, num_experts_per_tok=2), "num_key_value_heads": HEADS},
                   {"expert_count": 4, "expert_used_count": 2}),
    "gptneox": Shape({**entries(model_type="gpt_neox", partial_rotary_factor=0.25, layer_norm_eps=1e-5),
                      "num_key_value_heads": HEADS}, fused=("attn_qkv",)),
    "starcoder2": Shape(entries(model_type="starcoder2", norm_epsilon=1e-5)),
    "nemotron": Shape(entries(model_type="nemotron", norm_eps=1e-5), shifted=True),
    "arcee": Shape(entries(model_type="arcee"), permuted=True),
    "seed_oss": Shape(entries(model_type="seed_oss")),
    "exaone4": Shape({**entries(model_type="exaone4", sliding_window=8, sliding_window_pattern=2),
                      "layer_types": ["sliding_attention", "full_attention"]}, {
        "attention.sliding_window": 8, "attention.sliding_window_pattern": [True, False]}),
    "ernie4_5": Shape(entries(model_type="ernie4_5")),
    "ernie4_5-moe": Shape(entries(
        model_type="ernie4_5_moe", moe_num_experts=4, moe_k=2, moe_intermediate_size=256, moe_layer_start_index=1,
        moe_num_shared_experts=1), {
        "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 256, "leading_dense_block_count": 1,
        "interleave_moe_layer_step": 1, "expert_shared_count": 1}),
    "granitemoe": Shape(entries(model_type="granitemoe", num_local_experts=4, embedding_multiplier=12.0,
                                residual_multiplier=0.25, attention_multiplier=0.0625, logits_scaling=8.0), {
        "expert_count": 4, "expert_used_count": 2, "embedding_scale": 12.0, "residual_scale": 0.25,
        "attention.scale": 0.0625, "logit_scale": 8.0}, permuted=True),
    "glm4moe": Shape(entries(
        model_type="glm4_moe", partial_rotary_factor=0.5, n_routed_experts=4, num_experts_per_tok=2, use_qk_norm=True,
        moe_intermediate_size=256, first_k_dense_replace=1, routed_scaling_factor=1.5, attention_bias=True), {
        "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 256, "leading_dense_block_count": 1,
        "expert_shared_count": 1, "expert_weights_scale": 1.5, "expert_weights_norm": True}),
    "minimax-m2": Shape(entries(model_type="minimax_m2", rotary_dim=32, num_local_experts=4, num_experts_per_tok=2),
                        {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": MLP}),
    "hunyuan-dense": Shape(entries(model_type="hunyuan_v1_dense")),
    "gpt-oss": Shape(entries(
        model_type="gpt_oss", num_local_experts=4, num_experts_per_tok=2, sliding_window=8,
        rope_scaling={"rope_type": "default"}), {
        "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": MLP, "attention.sliding_window": 8}),
    "gemma4": Shape(entries(
        model_type="gemma4_text", sliding_window=8, rope_parameters=BOTH, global_head_dim=2 * HEAD, num_hidden_layers=4,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=32, vocab_size_per_layer_input=260, use_double_wide_mlp=True,
        layer_types=["sliding_attention", "full_attention"] * 2, tie_word_embeddings=True), {
        **GEMMA4, "attention.shared_kv_layers": 2, "embedding_length_per_layer_input": 32,
        "feed_forward_length": [MLP, MLP, 2 * MLP, 2 * MLP],
        "attention.sliding_window_pattern": [True, False, True, False]}, tensors=TURNED),
    "gemma4-moe": Shape(entries(
        model_type="gemma4_text", sliding_window=8, rope_parameters=BOTH, global_head_dim=2 * HEAD,
        hidden_size_per_layer_input=0,
        layer_types=["sliding_attention", "full_attention"], enable_moe_block=True, num_experts=4, top_k_experts=2,
        moe_intermediate_size=256, attention_k_eq_v=True, num_global_key_value_heads=1, tie_word_embeddings=True), {
        **GEMMA4, "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 256,
        "attention.sliding_window_pattern": [True, False], "attention.head_count_kv": [2, 1]},
        fused=("ffn_gate_up_exps",), tensors=TURNED),
    "gpt2": Shape({"model_type": "gpt2", "vocab_size": 260, "n_embd": WIDTH, "n_head": HEADS, "n_layer": LAYERS,
                   "n_inner": MLP, "n_positions": CONTEXT, "tie_word_embeddings": True}, fused=("attn_qkv",)),
}
"""Small models by architecture ("mixtral" is a llama with experts, "gemma4-moe" a gemma4 with them)."""
ALIASES = {"mixtral": "llama", "gemma4-moe": "gemma4"}


def network(name: str) -> tuple[Transformer, dict[str, Any]]:
    """Returns a small model and its weights by path."""
    model = Transformer(read_config(SHAPES[name].entries))
    draw = np.random.default_rng(len(name))
    shapes = flatten(model.abstract_params())
    spread = lambda path: (0.1 if path.endswith("scale") else 0.05, 1.0 if path.endswith("scale") and not (
        SHAPES[name].shifted) else 0.0)
    return model, {path: (draw.normal(size=leaf.shape) * spread(path)[0] + spread(path)[1]).astype(np.float32)
                   for path, leaf in shapes.items()}


def write(path: Path, name: str, weights: dict[str, np.ndarray], kind: Callable[[str], Type],
          change: Callable[[gguf.GGUFWriter], None] = lambda file: None, tokenizer: str = "gpt2",
          drop: str = "") -> dict[str, np.ndarray]:
    """Writes a file.

    Args:
        path: where.
        name: a key of `SHAPES`.
        weights: the weights by path.
        kind: the type of each tensor of two or more axes, by its name.
        change: adds metadata.
        tokenizer: "gpt2" or "llama".
        drop: a tensor to leave out.

    Returns:
        The weights as they are after packing.
    """
    shape, config = SHAPES[name], read_config(SHAPES[name].entries)
    arch = ALIASES.get(name, name)
    file = gguf.GGUFWriter(str(path), arch)
    _metadata(file, config, shape)
    (byte_level if tokenizer == "gpt2" else sentence_piece)(file)
    change(file)
    for tensor, data in shape.tensors.items():
        file.add_tensor(tensor, data)
    kept, tensors = {}, dict[str, np.ndarray]()
    for where, weight in weights.items():
        tensor, array = _tensor(where, weight, config, shape, ARCHITECTURES[arch].names)
        plain = array.ndim < 2 or any(part in tensor for part in ("norm", "gate_inp", ".bias"))
        own = Type.F32 if plain else kind(tensor)
        data = gguf.quants.quantize(array, own) if own != Type.BF16 else gguf.quants.quantize(array, Type.BF16)
        back = gguf.quants.dequantize(data, own).reshape(array.shape)
        kept[where] = _weight(where, back, config, shape)
        tensors[tensor] = data
        if tensor != drop and not shape.fused:
            _add(file, tensor, data, own)
    if shape.fused:
        _fuse(tensors, shape.fused)
        for tensor, data in tensors.items():
            own = kind(tensor) if data.ndim > 1 and "norm" not in tensor else Type.F32
            _add(file, tensor, data, own)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return kept


def _add(file: gguf.GGUFWriter, tensor: str, data: np.ndarray, own: Type) -> None:
    floats = own in (Type.F32, Type.F16)
    file.add_tensor(tensor, data, raw_dtype=None if floats else own)


def _fuse(tensors: dict[str, np.ndarray], wholes: tuple[str, ...]) -> None:
    """Joins the tensors that are parts of `wholes`, in place."""
    parts = {"attn_qkv": ("attn_q", "attn_k", "attn_v"), "ffn_up": ("ffn_gate", "ffn_up"),
             "ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps")}
    for i in range(LAYERS):
        for whole, tail in itertools.product(wholes, ("weight", "bias")):
            names = [f"blk.{i}.{part}.{tail}" for part in parts[whole]]
            if all(name in tensors for name in names):
                tensors[f"blk.{i}.{whole}.{tail}"] = np.concatenate(
                    [tensors.pop(name) for name in names], 1 if "exps" in whole else 0)


def _metadata(file: gguf.GGUFWriter, config: DecoderConfig, shape: Shape) -> None:
    rope = next((layer.rope for layer in config.layers if layer.rope is not None), None)
    rotates = rope is not None
    file.add_block_count(len(config.layers))
    file.add_context_length(config.context)
    file.add_embedding_length(config.width)
    file.add_head_count(config.heads)
    for key, add, value in (("feed_forward_length", file.add_feed_forward_length, config.mlp),
                            ("attention.head_count_kv", file.add_head_count_kv, config.kv_heads),
                            ("attention.key_length", file.add_key_length, config.head_dim),
                            ("attention.value_length", file.add_value_length, config.head_dim)):
        if key not in shape.metadata and (rotates or "length" not in key or "feed" in key):
            add(value)
    (file.add_layer_norm_rms_eps if config.norm.kind == "rms" else file.add_layer_norm_eps)(config.norm.eps)
    if rope is not None:
        file.add_rope_dimension_count(rope.width)
        file.add_rope_freq_base(shape.metadata.get("rope.freq_base", rope.theta))
    for key, value in shape.metadata.items():
        if key.startswith("rope."):
            continue
        add = {float: file.add_float32, bool: file.add_bool, list: file.add_array}.get(type(value), file.add_uint32)
        add(f"{file.arch}.{key}", value)


def _tensor(where: str, weight: np.ndarray, config: DecoderConfig, shape: Shape, own: Mapping[str, str]
            ) -> tuple[str, np.ndarray]:
    """Returns a weight's name and array in the file; `own` are the names of the architecture."""
    array = np.swapaxes(weight, -1, -2) if where.endswith("kernel") else weight
    if shape.shifted and where.endswith("scale"):
        array = array + 1
    module, leaf = where.rsplit(".", 1) if "." in where else (where, "")
    tail = "bias" if leaf == "bias" else "weight"
    if where in WHOLE or module in WHOLE:
        return WHOLE.get(where, f"{WHOLE.get(module)}.{tail}"), np.ascontiguousarray(array)
    _, index, rest = where.split(".", 2)
    if rest in own:
        return f"blk.{index}.{own[rest]}", np.ascontiguousarray(array)
    inner = rest.rsplit(".", 1)[0]
    if shape.permuted and inner in ("attn.q", "attn.k"):        # as in the converter
        heads = config.heads if inner == "attn.q" else config.kv_heads
        array = array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
    experts = "_exps" if array.ndim == 3 or (leaf == "bias" and array.ndim == 2) else ""
    return f"blk.{index}.{({**NAMES, **own})[inner]}{experts}.{tail}", np.ascontiguousarray(array)


def _weight(where: str, array: np.ndarray, config: DecoderConfig, shape: Shape) -> np.ndarray:
    """Returns the weight of an array in the file: the inverse of `_tensor`."""
    inner = where.rsplit(".", 1)[0].split(".", 2)[-1]
    if shape.permuted and inner in ("attn.q", "attn.k"):
        heads = config.heads if inner == "attn.q" else config.kv_heads
        array = array.reshape(heads, -1, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
    if shape.shifted and where.endswith("scale"):
        array = array - 1
    return np.swapaxes(array, -1, -2) if where.endswith("kernel") else array


SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def byte_level(file: gguf.GGUFWriter, special: Sequence[str] = SPECIAL,
               ids: Mapping[str, int] = {"bos": 1, "eos": 2, "padding": 2}) -> None:
    """Adds a byte-level BPE of 257 tokens after the special ones, and ids by name."""
    tokens = [*special, *sorted(byte_of_char()), "he"]
    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre("smollm")
    file.add_token_list(tokens)
    file.add_token_types([3 if i < len(special) else 1 for i in range(len(tokens))])
    file.add_token_merges(["h e"])
    for name, id in ids.items():
        file.add_uint32(f"tokenizer.ggml.{name}_token_id", id)
    file.add_add_bos_token(False)
    file.add_chat_template("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}")


def sentence_piece(file: gguf.GGUFWriter) -> None:
    """Adds a SentencePiece BPE of 260 tokens; bytes of which some have no token of their own."""
    pieces = ["▁", "h", "e", "l", "o", "he", "ll", "llo", "hello", "▁hello", "▁h", "lo"]
    bytes_ = [f"<0x{b:02X}>" for b in range(256)][:260 - 3 - len(pieces)]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *pieces]
    file.add_tokenizer_model("llama")
    file.add_tokenizer_pre("default")
    file.add_token_list(tokens)
    file.add_token_scores([0.0] * 3 + [0.0] * len(bytes_) + [-float(i) for i in range(len(pieces))])
    file.add_token_types([2, 3, 3, *[6] * len(bytes_), *[1] * len(pieces)])
    file.add_bos_token_id(1)
    file.add_eos_token_id(2)
    file.add_unk_token_id(0)


def mixed(tensor: str) -> Type:
    """A mix of types as in files: tables in Q8_0, values in Q5_1, others in Q4_0."""
    if "token_embd" in tensor or tensor.startswith("output"):
        return Type.Q8_0
    return Type.Q5_1 if "attn_v" in tensor else Type.Q4_0


def restored(model: Transformer, kept: dict[str, np.ndarray]) -> Any:
    """Returns weights by path as the pytree of a network."""
    shapes = model.abstract_params()
    return jax.tree.unflatten(jax.tree.structure(shapes), [jnp.asarray(kept[path]) for path in flatten(shapes)])
