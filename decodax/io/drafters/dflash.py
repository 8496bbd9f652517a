"""Reads block heads in their published layouts: DFlash (Z Lab, SpecForge, speculators), DSpark (DeepSpec, SpecForge,
speculators), Domino, DFlash2, JetSpec and XPress.

All have the tensors of a DFlash head; corrections add some. They differ in the place and the meaning of the entries of
`config.json`:

- `target_layer_ids` counts layers whose outputs are read, `aux_hidden_state_layer_ids` (speculators) the
  `hidden_states` of transformers, which begin with the embeddings.
- A slot predicts the token at its position (DFlash, DFlash2, JetSpec, XPress) or the token after it (DSpark;
  `shift_label` of Domino; `sample_from_anchor` of speculators).
- Layers with a sliding window see a block in order or as a whole, and files of Z Lab and SpecForge do not say which.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from decodax.io.drafters.tensors import Source, Tensors, taps
from decodax.io.files import CheckpointError
from decodax.models.config import DecoderConfig
from decodax.models.drafters.block import BlockHead
from decodax.models.drafters.corrections import CandidateSelector, Correction, Markov, PrefixGRU, Refiner
from decodax.models.drafters.local_convolution import LocalConvolution
from decodax.models.families import read_config
from decodax.models.names import LLAMA, flatten
from decodax.models.weight_source import WeightSource

OWN = ("architectures", "auto_map", "block_size", "dflash_config", "num_target_layers", "speculators_model_type",
       "target_layer_ids", "mask_token_id", "num_anchors", "emb_dim")
"""Entries of a drafter's config that are not those of its layers."""

KINDS = ("dflash", "dspark", "domino", "dflash2", "xpress")
"""The methods whose files are read."""

MODULES = {
    "taps": "fc", "tap_norm": "hidden_norm", "norm": "norm", "lm_head": "lm_head", "confidence": "confidence_head.proj",
    Markov: {"out": "markov_head.markov_w2", "gate": "markov_head.gate_proj", "joint": "markov_head.joint_proj"},
    PrefixGRU: {"down": "embed_proj.0", "up": "embed_proj.2"},
    CandidateSelector: {"project": "candidate_selector.hidden_projection"},
    Refiner: {ours: f"refiner_head.{theirs}" for ours, theirs in (
        ("own", "down_h"), ("mean", "down_g"), ("fuse", "in_proj"), ("gate", "mlp_gate"), ("up", "mlp_up"),
        ("down", "mlp_down"), ("readout", "readout"))}}
TENSORS = {
    "embed": "embed_tokens.weight",
    Markov: {"table": "markov_head.markov_w1.weight"},
    PrefixGRU: {"into.kernel": "prefix_gru.weight_ih_l0", "again.kernel": "prefix_gru.weight_hh_l0"},
    CandidateSelector: {"before": "candidate_selector.predecessor_codebook",
                        "after": "candidate_selector.successor_codebook"},
    Refiner: {"table": "refiner_head.token_embed.weight", "mix": "refiner_head.mix_l"}}


def is_block_head(config: Mapping[str, Any]) -> bool:
    """Returns True if a `config.json` is that of a block head."""
    kinds = " ".join(config.get("architectures") or ())
    return "dflash_config" in config or config.get("speculators_model_type") in KINDS or any(
        kind in kinds for kind in ("DFlash", "DSpark", "Domino", "XPress"))


def system_of(head: BlockHead) -> str:
    """Returns the name of the method that a head is drafted with."""
    named = {Markov: "dspark", PrefixGRU: "domino", CandidateSelector: "dflash2", Refiner: "xpress"}
    return "jetspec" if head.causal else named.get(type(head.correction), "dflash")     # type: ignore[arg-type]


