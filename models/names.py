"""The tensors of a Hugging Face file that make up each weight of the decoder.

Files store linear layers `[out, in]` (GPT-2: `[in, out]`). Some families fuse projections into one tensor, or split a
weight into one tensor per head. One table serves loading and saving.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection
from typing import Any

import jax
from jax import Array

from decodax.models.config import DecoderConfig
from decodax.models.packed import Adapted, Packed
from decodax.models.transformer import Weights


@dataclasses.dataclass(frozen=True)
class WeightSource:
    """The place of a weight in a file.

    Attributes:
        tensors: name of the tensor; several tensors are stacked along a new first axis.
        transpose: True if the file stores `[out, in]`.
        part: the weight is `[..., part[0]:part[1]]` of the tensor (after transposing); None: all of it.
        full: shape of the tensor in the file (of each, if several are stacked).
    """

    tensors: tuple[str, ...]
    transpose: bool
    part: tuple[int, int] | None
    full: tuple[int, ...]


LLAMA = {"attn_in": "input_layernorm", "mlp_in": "post_attention_layernorm", "attn.q": "self_attn.q_proj",
         "attn.k": "self_attn.k_proj", "attn.v": "self_attn.v_proj", "attn.o": "self_attn.o_proj",
         "attn.q_norm": "self_attn.q_norm", "attn.k_norm": "self_attn.k_norm", "mlp.gate": "mlp.gate_proj",
         "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj", "mlp.router": "mlp.gate"}
SANDWICH = {**LLAMA, "attn_out": "post_attention_layernorm", "mlp_in": "pre_feedforward_layernorm",
            "mlp_out": "post_feedforward_layernorm"}
EXPERTS = {f"mlp.{part}": f"mlp.experts.{{expert}}.{part}_proj" for part in ("gate", "up", "down")}
QKV, GATE_UP = ("attn.q", "attn.k", "attn.v"), ("mlp.gate", "mlp.up")


@dataclasses.dataclass(frozen=True)
class Names:
    """The tensor names of a model family.

    Attributes:
        layer: module name inside a layer, by the network path inside a layer.
        experts: module name of each projection of an expert, by the network path inside a layer.
        stem: prefix of all names.
        layers: name of the list of layers.
        embed: name of the embedding table.
        norm: name of the last norm.
        head: full name of the output head.
        positions: name of the position embedding.
        fused: groups of paths that share one tensor, in its order.
        transposed: True if linear layers are stored `[out, in]`.
    """

    layer: dict[str, str]
    experts: dict[str, str] = dataclasses.field(default_factory=lambda: EXPERTS)
    stem: str = "model."
    layers: str = "layers"
    embed: str = "embed_tokens"
    norm: str = "norm"
    head: str = "lm_head"
    positions: str = ""
    fused: tuple[tuple[str, ...], ...] = ()
    transposed: bool = True


FAMILY_NAMES = {
    "gpt2": Names({"attn_in": "ln_1", "mlp_in": "ln_2", **dict.fromkeys(QKV, "attn.c_attn"), "attn.o": "attn.c_proj",
                   "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}, stem="transformer.", layers="h", embed="wte",
                  norm="ln_f", positions="wpe", fused=(QKV,), transposed=False),
    "llada": Names({"attn_in": "attn_norm", "mlp_in": "ff_norm", "attn.q": "q_proj", "attn.k": "k_proj",
                    "attn.v": "v_proj", "attn.o": "attn_out", "mlp.gate": "ff_proj", "mlp.up": "up_proj",
                    "mlp.down": "ff_out"}, stem="model.transformer.", layers="blocks", embed="wte", norm="ln_f",
                   head="model.transformer.ff_out"),
    "phi3": Names({**LLAMA, **dict.fromkeys(QKV, "self_attn.qkv_proj"), **dict.fromkeys(GATE_UP, "mlp.gate_up_proj")},
                  fused=(QKV, GATE_UP)),
    "gemma2": Names(SANDWICH), "gemma3_text": Names(SANDWICH), "olmo2": Names(SANDWICH), "olmo3": Names(SANDWICH),
    "mixtral": Names({**LLAMA, "mlp.router": "block_sparse_moe.gate"},
                     experts={"mlp.gate": "block_sparse_moe.experts.{expert}.w1",
                              "mlp.up": "block_sparse_moe.experts.{expert}.w3",
                              "mlp.down": "block_sparse_moe.experts.{expert}.w2"}),
    "glm": Names({**LLAMA, **dict.fromkeys(GATE_UP, "mlp.gate_up_proj")}, fused=(GATE_UP,)),
    "glm4": Names({**LLAMA, **dict.fromkeys(GATE_UP, "mlp.gate_up_proj"), "attn_out": "post_self_attn_layernorm",
                   "mlp_out": "post_mlp_layernorm"}, fused=(GATE_UP,)),
    "phi": Names({**LLAMA, "attn.o": "self_attn.dense", "attn.q_norm": "self_attn.q_layernorm",
                  "attn.k_norm": "self_attn.k_layernorm", "mlp.up": "mlp.fc1", "mlp.down": "mlp.fc2"},
                 norm="final_layernorm"),
    "stablelm": Names({**LLAMA, "attn.q_norm": "self_attn.q_layernorm.norms.{head}",
                       "attn.k_norm": "self_attn.k_layernorm.norms.{head}"}),
}
"""Names by `model_type`; other families have Llama's names."""

