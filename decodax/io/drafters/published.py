"""Recognises the layout of a published drafter by its `config.json`, and reads it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from decodax.io.drafters import dflash
from decodax.io.drafters.assistant import is_assistant, read_assistant
from decodax.io.drafters.eagle import FeedsBack, LayerIds, read_eagle, read_eagle3
from decodax.io.drafters.further import check_further, further_in, read_further, read_tuned
from decodax.io.drafters.glimmer import is_glimmer, read_glimmer
from decodax.io.drafters.reading import names_in, tensors_in
from decodax.io.drafters.stacked import medusa_in, medusa_tensors, read_hydra, read_medusa, read_mlp_speculator
from decodax.io.files import CheckpointError, read_json
from decodax.models.config import DecoderConfig
from decodax.models.drafters.parallel import ParallelHead

PARD = "pard_token"
"""The entry of a `config.json` with which a language model was tuned to draft (PARD, PARD-2)."""


@dataclasses.dataclass(frozen=True)
class Conventions:
    """The user's answers to what a file may leave open. They are the arguments of `decodax.io.drafters.load_drafter`;
    None takes what the file says.

    Attributes:
        depth: number of the target's layers, or None if it is not known.
        config: the target's configuration, or None if it is not known.
    """

    depth: int | None = None
    layer_ids: LayerIds | None = None
    feeds_back: FeedsBack | None = None
    layers: Sequence[int] | None = None
    mask: int | None = None
    causal_sliding: bool | None = None
    config: DecoderConfig | None = None


def is_published(path: Path) -> bool:
    """Returns True if a directory holds a drafter, and no language model, in one of the layouts that others have
    published. Of the tensors in `.safetensors` files it reads names alone."""
    if not (path / "config.json").is_file():
        return False
    config = read_json(path / "config.json")
    if PARD in config or further_in(path, config):
        return False        # a language model, perhaps with a drafter inside
    if (heads := medusa_in(path)):
        return len(heads) == len(names_in(path))        # without the model that they belong to
    kinds = " ".join(config.get("architectures") or ())
    if is_assistant(config) or is_glimmer(config) or dflash.is_block_head(config) or "Eagle" in kinds or any(
            key in config for key in ("speculators_model_type", "medusa_num_heads", "hydra_num_heads",
                                      "draft_vocab_size")) or config.get("model_type") == "mlp_speculator":
        return True
    # EAGLE-1 has the entries of a language model with one layer.
    if config.get("num_hidden_layers") != 1:
        return False
    names = names_in(path)
    return "fc.weight" in names and "lm_head.weight" not in names


def read_published(path: Path, dtype: Any, how: Conventions) -> tuple[str, Any, Any, Any]:
    """Reads a drafter in one of the layouts that others have published. Returns the name of its method, its network,
    its weights in `dtype`, and the target's token for each of its logits, `i32[Vd]` (None: they are the target's).

    Raises:
        CheckpointError: the layout is not known, leaves something open, or a tensor does not fit it.
    """
    whole = read_json(path / "config.json")
    if is_assistant(whole):
        assistant, weights, order = read_assistant(tensors_in(path), dtype)
        return "mtp", assistant, weights, None if order is None else jnp.asarray(order, jnp.int32)
    if whole.get("speculators_model_type") == "mtp":
        return "mtp", *read_tuned(path, whole, dtype), None
    if (found := further_in(path, whole)):
        return "mtp", *read_further(path, whole, found, dtype), None
    if (heads := medusa_in(path)):
        return "medusa", *read_medusa(medusa_tensors(path, heads), dtype), None
    check_further(path, whole)
    if PARD in whole:
        raise CheckpointError(f"{path}: is a draft model of PARD, a language model of its own; takes "
                              f"draft=decodax.load({str(path)!r})")
    tensors = tensors_in(path)
    config, kinds = tensors.config, " ".join(tensors.config.get("architectures") or ())
    if "medusa_num_heads" in config:
        return "medusa", *read_medusa(tensors, dtype), None
    if "hydra_num_heads" in config:
        hydra, weights = read_hydra(tensors, dtype, how.config)
        return "hydra" if hydra.prefix is None else "hydra-plus-plus", hydra, weights, None
    if config.get("model_type") == "mlp_speculator":
        return "mlp-speculator", *read_mlp_speculator(tensors, dtype), None
    if is_glimmer(config):
        return "dflash", *read_glimmer(tensors, dtype, how.config, how.layers, how.mask), None
    if dflash.is_block_head(config):
        made, own, known = dflash.read(tensors, layers=how.layers, mask=how.mask, causal_sliding=how.causal_sliding,
                                       dtype=dtype)
        return dflash.system_of(made), made, own, None if known is None else jnp.asarray(known, jnp.int32)
    eagle3 = "Eagle3" in kinds or config.get("speculators_model_type") in ("eagle3", "peagle")
    if eagle3 or "draft_vocab_size" in config or "mask_hidden" in tensors:
        head, weights, ids = read_eagle3(tensors, dtype, how.depth, how.layer_ids, how.feeds_back)
        system = "p-eagle" if isinstance(head, ParallelHead) else "eagle-3"
        return system, head, weights, None if ids is None else jnp.asarray(ids, jnp.int32)
    if "fc.weight" in tensors and "lm_head.weight" not in tensors:
        return "eagle", *read_eagle(tensors, dtype), None
    raise CheckpointError(f"{path}: is no drafter in a known layout (architectures {config.get('architectures')}, "
                          f"model_type {config.get('model_type')!r}); known are Medusa, Hydra, the MLP speculator, "
                          "EAGLE-1 to 3, P-EAGLE, block heads (DFlash and its successors), the assistants of Gemma 4 "
                          "and Muse Glimmer, layers for multi-token prediction, and this library's own; a draft model "
                          "is loaded by decodax.load")
