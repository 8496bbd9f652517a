"""Reads the checkpoints of HAMburger's authors, which hold a tuned model, its embedder and its decoder in one file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from decodax.io.drafters.eagle import layer_names
from decodax.io.drafters.reading import placed
from decodax.io.drafters.tensors import Tensors
from decodax.io.files import CheckpointError
from decodax.models.config import DecoderConfig
from decodax.models.drafters.hamburger import LAYERS, HamburgerHead
from decodax.models.drafters.prefixed import plain_layers

FOLDER = "micro-steps"
"""Folder of embedder and decoder within the directory of the model that was tuned with them."""

DEPTH, TAPS, MERGE_HEADS = 16, (3, 7, 11), 64
"""Layers of the model, those whose outputs are read beside the final state, and heads of the embedder, which are fixed
in the authors' code."""


def read_hamburger(tensors: Mapping[str, np.ndarray], config: DecoderConfig, dtype: Any = "float32"
                   ) -> tuple[HamburgerHead, dict[str, Any]]:
    """Returns HAMburger's embedder and decoder, and their weights.

    Args:
        tensors: the `state_dict` of a checkpoint; those of the model itself (`model.*`) are passed over.
        config: configuration of the model.
        dtype: dtype of the weights.

    Raises:
        CheckpointError: a model of another depth, or a tensor is missing, has another shape or has no place.
    """
    if len(config.layers) != DEPTH:
        raise CheckpointError(f"model: got one of {len(config.layers)} layers, the authors' code takes {DEPTH}")
    own = Tensors({name: x for name, x in tensors.items() if not name.startswith("model.")
                   and not name.endswith("rotary_emb.inv_freq") and name != "comp_embedder.embedding.weight"}, {})
    head = HamburgerHead(TAPS, config.vocab, config=plain_layers(config, config.vocab, LAYERS),
                         steps=own["comp_embedder.merger.pos"].shape[0], merge_heads=MERGE_HEADS)
    names = {"places": "comp_embedder.merger.pos", **layer_names("micro_step_decoder.decoders.", LAYERS)}
    linear = {f"merge.{part}": f"comp_embedder.merger.{part}_proj" for part in "qkv"} | {
        "merge.o": "comp_embedder.out_proj"} | {f"stop.{i}": f"micro_step_decoder.stop_head.{2 * i}" for i in range(3)}
    for ours, theirs in linear.items():
        names |= {f"{ours}.kernel": f"{theirs}.weight", f"{ours}.bias": f"{theirs}.bias"}
    return head, placed(own, head, names, dtype)


__all__ = ["FOLDER", "read_hamburger"]
