"""A published RWKV-7 or RWKV-X (`.pth`) as a directory for `decodax.load`.

    python scripts/convert_rwkv.py RWKV-x070-World-0.1B-v2.8-20241210-ctx4096.pth rwkv7-0.1b
    python -c "import decodax as dx; print(dx.generate(dx.load('rwkv7-0.1b'), [[33155, 37576]]).tokens)"

Tensors keep their names, numbers and dtype. The model's tokenizer is a file of words that is not read here, so it takes
ids; `decodax.load(..., tokenizer=)` takes another one. PyTorch is needed to read the file, and only here.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from decodax.models.rwkv7 import IGNORED, describe_rwkv7
from decodax.models.rwkv_x import describe_rwkv_x


def convert(checkpoint: Path, directory: Path) -> None:
    """Writes config.json and model.safetensors.

    Raises:
        ValueError: the file is neither, or the directory exists.
    """
    state = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)
    describe = describe_rwkv_x if any(name.startswith("moba.") for name in state) else describe_rwkv7
    config = describe({name: tuple(value.shape) for name, value in state.items()})
    if directory.exists():
        raise ValueError(f"directory: {directory} exists")
    directory.mkdir(parents=True)
    save_file({name: value.contiguous() for name, value in state.items() if not IGNORED.search(name)},
              directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="the .pth file")
    parser.add_argument("directory", type=Path, help="where to write; must not exist")
    args = parser.parse_args()
    convert(args.checkpoint, args.directory)


if __name__ == "__main__":
    main()