def read(source: Source | Tensors, config: Mapping[str, Any] | None = None, *, layers: Sequence[int] | None = None,
         mask: int | None = None, causal_sliding: bool | None = None, dtype: jax.typing.DTypeLike = "float32"
         ) -> tuple[BlockHead, dict[str, Any], np.ndarray | None]:
    """Reads a block head.

    Args:
        source: a directory, or tensors by name, or `Tensors` with their config.
        config: its `config.json`; None: that of the directory.
        layers: the target's layers whose outputs are read, counted from 0, for files that do not say.
        mask: the mask token, for files that do not say.
        causal_sliding: True if layers with a sliding window see a block in order, for files that do not say.
        dtype: dtype of the weights.

    Returns:
        The head, its weights, and the target's token for each of its logits, `i32[Vd]`; None: they are the target's.

    Raises:
        CheckpointError: something is missing or has another shape, or the file leaves open what it means; the message
            says what.
    """
    tensors = source if isinstance(source, Tensors) else Tensors(source, config)
    given = tensors.config
    nested = given.get("dflash_config") or {}
    entry = lambda key, default=None: given[key] if given.get(key) is not None else nested.get(key, default)
    kind, speculators = _kind(tensors, entry), "speculators_model_type" in given
    body = dict(given["transformer_layer_config"]) if "transformer_layer_config" in given else {
        key: value for key, value in given.items() if key not in OWN}
    decoder = _decoder(tensors, body)
    found = taps(tensors.name, layers or entry("target_layer_ids"),
                 None if layers else entry("aux_hidden_state_layer_ids"), entry("num_target_layers"))
    found = found or _default(tensors, entry("num_target_layers"), len(decoder.layers))
    wide = tensors["fc.weight"].shape[1]
    if wide % len(found):
        raise CheckpointError(f"{tensors.name}: fc.weight reads {wide} features, takes a multiple of the number of "
                              f"layers, {len(found)}")
    mask = entry("mask_token_id") if mask is None else mask
    if mask is None:
        raise CheckpointError(f"{tensors.name}: does not say which token is the mask; takes mask=")
    block = entry("block_size")
    if block is None:
        raise CheckpointError(f"{tensors.name}: config.json lacks block_size")
    target = decoder.vocab
    size = tensors["lm_head.weight"].shape[0] if "lm_head.weight" in tensors else target
    sliding = any(layer.sliding is not None for layer in decoder.layers)
    if sliding and causal_sliding is None:
        whole = entry("sliding_window_non_causal", False if speculators else None)
        if whole is None:
            raise CheckpointError(f"{tensors.name}: has layers with a sliding window and does not say whether they see "
                                  "a block in order; takes causal_sliding=True (as SpecForge trains) or False")
        causal_sliding = not whole
    correction = _correction(kind, entry)
    confidence = None
    if "confidence_head.proj.weight" in tensors:
        more = tensors["confidence_head.proj.weight"].shape[1] > decoder.width
        confidence = "token" if more else "hidden"
    head = BlockHead(
        found, size, config=dataclasses.replace(decoder, vocab=size, head_bias="lm_head.bias" in tensors, tied=False),
        block=block, mask=mask, feature_width=wide // len(found), target_vocab=target,
        first_predicts=_first_predicts(kind, entry), causal=bool(entry("causal_head", False)),
        causal_sliding=causal_sliding if sliding else None, window_from="newest" if speculators else "slot",
        correction=correction, confidence=confidence,      # type: ignore[arg-type]
        convolution=_convolution(tensors, entry, decoder), own_head="lm_head.weight" in tensors,
        own_table="embed_tokens.weight" in tensors)
    ids = tensors.vocabulary(size, target)
    tensors.skip("verifier_norm.weight", "verifier_lm_head.weight", "rotary_emb.inv_freq", "d2t", "t2d")
    return head, tensors.weights(sources(head), dtype), ids


def sources(head: BlockHead) -> dict[str, WeightSource]:
    """Returns where each weight of a block head, by its dotted path, is in a file: its tensor and shape there."""
    return {path: _source(path, leaf.shape, type(head.correction)) for path, leaf in
            flatten(head.abstract_params()).items()}


def shared_tables(head: BlockHead, weights: dict[str, Any], embed: Any, lm_head: Any
                  ) -> tuple[BlockHead, dict[str, Any]]:
    """Returns the head without tables that are copies of the target's.

    Args:
        head: the head.
        weights: its weights.
        embed: `f[V, D]`, the target's embedding table.
        lm_head: `f[D, V]`, its vocabulary matrix.
    """
    same = lambda a, b: a.shape == b.shape and bool((np.asarray(a) == np.asarray(b, a.dtype)).all())
    weights = dict(weights)
    if head.own_table and same(weights["embed"], embed):
        head, _ = dataclasses.replace(head, own_table=False), weights.pop("embed")
    if head.own_head and not head.config.head_bias and same(weights["lm_head"]["kernel"], lm_head):
        head, _ = dataclasses.replace(head, own_head=False), weights.pop("lm_head")
    return head, weights


def _source(path: str, shape: tuple[int, ...], correction: type) -> WeightSource:
    """Returns the tensor of one weight."""
    module, _, leaf = path.rpartition(".")
    turned = leaf == "kernel"
    full = shape[::-1] if turned else shape
    tail = "weight" if leaf in ("kernel", "scale") else leaf
    first, _, inner = path.partition(".")
    if first == "layers":
        index, _, part = module.split(".", 2)[1:][0], None, module.split(".", 2)[2]
        return WeightSource((f"layers.{index}.{LLAMA[part]}.{tail}",), turned, None, full)
    if first == "convolutions":
        index, half = inner.split(".")[0].split("_")
        around = f"layers.{index}.{'attention' if half == 'attn' else 'mlp'}_conv"
        name = f"{around}.base_kernel" if leaf == "base" else f"{around}.kernel_projection.weight"
        return WeightSource((name,), turned, None, full)
    modules: Any = MODULES[correction] if first == "correction" else MODULES
    whole: Any = TENSORS[correction] if first == "correction" else TENSORS
    inside = inner if first == "correction" else path
    if inside in whole:
        return WeightSource((whole[inside],), turned, None, full)
    return WeightSource((f"{modules[inside.rpartition('.')[0]]}.{tail}",), turned, None, full)


