"""Reads the published files of EAGLE-1, 2 and 3: the authors', and those of SpecForge, speculators and NVIDIA.

Files name the target's layers in two ways, which differ by one: by the layer whose *output* is read, counted from 0, or
by the layer whose *input* it is. Here layers are always outputs. A file whose way is not known is refused without the
argument `layer_ids`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from decodax.io.drafters.reading import placed
from decodax.io.drafters.tensors import Tensors, taps
from decodax.io.files import CheckpointError
from decodax.models.config import DecoderConfig
from decodax.models.drafters.parallel import ParallelHead
from decodax.models.drafters.recurrent import RecurrentHead
from decodax.models.families import read_config

Json = Mapping[str, Any]
LayerIds = Literal["outputs", "inputs"]
FeedsBack = Literal["before norm", "after norm"]

SHAPE = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps",
         "rope_theta", "rope_scaling", "rope_parameters", "hidden_act", "attention_bias", "mlp_bias",
         "max_position_embeddings", "num_hidden_layers", "partial_rotary_factor")
"""The entries of a configuration that describe a head's layers."""

NVIDIA = {"use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True,
          "next_layer_regular": True, "use_mtp_layernorm": False, "parallel_draft_step": 1}
"""Entries of `eagle_config` that NVIDIA's exporter writes, and SpecForge some of them, with the values of a head of
EAGLE-3 alone. Both name layers by their outputs."""

UNUSED = ("eagle_aux_hidden_state_layer_ids", "parallel_draft_heads_num_layers")
"""Entries of `eagle_config` that are read apart, or matter to heads that are refused."""

SPECULATORS = ("eagle3", "peagle")
"""The `speculators_model_type` of heads of EAGLE-3 and P-EAGLE, whose files name layers by their inputs."""


def read_eagle(tensors: Tensors, dtype: Any) -> tuple[RecurrentHead, Any]:
    """Reads the head of EAGLE-1 or EAGLE-2, a decoder layer without an input norm after a linear layer over embedding
    and state. Returns the head and its weights in `dtype`."""
    layers = _layers(tensors.config, int(tensors.config["vocab_size"]))
    head = RecurrentHead((), layers.vocab, config=layers, fuse="fc", bias="fc.bias" in tensors, first_norm=False,
                         final_norm=False)
    names = {"fc.kernel": "fc.weight", "fc.bias": "fc.bias", **layer_names("layers.", len(layers.layers))}
    tensors.skip("embed_tokens.weight")     # a copy of the target's
    return head, placed(tensors, head, names, dtype)


def read_eagle3(tensors: Tensors, dtype: Any, depth: int | None = None, layer_ids: LayerIds | None = None,
                feeds_back: FeedsBack | None = None) -> tuple[RecurrentHead, Any, np.ndarray | None]:
    """Returns a head of EAGLE-3 or P-EAGLE, its weights, and the target's token for each of its logits, or None.

    Args:
        tensors: the tensors of the file, with its `config.json`.
        dtype: dtype of the weights.
        depth: number of the target's layers; None: unknown, which files without layers need.
        layer_ids: how the file names layers; None: as its producer does, if that is known.
        feeds_back: the state that is fed back; None: as the producer does, if that is known.
    """
    config = tensors.config
    whole = {**config, **config.get("transformer_layer_config", {})}
    exporter = _check_entries(tensors, whole)
    mid = "midlayer." if any(name.startswith("midlayer.") for name in tensors.names) else "layers.0."
    vocab, known = int(tensors["lm_head.weight"].shape[0]), int(whole["vocab_size"])
    layers = _layers(whole, vocab)
    read = _taps(tensors, depth, layer_ids)
    each, every = "fc_norm.0.weight" in tensors, "input_norm.weight" in tensors
    wide = tensors["fc.weight"].shape[1] // len(read)
    own_table = "embed_tokens.weight" in tensors
    parallel = "mask_hidden" in tensors         # P-EAGLE, which feeds nothing back
    settings: dict[str, Any] = dict(
        config=layers, feature_width=wide, project=True, own_head=True, fuse="attention", own_table=own_table,
        table_size=known, tap_norm="each" if each else "all" if every else None,
        norm_residual=bool(config.get("norm_before_residual", False)),
        feeds_back="before norm" if parallel else _feeds_back(tensors, feeds_back))
    head = (ParallelHead(read, vocab, **settings, **_masks(tensors)) if parallel
            else RecurrentHead(read, vocab, **settings))
    names = {"taps.kernel": "fc.weight", "embed_norm.scale": f"{mid}input_layernorm.weight",
             "state_norm.scale": f"{mid}hidden_norm.weight", "norm.scale": "norm.weight", "tap_norm.scale":
             "input_norm.weight", "lm_head.kernel": "lm_head.weight", "embed": "embed_tokens.weight",
             **{f"tap_norms.{i}.scale": f"fc_norm.{i}.weight" for i in range(len(read))},
             "mask_feature": "mask_hidden", **layer_names("layers.", len(layers.layers))}
    if mid == "midlayer.":
        names = {where: name.replace("layers.0.", mid) for where, name in names.items()}
    ids = tensors.vocabulary(vocab, known, differences=exporter)
    return head, placed(tensors, head, names, dtype), ids


