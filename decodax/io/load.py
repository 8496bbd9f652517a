"""Loading a model by name: one of the zoo, or a local Hugging Face directory."""

from __future__ import annotations

import dataclasses
import difflib
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

import decodax.models
from decodax.core.loaded import Loaded
from decodax.core.types import Model
from decodax.io.checkpoint import dtype_name, load_diffusion, load_model, load_t5
from decodax.io.files import CheckpointError, adapter, missing, read_json
from decodax.io.packed import ENTRY
from decodax.io.text import Tokenizer
from decodax.models.diffusion import Diffusion
from decodax.models.fields import checked
from decodax.models.formats import Format

ZOO = Path(decodax.models.__file__).parent / "zoo"
"""Where the shipped models lie."""

SLOW = ("tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "merges.txt", "spiece.model",
        "tekken.json", "*.tiktoken")
"""Files of tokenizers that are not read."""

SPECIAL = ("eos_token_id", "bos_token_id", "pad_token_id")


@dataclasses.dataclass(frozen=True)
class LM(Loaded):
    """A language model ready to decode.

    Attributes:
        model, params: the network as the core sees it, and its weights.
        vocab_size: entries of its logits.
        tokenizer: None for a model of bare ids.
        generation_config: the model's own defaults, by Hugging Face's names; the ids of EOS, BOS and padding where the
            files have them.
        name: what it was loaded as.
        mesh: the mesh its weights lie on; batches are placed on it.
        diffusion: how it fills masks; None for an autoregressive model.
        directory: where it was loaded from.
    """

    model: Model
    params: Any
    vocab_size: int
    tokenizer: Tokenizer | None = None
    generation_config: dict[str, Any] = dataclasses.field(default_factory=dict)
    name: str = "model"
    mesh: Mesh | None = None
    diffusion: Diffusion | None = None
    directory: Path | None = None

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
    if path.is_file():
        raise ValueError(f"{path}: is a file, takes the directory of a model")
    if (path / "adapter_config.json").is_file():
        raise CheckpointError(adapter(path))
    if path.is_dir():
        raise CheckpointError(f"{path}: has no config.json, so it is no Hugging Face model directory\n{missing(path)}")
    near = difflib.get_close_matches(name, zoo(), n=3, cutoff=0.5)
    raise ValueError(f"model {name!r}: neither a directory nor a shipped model ({', '.join(zoo())})"
                     + (f"; did you mean {' or '.join(near)}?" if near else ""))


def load(name_or_dir: str | Path, *, dtype: jax.typing.DTypeLike | None = None, mesh: Mesh | None = None,
         context: int | None = None, tokenizer: str | Path | Tokenizer | None = None,
         weights: str | Format | None = None) -> LM:
    """Loads a shipped model by name, or a local Hugging Face directory.

    Args:
        name_or_dir: such as "pycode", or a path with config.json, safetensors and tokenizer.json.
        dtype: of weights and cache, "float32", "bfloat16" or "float16"; default float32 on CPU, else the checkpoint's
            own.
        context: positions to serve; rotary scalings that depend on the length (dynamic, longrope) are set for it.
        mesh: puts the weights on a mesh, heads, MLP and vocabulary over its axis "model"; batches go over "data".
        tokenizer: another one, or a directory that holds one; None: the directory's own tokenizer.json, and none if it
            has no file of a tokenizer at all.
        weights: the format in which the weights are kept and read: "int8", "int4", "fp8", "bfloat16", "float16" or
            "float32", or a `decodax.models.formats.Format`; activations and cache keep `dtype`. None: arrays of
            `dtype`, or what `decodax.save` has packed; on CPU half precision is a format, since XLA emulates its
            products there.

    Raises:
        ValueError: an unknown name or architecture, a broken file, a missing tensor or one of the wrong shape, weights
            or a tokenizer in a format that is not read, or an argument out of its range, by name.
    """
    path = find(name_or_dir)
    if dtype is None and jax.default_backend() == "cpu":
        dtype = "float32"      # bfloat16 matrix products take almost twice as long there
    elif (weights is None and dtype is not None and jax.default_backend() == "cpu" and dtype_name(dtype) != "float32"
          and ENTRY not in read_json(path / "config.json")):
        weights = dtype_name(dtype)     # XLA emulates products of half precision there; a format is read as it lies
    diffusion, generation_config = load_diffusion(path), _generation_config(path)
    if not isinstance(tokenizer, Tokenizer):
        tokenizer = _tokenizer(path) if tokenizer is None else _tokenizer(Path(tokenizer), needed=True)
    model: Any
    if read_json(path / "config.json").get("model_type") == "t5":
        if mesh is not None or context is not None:
            raise ValueError(f"{'context' if mesh is None else 'mesh'}: got one for {path.name!r}; a T5 lies on one "
                             "device and has no length to be set for")
        model, params = load_t5(path, dtype=dtype, weights=weights)
    else:
        # last, for it takes longest
        model, params = load_model(path, dtype=dtype, mesh=mesh, context=context, weights=weights)
    return LM(model=model, params=params, vocab_size=model.config.vocab, tokenizer=tokenizer,
              generation_config=generation_config, name=path.name, mesh=mesh, diffusion=diffusion, directory=path)


def _tokenizer(path: Path, needed: bool = False) -> Tokenizer | None:
    """The tokenizer of a directory, or None if it has none."""
    if (path / "tokenizer.json").is_file():
        return Tokenizer.from_dir(path)
    if other := sorted(file.name for pattern in SLOW for file in path.glob(pattern)):
        raise CheckpointError(f"{path}: has {', '.join(other)} and no tokenizer.json; transformers writes one:\n"
                              f"    tokenizer = transformers.AutoTokenizer.from_pretrained({str(path)!r})\n"
                              f"    tokenizer.save_pretrained({str(path)!r})")
    return Tokenizer.from_dir(path) if needed else None         # which says what is missing


def _generation_config(path: Path) -> dict[str, Any]:
    """The entries of generation_config.json, and the special ids of config.json that it lacks."""
    found: dict[str, Any] = {}
    for file in (path / "config.json", path / "generation_config.json"):
        given = read_json(file) if file.is_file() else {}
        try:
            ids = checked({key: _inner(given, key) for key in SPECIAL})
        except ValueError as e:
            raise CheckpointError(f"{file}: {e}") from None
        rest = given if file.name == "generation_config.json" else {}
        found |= {key: value for key, value in rest.items() if key not in SPECIAL}
        found |= {key: value for key, value in ids.items() if value != -1}
    return found


def _inner(config: dict[str, Any], key: str) -> Any:
    """An entry of a config.json, or of the language model's part of it."""
    inside = config.get("text_config")
    return config[key] if config.get(key) is not None else inside.get(key) if isinstance(inside, dict) else None
