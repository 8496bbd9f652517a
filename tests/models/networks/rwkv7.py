"""Models, data and helpers of `test_rwkv7.py` that other tests use too."""

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

import decodax as dx
from decodax.models.recurrent.rwkv7 import describe_rwkv7

WIDTH, HEAD, LAYERS, VOCABULARY, INNER = 32, 8, 3, 40, 96
RANKS = {"w": 6, "a": 5, "v": 4, "g": 7}


def tensors(layers: int = LAYERS, vocabulary: int = VOCABULARY, width: int = WIDTH, head: int = HEAD
            ) -> dict[str, np.ndarray]:
    """Returns the tensors of a tiny published file."""
    r, found = np.random.default_rng(7), dict[str, np.ndarray]()
    normal = lambda *shape, scale=0.5: (r.standard_normal(shape) * scale).astype(np.float32)
    row = lambda: r.random((1, 1, width)).astype(np.float32)

    def norm(name: str) -> None:
        found[f"{name}.weight"], found[f"{name}.bias"] = 1 + normal(width, scale=.2), normal(width, scale=.2)

    found["emb.weight"] = normal(vocabulary, width, scale=1)
    for i in range(layers):
        block, own = f"blocks.{i}", f"blocks.{i}.att"
        for name in ("ln0", "ln1", "ln2")[i > 0:]:
            norm(f"{block}.{name}")
        found |= {f"{own}.x_{name}": row() for name in "rwkvag"}
        for name in "wav":
            found |= {f"{own}.{name}0": normal(1, 1, width), f"{own}.{name}1": normal(width, RANKS[name]),
                      f"{own}.{name}2": normal(RANKS[name], width)}
        found |= {f"{own}.g1": normal(width, RANKS["g"]), f"{own}.g2": normal(RANKS["g"], width)}
        found |= {f"{own}.k_k": 1 + normal(1, 1, width, scale=.2), f"{own}.k_a": 1 + normal(1, 1, width, scale=.2),
                  f"{own}.r_k": normal(width // head, head)}
        found |= {f"{own}.{name}.weight": normal(width, width, scale=.25)
                  for name in ("receptance", "key", "value", "output")}
        norm(f"{own}.ln_x")
        found |= {f"{block}.ffn.x_k": row(), f"{block}.ffn.key.weight": normal(INNER, width, scale=.25),
                  f"{block}.ffn.value.weight": normal(width, INNER, scale=.2)}
    norm("ln_out")
    return {**found, "head.weight": normal(vocabulary, width, scale=.4)}


def write(directory: Path, found: dict[str, np.ndarray]) -> Path:
    save_file(found, directory / "model.safetensors")
    shapes = {name: value.shape for name, value in found.items()}
    (directory / "config.json").write_text(json.dumps(describe_rwkv7(shapes)))
    return directory


@functools.cache
def loaded() -> Any:
    return dx.load(write(Path(tempfile.mkdtemp()), tensors()))
