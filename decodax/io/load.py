"""Loads a model by name: one of the shipped models, a local Hugging Face directory, or a GGUF file."""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from decodax.common.arguments import outside, shown
from decodax.common.ids import named
from decodax.core.loaded import Loaded
from decodax.core.types import Model, RandomWeights
from decodax.io.checkpoint import (
    dtype_name,
    load_diffusion,
    load_encoder_decoder,
    load_model,
    load_recurrent,
    recurrent_type,
)
from decodax.io.defaults import read_defaults
from decodax.io.files import CheckpointError, adapter, missing, read_json
from decodax.io.kinds import ZOO, is_drafter, is_gguf
from decodax.io.packed import ENTRY
from decodax.io.quantised import quantization
from decodax.io.row_order import by_row
from decodax.io.sentence_pieces import NEEDS, has_pieces, installed, read_pieces
from decodax.io.text import Tokenizer
from decodax.models import EncoderDecoder, Transformer, adapters
from decodax.models.diffusion import Diffusion
from decodax.models.encoder_decoder.reading import ENCODER_DECODERS
from decodax.models.families import family_of
from decodax.models.formats import Format

SLOW = ("tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "merges.txt", "spiece.model",
        "tekken.json", "*.tiktoken")
"""Tokenizer files in formats that cannot be read."""

WITHOUT_FAST = "m2m_100", "marian"
"""Families whose released tokenizers have no fast form, so no tokenizer.json; see `decodax.io.sentence_pieces`."""


