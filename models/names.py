"""The tensors of a Hugging Face file that make up each weight of the decoder.

Files store linear layers `[out, in]` (GPT-2: `[in, out]`). Some families fuse projections into one tensor, or split a
weight into one tensor per head. One table serves loading and saving.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax

from decodax.models.blocks.names import NAMES as BLOCKS
from decodax.models.compressed.names import NAMES as DEEPSEEK_V4
from decodax.models.config import DecoderConfig
from decodax.models.latent.names import NAMES as MLA
from decodax.models.packed import Adapted, Packed
from decodax.models.recurrent.names import NAMES, SHARED_HALVES, STACKED
from decodax.models.recurrent.options import GatedDelta
from decodax.models.residual.names import NAMES as GEMMA
from decodax.models.transformer import Weights
from decodax.models.weight_source import Columns, WeightSource

LLAMA = {"attn_in": "input_layernorm", "mlp_in": "post_attention_layernorm", "attn.q": "self_attn.q_proj",
         "attn.k": "self_attn.k_proj", "attn.v": "self_attn.v_proj", "attn.o": "self_attn.o_proj",
         "attn.q_norm": "self_attn.q_norm", "attn.k_norm": "self_attn.k_norm", "mlp.gate": "mlp.gate_proj",
         "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj", "mlp.router": "mlp.gate",
         "mlp.shared.gate": "mlp.shared_experts.gate_proj", "mlp.shared.up": "mlp.shared_experts.up_proj",
         "mlp.shared.down": "mlp.shared_experts.down_proj", "mlp.act": "mlp.act_fn"}
SANDWICH = {**LLAMA, "attn_out": "post_attention_layernorm", "mlp_in": "pre_feedforward_layernorm",
            "mlp_out": "post_feedforward_layernorm"}
HUNYUAN = {**LLAMA, "attn.q_norm": "self_attn.query_layernorm", "attn.k_norm": "self_attn.key_layernorm"}
EXPERTS = {f"mlp.{part}": f"mlp.experts.{{expert}}.{part}_proj" for part in ("gate", "up", "down")}
QKV, GATE_UP = ("attn.q", "attn.k", "attn.v"), ("mlp.gate", "mlp.up")


@dataclasses.dataclass(frozen=True)
class Names:
    """The tensor names of a model family.

    Attributes:
        layer: module name inside a layer, by the network path inside a layer.
        experts: module name of each projection of an expert, by the network path inside a layer; without `{expert}` in
            it, the name of a tensor that has those of all experts.
        correction: name inside a layer of the tensor that is added to the scores of experts for their choice.
        stem: prefix of all names.
        bare: prefix in files of the model without its output head.
        layers: name of the list of layers.
        embed: name of the embedding table.
        norm: name of the last norm.
        head: full name of the output head.
        positions: name of the position embedding.
        embed_norm: name of the norm of embeddings.
        fused: groups of paths that share one tensor, in its order.
        grouped: in a fused tensor of attention, the columns of each key/value head for the first path are followed by
            those for the others.
        repeated: groups of `fused` whose parts are repeated for each head, and whose heads: "heads" or "key_heads".
        stacked: name of the tensor of all experts, by path, if a file has these in place of those of `experts`.
        further: prefixes of the tensors of layers that predict further tokens.
        twin: entries of `layer` that differ with `DecoderConfig.twin_norms`.
        transposed: True if linear layers are stored `[out, in]`.
        experts_transposed: the same for tensors that hold all experts.
        interleaved: the columns of the projections in a fused tensor of all experts alternate.
        extra: full names of tensors inside a layer that are used as they are, by the weight's path inside a layer.
        outside: names of further tensors outside of layers, by the weight's path.
        variants: ends of tensors' names that only some files have, each with the fields that differ in these.
        padded: numbers of first and last axes of length 1 that such tensors have in the file alone, by path inside a
            layer.
        halves: number of layers of the decoder in each layer of the file; `{half}` in names is the number of one.
    """

    layer: dict[str, str]
    experts: dict[str, str] = dataclasses.field(default_factory=lambda: EXPERTS)
    correction: str = "mlp.gate.e_score_correction_bias"
    stem: str = "model."
    bare: str = ""
    layers: str = "layers"
    embed: str = "embed_tokens"
    norm: str = "norm"
    head: str = "lm_head"
    positions: str = ""
    embed_norm: str = ""
    fused: tuple[tuple[str, ...], ...] = ()
    grouped: bool = False
    repeated: dict[tuple[str, ...], str] = dataclasses.field(default_factory=dict)
    stacked: dict[str, str] = dataclasses.field(default_factory=dict)
    further: tuple[str, ...] = ()
    twin: dict[str, str] = dataclasses.field(default_factory=dict)
    transposed: bool = True
    experts_transposed: bool = True
    interleaved: bool = False
    extra: dict[str, str] = dataclasses.field(default_factory=lambda: {"attn.sinks": "self_attn.sinks"})
    outside: dict[str, str] = dataclasses.field(default_factory=dict)
    padded: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    variants: tuple[tuple[str, dict[str, Any]], ...] = ()
    halves: int = 1


NEOX = {"attn_in": "input_layernorm", "mlp_in": "post_attention_layernorm", "mlp.up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h"}

FAMILY_NAMES = {
    "gpt2": Names({"attn_in": "ln_1", "mlp_in": "ln_2", **dict.fromkeys(QKV, "attn.c_attn"), "attn.o": "attn.c_proj",
                   "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}, stem="transformer.", layers="h", embed="wte",
                  norm="ln_f", positions="wpe", fused=(QKV,), transposed=False),
    "llada": Names({"attn_in": "attn_norm", "mlp_in": "ff_norm", "attn.q": "q_proj", "attn.k": "k_proj",
                    "attn.v": "v_proj", "attn.o": "attn_out", "mlp.gate": "ff_proj", "mlp.up": "up_proj",
                    "mlp.down": "ff_out"}, stem="model.transformer.", layers="blocks", embed="wte", norm="ln_f",
                   head="model.transformer.ff_out"),
    "lladamoe": Names({**LLAMA, **{f"mlp.shared.{part}": f"shared_expert.{part}_proj"
                                   for part in ("gate", "up", "down")}}),
    "llada2_moe": Names({**LLAMA, **dict.fromkeys(QKV, "attention.query_key_value"), "attn.o": "attention.dense",
                         "attn.q_norm": "attention.query_layernorm", "attn.k_norm": "attention.key_layernorm"},
                        embed="word_embeddings", fused=(QKV,), correction="mlp.gate.expert_bias"),
    "phi3": Names({**LLAMA, **dict.fromkeys(QKV, "self_attn.qkv_proj"), **dict.fromkeys(GATE_UP, "mlp.gate_up_proj")},
                  fused=(QKV, GATE_UP)),
    "gemma2": Names(SANDWICH), "gemma3_text": Names(SANDWICH), "olmo2": Names(SANDWICH), "olmo3": Names(SANDWICH),
    "granitemoe": Names({**LLAMA, "mlp.router": "block_sparse_moe.router.layer"}, fused=(GATE_UP,),
                        experts={**dict.fromkeys(GATE_UP, "block_sparse_moe.input_linear.weight"),
                                 "mlp.down": "block_sparse_moe.output_linear.weight"}),
    "granitemoe_swa": Names(
        {**LLAMA, "mlp.router": "block_sparse_moe.router", **dict.fromkeys(SHARED_HALVES, "shared_mlp.input_linear"),
         "mlp.shared.down": "shared_mlp.output_linear"}, fused=(GATE_UP, SHARED_HALVES),
        experts={**dict.fromkeys(GATE_UP, "block_sparse_moe.experts.gate_up_proj"),
                 "mlp.down": "block_sparse_moe.experts.down_proj"}),
    "qwen2_moe": Names({**LLAMA, **{f"mlp.shared.{part}": f"mlp.shared_expert.{part}_proj"
                                    for part in ("gate", "up", "down")}, "mlp.shared_gate": "mlp.shared_expert_gate"}),
    "qwen3_vl_moe_text": Names(LLAMA, fused=(GATE_UP,), experts_transposed=False,
                               experts={**dict.fromkeys(GATE_UP, "mlp.experts.gate_up_proj"),
                                        "mlp.down": "mlp.experts.down_proj"}),
    "llama4_text": Names({**LLAMA, "mlp.router": "feed_forward.router",
                          **{f"mlp.{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
                          **{f"mlp.shared.{part}": f"feed_forward.shared_expert.{part}_proj"
                             for part in ("gate", "up", "down")}}, fused=(GATE_UP,), experts_transposed=False,
                         experts={**dict.fromkeys(GATE_UP, "feed_forward.experts.gate_up_proj"),
                                  "mlp.down": "feed_forward.experts.down_proj"}),
    "gpt_oss": Names({**LLAMA, "mlp.router": "mlp.router"}, fused=(GATE_UP,), experts_transposed=False,
                     interleaved=True, experts={**dict.fromkeys(GATE_UP, "mlp.experts.gate_up_proj"),
                                                "mlp.down": "mlp.experts.down_proj"}),
    "hy_v3": Names({**LLAMA, "mlp.router": "mlp.router.gate", **{f"mlp.shared.{part}": f"mlp.shared_mlp.{part}_proj"
                                                                for part in ("gate", "up", "down")}},
                   correction="mlp.expert_bias"),
    "laguna": Names({**LLAMA, "attn.gate": "self_attn.g_proj", **{
        f"mlp.shared.{part}": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")}}, stacked=STACKED,
        correction="mlp.experts.e_score_correction_bias",
        variants=(("mlp.gate.e_score_correction_bias", {"correction": "mlp.gate.e_score_correction_bias"}),)),
    "muse_glimmer_text": Names({**SANDWICH, "attn.gate": "self_attn.gate_proj"}),
    "mimo_v2_flash": Names(LLAMA, extra={"attn.sinks": "self_attn.attention_sink_bias"}),
    "ernie4_5_moe": Names(LLAMA, correction="mlp.moe_statics.e_score_correction_bias"),
    "gpt_neox": Names({**NEOX, **dict.fromkeys(QKV, "attention.query_key_value"), "attn.o": "attention.dense"},
                      stem="gpt_neox.", embed="embed_in", norm="final_layer_norm", head="embed_out", fused=(QKV,),
                      grouped=True),
    "falcon": Names({**NEOX, **dict.fromkeys(QKV, "self_attention.query_key_value"),
                     "attn.o": "self_attention.dense"}, stem="transformer.", layers="h", embed="word_embeddings",
                    norm="ln_f", fused=(QKV,), grouped=True, twin={"attn_in": "ln_attn", "mlp_in": "ln_mlp"}),
    "bloom": Names({**NEOX, **dict.fromkeys(QKV, "self_attention.query_key_value"), "attn.o": "self_attention.dense"},
                   stem="transformer.", layers="h", embed="word_embeddings", norm="ln_f", fused=(QKV,), grouped=True,
                   embed_norm="word_embeddings_layernorm"),
    "gptj": Names({"attn_in": "ln_1", **{f"attn.{x}": f"attn.{x}_proj" for x in "qkv"}, "attn.o": "attn.out_proj",
                   "mlp.up": "mlp.fc_in", "mlp.down": "mlp.fc_out"}, stem="transformer.", layers="h", embed="wte",
                  norm="ln_f"),
    "opt": Names({**LLAMA, "attn_in": "self_attn_layer_norm", "mlp_in": "final_layer_norm",
                  "attn.o": "self_attn.out_proj", "mlp.up": "fc1", "mlp.down": "fc2"}, stem="model.decoder.",
                 bare="decoder.", norm="final_layer_norm", positions="embed_positions"),
    "starcoder2": Names({**LLAMA, "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}),
    "nanochat": Names({**LLAMA, "mlp.up": "mlp.fc1", "mlp.down": "mlp.fc2"}),
    "apertus": Names({**LLAMA, "attn_in": "attention_layernorm", "mlp_in": "feedforward_layernorm"}),
    "exaone4": Names(SANDWICH),
    "hunyuan_v1_dense": Names(HUNYUAN),
    "hunyuan_v1_moe": Names({**HUNYUAN, "mlp.router": "mlp.gate.wg", **{
        f"mlp.shared.{part}": f"mlp.shared_mlp.{part}_proj" for part in ("gate", "up", "down")}}),
    "glm": Names({**LLAMA, **dict.fromkeys(GATE_UP, "mlp.gate_up_proj")}, fused=(GATE_UP,)),
    "glm4": Names({**LLAMA, **dict.fromkeys(GATE_UP, "mlp.gate_up_proj"), "attn_out": "post_self_attn_layernorm",
                   "mlp_out": "post_mlp_layernorm"}, fused=(GATE_UP,)),
    "phi": Names({**LLAMA, "attn.o": "self_attn.dense", "attn.q_norm": "self_attn.q_layernorm",
                  "attn.k_norm": "self_attn.k_layernorm", "mlp.up": "mlp.fc1", "mlp.down": "mlp.fc2"},
                 norm="final_layernorm"),
    "stablelm": Names({**LLAMA, "attn.q_norm": "self_attn.q_layernorm.norms.{head}",
                       "attn.k_norm": "self_attn.k_layernorm.norms.{head}"}),
    **{family: Names(**fields) for family, fields in (NAMES | GEMMA | MLA | BLOCKS | DEEPSEEK_V4).items()},
}
"""Names by `model_type`; other families have Llama's names."""

