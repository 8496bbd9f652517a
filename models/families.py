"""Hugging Face `config.json` to `DecoderConfig`, one short function a model family.

The facts are those of the families' reference implementations in transformers (for the diffusion models, of the code
that is released with them: `decodax.models.diffusion`), defaults included: older files leave
out what equals a default, and write `rope_theta` and `rope_scaling` where newer ones write `rope_parameters`.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Mapping
from typing import Any

from decodax.models.config import Activation, DecoderConfig, Layer, NormConfig
from decodax.models.fields import checked
from decodax.models.rope import Dynamic, Linear, Llama3, LongRope, Rope, Scaling, Yarn, mscale

Json = Mapping[str, Any]

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh"}


def read_config(c: Json) -> DecoderConfig:
    """The decoder that a `config.json` describes.

    Raises:
        ValueError: `model_type` is not a supported family (the message names the near ones), an entry is missing, of
            the wrong type or out of its range, or an option has no counterpart here.
    """
    c = text_part(checked(c))
    kind = c.get("model_type")
    if kind not in FAMILIES:
        known = [*FAMILIES, *WITH_IMAGES]
        near = difflib.get_close_matches(str(kind), known, n=3, cutoff=0.5)
        raise ValueError(f"model_type: got {kind!r} (architectures {c.get('architectures')}), "
                         f"{'near to ' + ', '.join(near) + '; ' if near else ''}supported are {', '.join(known)}")
    try:
        return FAMILIES[kind](c)
    except KeyError as e:
        raise ValueError(f"config.json of a {kind} model lacks {e}") from None


def text_part(c: Json) -> Json:
    """The configuration of the language model inside one that also sees images; of any other model `c` itself.

    >>> text_part({"model_type": "gemma3", "text_config": {"hidden_size": 8}, "vision_config": {}, "eos_token_id": 1})
    {'model_type': 'gemma3_text', 'eos_token_id': 1, 'hidden_size': 8}
    """
    kind = str(c.get("model_type"))
    if kind not in WITH_IMAGES:
        return c
    inner = c.get("text_config") or {}
    family = inner.get("model_type", WITH_IMAGES[kind])
    own = {key: value for key, value in c.items() if not key.endswith("_config") and key != "architectures"}
    # the whole model ties its head, or does not, whatever text_config says
    tied = {"tie_word_embeddings": c["tie_word_embeddings"]} if "tie_word_embeddings" in c else {}
    found = {**own, **inner, **tied, "model_type": TEXT_PARTS.get(family, family)}
    for key in ("rope_scaling", "rope_parameters"):
        if "mrope_section" in (found.get(key) or {}):
            # a position in time, height and width: for text they are one, and the rope is the usual one
            found[key] = {**{k: v for k, v in found[key].items() if not k.startswith("mrope")}, "rope_type": "default"}
            found[key].pop("type", None)
    return found


def _shape(c: Json, **changes: Any) -> dict[str, Any]:
    """The fields that most families share, from their common names."""
    heads = c["num_attention_heads"]
    kv_heads = c.get("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads: got {heads}, not a multiple of num_key_value_heads = {kv_heads}")
    head_dim = changes.get("head_dim") or c.get("head_dim") or _divided(c, "hidden_size", "num_attention_heads")
    return {
        "vocab": c["vocab_size"], "width": c["hidden_size"], "mlp": c["intermediate_size"], "heads": heads,
        "kv_heads": kv_heads, "head_dim": head_dim,
        "context": c.get("max_position_embeddings", 2048), "norm": NormConfig(eps=c.get("rms_norm_eps", 1e-6)),
        "activation": changes.get("activation") or _activation(c, "hidden_act", "silu"),
        "tied": c.get("tie_word_embeddings", False), **changes,
    }


def _divided(c: Json, width: str, heads: str) -> int:
    """The width of a head where it is not given."""
    if c[width] % c[heads]:
        raise ValueError(f"{heads}: got {c[heads]}, which does not divide {width} = {c[width]}")
    return c[width] // c[heads]


def _llama(c: Json) -> DecoderConfig:
    bias = c.get("attention_bias", False)
    shape = _shape(c, qkv_bias=bias, out_bias=bias, mlp_bias=c.get("mlp_bias", False))
    return DecoderConfig(layers=_layers(c, shape), **shape)


def _mistral(c: Json) -> DecoderConfig:
    shape = _shape(c)
    return DecoderConfig(layers=_layers(c, shape, sliding=c.get("sliding_window", 4096)), **shape)


def _qwen2(c: Json) -> DecoderConfig:
    if "text_mask_token_id" in c:
        _unslid(c)                          # SDLM
    shape = _shape(c, qkv_bias=True)
    return DecoderConfig(layers=_qwen_layers(c, shape), **shape)


def _qwen3(c: Json) -> DecoderConfig:
    bias = c.get("attention_bias", False)
    shape = _shape(c, qkv_bias=bias, out_bias=bias, qk_norm="head", head_dim=c.get("head_dim", 128))
    return DecoderConfig(layers=_qwen_layers(c, shape), **shape)


def _qwen_layers(c: Json, shape: Json) -> tuple[Layer, ...]:
    sliding = c.get("sliding_window", 4096) if c.get("use_sliding_window", False) else None
    first = c.get("max_window_layers", 28)
    return _layers(c, shape, sliding=sliding, slides=lambda i: i >= first)


def _gemma_shape(c: Json, **changes: Any) -> dict[str, Any]:
    if c.get("use_bidirectional_attention"):
        raise ValueError("use_bidirectional_attention: got True, a decoder takes False")
    # "gelu" in the first Gemma files means the tanh form; hidden_activation, where present, says so
    key = "hidden_activation" if "hidden_activation" in c else "hidden_act"
    act: Activation = "gelu_tanh" if c.get(key, "gelu") == "gelu" else _activation(c, key, "gelu")
    bias = c.get("attention_bias", False)
    norm = NormConfig(eps=c.get("rms_norm_eps", 1e-6), unit_offset=True)
    return _shape(c, norm=norm, activation=act, tied=c.get("tie_word_embeddings", True), qkv_bias=bias,
                  out_bias=bias, embed_scale=c["hidden_size"] ** 0.5, head_dim=c.get("head_dim", 256), **changes)


def _gemma(c: Json) -> DecoderConfig:
    shape = _gemma_shape(c)
    return DecoderConfig(layers=_layers(c, shape), **shape)


def _gemma2(c: Json) -> DecoderConfig:
    shape = _gemma_shape(c, block="sandwich", attention_softcap=c.get("attn_logit_softcapping", 50.0),
                         logit_softcap=c.get("final_logit_softcapping", 30.0))
    return DecoderConfig(layers=_layers(c, shape, sliding=c.get("sliding_window", 4096), slides=lambda i: i % 2 == 0,
                                        scale=c.get("query_pre_attn_scalar", 256) ** -0.5), **shape)


def _gemma3(c: Json) -> DecoderConfig:
    c = {**GEMMA3, **c}
    shape = _gemma_shape(c, block="sandwich", qk_norm="head", attention_softcap=c.get("attn_logit_softcapping"),
                         logit_softcap=c.get("final_logit_softcapping"))
    period = c.get("sliding_window_pattern", 6)
    new = c.get("rope_parameters") or {}
    everywhere = {"rope_theta": c.get("rope_theta", 1e6), **c.get("rope_scaling", {}), **new.get("full_attention", {})}
    local = {"rope_theta": c.get("rope_local_base_freq", 1e4), **new.get("sliding_attention", {})}
    near = _rope({**c, "rope_parameters": local, "rope_scaling": None}, shape)
    layers = _layers({**c, "rope_parameters": everywhere}, shape, sliding=c.get("sliding_window", 4096), near=near,
                     slides=lambda i: (i + 1) % period != 0, scale=c.get("query_pre_attn_scalar", 256) ** -0.5)
    return DecoderConfig(layers=layers, **shape)


GEMMA3 = {"vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
          "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131_072}
"""What the released files of the models that see images leave out of their text_config."""


def _phi3(c: Json) -> DecoderConfig:
    shape = _shape(c, norm=NormConfig(eps=c.get("rms_norm_eps", 1e-5)))
    return DecoderConfig(layers=_layers(c, shape, sliding=c.get("sliding_window")), **shape)


def _olmo2(c: Json) -> DecoderConfig:
    bias = c.get("attention_bias", False)
    shape = _shape(c, norm=NormConfig(eps=c.get("rms_norm_eps", 1e-5)), block="post", qk_norm="full", qkv_bias=bias,
                   out_bias=bias)
    return DecoderConfig(layers=_layers(c, shape), **shape)


def _olmo3(c: Json) -> DecoderConfig:
    plain, new = _olmo2(c), c.get("rope_parameters") or {}
    shape = {"head_dim": plain.head_dim, "context": plain.context}
    theta = {"rope_theta": c.get("rope_theta", 5e5)}
    everywhere = {**theta, **c.get("rope_scaling", {}), **new.get("full_attention", {})}
    near = _rope({"rope_parameters": {**theta, **new.get("sliding_attention", {})}}, shape)
    layers = _layers({**c, "rope_parameters": everywhere}, shape, sliding=c.get("sliding_window", 4096), near=near,
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
    layers = _layers(c, shape, sliding=sliding, slides=lambda i: not rotated[i])
    still = tuple(dataclasses.replace(layer, rope=None) for layer in layers)
    return dataclasses.replace(plain, layers=tuple((still[i], layers[i])[rotated[i]] for i in range(count)))


def _glm(c: Json, **changes: Any) -> DecoderConfig:
    c = {"partial_rotary_factor": 0.5, "num_key_value_heads": 2, **c}
    shape = _shape(c, norm=NormConfig(eps=c.get("rms_norm_eps", 1.5625e-7)), qkv_bias=c.get("attention_bias", True),
                   head_dim=c.get("head_dim", 128), **changes)
    return DecoderConfig(layers=_layers(c, shape, interleaved=True), **shape)


def _glm4(c: Json) -> DecoderConfig:
    return _glm(c, block="sandwich")


def _cohere_shape(c: Json, **changes: Any) -> dict[str, Any]:
    bias = c.get("attention_bias", False)
    return _shape(c, norm=NormConfig("layer", c.get("layer_norm_eps", 1e-5)), block="parallel", qkv_bias=bias,
                  out_bias=bias, tied=c.get("tie_word_embeddings", True), logit_scale=c.get("logit_scale", 0.0625),
                  context=c.get("max_position_embeddings", 8192), **changes)


def _cohere(c: Json) -> DecoderConfig:
    shape = _cohere_shape(c, qk_norm="per_head" if c.get("use_qk_norm", False) else None)
    return DecoderConfig(layers=_layers({"rope_theta": 5e5, **c}, shape, interleaved=True), **shape)


def _cohere2(c: Json) -> DecoderConfig:
    shape, period = _cohere_shape(c), c.get("sliding_window_pattern", 4)
    layers = _layers(c, shape, sliding=c.get("sliding_window", 4096), slides=lambda i: (i + 1) % period != 0,
                     interleaved=True)
    # only layers that slide rotate
    layers = tuple(layer if layer.sliding else dataclasses.replace(layer, rope=None) for layer in layers)
    return DecoderConfig(layers=layers, **shape)


def _phi(c: Json) -> DecoderConfig:
    norm = NormConfig("layer", c.get("layer_norm_eps", 1e-5), bias=True)
    shape = _shape(c, norm=norm, block="parallel", gated=False, qkv_bias=True, out_bias=True, mlp_bias=True,
                   head_bias=True, activation=_activation(c, "hidden_act", "gelu_new"),
                   qk_norm="head" if c.get("qk_layernorm", False) else None)
    return DecoderConfig(layers=_layers({"partial_rotary_factor": 0.5, **c}, shape), **shape)


def _stablelm(c: Json) -> DecoderConfig:
    eps = c.get("layer_norm_eps", 1e-5)
    shape = _shape(c, norm=NormConfig("layer", eps, bias=True), qkv_bias=c.get("use_qkv_bias", False),
                   block="parallel" if c.get("use_parallel_residual", False) else "pre",
                   qk_norm="per_head" if c.get("qk_layernorm", False) else None,
                   qk_norm_kind=NormConfig("layer", eps) if c.get("qk_layernorm", False) else None)
    return DecoderConfig(layers=_layers({"partial_rotary_factor": 0.25, **c}, shape), **shape)


def _granite(c: Json) -> DecoderConfig:
    bias = c.get("attention_bias", False)
    shape = _shape(c, qkv_bias=bias, out_bias=bias, mlp_bias=c.get("mlp_bias", False),
                   embed_scale=float(c.get("embedding_multiplier", 1.0)), logit_scale=1 / c.get("logits_scaling", 1.0),
                   residual_scale=float(c.get("residual_multiplier", 1.0)))
    return DecoderConfig(layers=_layers(c, shape, scale=float(c.get("attention_multiplier", 1.0))), **shape)


def _gpt2(c: Json) -> DecoderConfig:
    if c.get("add_cross_attention"):
        raise ValueError("add_cross_attention: got True, a decoder takes False")
    width, heads, head_dim = c["n_embd"], c["n_head"], _divided(c, "n_embd", "n_head")
    scale = head_dim ** -0.5 if c.get("scale_attn_weights", True) else 1.0
    by_layer = c.get("scale_attn_by_inverse_layer_idx", False)
    return DecoderConfig(
        vocab=c["vocab_size"], width=width, heads=heads, kv_heads=heads, head_dim=head_dim,
        mlp=c.get("n_inner") or 4 * width, context=c["n_positions"], learned_positions=c["n_positions"],
        layers=tuple(Layer(scale=scale / (i + 1) if by_layer else scale) for i in range(c["n_layer"])),
        norm=NormConfig("layer", c.get("layer_norm_epsilon", 1e-5), bias=True), gated=False,
        activation=_activation(c, "activation_function", "gelu_new"), tied=c.get("tie_word_embeddings", True),
        qkv_bias=True, out_bias=True, mlp_bias=True)


def _dream(c: Json) -> DecoderConfig:
    return _qwen2(_unslid(c))


def _sdar(c: Json) -> DecoderConfig:
    return _qwen3(_unslid(c))


def _unslid(c: Json) -> Json:
    if c.get("use_sliding_window"):
        raise ValueError("use_sliding_window: got True; a masked-diffusion model looks both ways, it takes False")
    return c


LLADA = {"alibi": (False, False), "attention_layer_norm": (False, False), "bias_for_layer_norm": (False, False),
         "block_group_size": (1, 1), "block_type": ("sequential", "llama"), "include_bias": (False, False),
         "layer_norm_type": ("default", "rms"), "layer_norm_with_affine": (True, True), "rope": (False, True)}
"""Options of LLaDA's class, which is OLMo's: what it takes for a missing one, and what the released models have."""


def _llada(c: Json) -> DecoderConfig:
    for name, (default, taken) in LLADA.items():
        got = default if c.get(name) is None else c[name]
        if got != taken:
            raise ValueError(f"{name}: got {got!r}, supported is {taken!r}")
    width, heads, head_dim = c["d_model"], c["n_heads"], _divided(c, "d_model", "n_heads")
    rope = Rope(head_dim, float(c.get("rope_theta", 10_000.0)))
    return DecoderConfig(
        vocab=c.get("embedding_size") or c["vocab_size"], width=width, heads=heads, head_dim=head_dim,
        kv_heads=c.get("n_kv_heads") or (1 if c.get("multi_query_attention") else heads),
        mlp=c.get("mlp_hidden_size") or int(c.get("mlp_ratio", 4) * width), layers=(Layer(rope),) * c["n_layers"],
        context=c.get("max_sequence_length", 1024), norm=NormConfig(eps=c.get("rms_norm_eps", 1e-5)),
        activation=_activation(c, "activation_type", "swiglu"), qkv_bias=bool(c.get("include_qkv_bias")),
        tied=c.get("weight_tying", True), embed_scale=width ** 0.5 if c.get("input_emb_norm") else 1.0,
        logit_scale=width ** -0.5 if c.get("scale_logits") else 1.0)


FAMILIES: dict[str, Callable[[Json], DecoderConfig]] = {
    "cohere": _cohere, "cohere2": _cohere2, "gemma": _gemma, "gemma2": _gemma2, "gemma3_text": _gemma3, "glm": _glm,
    "glm4": _glm4, "gpt2": _gpt2, "granite": _granite, "llama": _llama, "ministral": _mistral, "mistral": _mistral,
    "olmo2": _olmo2, "olmo3": _olmo3, "phi": _phi, "phi3": _phi3, "qwen2": _qwen2, "qwen3": _qwen3,
    "smollm3": _smollm3, "stablelm": _stablelm, "Dream": _dream, "Fast_dLLM_Qwen": _dream, "llada": _llada,
    "sdar": _sdar,
}
"""By `model_type`."""

WITH_IMAGES = {"gemma3": "gemma3_text", "mistral3": "mistral", "qwen2_vl": "qwen2", "qwen2_5_vl": "qwen2"}
"""Models that also see images, of which the language model is read: its family where text_config does not name it."""

TEXT_PARTS = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2"}
"""Families under the names that such a text_config gives them."""


def _layers(c: Json, shape: Json, *, sliding: int | None = None, slides: Callable[[int], bool] = lambda i: True,
            scale: float | None = None, near: Rope | None = None, interleaved: bool = False) -> tuple[Layer, ...]:
    """One entry a layer; `layer_types` of the file, where present, says which slide. `near` is the rope of those."""
    rope, count, kinds = _rope(c, shape, interleaved), c["num_hidden_layers"], c.get("layer_types")
    if kinds is not None and len(kinds) < count:
        raise ValueError(f"layer_types: got {len(kinds)} entries for num_hidden_layers = {count}")
    local = lambda i: kinds[i] == "sliding_attention" if kinds else slides(i)
    far = Layer(rope, None, scale)
    close = far if sliding is None else Layer(near or rope, sliding, scale)
    return tuple(close if local(i) else far for i in range(count))


def _rope(c: Json, shape: Json, interleaved: bool = False) -> Rope:
    r = {**(c.get("rope_scaling") or {}), **(c.get("rope_parameters") or {})}
    fraction = r.get("partial_rotary_factor", c.get("partial_rotary_factor", 1.0))
    theta, width = float(r.get("rope_theta") or c.get("rope_theta") or 10_000.0), int(shape["head_dim"] * fraction)
    if width < 2 or width % 2:
        raise ValueError(f"head_dim: got {shape['head_dim']}, of which partial_rotary_factor = {fraction} leaves "
                         f"{width} to rotate; takes an even number from 2")
    try:
        return Rope(width, theta, _scaling(c, r, shape["context"]), interleaved)
    except ArithmeticError:
        raise ValueError(f"rope_scaling: got {r}, which gives no finite frequencies") from None


def _scaling(c: Json, r: Json, context: int) -> Scaling | None:
    kind = r.get("rope_type") or r.get("type")
    if kind is None and "factor" in r:
        raise ValueError(f"rope_type: got none beside factor = {r['factor']}")
    if kind == "su" or (kind == "yarn" and c.get("model_type") == "phi3"):
        kind = "longrope"                   # earlier names of it in Phi-3 files
    trained = c.get("original_max_position_embeddings") or r.get("original_max_position_embeddings") or context
    if kind in ("default", None):
        return None
    if kind == "linear":
        return Linear(float(r["factor"]))
    if kind == "dynamic":
        return Dynamic(float(r["factor"]), context)
    if kind == "llama3":
        return Llama3(float(r["factor"]), float(r["low_freq_factor"]), float(r["high_freq_factor"]), trained)
    if kind == "yarn":
        factor = float(r.get("factor") or context / trained)
        attention = r.get("attention_factor")
        if attention is None and r.get("mscale") and r.get("mscale_all_dim"):
            attention = mscale(factor, r["mscale"]) / mscale(factor, r["mscale_all_dim"])
        return Yarn(factor, trained, r.get("beta_fast") or 32.0, r.get("beta_slow") or 1.0, attention,
                    r.get("truncate", True))
    if kind == "longrope":
        factor = r.get("factor") or context / trained
        attention = r.get("attention_factor")
        if attention is None:
            attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
        return LongRope(tuple(r["short_factor"]), tuple(r["long_factor"]), trained, attention)
    raise ValueError(f"rope_type: got {kind!r}, supported are default, linear, dynamic, yarn, longrope, llama3")


def _activation(c: Json, key: str, default: str) -> Activation:
    name = c.get(key, default)
    if name not in ACTIVATIONS:
        raise ValueError(f"{key}: got {name!r}, supported are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]
