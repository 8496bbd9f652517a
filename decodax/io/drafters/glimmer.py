"""Reads the assistant of Muse Glimmer (Meta, 2026): a DFlash head whose file has names and entries of its own.

In its layers with a sliding window, a slot attends to tokens up to `sliding_window` positions away in both directions,
where the decoder's windows count the slot's own position. Embeddings of the block are rows of the target's table
without the target's norm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from decodax.io.drafters import dflash
from decodax.io.drafters.tensors import Tensors
from decodax.io.files import CheckpointError
from decodax.models.config import DecoderConfig
from decodax.models.drafters.block import BlockHead

DEFAULTS: dict[str, Any] = {
    "hidden_size": 6656, "intermediate_size": 19_968, "num_hidden_layers": 5, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 131_072,
    "sliding_window": 2048, "block_size": 16, "mask_token_id": 201_818, "target_layer_ids": [1, 13, 25, 37, 49],
    "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}}
"""Entries that a file may leave out, with the values of transformers."""

RENAMED = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
"""Tensors by their names in a file, with those of DFlash."""


def is_glimmer(config: Mapping[str, Any]) -> bool:
    """Returns True if a `config.json` is that of an assistant of Muse Glimmer."""
    return config.get("model_type") == "muse_glimmer_assistant"


def read_glimmer(tensors: Tensors, dtype: Any, target: DecoderConfig | None, layers: Sequence[int] | None,
                 mask: int | None) -> tuple[BlockHead, dict[str, Any]]:
    """Reads an assistant of Muse Glimmer. Returns its network and its weights in `dtype`.

    Args:
        tensors: its file.
        dtype: dtype of the weights.
        target: the target's configuration; None: it is not known.
        layers: the target's layers whose outputs are read, counted from 0; None: as the file says.
        mask: the mask token; None: as the file says.

    Raises:
        CheckpointError: the target, whose vocabulary the assistant uses, is not known, a block is longer than the
            window, or a tensor or an entry does not fit.
    """
    if target is None:
        raise CheckpointError(f"{tensors.name}: has no vocabulary of its own; takes target=, the model that it drafts "
                              "for")
    given = {**DEFAULTS, **{key: value for key, value in tensors.config.items() if value is not None}}
    reach, block = given["sliding_window"], given["block_size"]
    kinds = given.get("layer_types") or ["sliding_attention"] * given["num_hidden_layers"]
    if "sliding_attention" in kinds and block > reach + 1:
        raise CheckpointError(f"{tensors.name}: block_size: got {block}, takes at most one more than sliding_window = "
                              f"{reach}")
    for theirs, ours in RENAMED.items():
        if theirs not in tensors:
            raise CheckpointError(f"{tensors.name}: lacks tensor {theirs}")
        tensors.rename(theirs, ours)
    tensors.config = {**given, "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "layer_types": kinds,
                      "sliding_window": reach + 1, "vocab_size": target.vocab, "num_target_layers": len(target.layers)}
    head, weights, _ = dflash.read(tensors, layers=layers, mask=mask, causal_sliding=False, dtype=dtype)
    return head, weights


__all__ = ["is_glimmer", "read_glimmer"]
