"""Loading a model by name: one of the zoo, or a local Hugging Face directory."""

from __future__ import annotations

import dataclasses
import difflib
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

import decodax.models
from decodax.core.types import Model
from decodax.io.checkpoint import load_diffusion, load_model
from decodax.io.text import Tokenizer, read_object
from decodax.models.diffusion import Diffusion

ZOO = Path(decodax.models.__file__).parent / "zoo"
"""Where the shipped models lie."""


@dataclasses.dataclass(frozen=True)
class LM:
    """A language model ready to decode.

    Attributes:
        model, params: the network as the core sees it, and its weights.
        vocab_size: entries of its logits.
        tokenizer: None for a model of bare ids.
        generation_config: the model's own defaults, by Hugging Face's names.
        name: what it was loaded as.
        mesh: the mesh its weights lie on; batches are placed on it.
        diffusion: how it fills masks; None for an autoregressive model.
    """

    model: Model
    params: Any
    vocab_size: int
    tokenizer: Tokenizer | None = None
    generation_config: dict[str, Any] = dataclasses.field(default_factory=dict)
    name: str = "model"
    mesh: Mesh | None = None
    diffusion: Diffusion | None = None

    @property
    def eos(self) -> list[int]:
        """Ids that end a sequence, from the generation config or the tokenizer."""
        ids = self.generation_config.get("eos_token_id")
        if ids is None:
            return list(self.tokenizer.eos_ids) if self.tokenizer else []
        return list(ids) if isinstance(ids, (list, tuple)) else [ids]

    @property
    def bos(self) -> int | None:
        """The id an empty prompt begins with."""
        return self.tokenizer.bos_id if self.tokenizer else self.generation_config.get("bos_token_id")

    @property
    def pad(self) -> int:
        """The id that fills rows of `Result.tokens` beyond their length."""
        own = self.tokenizer.pad_id if self.tokenizer else self.generation_config.get("pad_token_id")
        return own if own is not None else self.eos[0] if self.eos else 0


def zoo() -> list[str]:
    """Names of the shipped models."""
    return sorted(p.parent.name for p in ZOO.glob("*/config.json"))


def find(name_or_dir: str | Path) -> Path:
    """The directory of a model.

    Raises:
        ValueError: neither a shipped model nor a directory with a config.json; lists near names.
    """
    name = str(name_or_dir)
    if name in zoo():
        return ZOO / name
    path = Path(name_or_dir).expanduser()
    if (path / "config.json").is_file():
        return path
    if path.is_dir():
        raise ValueError(f"{path}: has no config.json, so it is no Hugging Face model directory")
    near = difflib.get_close_matches(name, zoo(), n=3, cutoff=0.5)
    raise ValueError(f"model {name!r}: neither a directory nor a shipped model ({', '.join(zoo())})"
                     + (f"; did you mean {' or '.join(near)}?" if near else ""))


def load(name_or_dir: str | Path, *, dtype: jax.typing.DTypeLike | None = None, mesh: Mesh | None = None,
         context: int | None = None) -> LM:
    """Loads a shipped model by name, or a local Hugging Face directory.

    Args:
        name_or_dir: such as "pycode", or a path with config.json, safetensors and tokenizer.json.
        dtype: of weights and cache; default float32 on CPU, else the checkpoint's own.
        context: positions to serve; rotary scalings that depend on the length (dynamic, longrope) are set for it.
        mesh: puts the weights on a mesh, heads, MLP and vocabulary over its axis "model"; batches go over "data".

    Raises:
        ValueError: an unknown name or architecture, a missing tensor or one of the wrong shape, by name.
    """
    path = find(name_or_dir)
    if dtype is None and jax.default_backend() == "cpu":
        dtype = "float32"      # bfloat16 matrix products take almost twice as long there
    diffusion = load_diffusion(path)
    model, params = load_model(path, dtype=dtype, mesh=mesh, context=context)
    tokenizer = Tokenizer.from_dir(path) if (path / "tokenizer.json").is_file() else None
    # where generation_config.json is silent on special tokens, config.json speaks
    config = read_object(path / "config.json")
    inner = config.get("text_config")
    ids = {name: found[name] for found in (inner if isinstance(inner, dict) else {}, config)
           for name in ("bos_token_id", "eos_token_id", "pad_token_id") if found.get(name) is not None}
    return LM(model=model, params=params, vocab_size=model.config.vocab, tokenizer=tokenizer,
              generation_config={**ids, **read_object(path / "generation_config.json")},
              name=path.name, mesh=mesh, diffusion=diffusion)