IGNORED = re.compile(r"(\.(attn|attention)\.(masked_)?bias|^h\.\d+\.attn\.(masked_)?bias|rotary_emb\.inv_freq"
                     r"|\.ple_embedding\.(layer_multipliers|ngram_heads_(vocab_sizes|offsets)))$")
"""Buffers, most of them in older files, which are recomputed and not loaded."""

IMAGES = re.compile(r"^(model\.)?(encoder\.)?(vision_tower|vision_model|multi_modal_projector|mm_projector|visual"
                    r"|patch_merge_mlp|embed_vision|vision_embedder|vit|vision_adapter|vision_projection|audio_tower"
                    r"|embed_audio|embed_tokens_extend|vit_large_projector)\."
                    r"|^(vision_encoder|vision_language_adapter|pre_mm_projector_norm|patch_merger)\."
                    r"|\.lora_[AB]\.(vision|speech)\.")
"""Tensors of the parts of multimodal models that read images or sound, and of the adapters that the decoder of
Phi-4-multimodal has for prompts with these."""

def sources(family: str, config: DecoderConfig, shapes: Weights,
            present: Collection[str] = ()) -> dict[str, WeightSource]:
    """Returns the source of each weight, by its dotted path in `shapes` (`Transformer.abstract_params`).

    Args:
        family: the `model_type`.
        config: the network's configuration.
        shapes: shapes of the weights.
        present: tensor names of the file to be loaded. Files of a bare model lack the first part of the names (as
            GPT-2's own do); files of multimodal models have additional parts.
    """
    names = names_of(family, present)
    if config.twin_norms:
        names = dataclasses.replace(names, layer={**names.layer, **names.twin})
    sizes = {path: leaf.shape for path, leaf in flatten(shapes).items()}
    deltas = [layer.recurrent.key_heads for layer in config.layers if isinstance(layer.recurrent, GatedDelta)]
    heads = {"heads": config.heads, "key_heads": deltas[0] if deltas else 1}
    parts = {group: heads[names.repeated[group]] for group in names.fused if group in names.repeated}
    if names.grouped:
        parts |= dict.fromkeys((group for group in names.fused if group[0].startswith("attn.")), config.kv_heads)
    experts = max((layer.mixture.count for layer in config.layers if layer.mixture is not None), default=0)
    found = {path: _source(path, names, sizes, parts, experts) for path in sizes}
    return {path: source.in_shards(present) if path.endswith(".table") else source for path, source in found.items()}


