"""Reads the assistants of Gemma 4 (`decodax.models.drafters.assistant`)."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from decodax.io.drafters.tensors import Tensors
from decodax.io.files import CheckpointError
from decodax.models.drafters.assistant import AssistantHead
from decodax.models.families import read_config
from decodax.models.names import flatten, sources
from decodax.models.weight_source import WeightSource, kernel

ASSISTANTS = "gemma4_assistant", "gemma4_unified_assistant"
"""Their `model_type`."""

WITHOUT = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "enable_moe_block": False,
           "use_double_wide_mlp": False}
"""Entries of Gemma 4 that an assistant does not use."""


def read_assistant(tensors: Tensors, dtype: Any) -> tuple[AssistantHead, Any, np.ndarray | None]:
    """Reads a Gemma 4 assistant, a drafter that attends to the target's keys. Returns its network, its weights in
    `dtype`, and the target's token for each of its logits, `i32[Vd]`, or None if they are in the target's order.

    Raises:
        CheckpointError: an entry of its configuration is one that an assistant cannot have, or a tensor does not fit.
    """
    config = tensors.config
    text = {**WITHOUT, **config["text_config"]}
    if given := next((key for key, value in WITHOUT.items() if text[key] != value), None):
        raise CheckpointError(f"{tensors.name}: text_config.{given}: got {text[given]!r}, an assistant has "
                              f"{WITHOUT[given]!r}")
    # Its layers, which all read the target's keys, are described as if they had their own.
    used = {key: value for key, value in text.items() if key != "vocab_size_per_layer_input"}
    shape = read_config({"model_type": "gemma4_text", **used, "num_kv_shared_layers": 0})
    ordered = bool(config.get("use_ordered_embeddings", False))
    head = AssistantHead((), shape.vocab, config=dataclasses.replace(shape, logit_softcap=None),
                         backbone=int(config["backbone_hidden_size"]),
                         centroids=int(config.get("num_centroids", 2048)) if ordered else 0,
                         chosen=int(config.get("centroid_intermediate_top_k", 32)))
    ids = _clustered(tensors, head) if ordered else None
    leaves, d = flatten(head.abstract_params()), shape.width
    inside = sources(str(text.get("model_type", "gemma4_text")), head.config, {
        name: part for name, part in head.abstract_params().items() if name in ("layers", "norm")})
    found = {path: dataclasses.replace(source, tensors=tuple(name.removeprefix("model.") for name in source.tensors))
             for path, source in inside.items()} | {
        "narrow.kernel": kernel("pre_projection", d, 2 * head.backbone),
        "widen.kernel": kernel("post_projection", head.backbone, d),
        "centroids.kernel": kernel("masked_embedding.centroids", head.centroids, d),
        "table": WeightSource(("embed_tokens.weight",), False, None, leaves["table"].shape)}
    tensors.skip("lm_head.weight")      # a copy of the table
    return head, tensors.weights({path: found[path] for path in leaves}, dtype), ids


def _clustered(tensors: Tensors, head: AssistantHead) -> np.ndarray:
    """Puts the rows of the table into the order of the clusters; returns the token of each, `i32[V]`."""
    name = "masked_embedding.token_ordering"
    ids = np.asarray(tensors[name], np.int64)
    if not np.array_equal(np.sort(ids), np.arange(head.vocab)):
        raise CheckpointError(f"{tensors.name}: tensor {name} does not name each of the {head.vocab} tokens once")
    table = tensors["embed_tokens.weight"]
    if table.shape != (head.vocab, head.config.width):
        raise CheckpointError(f"{tensors.name}: tensor embed_tokens.weight has shape {list(table.shape)}, takes "
                              f"{[head.vocab, head.config.width]}")
    tensors.replace("embed_tokens.weight", table[ids].reshape(head.centroids, -1, head.config.width))
    return ids.astype(np.int32)


def is_assistant(config: Any) -> bool:
    """Returns True if a `config.json` is that of an assistant."""
    return config.get("model_type") in ASSISTANTS


__all__ = ["is_assistant", "read_assistant"]