def _masks(tensors: Tensors) -> dict[str, Any]:
    """Returns the mask token and the number of drafts of a P-EAGLE head, whose mask feature becomes a vector."""
    config = tensors.config
    mask = next((config[key] for key in ("mask_token_id", "ptd_token_id") if config.get(key) is not None), None)
    if mask is None:
        raise CheckpointError(f"{tensors.name}: config.json names no mask token, as mask_token_id or ptd_token_id")
    tensors.replace("mask_hidden", tensors["mask_hidden"].reshape(-1))
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return {"mask": int(mask), "drafts": int(methods[0].get("speculative_tokens") or 8)}


def _layers(config: Json, vocab: int) -> DecoderConfig:
    entries = {key: config[key] for key in SHAPE if config.get(key) is not None}
    kind = config.get("model_type", "llama")
    family = kind if kind in ("llama", "qwen2", "qwen3", "mistral") else "llama"
    made = read_config({**entries, "model_type": family, "vocab_size": vocab, "tie_word_embeddings": False,
                        "num_hidden_layers": entries.get("num_hidden_layers", 1)})
    window, kinds = config.get("sliding_window"), config.get("layer_types") or ()
    if kinds and (len(kinds) != len(made.layers) or not {*kinds} <= {"full_attention", "sliding_attention"}):
        raise CheckpointError(f"layer_types: got {list(kinds)}, takes 'full_attention' or 'sliding_attention' for each "
                              f"of {len(made.layers)} layers")
    if "sliding_attention" in kinds and window is None:
        raise CheckpointError(f"layer_types: got {list(kinds)}, takes sliding_window, the number of tokens that layers "
                              "with 'sliding_attention' see")
    # As in vLLM and in P-EAGLE's training, a draft's window ends at its own position.
    slides = lambda i: bool(kinds) and kinds[i] == "sliding_attention"
    layers = tuple(dataclasses.replace(layer, sliding=window if slides(i) else None)
                   for i, layer in enumerate(made.layers))
    # Drafts may lie beyond the number of positions that files state; angles are computed for any.
    return dataclasses.replace(made, context=max(made.context, 1), layers=layers)


