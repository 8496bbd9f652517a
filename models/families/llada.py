"""LLaDA, a masked-diffusion model with the options of OLMo's class."""

from __future__ import annotations

from collections.abc import Callable

from decodax.models.config import DecoderConfig, Layer, NormConfig
from decodax.models.reading import Json, head_width, read_activation
from decodax.models.rope import Rope

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
    "llada": _llada,
}