def head_tensor(family: str, present: Collection[str]) -> str:
    """Returns the name of the output head's tensor, which files of models with a tied head may also contain."""
    return f"{names_of(family, present).head}.weight"


def layers_in(family: str, present: Collection[str]) -> int:
    """Returns the number of layers of the decoder in a checkpoint of the `model_type` `family` with the tensor names
    `present`: one more than the largest index of a layer, 0 without layers."""
    names = names_of(family, present)
    prefix = f"{names.stem}{names.layers}."
    found = {tensor[len(prefix):].split(".", 1)[0] for tensor in present if tensor.startswith(prefix)}
    return names.halves * (1 + max((int(index) for index in found if index.isdecimal()), default=-1))


def further_layers(family: str, layers: int, config: Mapping[str, Any], present: Collection[str]) -> list[str]:
    """Returns the tensors of layers for multi-token prediction among those `present`.

    Args:
        family: the `model_type`.
        layers: number of layers of the decoder.
        config: the `config.json`, which has the number of such layers.
        present: tensor names of a file.
    """
    count = config.get("num_nextn_predict_layers", config.get("num_mtp_layers", 0)) or 0
    names = names_of(family, present)
    if names.further:
        return [tensor for tensor in present if tensor.startswith(names.further)]
    if not isinstance(count, int):
        return []
    prefixes = tuple(f"{names.stem}{names.layers}.{layers + i}." for i in range(min(count, 64)))
    return [tensor for tensor in present if tensor.startswith((*prefixes, "mtp.", "mtp_", f"{names.stem}mtp"))]