def _check_entries(tensors: Tensors, whole: Json) -> bool:
    """Checks that the entries of a file of EAGLE-3 are those of a head that is read. Returns True if NVIDIA's exporter
    has written it, which stores the draft vocabulary in the order of its frequency, as differences.

    Raises:
        CheckpointError: an entry is another one, or a norm that one names is missing.
    """
    nested = tensors.config.get("eagle_config") or {}
    for key, value in nested.items():
        if key not in UNUSED and value is not None and (key not in NVIDIA or value != NVIDIA[key]):
            takes = NVIDIA.get(key, "no such entry")
            raise CheckpointError(f"{tensors.name}: eagle_config: {key}: got {value!r}, a head of EAGLE-3 has {takes}")
    for key, tensor in (("norm_before_fc", "input_norm.weight"), ("fc_norm", "fc_norm.0.weight")):
        if tensors.config.get(key) and tensor not in tensors:
            raise CheckpointError(f"{tensors.name}: {key}: got {tensors.config[key]}, and lacks tensor {tensor}")
    window, slides = whole.get("sliding_window"), whole.get("use_sliding_window")
    # Without layer_types, layers of speculators see everything whatever the other entries are.
    if not whole.get("layer_types") and "speculators_model_type" not in tensors.config and (
            slides or (window is not None and slides is not False)):
        raise CheckpointError(f"{tensors.name}: sliding_window: got {window}, takes layer_types, which say of which "
                              "layers, or null")
    return "next_layer_regular" in nested


def layer_names(stem: str, count: int) -> dict[str, str]:
    """Returns the tensor's name of each weight of `count` Llama-like decoder layers, by the weight's dotted path;
    `stem` is the prefix of all names in the file."""
    names: dict[str, str] = {}
    for i in range(count):
        own = f"{stem}{i}."
        for part in ("q", "k", "v", "o"):
            for kind, suffix in (("kernel", "weight"), ("bias", "bias")):
                names[f"layers.{i}.attn.{part}.{kind}"] = f"{own}self_attn.{part}_proj.{suffix}"
        for part in ("gate", "up", "down"):
            for kind, suffix in (("kernel", "weight"), ("bias", "bias")):
                names[f"layers.{i}.mlp.{part}.{kind}"] = f"{own}mlp.{part}_proj.{suffix}"
        names |= {f"layers.{i}.attn_in.scale": f"{own}input_layernorm.weight",
                  f"layers.{i}.mlp_in.scale": f"{own}post_attention_layernorm.weight",
                  f"layers.{i}.attn.q_norm.scale": f"{own}self_attn.q_norm.weight",
                  f"layers.{i}.attn.k_norm.scale": f"{own}self_attn.k_norm.weight"}
    return names


def _taps(tensors: Tensors, depth: int | None, layer_ids: LayerIds | None) -> tuple[int, ...]:
    """Returns the layers whose outputs a head of EAGLE-3 reads, counted from 0."""
    config, path = tensors.config, tensors.name
    nested = config.get("eagle_config") or {}
    ids = config.get("eagle_aux_hidden_state_layer_ids") or nested.get("eagle_aux_hidden_state_layer_ids")
    if not ids:
        if depth is None:
            raise CheckpointError(f"{path}: names no layers of the target; takes load_drafter(..., target=lm), whose "
                                  "depth gives the default")
        default = 1, depth // 2 - 1, depth - 4      # inputs of the layers 2, depth / 2 and depth - 3
        if len(set(default)) < 3 or min(default) < 0:
            raise CheckpointError(f"{path}: names no layers of the target, and the default ones of a target of "
                                  f"{depth} layers are {default}, which collide")
        return default
    known: LayerIds | None = "inputs" if config.get("speculators_model_type") in SPECULATORS else (
        "outputs" if any(key in nested for key in NVIDIA) else None)
    way = layer_ids or known
    if way is None:
        raise CheckpointError(f"{path}: reads the target's layers {list(ids)}, and does not say if these are the "
                              "layers whose outputs or whose inputs are read; takes layer_ids='outputs' or 'inputs'")
    found = taps(path, ids if way == "outputs" else None, ids if way == "inputs" else None, depth)
    assert found is not None
    return found


def _feeds_back(tensors: Tensors, given: FeedsBack | None) -> FeedsBack:
    """Returns the state that a head of EAGLE-3 feeds back: before its norm, unless speculators says otherwise."""
    if given is not None:
        return given
    if not tensors.config.get("norm_output", False):
        return "before norm"
    if tensors.config.get("speculators_model_type") == "eagle3":
        return "after norm"
    raise CheckpointError(f"{tensors.name}: norm_output is true, which producers mean differently; takes "
                          "feeds_back='before norm' (SpecForge's training) or 'after norm'")
