"""GPT-OSS as OpenAI writes it. It imports no torch, beside which collectives on CPU crash."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from decodax.models.formats import Mxfp4


def as_released(root: Path, **entries: Any) -> None:
    """Stores the experts of a directory in MXFP4 and says so in its `config.json`, with these entries."""
    tensors: dict[str, np.ndarray] = {}
    for name, value in load_file(root / "model.safetensors").items():
        if value.ndim == 3:
            packed = Mxfp4().pack(jnp.asarray(value))
            tensors[f"{name}_blocks"] = np.ascontiguousarray(np.swapaxes(packed.codes, -1, -2))
            tensors[f"{name}_scales"] = np.asarray(packed.scales)
        else:
            tensors[name] = value
    save_file(tensors, root / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((root / "config.json").read_text())
    (root / "config.json").write_text(json.dumps(
        config | entries | {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": [
            "model.layers.*.self_attn"]}}))
