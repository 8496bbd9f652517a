"""Writes published PyTorch checkpoints as directories for `decodax.load`.

    python scripts/convert.py packed Llama-3-8B-QServe-g128 Llama-3-8B-QServe-g128/pytorch_model.bin llama-3-8b-qserve
    python scripts/convert.py packed vicuna-7b sq-vicuna-7b-w4-s45.pt vicuna-7b-squeezellm
    python scripts/convert.py rwkv RWKV-x070-World-0.1B-v2.8-20241210-ctx4096.pth rwkv7-0.1b
    python scripts/convert.py hamburger Llama-3.2-1B-Instruct hamburger-llama-1B.ckpt hamburger-1b

`packed` reads QServe and SqueezeLLM. MODEL is a directory with config.json, whose tokenizer is taken, too. Weights that
the checkpoint lacks, such as embeddings, norms and head in SqueezeLLM's oldest, come from the safetensors files there.
Codes, tables and scales stay as they are; scales of a quantised cache are left out, since the cache is not quantised
here. `rwkv` reads RWKV-7 and RWKV-X. Tensors keep their names, numbers and dtype; the model's tokenizer is a file of
words that is not read here, so the model takes ids. `hamburger` reads a model with its embedder and decoder, which are
written into a folder beside it. Only these conversions need PyTorch.
"""

from __future__ import annotations

import argparse
import collections
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import commands
from commands import Command

IGNORED = re.compile(r"^sparse_threshold\.|rotary_emb\.inv_freq$|kv_scale_quant_orig$|_kv_scale$")


def packed(directory: Path, checkpoint: Path) -> Any:
    """Returns the model of a directory with the weights of a QServe or SqueezeLLM checkpoint."""
    import torch

    return assembled(directory, torch.load(checkpoint, map_location="cpu", weights_only=True))


def hamburger(directory: Path, checkpoint: Path, out: Path) -> None:
    """Writes a model that HAMburger's authors tuned, and its embedder and decoder."""
    import torch

    import decodax as dx
    from decodax.io.drafters import TrainedDrafter, save_drafter
    from decodax.io.drafters.hamburger import FOLDER, read_hamburger

    held = torch.load(checkpoint, map_location="cpu", weights_only=True)
    state = held.get("state_dict", held)
    own = {name for name in state if name.startswith("model.")}
    lm = assembled(directory, {name.removeprefix("model."): state[name] for name in own})
    head, weights = read_hamburger({name: state[name].float().numpy() for name in state.keys() - own}, lm.model.config)
    dx.save(lm, out)
    save_drafter(out / FOLDER, TrainedDrafter("hamburger", head, weights))


def assembled(directory: Path, tensors: Mapping[str, Any]) -> Any:
    """Returns the model of a directory with the weights of a checkpoint, tensors of PyTorch by name."""
    import jax
    import jax.numpy as jnp
    import torch

    from decodax.io.files import Files, read_json
    from decodax.io.load import LM
    from decodax.io.text import Tokenizer
    from decodax.models.families import read_config, text_part
    from decodax.models.names import flatten, sources
    from decodax.models.transformer import Transformer

    config = read_json(directory / "config.json")
    decoder, family = read_config(config), text_part(config)["model_type"]
    model = Transformer(decoder)
    state = {key: value for key, value in tensors.items() if not IGNORED.search(key)}
    kernels: dict[str, dict[str, Any]] = collections.defaultdict(dict)
    for key in [key for key in state if f"{key.rpartition('.')[0]}.qweight" in state and not key.endswith(".bias")]:
        kernels[key.rpartition(".")[0]][key.rpartition(".")[2]] = state.pop(key).numpy()
    present = [*state, *(f"{module}.weight" for module in kernels)]
    files = Files(directory) if list(directory.glob("*.safetensors*")) else None
    shapes, made = model.abstract_params(), {}
    for path, source in sources(family, decoder, shapes, present).items():
        name, *others = source.tensors
        if others or source.part is not None:
            raise ValueError(f"checkpoint: {path} is a part of {name} or made of several tensors; takes a model whose "
                             "kernels have one tensor each, such as a Llama or Mistral")
        module = name.removesuffix(".weight")
        if module in kernels:
            made[path] = _kernel(module, kernels.pop(module))
            continue
        if name in state:
            value = state.pop(name)
            found = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
        elif files is not None and name in files.home:
            found = files.slice(name)[...]
        else:
            raise ValueError(f"checkpoint: lacks {name}, and so does {directory}")
        made[path] = jnp.asarray(found.T if source.transpose else found)
    left = [name for name in [*state, *kernels] if not decoder.tied or name != "lm_head.weight"]
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


def _kernel(module: str, tensors: Mapping[str, Any]) -> Any:
    """Reads the tensors of a kernel; the name of one tells the format."""
    from decodax.models.formats import qserve, squeezellm

    readers = {"s1_scales": qserve.read_tensors, "lookup_table": squeezellm.read_tensors}
    for name, reader in readers.items():
        if name in tensors:
            try:
                return reader(tensors)
            except (KeyError, ValueError) as error:
                raise ValueError(f"checkpoint: {module}: {error}") from None
    raise ValueError(f"checkpoint: {module} has tensors {', '.join(sorted(tensors))}; takes one of "
                     f"{', '.join(readers)} beside qweight")


def rwkv(checkpoint: Path, directory: Path) -> None:
    """Writes config.json and model.safetensors of an RWKV-7 or RWKV-X."""
    import torch
    from safetensors.torch import save_file

    from decodax.models.recurrent.rwkv7 import IGNORED as UNUSED
    from decodax.models.recurrent.rwkv7 import describe_rwkv7
    from decodax.models.recurrent.rwkv_x import describe_rwkv_x

    state = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)
    describe = describe_rwkv_x if any(name.startswith("moba.") for name in state) else describe_rwkv7
    config = describe({name: tuple(value.shape) for name, value in state.items()})
    if directory.exists():
        raise ValueError(f"directory: {directory} exists")
    directory.mkdir(parents=True)
    save_file({name: value.contiguous() for name, value in state.items() if not UNUSED.search(name)},
              directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


given = lambda name, text: dict(positional=True, type=Path, metavar=name, help=text)
FILES: dict[str, Any] = {"checkpoint": given("CHECKPOINT", "file such as pytorch_model.bin"),
                         "out": given("OUT", "directory to write; for rwkv it must not exist")}
COMMANDS = {"packed": Command("a published QServe or SqueezeLLM",
                              model=given("MODEL", "directory with config.json and tokenizer"), **FILES),
            "rwkv": Command("a published RWKV-7 or RWKV-X", **FILES),
            "hamburger": Command("a model of HAMburger's authors",
                                 model=given("MODEL", "directory of the model that was tuned"), **FILES)}


def call(args: argparse.Namespace) -> None:
    """Converts with the arguments of the command line."""
    if args.command == "rwkv":
        rwkv(args.checkpoint, args.out)
    elif args.command == "hamburger":
        hamburger(args.model, args.checkpoint, args.out)
    else:
        import decodax as dx

        dx.save(packed(args.model, args.checkpoint), args.out)


def main(argv: list[str] | None = None) -> int:
    """Runs a command line and returns the exit status."""
    return commands.run("convert.py", commands.parser(__doc__, COMMANDS, {}, "Converts").parse_args(argv), call)


if __name__ == "__main__":
    raise SystemExit(main())