def _kind(tensors: Tensors, entry: Any) -> str:
    """Returns the method: "dflash", "dspark", "domino", "dflash2" or "xpress".

    Raises:
        CheckpointError: config and tensors name different ones.
    """
    named = str(entry("speculators_model_type") or entry("projector_type") or "").lower()
    architecture = str((entry("architectures") or [""])[0]).lower()
    if not named:
        named = next((kind for kind in ("dspark", "domino", "dflash2", "xpress") if kind in architecture), "dflash")
    held = next((kind for name, kind in (("prefix_gru.weight_ih_l0", "domino"), ("markov_head.markov_w1.weight",
                 "dspark"), ("candidate_selector.predecessor_codebook", "dflash2"), ("predecessor_codebook", "dflash2"),
                 ("refiner_head.readout.weight", "xpress")) if name in tensors), None)
    if named == "dflash" and held == "dflash2" and "selector_rank" in (entry("dflash_config") or {}):
        named = "dflash2"
    if named not in KINDS or held not in (None, named) or (
            held is None and named not in ("dflash", "dspark")):
        raise CheckpointError(f"{tensors.name}: says that it is {named!r}, and holds the tensors of "
                              f"{held or 'dflash'!r}; takes files of dflash, dspark, domino, dflash2 or xpress")
    for name in [name for name in ("predecessor_codebook", "successor_codebook", "hidden_projection.weight")
                 if name in tensors]:
        tensors.rename(name, f"candidate_selector.{name}")
    return named


def _decoder(tensors: Tensors, body: dict[str, Any]) -> DecoderConfig:
    """Returns the shape of the layers.

    Raises:
        CheckpointError: the family is unknown, or has another kind of layers.
    """
    slides = "sliding_attention" in (body.get("layer_types") or ())
    if slides and not body.get("sliding_window"):
        raise CheckpointError(f"{tensors.name}: layer_types names sliding_attention, and sliding_window is missing")
    try:
        decoder = read_config({"model_type": "qwen3", **body, **({"use_sliding_window": True} if slides else {})})
    except ValueError as e:
        raise CheckpointError(f"{tensors.name}: {e}") from None
    return decoder


def _default(tensors: Tensors, target: int | None, count: int) -> tuple[int, ...]:
    """Returns the layers that Z Lab's code reads if the file names none: spread evenly."""
    if target is None:
        raise CheckpointError(f"{tensors.name}: names neither target_layer_ids nor num_target_layers; takes layers=, "
                              "the target's layers whose outputs it reads")
    if count == 1:
        return (target // 2,)
    return tuple(round(1 + i * (target - 4) / (count - 1)) for i in range(count))


def _first_predicts(kind: str, entry: Any) -> bool:
    given = entry("sample_from_anchor")
    if given is not None:
        return bool(given)
    return kind == "dspark" or (kind == "domino" and bool(entry("shift_label", False)))


def _correction(kind: str, entry: Any) -> Correction | None:
    if kind == "dspark":
        rank = int(entry("markov_rank", 256) or 0)
        return Markov(rank, str(entry("markov_head_type", "vanilla")).lower()) if rank else None   # type: ignore[arg-type]
    if kind == "domino":
        return PrefixGRU(int(entry("gru_hidden_dim", 1024)), int(entry("emb_dim", 256)),
                         int(entry("pure_draft_prefix_len", 0)))
    if kind == "dflash2":
        return CandidateSelector(int(entry("selector_rank", 256)), int(entry("selector_top_k", 16)))
    if kind == "xpress":
        return Refiner(int(entry("xpress_rank", 256)), int(entry("xpress_mlp_ratio", 2)))
    return None


def _convolution(tensors: Tensors, entry: Any, decoder: DecoderConfig) -> LocalConvolution | None:
    """Returns the shape of the local convolutions, whose tensors fix it; the config's entries have to agree."""
    base = "layers.0.attention_conv.base_kernel"
    if base not in tensors:
        return None
    count = tensors[base].shape[1]
    group = 2 * count * decoder.width // tensors["layers.0.attention_conv.kernel_projection.weight"].shape[0]
    for key, found in (("conv_kernel_size", count), ("conv_group_size", group)):
        if entry(key, found) != found:
            raise CheckpointError(f"{tensors.name}: {key}: got {entry(key)}, its tensors have {found}")
    return LocalConvolution(count, group)


__all__ = ["read", "shared_tables", "sources"]
