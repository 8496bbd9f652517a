"""Reads quantised checkpoints in Hugging Face layout into packed kernels: a module for each family of formats."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from decodax.io.files import CheckpointError, read_object
from decodax.io.packed import ENTRY
from decodax.io.quantised.awq import Awq
from decodax.io.quantised.bitsandbytes import BitsAndBytes
from decodax.io.quantised.compressed import CompressedTensors
from decodax.io.quantised.float8 import Float8Weights
from decodax.io.quantised.gptq import Gptq
from decodax.io.quantised.modelopt import ModelOptimizer
from decodax.io.quantised.scheme import Scheme

METHODS: dict[str, type[Scheme]] = {
    "fp8": Float8Weights, "fbgemm_fp8": Float8Weights, "compressed-tensors": CompressedTensors, "awq": Awq,
    "gptq": Gptq, "bitsandbytes": BitsAndBytes, "modelopt": ModelOptimizer}
"""Readers by `quant_method`."""

BESIDE = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
"""Files in which older checkpoints have their configuration, and its method."""


def quantization(root: Path, config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]] | None:
    """Returns the name of the file with the quantization of a checkpoint and its entries; None if it is not quantised,
    or was packed by `decodax.save`.

    Args:
        root: the directory.
        config: the content of its config.json.
    """
    if ENTRY in config:
        return None
    text = config.get("text_config")
    for entries in (config, text if isinstance(text, Mapping) else {}):
        for key in ("quantization_config", "compression_config"):
            if isinstance(entries.get(key), Mapping) and entries[key]:
                return f"config.json: {key}", entries[key]
    for file, method in BESIDE.items():
        if (found := read_object(root / file)):
            return file, {"quant_method": method, **found}
    return None


def read_scheme(root: Path, config: Mapping[str, Any]) -> Scheme | None:
    """Returns the format of a checkpoint; None if it is not quantised.

    Raises:
        CheckpointError: the format is not read; the message names the entry.
    """
    found = quantization(root, config)
    if found is None:
        return None
    where, entries = found
    method = entries.get("quant_method")
    if method is None and any("load_in_" in key for key in entries):
        method = "bitsandbytes"
    if method not in METHODS:
        near = difflib.get_close_matches(str(method), METHODS, n=1, cutoff=0.5)
        raise CheckpointError(f"{root / where}.quant_method: got {method!r}, takes {', '.join(map(repr, METHODS))}"
                              + (f"; did you mean {near[0]!r}?" if near else "; transformers' model.dequantize() turns "
                                 "other weights into arrays, which save_pretrained writes"))
    try:
        return METHODS[method].of(entries)
    except ValueError as error:
        raise CheckpointError(f"{root / where}.{error}") from None


def refuse_quantised(root: Path, config: Mapping[str, Any]) -> None:
    """Refuses a quantised checkpoint of a network that is no decoder.

    Raises:
        CheckpointError: the checkpoint is quantised.
    """
    if (found := quantization(root, config)) is not None:
        raise CheckpointError(f"{root / found[0]}: got quantised weights, takes floats for model_type "
                              f"{config.get('model_type')!r}")