@dataclasses.dataclass(frozen=True)
class LM(Loaded):
    """A language model ready to decode: network, weights, tokenizer and defaults.

    Attributes:
        model: the network, a `decodax.Model`.
        params: its weights.
        vocab_size: number of logits.
        tokenizer: the tokenizer; None for a model of bare token ids.
        generation_config: the model's default options of `generate`, with the names of Hugging Face, and the ids of
            EOS, BOS and padding if the files have them.
        name: the name by which it was loaded.
        mesh: the mesh on which the weights are placed; batches are placed on it, too. None: one device.
        diffusion: masked diffusion settings; None for an autoregressive model.
        directory: the directory from which it was loaded.
        entries: the entries of a `config.json` for a model that was loaded from a GGUF file.
        file: the GGUF file from which it was loaded.
        adapters: names of the adapters among which `generate(adapter=)` chooses, in the order of `with_adapters`.
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
    adapters: tuple[str, ...] = ()
    entries: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    file: Path | None = None

    def __repr__(self) -> str:
        """Returns one line with the network, its size, dtypes and devices."""
        leaves = [x for x in jax.tree.leaves(self.params) if hasattr(x, "dtype")]
        size: dict[str, int] = {}
        for x in leaves:
            size[str(x.dtype)] = size.get(str(x.dtype), 0) + math.prod(x.shape) * x.dtype.itemsize
        kinds = " and ".join(sorted(size, key=lambda name: -size[name])[:3])
        found: Any = jax.eval_shape(self.model.init_params, jax.random.key(0)) if isinstance(
            self.model, RandomWeights) else leaves      # packed weights have fewer numbers than parameters
        count = sum(math.prod(x.shape) for x in jax.tree.leaves(found))
        trained = self.model.trained_positions
        where = sorted({str(device) for x in leaves if isinstance(x, jax.Array) for device in x.sharding.device_set})
        parts = [f"{type(self.model).__name__} of {count:,} parameters",
                 f"{sum(size.values()) / 1e6:,.1f} MB of {kinds}",
                 f"vocabulary {self.vocab_size:,}", "no tokenizer" if self.tokenizer is None else "",
                 "" if trained is None else f"context {trained:,}",
                 "" if self.diffusion is None else "fills masks", f"on {', '.join(where[:2])}" + (
                     f" and {len(where) - 2} more" if len(where) > 2 else ""),
                 f"adapters {', '.join(self.adapters)}"[:100] if self.adapters else ""]
        return f"<LM {self.name!r}: {', '.join(part for part in parts if part)}>"

    def with_params(self, params: Any) -> LM:
        """Returns this model with other weights, such as those of a training loop, without copying them.

        Nothing is recompiled if shapes, dtypes and shardings are the same. If the weights are placed on a mesh, batches
        are placed on it, too; its axes "data" and "model" are used.

        Args:
            params: weights with the same structure and shapes.

        Raises:
            ValueError: the structure or a shape differs; the message names the first difference.
        """
        old, new = shapes_of(self.params), shapes_of(params)
        for path in {**old, **new}:
            if old.get(path) != new.get(path):
                say = lambda found: "nothing" if found is None else f"shape {found}"
                raise ValueError(f"params{path}: got {say(new.get(path))}, the model has {say(old.get(path))}")
        places = {x.sharding.mesh for x in jax.tree.leaves(params) if isinstance(x, jax.Array)
                  and isinstance(x.sharding, NamedSharding)}
        concrete = [mesh for mesh in places if isinstance(mesh, Mesh) and mesh.size > 1]
        return dataclasses.replace(self, params=params, mesh=concrete[0] if concrete else self.mesh)

    def with_adapter(self, adapter: Any, merge: bool = True) -> LM:
        """Returns this model with an adapter that all rows use.

        Args:
            adapter: a result of `decodax.adapters`, or the directory of an adapter in peft's layout.
            merge: True adds the adapter to a copy of the weights that it changes, so that decoding is as fast as
                without an adapter. False keeps it separate, which packed weights need.

        Raises:
            ValueError: the adapter does not fit the model, or cannot be read.
        """
        change = adapters.merge if merge else adapters.apply
        return dataclasses.replace(self, params=change(self.params, self._read(adapter)))

    def with_adapters(self, named: Mapping[str, Any]) -> LM:
        """Returns this model with several named adapters; `generate(..., adapter=)` selects one for each prompt.

        Args:
            named: adapters by name, each as in `with_adapter`.

        Raises:
            TypeError: `named` is not a mapping.
            ValueError: as in `with_adapter`.
        """
        if not isinstance(named, Mapping):
            raise TypeError(f"named: got {shown(named)}, takes a dictionary of adapters by name")
        params = adapters.apply(self.params, adapters.stack([self._read(each) for each in named.values()]))
        return dataclasses.replace(self, params=params, adapters=tuple(named))

    def _read(self, adapter: Any) -> Any:
        if not isinstance(self.model, Transformer):
            raise ValueError(f"adapter: {type(self.model).__name__} cannot have one; takes a Transformer")
        if not isinstance(adapter, (str, Path)):
            return adapter
        return adapters.read(adapter, self.model, family_of(self.config_entries) or "llama")

    @property
    def config_entries(self) -> dict[str, Any]:
        """The entries of its `config.json`, or those made from a GGUF file; empty for a model made in memory."""
        return dict(self.entries) if self.directory is None else read_json(self.directory / "config.json")

    @property
    def eos(self) -> list[int]:
        """Ids of the tokens that end a sequence, from the generation config or the tokenizer."""
        ids = named(self.generation_config.get("eos_token_id"))
        if ids is None:
            return [i for i in self.tokenizer.eos_ids if i < self.vocab_size] if self.tokenizer else []
        return list(ids) if isinstance(ids, (list, tuple)) else [ids]

    @property
    def start(self) -> int | None:
        """Id of the token with which the texts of an encoder-decoder's decoder begin; None for other models."""
        found = self.generation_config.get("decoder_start_token_id") if isinstance(self.model, EncoderDecoder) else None
        return found if isinstance(found, int) else None

    @property
    def bos(self) -> int | None:
        """Id of the token with which an empty prompt begins, or None."""
        if self.start is not None:
            return self.start
        return self._own("bos_token_id", self.tokenizer.bos_id if self.tokenizer else None)

    @property
    def pad(self) -> int:
        """Id that fills rows of `Result.tokens` beyond their length."""
        own = self._own("pad_token_id", self.tokenizer.pad_id if self.tokenizer else None)
        return own if own is not None else next((i for i in self.eos if isinstance(i, int) and i < self.vocab_size), 0)

    def _own(self, key: str, spelt: int | None) -> int | None:
        """Returns the special token id that the files give for `key`, or else the tokenizer's id `spelt` if it is
        within the vocabulary of the model."""
        found = named(self.generation_config.get(key))
        return found if found is not None else spelt if spelt is not None and spelt < self.vocab_size else None