def deciding_names(family: str, present: Collection[str]) -> set[str]:
    """Returns the tensors among `present` by whose names `names_of` tells the layouts of a family apart."""
    ends = tuple(end for end, _ in FAMILY_NAMES.get(family, Names(LLAMA)).variants)
    return {tensor for tensor in present if tensor.endswith(ends)} if ends else set()


def unused_tensors(family: str, config: DecoderConfig, present: Collection[str]) -> set[str]:
    """Returns the tensors among `present` that some files have and nothing reads: the keys and values of layers that
    attend to those of other layers, and the projections of experts that compute nothing."""
    names = names_of(family, present)
    parts = [names.layer[f"attn.{part}"] for part in ("k", "v", "k_norm", "v_norm") if f"attn.{part}" in names.layer]
    starts = tuple(f"{names.stem}{names.layers}.{i}.{part}." for i, layer in enumerate(config.layers)
                   if layer.reads is not None for part in parts)
    zero = {layer.mixture.count for layer in config.layers if layer.mixture is not None and layer.mixture.zero}
    later = re.compile(rf"{re.escape(names.stem + names.layers)}\.\d+\.mlp\.experts\.(\d+)\.")
    return {tensor for tensor in present if tensor.startswith(starts) or (
        zero and (found := later.match(tensor)) is not None and int(found[1]) >= min(zero))}


