"""The tensors of encoder-decoders in Hugging Face files, in the layouts of T5 and of BART.

Names are without the prefix `model.`, which files of a bare model lack.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from decodax.models.encoder_decoder.config import EncoderDecoderConfig, LearnedPositions, RelativePositions, Stack
from decodax.models.weight_source import WeightSource, kernel, plain

ANCHORS = ("shared.weight", "decoder.embed_tokens.weight")
"""Tensors of which every file has one."""

TABLES = ("shared.weight", "decoder.embed_tokens.weight", "encoder.embed_tokens.weight")
"""The embedding table, of which files have one or several copies."""

HEADS = ("lm_head.weight", "proj_out.weight")
"""The output head."""

LOGITS_BIAS = "final_logits_bias"

IGNORED = re.compile(r"EncDecAttention\.relative_attention_bias\.weight$|\.embed_positions\.weights?$|coder\.version$")
"""An unused bias, tables of sinusoids, and versions, in older files."""


def sources(c: EncoderDecoderConfig, present: Collection[str] = ()) -> dict[str, WeightSource]:
    """Returns the shape of every weight and the tensor that holds it in a Hugging Face file, by the weight's dotted
    path.

    Args:
        c: the configuration.
        present: tensor names of the file to be loaded, which may hold the embedding table under several names.
    """
    own = c.source_vocab is not None
    first = next((name for name in TABLES[own:] if name in present), TABLES[own])
    found = {"embed": plain(first, c.vocab, c.width)}
    if own:
        found["encoder.embed"] = plain("encoder.embed_tokens.weight", c.source_vocab or 0, c.width)
    layout = _t5 if isinstance(c.encoder.positions, RelativePositions) else _bart
    for side, stack in (("encoder", c.encoder), ("decoder", c.decoder)):
        found |= layout(c, side, stack)
    if c.features is not None:
        for name, into in (("conv1", c.features), ("conv2", c.width)):
            tensor = f"encoder.{name}"
            found |= {f"{tensor}.kernel": WeightSource((f"{tensor}.weight",), True, None, (c.width, into, 3)),
                      f"{tensor}.bias": plain(f"{tensor}.bias", c.width)}
    if not c.tied:
        found["head.kernel"] = kernel("proj_out" if "proj_out.weight" in present else "lm_head", c.vocab, c.width)
    if c.logits_bias:
        found["logits_bias"] = plain(LOGITS_BIAS, 1, c.vocab)
    return found


def divided(c: EncoderDecoderConfig, path: str) -> tuple[int, int] | None:
    """Returns how a mesh may divide the weight with the dotted path `path`: the axis of the array, and the number of
    heads, MLP channels or tokens along it, none of which may be split. None: the weight is not divided."""
    *above, leaf = path.split(".")
    stack, module = c.encoder if above[:1] == ["encoder"] else c.decoder, above[-1] if above else ""
    if leaf == "embed":
        return 0, c.vocab if not above else c.source_vocab or 0
    if module == "head" or leaf == "logits_bias":
        return -1, c.vocab
    if leaf == "relative" or module in ("q", "k", "v"):
        return -1, stack.heads
    if module in ("up", "gate"):
        return -1, stack.mlp
    return (0, stack.heads if module == "o" else stack.mlp) if module in ("o", "down") and leaf == "kernel" else None


def _t5(c: EncoderDecoderConfig, side: str, stack: Stack) -> dict[str, WeightSource]:
    """Returns the weights of a stack in the layout of T5."""
    own, inner = stack.positions, stack.heads * stack.head_dim
    assert isinstance(own, RelativePositions)
    first = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    found = {f"{side}.relative": plain(first, own.buckets, stack.heads),
             **_norm(c, f"{side}.norm", f"{side}.final_layer_norm")}
    halves = [("attn", "SelfAttention"), ("cross", "EncDecAttention"), ("mlp", "DenseReluDense")]
    if side == "encoder":
        del halves[1]
    for i in range(stack.layers):
        for j, (half, module) in enumerate(halves):
            path, tensor = f"{side}.layers.{i}.{half}", f"{side}.block.{i}.layer.{j}"
            found |= _norm(c, f"{path}.norm", f"{tensor}.layer_norm")
            if half == "mlp":
                ups = {"gate": "wi_0", "up": "wi_1"} if c.gated else {"up": "wi"}
                found |= {f"{path}.{ours}.kernel": kernel(f"{tensor}.{module}.{theirs}", stack.mlp, c.width)
                          for ours, theirs in ups.items()}
                found[f"{path}.down.kernel"] = kernel(f"{tensor}.{module}.wo", c.width, stack.mlp)
            else:
                found |= {f"{path}.{name}.kernel": kernel(f"{tensor}.{module}.{name}", inner, c.width)
                          for name in "qkv"}
                found[f"{path}.o.kernel"] = kernel(f"{tensor}.{module}.o", c.width, inner)
    return found


def _bart(c: EncoderDecoderConfig, side: str, stack: Stack) -> dict[str, WeightSource]:
    """Returns the weights of a stack in the layout of BART."""
    own, inner = stack.positions, stack.heads * stack.head_dim
    found: dict[str, WeightSource] = {}
    if isinstance(own, LearnedPositions):
        found[f"{side}.positions"] = plain(f"{side}.embed_positions.weight", own.count + own.offset, c.width)
    if c.embed_norm:
        found |= _norm(c, f"{side}.embed_norm", f"{side}.layernorm_embedding")
    if c.pre_norm:
        found |= _norm(c, f"{side}.norm", f"{side}.layer_norm")
    attentions = {"attn": "self_attn"} | ({"cross": "encoder_attn"} if side == "decoder" else {})
    for i in range(stack.layers):
        path, tensor = f"{side}.layers.{i}", f"{side}.layers.{i}"
        for half, module in attentions.items():
            found |= _norm(c, f"{path}.{half}.norm", f"{tensor}.{module}_layer_norm")
            for name, out, into in (("q", inner, c.width), ("k", inner, c.width), ("v", inner, c.width),
                                    ("o", c.width, inner)):
                module_name = "out_proj" if name == "o" else f"{name}_proj"
                found |= _linear(f"{path}.{half}.{name}", f"{tensor}.{module}.{module_name}", out, into,
                                 c.bias and (name != "k" or c.key_bias))
        found |= _norm(c, f"{path}.mlp.norm", f"{tensor}.final_layer_norm")
        found |= _linear(f"{path}.mlp.up", f"{tensor}.fc1", stack.mlp, c.width, c.bias)
        found |= _linear(f"{path}.mlp.down", f"{tensor}.fc2", c.width, stack.mlp, c.bias)
    return found


def _linear(path: str, tensor: str, out: int, into: int, bias: bool) -> dict[str, WeightSource]:
    found = {f"{path}.kernel": kernel(tensor, out, into)}
    return {**found, f"{path}.bias": plain(f"{tensor}.bias", out)} if bias else found


def _norm(c: EncoderDecoderConfig, path: str, tensor: str) -> dict[str, WeightSource]:
    found = {f"{path}.scale": plain(f"{tensor}.weight", c.width)}
    return {**found, f"{path}.bias": plain(f"{tensor}.bias", c.width)} if c.norm.bias else found