IGNORED = re.compile(r"(\.attn\.(masked_)?bias|^h\.\d+\.attn\.(masked_)?bias|rotary_emb\.inv_freq)$")
"""Buffers in older files, which are recomputed and not loaded."""

IMAGES = re.compile(r"^(model\.)?(vision_tower|multi_modal_projector|visual)\.")
"""Tensors of the vision parts of multimodal models."""


WRAPPERS = frozenset({"_orig_mod", "module", "_fsdp_wrapped_module", "_fpw_module", "_checkpoint_wrapped_module",
                      "_forward_module"})
"""Parts of names that torch.compile, DDP, FSDP, activation checkpoints and Lightning add to the saved state of a model
that they wrap."""


def unwrapped(tensor: str) -> str:
    """Returns a tensor's name without the parts that wrapper modules add.

    >>> unwrapped("_orig_mod.model.layers.0._checkpoint_wrapped_module.mlp.up_proj.weight")
    'model.layers.0.mlp.up_proj.weight'
    """
    return ".".join(part for part in tensor.split(".") if part not in WRAPPERS)


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
    names = _names(family, present)
    sizes = {path: leaf.shape for path, leaf in flatten(shapes).items()}
    return {path: _source(path, names, sizes) for path in sizes}


def head_tensor(family: str, present: Collection[str]) -> str:
    """Returns the name of the output head's tensor, which files of models with a tied head may also contain."""
    return f"{_names(family, present).head}.weight"


def layers_in(family: str, present: Collection[str]) -> int:
    """Returns the number of layers among the tensors `present`."""
    names = _names(family, present)
    prefix = f"{names.stem}{names.layers}."
    found = {tensor[len(prefix):].split(".", 1)[0] for tensor in present if tensor.startswith(prefix)}
    return 1 + max((int(index) for index in found if index.isdecimal()), default=-1)


def embeddings(family: str) -> list[str]:
    """Returns the possible names of the embedding table, in files of a whole model, of a bare model and of multimodal
    models."""
    names = FAMILY_NAMES.get(family, Names(LLAMA))
    return [f"{stem}{names.embed}.weight" for stem, _ in _stems(names)]


def _stems(names: Names) -> list[tuple[str, str]]:
    """Returns the possible prefixes of the language model in a file, each with the name of its output head."""
    return [(names.stem, names.head), ("", names.head), (f"{names.stem}language_model.", names.head),
            (f"language_model.{names.stem}", f"language_model.{names.head}")]


def _names(family: str, present: Collection[str]) -> Names:
    """Returns the tensor names for a file that has the tensors `present`, which may be that of a bare model or of a
    larger model that contains it."""
    names = FAMILY_NAMES.get(family, Names(LLAMA))
    places = _stems(names)
    found = (place for place in places if f"{place[0]}{names.embed}.weight" in present)
    stem, head = next(found, places[0])
    # A bare model and its head side by side in one module.
    beside = f"{stem}{head}.weight" in present and f"{head}.weight" not in present
    return dataclasses.replace(names, stem=stem, head=f"{stem}{head}" if beside else head)


def _source(path: str, names: Names, sizes: dict[str, tuple[int, ...]]) -> WeightSource:
    whole = {"embed": names.embed, "positions": names.positions}
    if path in whole:
        return WeightSource((f"{names.stem}{whole[path]}.weight",), False, None, sizes[path])
    module, leaf = path.rsplit(".", 1)
    tail = "bias" if leaf == "bias" else "weight"
    shape, transpose = sizes[path], leaf == "kernel" and (names.transposed or module == "lm_head")
    part = None
    if module == "lm_head":
        name = f"{names.head}.{tail}"
    elif module == "norm":
        name = f"{names.stem}{names.norm}.{tail}"
    else:
        _, index, inner = module.split(".", 2)
        within = f"{names.stem}{names.layers}.{index}."
        if len(shape) == 3:
            each = tuple(f"{within}{names.experts[inner].format(expert=e)}.{tail}" for e in range(shape[0]))
            return WeightSource(each, True, None, shape[:0:-1])
        name = f"{within}{names.layer[inner]}.{tail}"
        group = next((g for g in names.fused if inner in g), None)
        if group is not None:
            widths = [sizes[f"layers.{index}.{member}.{leaf}"][-1] for member in group]
            start = sum(widths[:group.index(inner)])
            part, shape = (start, start + shape[-1]), (*shape[:-1], sum(widths))
        if "{head}" in name:
            return WeightSource(tuple(name.format(head=h) for h in range(shape[0])), False, None, shape[1:])
    return WeightSource((name,), transpose, part, shape[::-1] if transpose else shape)


def kernel_of(path: str, weight: Array) -> Array:
    """Returns a weight as a kernel `f[..., K, N]`; an embedding table is transposed."""
    return weight.T if path == "embed" else weight


def flatten(tree: Weights) -> dict[str, Any]:
    """Returns the leaves of a nested dict by dotted path; a packed or adapted kernel is one leaf.

    >>> flatten({"a": {"b": 1}, "c": 2})
    {'a.b': 1, 'c': 2}
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: isinstance(x, Packed | Adapted))
    return {".".join(str(key.key) for key in path): leaf for path, leaf in leaves}