def embeddings(family: str) -> list[str]:
    """Returns the possible names of the embedding table, in files of a whole model, of a bare model and of multimodal
    models."""
    names = FAMILY_NAMES.get(family, Names(LLAMA))
    found = (names, *(dataclasses.replace(names, **fields) for _, fields in names.variants))
    return list(dict.fromkeys(f"{stem}{own.embed}.weight" for own in found for stem, _ in _stems(own)))


def _stems(names: Names) -> list[tuple[str, str]]:
    """Returns the possible prefixes of the language model in a file, each with the name of its output head."""
    return [(names.stem, names.head), (names.bare, names.head), (f"{names.stem}language_model.", names.head),
            (f"language_model.{names.stem}", f"language_model.{names.head}")]


def names_of(family: str, present: Collection[str]) -> Names:
    """Returns the tensor names for a file that has the tensors `present`, which may be that of a bare model or of a
    larger model that contains it."""
    names = FAMILY_NAMES.get(family, Names(LLAMA))
    for end, fields in names.variants:
        names = dataclasses.replace(names, **fields) if any(tensor.endswith(end) for tensor in present) else names
    # files with quantised experts one by one keep further layers as they were
    own = (tensor for tensor in present if not tensor.startswith(names.further)) if names.further else present
    if names.stacked and any(tensor.endswith(names.stacked["mlp.gate"]) for tensor in own):
        names = dataclasses.replace(names, experts=names.stacked, fused=(*names.fused, GATE_UP))
    places = _stems(names)
    found = (place for place in places if f"{place[0]}{names.embed}.weight" in present)
    stem, head = next(found, places[0])
    # A bare model and its head side by side in one module.
    beside = f"{stem}{head}.weight" in present and f"{head}.weight" not in present
    return dataclasses.replace(names, stem=stem, head=f"{stem}{head}" if beside else head)


