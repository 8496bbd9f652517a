"""Makes a directory for `decodax.load` of a published QServe checkpoint (Lin et al., 2024).

    python scripts/qserve_checkpoint.py Llama-3-8B-QServe-g128 llama-3-8b-qserve
    python -c 'import decodax as dx; print(dx.generate(dx.load("llama-3-8b-qserve"), "Hello").text[0])'

The authors publish models as PyTorch files, `pytorch_model.bin` or `quant_model.pt`, with or without groups. PyTorch is
needed to read them, and only here. Weights are taken as they are: 4-bit codes, steps, zeros and scales. Scales of a
quantised cache (`kv_scale_quant_orig`) are left out, since the cache is not quantised here.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from decodax.io.checkpoint import save_model
from decodax.io.quantize import BESIDE
from decodax.models.families import read_config, text_part
from decodax.models.formats.qserve import read
from decodax.models.names import flatten, sources
from decodax.models.transformer import Transformer

FILES = ("pytorch_model.bin", "quant_model.pt")
FIELDS = ("s2_scales", "s2_zeros", "s1_szeros")


def weights(config: dict[str, Any], tensors: Mapping[str, np.ndarray]) -> tuple[Transformer, Any]:
    """The model that a configuration describes, and its weights from the tensors of a checkpoint.

    Raises:
        ValueError: a tensor is missing, or has another shape than the configuration asks for; or the model's family
            keeps several kernels in a tensor.
    """
    decoder = read_config(config)
    model = Transformer(decoder)
    shapes = model.abstract_params()
    made = {}
    for path, source in sources(text_part(config)["model_type"], decoder, shapes, tensors.keys()).items():
        name, *others = source.tensors
        if others or source.part is not None:
            raise ValueError(f"config: {path} is a part of {name} or made of several tensors; takes a Llama or Mistral")
        stem = name.removesuffix(".weight")
        if f"{stem}.qweight" in tensors:
            fields = {field: tensors[f"{stem}.{field}"] for field in FIELDS if f"{stem}.{field}" in tensors}
            try:
                made[path] = read(tensors[f"{stem}.qweight"], tensors[f"{stem}.s1_scales"], **fields)
            except ValueError as e:
                raise ValueError(f"{stem}: {e}") from None
        elif name in tensors:
            made[path] = jnp.asarray(tensors[name].T if source.transpose else tensors[name])
        else:
            raise ValueError(f"tensors: {name} is missing")
        shape = made[path].shape if f"{stem}.qweight" in tensors else tensors[name].shape
        if shape != source.full:
            raise ValueError(f"{name}: got shape {shape}, the configuration asks for {source.full}")
    assert made.keys() == flatten(shapes).keys()
    return model, jax.tree.unflatten(jax.tree.structure(shapes), made.values())


def convert(source: Path, target: Path) -> None:
    """Writes the directory `target`."""
    import torch

    file = next((source / name for name in FILES if (source / name).is_file()), None)
    if file is None:
        raise SystemExit(f"{source}: has neither {' nor '.join(FILES)}")
    config = json.loads((source / "config.json").read_text())
    found = torch.load(file, map_location="cpu", weights_only=True)
    tensors = {name: (t.float() if t.dtype == torch.bfloat16 else t).numpy() for name, t in found.items()}
    model, params = weights(config, tensors)
    save_model(target, model, params, config)
    for name in BESIDE:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="directory of the checkpoint")
    parser.add_argument("target", type=Path, help="directory to write")
    args = parser.parse_args()
    convert(args.source, args.target)


if __name__ == "__main__":
    main()