def shapes_of(params: Any) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each array of a pytree by its path.

    >>> shapes_of({"a": np.zeros((2, 3))})
    {"['a']": (2, 3)}
    """
    return {jax.tree_util.keystr(path): np.shape(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(params)}


def zoo() -> list[str]:
    """Returns the names of the shipped models."""
    return sorted(p.parent.name for p in ZOO.glob("*/config.json") if not is_drafter(p.parent))


def find(name_or_dir: str | Path) -> Path:
    """Returns the directory of a model, or its GGUF file.

    Args:
        name_or_dir: the name of a shipped model, a directory with a config.json, or a GGUF file.

    Raises:
        ValueError: it is none of them; the message lists similar names.
    """
    name = str(name_or_dir)
    if name in zoo():
        return ZOO / name
    path = Path(name_or_dir).expanduser()
    if (path / "config.json").is_file() or is_gguf(path):
        return path
    if path.is_file():
        raise ValueError(f"name_or_dir: got the file {path}, takes the directory of a model, or a GGUF file")
    if (path / "adapter_config.json").is_file():
        raise CheckpointError(adapter(path))
    if path.is_dir():
        raise CheckpointError(f"{path}: has no config.json, which a Hugging Face model directory has; {missing(path)}")
    near = difflib.get_close_matches(name, zoo(), n=3, cutoff=0.5)
    raise ValueError(f"model {name!r}: neither a directory nor a shipped model ({', '.join(zoo())})"
                     + (f"; did you mean {' or '.join(near)}?" if near else ""))


def load(name_or_dir: str | Path, *, dtype: jax.typing.DTypeLike | None = None, mesh: Mesh | None = None,
         context: int | None = None, tokenizer: str | Path | Tokenizer | None = None,
         weights: str | Format | None = None, adapter: str | Path | None = None) -> LM:
    """Loads a shipped model by name, a local Hugging Face directory, or a GGUF file.

    Args:
        name_or_dir: a name such as "pycode", the path of a directory with config.json, safetensors and tokenizer.json,
            or the path of a `.gguf` file (`decodax[gguf]`), whose kernels stay packed in its own formats.
        dtype: dtype of weights and cache, "float32", "bfloat16" or "float16". None: float32 on CPU, else the stored
            dtype. On CPU "bfloat16" and "float16" keep kernels of that dtype as the file has them, in half the memory.
        mesh: a mesh on which the weights are placed, with heads, MLP and vocabulary sharded over its axis "model";
            batches are sharded over its axis "data".
        context: number of positions that will be used; rotary scalings that depend on the length (dynamic, longrope)
            are set for it.
        tokenizer: another tokenizer, or a directory that holds one. None: the directory's tokenizer.json, or no
            tokenizer if the directory has no tokenizer files at all.
        weights: the format in which the weights are stored and multiplied, one of `decodax.models.formats.FORMATS` such
            as "int8" or "int4:group=32", or a `Format`; activations and cache keep `dtype`. None: arrays of
            `dtype`, or the format of a quantised checkpoint, of a directory that `decodax.save` wrote or of a GGUF
            file. On CPU half precision is a format, since XLA emulates half-precision products there.
        adapter: the directory of a LoRA in peft's layout. It is added to the weights, or kept separate if they are
            packed.

    Returns:
        The model as an `LM`.

    Raises:
        ValueError: an unknown name or architecture, a broken file, a missing tensor or one of the wrong shape, weights
            or a tokenizer in a format that cannot be read, or an argument out of its range; the message names it.
    """
    for name, given, of, takes in (
            ("name_or_dir", name_or_dir, (str, os.PathLike), "the name of a shipped model, or a path"),
            ("mesh", mesh, (Mesh, type(None)), "a jax.sharding.Mesh"),
            ("tokenizer", tokenizer, (str, os.PathLike, Tokenizer, type(None)), "a directory or a Tokenizer")):
        if not isinstance(given, of):
            raise TypeError(f"{name}: got {shown(given)}, takes {takes}")
    path = find(name_or_dir)
    if path.is_file():
        return _load_gguf(path, dtype, mesh, context, tokenizer, weights, adapter)
    config = read_json(path / "config.json")
    if is_drafter(path):
        raise CheckpointError(f"name_or_dir: {path} holds a trained drafter, which decodax.load_drafter loads")
    packed = weights is not None or quantization(path, config) is not None or ENTRY in config
    if dtype is None and jax.default_backend() == "cpu":
        dtype = "float32"      # bfloat16 matrix products take almost twice as long on CPU
    elif not packed and dtype is not None and jax.default_backend() == "cpu" and dtype_name(dtype) != "float32":
        weights, packed = dtype_name(dtype), True   # XLA emulates half-precision products; a format is read as stored
    diffusion, generation_config = load_diffusion(path), read_defaults(path)
    if not isinstance(tokenizer, Tokenizer):
        tokenizer = _tokenizer(path, family=config.get("model_type")) if tokenizer is None else _tokenizer(
            Path(tokenizer), needed=True)
    recurrent, encodes = recurrent_type(config), config.get("model_type") in ENCODER_DECODERS
    kind = "an encoder-decoder" if encodes else {"mamba": "a Mamba", "mamba2": "a Mamba-2", "rwkv7": "an RWKV-7",
                                                 "rwkv_x": "an RWKV-X"}.get(recurrent or "")
    if kind and (context is not None or (mesh is not None and not encodes)):
        raise ValueError(f"{'context' if encodes or mesh is None else 'mesh'}: got one for {path.name!r}, takes None: "
                         f"{kind} {'' if encodes else 'runs on one device and '}has no context length to set")
    if recurrent is not None:
        model: Any
        model, params = load_recurrent(path, dtype=dtype, weights=weights)
    elif encodes:
        model, params = load_encoder_decoder(path, dtype=dtype, mesh=mesh, weights=weights)
    else:
        # last, since it takes longest
        model, params = load_model(path, dtype=dtype, mesh=mesh, context=context, weights=weights)
        params = by_row(model.config, params)
    lm = LM(model=model, params=params, vocab_size=model.config.vocab, tokenizer=tokenizer,
            generation_config=generation_config, name=path.name, mesh=mesh, diffusion=diffusion, directory=path)
    return lm if adapter is None else lm.with_adapter(adapter, merge=not packed)


def _load_gguf(path: Path, dtype: jax.typing.DTypeLike | None, mesh: Mesh | None, context: int | None,
               tokenizer: str | Path | Tokenizer | None, weights: str | Format | None,
               adapter: str | Path | None) -> LM:
    """Loads a GGUF file; see `load`."""
    from decodax.io.gguf import Gguf
    opened = Gguf.open(path)
    if not isinstance(tokenizer, Tokenizer):
        tokenizer = opened.tokenizer() if tokenizer is None else _tokenizer(Path(tokenizer), needed=True)
    if dtype is None and jax.default_backend() == "cpu":
        dtype = "float32"
    model, params = opened.load(dtype, mesh, context, weights)
    lm = LM(model=model, params=by_row(model.config, params), vocab_size=model.config.vocab, tokenizer=tokenizer,
            generation_config=opened.generation_config(tokenizer), name=path.stem, mesh=mesh, entries=opened.entries,
            file=path, diffusion=opened.diffusion())
    return lm if adapter is None else lm.with_adapter(adapter, merge=False)


def _tokenizer(path: Path, needed: bool = False, family: Any = None) -> Tokenizer | None:
    """Returns the tokenizer of a directory, or None if it has none. `family` is its `model_type`."""
    if (path / "tokenizer.json").is_file():
        return Tokenizer.from_dir(path)
    if (pieces := has_pieces(path)) and installed():
        return read_pieces(path)
    if other := sorted(file.name for pattern in SLOW for file in path.glob(pattern)):
        if family in WITHOUT_FAST and not needed:
            warnings.warn(f"{path}: has {', '.join(other)} and no tokenizer.json, so the model takes and gives token "
                          "ids; " + (f"pip install decodax[{NEEDS}] brings what reads texts" if pieces else
                                     "its tokenizer of transformers makes them, and texts from them"),
                          stacklevel=outside())
            return None
        raise CheckpointError(f"{path}: has {', '.join(other)} and no tokenizer.json; transformers writes one:\n"
                              f"    tokenizer = transformers.AutoTokenizer.from_pretrained({str(path)!r})\n"
                              f"    tokenizer.save_pretrained({str(path)!r})")
    return Tokenizer.from_dir(path) if needed else None         # from_dir reports what is missing