def _source(path: str, names: Names, sizes: dict[str, tuple[int, ...]], parts: Mapping[tuple[str, ...], int],
            experts: int) -> WeightSource:
    """Returns the source of one weight; `parts` is the number of parts of each fused tensor that are fused by
    themselves, `experts` the number of experts of a mixture."""
    whole = {"embed": names.embed, "positions": names.positions}
    if path in whole:
        return WeightSource((f"{names.stem}{whole[path]}.weight",), False, None, sizes[path])
    if path in names.outside:
        source = WeightSource((f"{names.stem}{names.outside[path]}",), path.endswith(".kernel"), None, sizes[path])
        return dataclasses.replace(source, full=source.turned(sizes[path]))
    module, leaf = path.rsplit(".", 1)
    tail = "weight" if leaf in ("kernel", "scale") else leaf
    shape, transpose = sizes[path], leaf == "kernel" and (names.transposed or module == "lm_head")
    part, leading = None, False
    if module == "lm_head":
        name = f"{names.head}.{tail}"
    elif module in ("norm", "embed_norm"):
        name = f"{names.stem}{names.norm if module == 'norm' else names.embed_norm}.{tail}"
    elif leaf == "correction":
        name = f"{names.stem}{names.layers}.{int(module.split('.')[1]) // names.halves}.{names.correction}"
        return WeightSource((name,), False, None, (1, *shape) if "moe_statics" in name else shape)
    else:
        _, index, inner = module.split(".", 2)
        within = f"{names.stem}{names.layers}.{int(index) // names.halves}."
        own = names.extra.get(f"{inner}.{leaf}")
        if own is not None and not leaf.endswith("_taps"):
            before, after = names.padded.get(f"{inner}.{leaf}", (0, 0))
            ids = experts if leaf == "hashed" else 0
            full = (*(1,) * before, *shape, *(1,) * after)
            return WeightSource((f"{within}{own}",), False, None, full, ids=ids, after=after)
        of_all = len(shape) == 3 or (leaf == "bias" and len(shape) == 2 and own is None)     # a tensor of all experts
        if own is not None:
            name, transpose, inner = f"{within}{own}", True, f"{inner}.{leaf}"
        elif len(shape) == 3 and "{expert}" in names.experts[inner]:
            stacked = tuple(f"{within}{names.experts[inner].format(expert=e)}.{tail}" for e in range(shape[0]))
            return WeightSource(stacked, True, None, shape[:0:-1])
        elif of_all:
            name = f"{within}{names.experts[inner]}{'_bias' if leaf == 'bias' else ''}"
            transpose, leading = names.experts_transposed and leaf != "bias", len(shape) == 3
        else:
            name = f"{within}{names.layer[inner]}.{tail}".replace("{half}", str(int(index) % names.halves))
        # The dense layers of a mixture may have separate tensors where its experts have one.
        group = next((g for g in names.fused if inner in g and (
            of_all or len({names.layer[member] for member in g}) == 1)), None)
        if group is not None:
            each = [f"layers.{index}.{member}" if own else f"layers.{index}.{member}.{leaf}" for member in group]
            groups = parts.get(group, 1)
            widths = [sizes[member][-1] // groups for member in each]
            start, at = sum(widths[:group.index(inner)]), group.index(inner)
            part = Columns(start, start + widths[at], sum(widths))
            if of_all and names.interleaved:
                part = Columns(at, at + 1, len(group))
            shape = (*shape[:-1], sum(widths) * groups)
        if "{head}" in name:
            return WeightSource(tuple(name.format(head=h) for h in range(shape[0])), False, None, shape[1:])
    source = WeightSource((name,), transpose, part, shape, leading)
    return dataclasses.replace(source, full=source.turned(shape))


def as_stored(where: Mapping[str, WeightSource], shape: Callable[[str], tuple[int, ...]]) -> dict[str, WeightSource]:
    """Returns the sources with the axes of tensors that hold all experts as a file has them.

    Released files and those that transformers writes exchange the last two axes of such tensors in some families.

    Args:
        where: the sources.
        shape: a tensor's shape in the file.
    """
    exchanged = lambda full: (full[0], full[2], full[1])
    if not any(source.leading and shape(source.tensors[0]) == exchanged(source.full) != source.full
               for source in where.values()):
        return dict(where)
    return {path: source if not source.leading else dataclasses.replace(
        source, transpose=not source.transpose, full=exchanged(source.full)) for path, source in where.items()}


def flatten(tree: Weights) -> dict[str, Any]:
    """Returns the leaves of a nested dict by dotted path; a packed or adapted kernel is one leaf.

    >>> flatten({"a": {"b": 1}, "c": 2})
    {'a.b': 1, 'c': 2}
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: isinstance(x, Packed | Adapted))
    return {".".join(str(key.key) for key in path): leaf for path, leaf in leaves}
