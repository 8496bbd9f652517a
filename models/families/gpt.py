"""GPT-2 and the decoders that look like it: layer norms with biases and a plain MLP."""

from __future__ import annotations

from collections.abc import Callable

from decodax.models.biases import Alibi
from decodax.models.blocks.options import Layer
from decodax.models.config import DecoderConfig, NormConfig
from decodax.models.reading import Json, head_width, read_activation, read_layers, read_shape
from decodax.models.rope import Rope


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


def _gpt_neox(c: Json) -> DecoderConfig:
    c = {"partial_rotary_factor": c.get("rotary_pct", 0.25), "rope_theta": c.get("rotary_emb_base", 1e4), **c,
         "num_key_value_heads": c["num_attention_heads"]}
    bias, parallel = c.get("attention_bias", True), c.get("use_parallel_residual", True)
    shape = read_shape(c, norm=NormConfig("layer", c.get("layer_norm_eps", 1e-5), bias=True), gated=False,
                       activation=read_activation(c, "hidden_act", "gelu"), qkv_bias=bias, out_bias=bias, mlp_bias=True,
                       block="parallel" if parallel else "pre", twin_norms=parallel)
    return DecoderConfig(layers=read_layers(c, shape), **shape)


def _gptj(c: Json) -> DecoderConfig:
    if c.get("tie_word_embeddings"):
        raise ValueError("tie_word_embeddings: got True, a head with a bias takes False")
    width, heads, head_dim = c["n_embd"], c["n_head"], head_width(c, "n_embd", "n_head")
    turned = c.get("rotary_dim", 64)
    if turned % 2:
        raise ValueError(f"rotary_dim: got {turned}, takes an even number")
    return DecoderConfig(
        vocab=c["vocab_size"], width=width, heads=heads, kv_heads=heads, head_dim=head_dim,
        mlp=c.get("n_inner") or 4 * width, context=c.get("n_positions", 2048),
        layers=(Layer(Rope(turned, interleaved=True)),) * c["n_layer"], block="parallel",
        norm=NormConfig("layer", c.get("layer_norm_epsilon", 1e-5), bias=True), gated=False, mlp_bias=True,
        activation=read_activation(c, "activation_function", "gelu_new"), head_bias=True)


def _opt(c: Json) -> DecoderConfig:
    width, heads = c["hidden_size"], c["num_attention_heads"]
    for name, default, taken in (("do_layer_norm_before", True, True), ("_remove_final_layer_norm", False, False),
                                 ("word_embed_proj_dim", width, width)):
        if c.get(name, default) != taken:
            raise ValueError(f"{name}: got {c[name]!r}, supported is {taken!r} (all OPT models but the one of 350M)")
    positions, bias = c.get("max_position_embeddings", 2048), c.get("enable_bias", True)
    norm = NormConfig("layer", 1e-5, bias=True, scaled=c.get("layer_norm_elementwise_affine", True))
    return DecoderConfig(
        vocab=c["vocab_size"], width=width, heads=heads, kv_heads=heads,
        head_dim=head_width(c, "hidden_size", "num_attention_heads"), mlp=c["ffn_dim"], context=positions,
        layers=(Layer(),) * c["num_hidden_layers"], norm=norm, gated=False, qkv_bias=bias, out_bias=bias, mlp_bias=bias,
        activation=read_activation(c, "activation_function", "relu"), learned_positions=positions, position_offset=2,
        tied=c.get("tie_word_embeddings", True))


def _falcon(c: Json) -> DecoderConfig:
    older = {"n_embed": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
    c = {**{new: c[old] for old, new in older.items() if old in c}, **c}
    width, heads = c["hidden_size"], c["num_attention_heads"]
    head_dim, grouped = head_width(c, "hidden_size", "num_attention_heads"), c.get("new_decoder_architecture", False)
    kv_heads = c.get("num_kv_heads", heads) if grouped else 1 if c.get("multi_query", True) else heads
    if heads % kv_heads:
        raise ValueError(f"num_kv_heads: got {kv_heads}, which does not divide num_attention_heads = {heads}")
    parallel, bias = grouped or c.get("parallel_attn", True), c.get("bias", False)
    if not isinstance(bias, bool):
        raise ValueError(f"bias: got {bias!r}, takes true or false")
    shape = read_shape(
        {**c, "intermediate_size": c.get("ffn_hidden_size") or 4 * width, "num_key_value_heads": kv_heads},
        head_dim=head_dim, norm=NormConfig("layer", c.get("layer_norm_epsilon", 1e-5), bias=True), gated=False,
        activation=read_activation(c, "activation", "gelu"), qkv_bias=bias, out_bias=bias, mlp_bias=bias,
        block="parallel" if parallel else "pre", tied=c.get("tie_word_embeddings", True),
        twin_norms=grouped and c.get("num_ln_in_parallel_attn", 2) == 2)
    if c.get("alibi", False):
        # Trained with the bias inside of the scaled scores, in bfloat16.
        layers = (Layer(bias=Alibi(heads, head_dim ** -0.5, rounded=True)),) * c["num_hidden_layers"]
    else:
        layers = read_layers(c, shape)
    return DecoderConfig(layers=layers, **shape)


def _bloom(c: Json) -> DecoderConfig:
    if c.get("apply_residual_connection_post_layernorm", False):
        raise ValueError("apply_residual_connection_post_layernorm: got True, supported is False")
    width, heads = c.get("n_embed") or c["hidden_size"], c.get("n_head") or c["num_attention_heads"]
    head_dim = head_width({"hidden_size": width, "n_head": heads}, "hidden_size", "n_head")
    return DecoderConfig(
        vocab=c["vocab_size"], width=width, heads=heads, kv_heads=heads, head_dim=head_dim, mlp=4 * width,
        context=c.get("seq_length", 2048), embed_norm=True, gated=False, activation="gelu_tanh",
        layers=(Layer(bias=Alibi(heads)),) * (c.get("n_layer") or c["num_hidden_layers"]),
        norm=NormConfig("layer", c.get("layer_norm_epsilon", 1e-5), bias=True), qkv_bias=True, out_bias=True,
        mlp_bias=True, tied=c.get("tie_word_embeddings", True))


def _starcoder2(c: Json) -> DecoderConfig:
    bias = c.get("use_bias", True)
    norm = NormConfig("layer", c.get("norm_epsilon", 1e-5), bias=True)
    shape = read_shape({"num_key_value_heads": 2, **c}, norm=norm, gated=False,
                       activation=read_activation(c, "hidden_act", "gelu_pytorch_tanh"), qkv_bias=bias,
                       out_bias=bias, mlp_bias=bias, tied=c.get("tie_word_embeddings", True))
    return DecoderConfig(layers=read_layers(c, shape, sliding=c.get("sliding_window")), **shape)


FAMILIES: dict[str, Callable[[Json], DecoderConfig]] = {
    "bloom": _bloom, "falcon": _falcon, "gpt2": _gpt2, "gpt_neox": _gpt_neox, "gptj": _gptj, "opt": _opt,
    "starcoder2": _starcoder2,
}
