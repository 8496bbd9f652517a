"""Checkpoints of SqueezeLLM's authors (https://huggingface.co/squeeze-ai-lab) as directories for `decodax.load`.

    python scripts/convert_squeezellm.py vicuna-7b sq-vicuna-7b-w4-s45.pt vicuna-7b-squeezellm

MODEL is the directory of the model that was quantised. Its config.json and tokenizer are always used; its weights where
the checkpoint lacks some, as the oldest lack embeddings, norms and head. Codes stay packed as they are. It needs torch.
"""

from __future__ import annotations

import argparse
import collections
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import decodax as dx
from decodax.io.files import Files, read_json
from decodax.io.load import LM
from decodax.models.families import read_config, text_part
from decodax.models.formats.squeezellm import read_tensors
from decodax.models.names import flatten, sources
from decodax.models.transformer import Transformer


def convert(directory: Path, checkpoint: Path) -> LM:
    """The model with the checkpoint's weights.

    Raises:
        ValueError: a weight is in neither, has another shape than config.json asks for, or is left over.
    """
    config = read_json(directory / "config.json")
    decoder, family = read_config(config), text_part(config)["model_type"]
    model = Transformer(decoder)
    state = {key: value for key, value in torch.load(checkpoint, map_location="cpu", weights_only=True).items()
             if not key.startswith("sparse_threshold.") and not key.endswith("rotary_emb.inv_freq")}
    packed: dict[str, dict[str, np.ndarray]] = collections.defaultdict(dict)
    for key in [key for key in state if f"{key.rpartition('.')[0]}.qweight" in state and not key.endswith(".bias")]:
        packed[key.rpartition(".")[0]][key.rpartition(".")[2]] = state.pop(key).numpy()
    present = [*state, *(f"{module}.weight" for module in packed)]
    files = Files(directory) if list(directory.glob("*.safetensors*")) else None
    shapes, made = model.abstract_params(), {}
    for path, source in sources(family, decoder, shapes, present).items():
        (name,) = source.tensors
        module = name.removesuffix(".weight")
        if module in packed:
            made[path] = read_tensors(packed.pop(module))
            continue
        if name in state:
            value = state.pop(name)
            found = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
        elif files is not None and name in files.home:
            found = files.slice(name)[...]
        else:
            raise ValueError(f"checkpoint: lacks {name}, and so does {directory}")
        made[path] = jnp.asarray(found.T if source.transpose else found)
    left = [*state, *packed]
    if decoder.tied:
        left = [name for name in left if name != "lm_head.weight"]
    if left:
        raise ValueError(f"checkpoint: holds {', '.join(left[:5])}, which {directory / 'config.json'} has no place for")
    for path, wanted in flatten(shapes).items():
        own: Any = made[path]
        shape = wanted.shape if isinstance(own, jax.Array) else (*wanted.shape[:-2], *wanted.shape[:-3:-1])
        if own.shape != shape:
            raise ValueError(f"checkpoint: {path} has shape {own.shape}, {directory / 'config.json'} asks for {shape}")
    params = jax.tree.unflatten(jax.tree.structure(shapes), [made[path] for path in flatten(shapes)])
    return LM(model=model, params=params, vocab_size=decoder.vocab, directory=directory, name=directory.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL", help="directory of the model that was quantised")
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="such as sq-vicuna-7b-w4-s45.pt")
    parser.add_argument("out", type=Path, metavar="OUT", help="directory to write")
    args = parser.parse_args()
    dx.save(convert(args.model, args.checkpoint), args.out)


if __name__ == "__main__":
    main()
