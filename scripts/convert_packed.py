"""Published checkpoints of QServe and SqueezeLLM as directories for `decodax.load`.

    python scripts/convert_packed.py Llama-3-8B-QServe-g128 Llama-3-8B-QServe-g128/pytorch_model.bin llama-3-8b-qserve
    python scripts/convert_packed.py vicuna-7b sq-vicuna-7b-w4-s45.pt vicuna-7b-squeezellm
    decodax generate --model vicuna-7b-squeezellm "Hello"

MODEL is a directory with config.json, whose tokenizer is taken, too. Where the checkpoint lacks a weight, as
SqueezeLLM's oldest lack embeddings, norms and head, it is taken from the safetensors files there. Codes, tables and
scales stay as they are; scales of a quantised cache are left out, since the cache is not quantised here. PyTorch is
needed to read the checkpoints, and only here.
"""

from __future__ import annotations

import argparse
import collections
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import decodax as dx
from decodax.io.files import Files, read_json
from decodax.io.load import LM
from decodax.io.text import Tokenizer
from decodax.models.families import read_config, text_part
from decodax.models.formats import qserve, squeezellm
from decodax.models.names import flatten, sources
from decodax.models.packed import Packed
from decodax.models.transformer import Transformer

READERS: dict[str, Callable[[Mapping[str, np.ndarray]], Packed]] = {
    "s1_scales": qserve.read_tensors, "lookup_table": squeezellm.read_tensors}
"""How the tensors of a kernel are read, by the name of one that only its format has."""

IGNORED = re.compile(r"^sparse_threshold\.|rotary_emb\.inv_freq$|kv_scale_quant_orig$|_kv_scale$")


def convert(directory: Path, checkpoint: Path) -> LM:
    """The model with the checkpoint's weights.

    Raises:
        ValueError: a weight is in neither, has another shape than config.json asks for, or is left over.
    """
    config = read_json(directory / "config.json")
    decoder, family = read_config(config), text_part(config)["model_type"]
    model = Transformer(decoder)
    state = {key: value for key, value in torch.load(checkpoint, map_location="cpu", weights_only=True).items()
             if not IGNORED.search(key)}
    packed: dict[str, dict[str, np.ndarray]] = collections.defaultdict(dict)
    for key in [key for key in state if f"{key.rpartition('.')[0]}.qweight" in state and not key.endswith(".bias")]:
        packed[key.rpartition(".")[0]][key.rpartition(".")[2]] = state.pop(key).numpy()
    present = [*state, *(f"{module}.weight" for module in packed)]
    files = Files(directory) if list(directory.glob("*.safetensors*")) else None
    shapes, made = model.abstract_params(), {}
    for path, source in sources(family, decoder, shapes, present).items():
        name, *others = source.tensors
        if others or source.part is not None:
            raise ValueError(f"checkpoint: {path} is a part of {name} or made of several tensors; takes a model whose "
                             "kernels have one tensor each, such as a Llama or Mistral")
        module = name.removesuffix(".weight")
        if module in packed:
            made[path] = _kernel(module, packed.pop(module))
            continue
        if name in state:
            value = state.pop(name)
            found = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
        elif files is not None and name in files.home:
            found = files.slice(name)[...]
        else:
            raise ValueError(f"checkpoint: lacks {name}, and so does {directory}")
        made[path] = jnp.asarray(found.T if source.transpose else found)
    left = [name for name in [*state, *packed] if not decoder.tied or name != "lm_head.weight"]
    if left:
        raise ValueError(f"checkpoint: holds {', '.join(left[:5])}, which {directory / 'config.json'} has no place for")
    for path, wanted in flatten(shapes).items():
        own: Any = made[path]
        shape = wanted.shape if isinstance(own, jax.Array) else (*wanted.shape[:-2], *wanted.shape[:-3:-1])
        if own.shape != shape:
            raise ValueError(f"checkpoint: {path} has shape {own.shape}, {directory / 'config.json'} asks for {shape}")
    params = jax.tree.unflatten(jax.tree.structure(shapes), [made[path] for path in flatten(shapes)])
    tokenizer = Tokenizer.from_dir(directory) if (directory / "tokenizer.json").is_file() else None
    defaults = directory / "generation_config.json"
    return LM(model=model, params=params, vocab_size=decoder.vocab, directory=directory, name=directory.name,
              tokenizer=tokenizer, generation_config=read_json(defaults) if defaults.is_file() else {})


def _kernel(module: str, tensors: Mapping[str, np.ndarray]) -> Packed:
    reader = next((reader for name, reader in READERS.items() if name in tensors), None)
    if reader is None:
        raise ValueError(f"checkpoint: {module} has tensors {', '.join(sorted(tensors))}; takes one of "
                         f"{', '.join(READERS)} beside qweight")
    try:
        return reader(tensors)
    except (KeyError, ValueError) as e:
        raise ValueError(f"checkpoint: {module}: {e}") from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL", help="directory with config.json and tokenizer")
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="such as pytorch_model.bin")
    parser.add_argument("out", type=Path, metavar="OUT", help="directory to write")
    args = parser.parse_args()
    dx.save(convert(args.model, args.checkpoint), args.out)


if __name__ == "__main__":
    main()
