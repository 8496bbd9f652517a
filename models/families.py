"""Reads a Hugging Face `config.json` as a `DecoderConfig`, with one short function for each model family.

Options and defaults are those of the families' reference implementations in transformers, and for diffusion models
those of the code released with them (`decodax.models.diffusion`). Older files omit entries that equal a default, and
have `rope_theta` and `rope_scaling` where newer ones have `rope_parameters`.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable
from typing import Any

from decodax.models.config import Activation, DecoderConfig, Experts, Layer, NormConfig, in_chunks
from decodax.models.fields import checked
from decodax.models.reading import Json, head_width, read_activation, read_layers, read_rope, read_shape
from decodax.models.rope import Chunks, Rope


def read_config(c: Json) -> DecoderConfig:
    """Returns the decoder that a `config.json` describes.

    Raises:
        ValueError: `model_type` is not a supported family (the message names similar ones), an entry is missing, of the
            wrong type or out of its range, or an option is not supported here.
    """
    known = [*FAMILIES, *WITH_IMAGES]
    # Checked only for known families: the entries of another family may have other types.
    if str(c.get("model_type")) in known:
        c = text_part(checked(c))
    kind = c.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        near = difflib.get_close_matches(str(kind), known, n=3, cutoff=0.5)
        raise ValueError(f"model_type: got {kind!r} (architectures {c.get('architectures')}), "
                         f"{'near to ' + ', '.join(near) + '; ' if near else ''}supported are {', '.join(known)}")
    try:
        return FAMILIES[kind](c)
    except KeyError as e:
        raise ValueError(f"config.json of a {kind} model lacks {e}") from None


def text_part(c: Json) -> Json:
    """Returns the configuration of the language model inside a multimodal one; other configurations are returned
    unchanged.

    >>> text_part({"model_type": "gemma3", "text_config": {"hidden_size": 8}, "vision_config": {}, "eos_token_id": 1})
    {'model_type': 'gemma3_text', 'eos_token_id': 1, 'hidden_size': 8}
    """
    kind = str(c.get("model_type"))
    if kind not in WITH_IMAGES:
        return c
    inner = c.get("text_config") or {}
    family = inner.get("model_type", WITH_IMAGES[kind])
    own = {key: value for key, value in c.items() if not key.endswith("_config") and key != "architectures"}
    # The whole model's entry decides about tying the head, whatever text_config says.
    tied = {"tie_word_embeddings": c["tie_word_embeddings"]} if "tie_word_embeddings" in c else {}
    found = {**own, **inner, **tied, "model_type": TEXT_PARTS.get(family, family)}
    for key in ("rope_scaling", "rope_parameters"):
        if "mrope_section" in (found.get(key) or {}):
            # A position has time, height and width: for text they are equal, and the rope is the usual one.
            found[key] = {**{k: v for k, v in found[key].items() if not k.startswith("mrope")}, "rope_type": "default"}
            found[key].pop("type", None)
    return found


def _llama(c: Json) -> DecoderConfig:
    bias = c.get("attention_bias", False)
    shape = read_shape(c, qkv_bias=bias, out_bias=bias, mlp_bias=c.get("mlp_bias", False))
    return DecoderConfig(layers=read_layers(c, shape), **shape)


def _mistral(c: Json) -> DecoderConfig:
    shape = read_shape(c)
    return DecoderConfig(layers=read_layers(c, shape, sliding=c.get("sliding_window", 4096)), **shape)


def _qwen2(c: Json) -> DecoderConfig:
    if "text_mask_token_id" in c:
        _unslid(c)                          # SDLM
    shape = read_shape(c, qkv_bias=True)
    return DecoderConfig(layers=_qwen_layers(c, shape), **shape)


def _qwen3(c: Json) -> DecoderConfig:
    bias = c.get("attention_bias", False)
    shape = read_shape(c, qkv_bias=bias, out_bias=bias, qk_norm="head", head_dim=c.get("head_dim", 128))
    return DecoderConfig(layers=_qwen_layers(c, shape), **shape)


def _mixtral(c: Json) -> DecoderConfig:
    c = {"rope_theta": 1e6, "rms_norm_eps": 1e-5, **c}
    shape = read_shape(c)
    layers = read_layers(c, shape, sliding=c.get("sliding_window"))
    experts = _experts(c.get("num_local_experts", 8), c.get("num_experts_per_tok", 2), shape["mlp"])
    return DecoderConfig(layers=_with_experts(layers, experts), **shape)


def _qwen3_moe(c: Json) -> DecoderConfig:
    dense = _qwen3(c if "head_dim" in c else {**c, "head_dim": head_width(c, "hidden_size", "num_attention_heads")})
    count = c.get("num_experts", c.get("num_local_experts", 128))       # newer files have the second key
    experts = _experts(count, c.get("num_experts_per_tok", 8), c.get("moe_intermediate_size", 768),
                       c.get("norm_topk_prob", False))
    plain, step = c.get("mlp_only_layers", []), c.get("decoder_sparse_step", 1)
    layers = _with_experts(dense.layers, experts, lambda i: i not in plain and (i + 1) % step == 0)
    return dataclasses.replace(dense, layers=layers)


def _experts(count: int, chosen: int, width: int, normalise: bool = True) -> Experts:
    if chosen > count:
        raise ValueError(f"num_experts_per_tok: got {chosen}, takes at most the number of experts, {count}")
    return Experts(count, chosen, width, normalise)


def _with_experts(layers: tuple[Layer, ...], experts: Experts,
                  sparse: Callable[[int], bool] = lambda i: True) -> tuple[Layer, ...]:
    return tuple(dataclasses.replace(layer, experts=experts) if sparse(i) else layer for i, layer in enumerate(layers))


def _qwen_layers(c: Json, shape: Json) -> tuple[Layer, ...]:
    sliding = c.get("sliding_window", 4096) if c.get("use_sliding_window", False) else None
    first = c.get("max_window_layers", 28)
    layers = read_layers(c, shape, sliding=sliding, slides=lambda i: i >= first)
    if (given := c.get("dual_chunk_attention_config")) is None:
        return layers
    # For the released files of Qwen2.5-1M and Qwen3-2507; defaults are vLLM's.
    chunks = Chunks(given.get("chunk_size", 8192), given.get("local_size", 1024),
                    given.get("original_max_position_embeddings") or None)
    if sliding is not None:
        raise ValueError("use_sliding_window: got True with a dual_chunk_attention_config, takes False")
    return in_chunks(layers, chunks)


def _gemma_shape(c: Json, **changes: Any) -> dict[str, Any]:
    if c.get("use_bidirectional_attention"):
        raise ValueError("use_bidirectional_attention: got True, a decoder takes False")
    # "gelu" in the first Gemma files means the tanh form; hidden_activation, where present, says so.
    key = "hidden_activation" if "hidden_activation" in c else "hidden_act"
    act: Activation = "gelu_tanh" if c.get(key, "gelu") == "gelu" else read_activation(c, key, "gelu")
    bias = c.get("attention_bias", False)
    norm = NormConfig(eps=c.get("rms_norm_eps", 1e-6), unit_offset=True)
    return read_shape(c, norm=norm, activation=act, tied=c.get("tie_word_embeddings", True), qkv_bias=bias,
                      out_bias=bias, embed_scale=c["hidden_size"] ** 0.5, head_dim=c.get("head_dim", 256), **changes)


def _gemma(c: Json) -> DecoderConfig:
    shape = _gemma_shape(c)
    return DecoderConfig(layers=read_layers(c, shape), **shape)


def _gemma2(c: Json) -> DecoderConfig:
    shape = _gemma_shape(c, block="sandwich", attention_softcap=c.get("attn_logit_softcapping", 50.0),
                         logit_softcap=c.get("final_logit_softcapping", 30.0))
    layers = read_layers(c, shape, sliding=c.get("sliding_window", 4096), slides=lambda i: i % 2 == 0,
                         scale=c.get("query_pre_attn_scalar", 256) ** -0.5)
    return DecoderConfig(layers=layers, **shape)


def _gemma3(c: Json) -> DecoderConfig:
    c = {**GEMMA3, **c}
    shape = _gemma_shape(c, block="sandwich", qk_norm="head", attention_softcap=c.get("attn_logit_softcapping"),
                         logit_softcap=c.get("final_logit_softcapping"))
    period = c.get("sliding_window_pattern", 6)
    new = c.get("rope_parameters") or {}
    everywhere = {"rope_theta": c.get("rope_theta", 1e6), **c.get("rope_scaling", {}), **new.get("full_attention", {})}
    local = {"rope_theta": c.get("rope_local_base_freq", 1e4), **new.get("sliding_attention", {})}
    near = read_rope({**c, "rope_parameters": local, "rope_scaling": None}, shape)
    layers = read_layers({**c, "rope_parameters": everywhere}, shape, sliding=c.get("sliding_window", 4096), near=near,
                         slides=lambda i: (i + 1) % period != 0, scale=c.get("query_pre_attn_scalar", 256) ** -0.5)
    return DecoderConfig(layers=layers, **shape)


GEMMA3 = {"vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
          "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131_072}
"""Defaults of entries that the text_config of released multimodal files lacks."""


def _phi3(c: Json) -> DecoderConfig:
    shape = read_shape(c, norm=NormConfig(eps=c.get("rms_norm_eps", 1e-5)))
    return DecoderConfig(layers=read_layers(c, shape, sliding=c.get("sliding_window")), **shape)


def _olmo2(c: Json) -> DecoderConfig:
    bias = c.get("attention_bias", False)
    shape = read_shape(c, norm=NormConfig(eps=c.get("rms_norm_eps", 1e-5)), block="post", qk_norm="full", qkv_bias=bias,
                       out_bias=bias)
    return DecoderConfig(layers=read_layers(c, shape), **shape)


def _olmo3(c: Json) -> DecoderConfig:
    plain, new = _olmo2(c), c.get("rope_parameters") or {}
    shape = {"head_dim": plain.head_dim, "context": plain.context}
    theta = {"rope_theta": c.get("rope_theta", 5e5)}
    everywhere = {**theta, **c.get("rope_scaling", {}), **new.get("full_attention", {})}
    near = read_rope({"rope_parameters": {**theta, **new.get("sliding_attention", {})}}, shape)
    layers = read_layers({**c, "rope_parameters": everywhere}, shape, sliding=c.get("sliding_window", 4096), near=near,
                         slides=lambda i: (i + 1) % 4 != 0)
    return dataclasses.replace(plain, layers=layers)


def _smollm3(c: Json) -> DecoderConfig:
    c = {"tie_word_embeddings": True, "rope_theta": 2e6, **c}
    period, count = c.get("no_rope_layer_interval", 4), c["num_hidden_layers"]
    rotated = c.get("no_rope_layers") or [int((i + 1) % period != 0) for i in range(count)]
    if len(rotated) < count:
        raise ValueError(f"no_rope_layers: got {len(rotated)} entries for num_hidden_layers = {count}")
    sliding = c.get("sliding_window") if c.get("use_sliding_window", False) else None
    plain = _llama(c)
    shape = {"head_dim": plain.head_dim, "context": plain.context}
    layers = read_layers(c, shape, sliding=sliding, slides=lambda i: not rotated[i])
    still = tuple(dataclasses.replace(layer, rope=None) for layer in layers)
    return dataclasses.replace(plain, layers=tuple((still[i], layers[i])[rotated[i]] for i in range(count)))


def _glm(c: Json, **changes: Any) -> DecoderConfig:
    c = {"partial_rotary_factor": 0.5, "num_key_value_heads": 2, **c}
    shape = read_shape(c, norm=NormConfig(eps=c.get("rms_norm_eps", 1.5625e-7)), qkv_bias=c.get("attention_bias", True),
                       head_dim=c.get("head_dim", 128), **changes)
    return DecoderConfig(layers=read_layers(c, shape, interleaved=True), **shape)


def _glm4(c: Json) -> DecoderConfig:
    return _glm(c, block="sandwich")


def _cohere_shape(c: Json, **changes: Any) -> dict[str, Any]:
    bias = c.get("attention_bias", False)
    return read_shape(c, norm=NormConfig("layer", c.get("layer_norm_eps", 1e-5)), block="parallel", qkv_bias=bias,
                      out_bias=bias, tied=c.get("tie_word_embeddings", True), logit_scale=c.get("logit_scale", 0.0625),
                      context=c.get("max_position_embeddings", 8192), **changes)


def _cohere(c: Json) -> DecoderConfig:
    shape = _cohere_shape(c, qk_norm="per_head" if c.get("use_qk_norm", False) else None)
    return DecoderConfig(layers=read_layers({"rope_theta": 5e5, **c}, shape, interleaved=True), **shape)


def _cohere2(c: Json) -> DecoderConfig:
    shape, period = _cohere_shape(c), c.get("sliding_window_pattern", 4)
    layers = read_layers(c, shape, sliding=c.get("sliding_window", 4096), slides=lambda i: (i + 1) % period != 0,
                         interleaved=True)
    # Only layers with a sliding window rotate.
    layers = tuple(layer if layer.sliding else dataclasses.replace(layer, rope=None) for layer in layers)
    return DecoderConfig(layers=layers, **shape)


def _phi(c: Json) -> DecoderConfig:
    if c.get("tie_word_embeddings"):
        raise ValueError("tie_word_embeddings: got True, a head with a bias takes False")
    norm = NormConfig("layer", c.get("layer_norm_eps", 1e-5), bias=True)
    shape = read_shape(c, norm=norm, block="parallel", gated=False, qkv_bias=True, out_bias=True, mlp_bias=True,
                       head_bias=True, activation=read_activation(c, "hidden_act", "gelu_new"),
                       qk_norm="head" if c.get("qk_layernorm", False) else None)
    return DecoderConfig(layers=read_layers({"partial_rotary_factor": 0.5, **c}, shape), **shape)


def _stablelm(c: Json) -> DecoderConfig:
    eps = c.get("layer_norm_eps", 1e-5)
    shape = read_shape(c, norm=NormConfig("layer", eps, bias=True), qkv_bias=c.get("use_qkv_bias", False),
                       block="parallel" if c.get("use_parallel_residual", False) else "pre",
                       qk_norm="per_head" if c.get("qk_layernorm", False) else None,
                       qk_norm_kind=NormConfig("layer", eps) if c.get("qk_layernorm", False) else None)
    return DecoderConfig(layers=read_layers({"partial_rotary_factor": 0.25, **c}, shape), **shape)


def _granite(c: Json) -> DecoderConfig:
    bias = c.get("attention_bias", False)
    shape = read_shape(c, qkv_bias=bias, out_bias=bias, mlp_bias=c.get("mlp_bias", False),
                       embed_scale=float(c.get("embedding_multiplier", 1.0)),
                       logit_scale=1 / c.get("logits_scaling", 1.0),
                       residual_scale=float(c.get("residual_multiplier", 1.0)))
    return DecoderConfig(layers=read_layers(c, shape, scale=float(c.get("attention_multiplier", 1.0))), **shape)


def _gpt2(c: Json) -> DecoderConfig:
    if c.get("add_cross_attention"):
        raise ValueError("add_cross_attention: got True, a decoder takes False")
    width, heads, head_dim = c["n_embd"], c["n_head"], head_width(c, "n_embd", "n_head")
    scale = head_dim ** -0.5 if c.get("scale_attn_weights", True) else 1.0
    by_layer = c.get("scale_attn_by_inverse_layer_idx", False)
    return DecoderConfig(
        vocab=c["vocab_size"], width=width, heads=heads, kv_heads=heads, head_dim=head_dim,
        mlp=c.get("n_inner") or 4 * width, context=c["n_positions"], learned_positions=c["n_positions"],
        layers=tuple(Layer(scale=scale / (i + 1) if by_layer else scale) for i in range(c["n_layer"])),
        norm=NormConfig("layer", c.get("layer_norm_epsilon", 1e-5), bias=True), gated=False,
        activation=read_activation(c, "activation_function", "gelu_new"), tied=c.get("tie_word_embeddings", True),
        qkv_bias=True, out_bias=True, mlp_bias=True)


def _dream(c: Json) -> DecoderConfig:
    return _qwen2(_unslid(c))


def _sdar(c: Json) -> DecoderConfig:
    return _qwen3(_unslid(c))


def _unslid(c: Json) -> Json:
    if c.get("dual_chunk_attention_config"):
        raise ValueError("dual_chunk_attention_config: got one, takes none for a masked-diffusion model, whose "
                         "attention is bidirectional")
    if c.get("use_sliding_window"):
        raise ValueError("use_sliding_window: got True, takes False for a masked-diffusion model, whose attention is "
                         "bidirectional")
    return c


LLADA = {"alibi": (False, False), "attention_layer_norm": (False, False), "bias_for_layer_norm": (False, False),
         "block_group_size": (1, 1), "block_type": ("sequential", "llama"), "include_bias": (False, False),
         "layer_norm_type": ("default", "rms"), "layer_norm_with_affine": (True, True), "rope": (False, True)}
"""Options of LLaDA's class, which is OLMo's: the default of a missing one, and the value of the released models."""


def _llada(c: Json) -> DecoderConfig:
    for name, (default, taken) in LLADA.items():
        got = default if c.get(name) is None else c[name]
        if got != taken:
            raise ValueError(f"{name}: got {got!r}, supported is {taken!r}")
    width, heads, head_dim = c["d_model"], c["n_heads"], head_width(c, "d_model", "n_heads")
    rope = Rope(head_dim, float(c.get("rope_theta", 10_000.0)))
    return DecoderConfig(
        vocab=c.get("embedding_size") or c["vocab_size"], width=width, heads=heads, head_dim=head_dim,
        kv_heads=c.get("n_kv_heads") or (1 if c.get("multi_query_attention") else heads),
        mlp=c.get("mlp_hidden_size") or int(c.get("mlp_ratio", 4) * width), layers=(Layer(rope),) * c["n_layers"],
        context=c.get("max_sequence_length", 1024), norm=NormConfig(eps=c.get("rms_norm_eps", 1e-5)),
        activation=read_activation(c, "activation_type", "swiglu"), qkv_bias=bool(c.get("include_qkv_bias")),
        tied=c.get("weight_tying", True), embed_scale=width ** 0.5 if c.get("input_emb_norm") else 1.0,
        logit_scale=width ** -0.5 if c.get("scale_logits") else 1.0)


FAMILIES: dict[str, Callable[[Json], DecoderConfig]] = {
    "cohere": _cohere, "cohere2": _cohere2, "gemma": _gemma, "gemma2": _gemma2, "gemma3_text": _gemma3, "glm": _glm,
    "glm4": _glm4, "gpt2": _gpt2, "granite": _granite, "llama": _llama, "ministral": _mistral, "mistral": _mistral,
    "mixtral": _mixtral, "olmo2": _olmo2, "olmo3": _olmo3, "phi": _phi, "phi3": _phi3, "qwen2": _qwen2,
    "qwen3": _qwen3, "qwen3_moe": _qwen3_moe,
    "smollm3": _smollm3, "stablelm": _stablelm, "Dream": _dream, "Fast_dLLM_Qwen": _dream, "llada": _llada,
    "sdar": _sdar,
}
"""Reader of each family, by `model_type`."""

WITH_IMAGES = {"gemma3": "gemma3_text", "mistral3": "mistral", "qwen2_vl": "qwen2", "qwen2_5_vl": "qwen2"}
"""Multimodal families, and the family of their language model if text_config does not name one."""

TEXT_PARTS = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2"}
"""Families by the names that such a text_config uses."""
