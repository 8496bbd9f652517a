"""Model directories in Hugging Face layout: `config.json` and one or several safetensors files.

Loading checks every tensor's name and shape against the network before it reads any, and then reads, for each device,
only the part that the device holds, casts it once and puts it there.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from safetensors.numpy import save_file

from decodax.io import packed as packed_files
from decodax.io.files import ONE, CheckpointError, Files, read_json
from decodax.models.config import DecoderConfig
from decodax.models.diffusion import Diffusion, read_diffusion
from decodax.models.families import WITH_IMAGES, read_config, text_part
from decodax.models.fields import checked
from decodax.models.formats import Format, kernels, without_data
from decodax.models.formats.rounded_mamba2 import QuantizedMamba2
from decodax.models.mamba import Mamba, read_mamba
from decodax.models.mamba import sources as mamba_sources
from decodax.models.mamba2 import Mamba2, Mamba2Config, entries_of, is_mamba2, read_mamba2
from decodax.models.mamba2 import sources as mamba2_sources
from decodax.models.names import IGNORED, IMAGES, WeightSource, embeddings, flatten, head_tensor, layers_in, sources
from decodax.models.packed import Packed
from decodax.models.rope import Dynamic, LinearScaling, Llama3, LongRope, Yarn
from decodax.models.rwkv7 import IGNORED as UNUSED
from decodax.models.rwkv7 import Rwkv7, read_rwkv7
from decodax.models.rwkv7 import sources as rwkv7_sources
from decodax.models.rwkv_x import RwkvX, read_rwkv_x
from decodax.models.rwkv_x import sources as rwkv_x_sources
from decodax.models.state_space import shape_of
from decodax.models.t5 import IGNORED as T5_IGNORED
from decodax.models.t5 import T5, nested, read_t5
from decodax.models.t5 import sources as t5_sources
from decodax.models.transformer import Transformer, Weights

DTYPES = {"F64": "float32", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""What each stored dtype is loaded as if none is asked for."""

ROUNDED = "rounded_states"
"""In config.json: whether a Mamba-2 is one of `decodax.models.formats.quamba2`, with 8-bit activations and states."""

TAKEN = ("float32", "bfloat16", "float16")
"""Dtypes of weights and cache."""


def load_model(directory: str | os.PathLike[str], dtype: jax.typing.DTypeLike | None = None, mesh: Mesh | None = None,
               context: int | None = None, weights: str | Format | None = None) -> tuple[Transformer, Weights]:
    """Loads a model directory.

    Args:
        dtype: of weights and cache, "float32", "bfloat16" or "float16"; None: as the file holds the embedding.
        mesh: weights are sharded over its axis "model" where they divide, else replicated; None: the first device.
        context: see `Transformer.context`.
        weights: the format of the kernels, see `decodax.models.formats`; None: arrays of `dtype`.

    Returns:
        The model, and its weights as a nested dict.

    Raises:
        CheckpointError: a file is missing or broken, the architecture is unknown, a tensor is missing, left over or of
            another shape than the configuration says. Nothing has been read into memory or compiled then.
        ValueError: `dtype`, `context` or `weights` is out of its range.
    """
    asked, packing = None if dtype is None else dtype_name(dtype), without_data(weights)
    if context is not None and (not isinstance(context, int) or isinstance(context, bool) or context < 1):
        raise ValueError(f"context: got {context!r}, takes a number of tokens from 1")
    root = Path(directory)
    config = read_json(root / "config.json")
    try:
        decoder, family = read_config(config), text_part(config)["model_type"]
        if config.get("quantization_config"):
            raise ValueError("quantization_config: quantised weights are not read; transformers' model.dequantize() "
                             "makes whole ones of them")
    except ValueError as e:
        raise CheckpointError(f"{root / 'config.json'}: {e}") from None
    if packed_files.ENTRY in config:
        return _load_packed(root, config, decoder, asked, mesh, context, weights)
    files = Files(root)
    files.within(embeddings(family))
    # before the network is laid out, which takes long for as many layers as a wrong number may ask for
    stored = layers_in(family, files.home)
    if not stored:
        raise CheckpointError(f"{files.name}: holds {_some(sorted(files.stored.values()))}, and no layer by the name "
                              f"that model_type {family!r} has for it; takes {', '.join(embeddings(family)[:2])} and "
                              "layers beside it, with one prefix before all names or none")
    if stored < len(decoder.layers):
        key = next((key for key in ("n_layer", "n_layers") if key in config), "num_hidden_layers")
        raise CheckpointError(f"{root / 'config.json'}: {key}: got {len(decoder.layers)}, {files.name} holds {stored} "
                              "layers")
    shapes = Transformer(decoder).abstract_params()
    where = sources(family, decoder, shapes, files.home)
    head, ignored = head_tensor(family, files.home), [IGNORED]
    if config["model_type"] in WITH_IMAGES:
        ignored.append(IMAGES)
    _check(where, files, {head} if decoder.tied else set(), ignored)
    if decoder.tied:
        _check_tied(files, where["embed"].tensors[0], head)

    name = asked or DTYPES[files.slice(where["embed"].tensors[0]).get_dtype()]
    model = Transformer(decoder, dtype=name, context=context)
    places = _places(model, shapes, mesh)
    chosen = [path for path in kernels(shapes) if packing.packs(path)] if packing is not None else []
    loaded = [_load(files, where[path], leaf.shape, name, places[path], packing if path in chosen else None,
                    path == "embed") for path, leaf in flatten(shapes).items()]
    return model, jax.tree.unflatten(jax.tree.structure(shapes), loaded)


def _places(model: Transformer, shapes: Weights, mesh: Mesh | None) -> dict[str, jax.sharding.Sharding]:
    here = SingleDeviceSharding(jax.local_devices()[0])
    return flatten(jax.tree.map(lambda _: here, shapes) if mesh is None else model.shardings(mesh))


def _load_packed(root: Path, config: dict[str, Any], decoder: DecoderConfig, dtype: str | None, mesh: Mesh | None,
                 context: int | None, weights: str | Format | None) -> tuple[Transformer, Weights]:
    """A directory that `save_model` wrote of packed weights."""
    if weights is not None:
        raise ValueError(f"weights: got {weights!r}, and those of {root.name!r} are packed; takes None")
    name = dtype or config.get("dtype", "float32")
    model = Transformer(decoder, dtype=name, context=context)
    shapes = model.abstract_params()
    leaves = packed_files.read(root, config, flatten(shapes), _places(model, shapes, mesh), name)
    return model, jax.tree.unflatten(jax.tree.structure(shapes), leaves.values())


def load_t5(directory: str | os.PathLike[str], dtype: jax.typing.DTypeLike | None = None,
            weights: str | Format | None = None) -> tuple[T5, Weights]:
    """Loads the directory of a T5, onto the first device. Arguments and errors as in `load_model`."""
    asked, packing = None if dtype is None else dtype_name(dtype), without_data(weights)
    root = Path(directory)
    entries, files = read_json(root / "config.json"), Files(root)
    files.within(["shared.weight"])
    try:
        config = read_t5(checked(entries), tied="lm_head.weight" not in files.home)
    except ValueError as e:
        raise CheckpointError(f"{root / 'config.json'}: {e}") from None
    where = t5_sources(config)
    _check(where, files, set(), [T5_IGNORED])
    name = asked or DTYPES[files.slice("shared.weight").get_dtype()]
    here = SingleDeviceSharding(jax.local_devices()[0])
    shape = lambda source: source.full[::-1] if source.transpose else source.full
    tied = lambda path: path == "embed" and config.tied
    loaded = {path: _load(files, source, shape(source), name, here,
                          packing if source.transpose or tied(path) else None, tied(path))
              for path, source in where.items()}
    return T5(config, dtype=name), nested(loaded)


RECURRENT: dict[str, tuple[Any, Any, Any]] = {
    "mamba": (Mamba, read_mamba, mamba_sources), "rwkv7": (Rwkv7, read_rwkv7, rwkv7_sources),
    "rwkv_x": (RwkvX, read_rwkv_x, rwkv_x_sources),
    "mamba2": (Mamba2, read_mamba2, mamba2_sources)}
"""Networks with recurrent states, by `model_type`: the network, what reads its config.json, and its weights."""


def recurrent_type(config: dict[str, Any]) -> str | None:
    """The entry of `RECURRENT` that a config.json describes."""
    return "mamba2" if is_mamba2(config) else name if (name := str(config.get("model_type"))) in RECURRENT else None


def load_recurrent(directory: str | os.PathLike[str], dtype: jax.typing.DTypeLike | None = None,
                   weights: str | Format | None = None) -> tuple[Mamba | Mamba2 | Rwkv7, Weights]:
    """Loads the directory of one of `RECURRENT`, onto the first device. Arguments and errors as in `load_model`."""
    asked, packing = None if dtype is None else dtype_name(dtype), without_data(weights)
    root = Path(directory)
    entries = read_json(root / "config.json")
    network, read, weights_of = RECURRENT[recurrent_type(entries) or "mamba2"]
    try:
        config = read(checked(entries))
    except ValueError as e:
        raise CheckpointError(f"{root / 'config.json'}: {e}") from None
    if packed_files.ENTRY in entries and network is Mamba2:
        return _load_packed_mamba2(root, entries, config, asked, weights)
    files = Files(root)
    files.within([weights_of(config, ())["embed"].tensors[0], "backbone.embedding.weight"])     # Mamba-2 has two
    where = weights_of(config, files.home)
    _check(where, files, {"lm_head.weight"} if config.tied else set(), [UNUSED] if issubclass(network, Rwkv7) else [])
    table = where["embed"].tensors[0]
    if config.tied:
        _check_tied(files, table, "lm_head.weight")
    name = asked or DTYPES[files.slice(table).get_dtype()]
    here = SingleDeviceSharding(jax.local_devices()[0])
    packs = lambda path: packing is not None and packing.packs(path) and (
        path.endswith(".kernel") or (path == "embed" and config.tied))
    loaded = {path: _load(files, source, shape_of(source), name, here, packing if packs(path) else None,
                          path == "embed") for path, source in where.items()}
    return network(config, dtype=name), nested(loaded)


def _load_packed_mamba2(root: Path, entries: dict[str, Any], config: Mamba2Config, dtype: str | None,
                        weights: str | Format | None) -> tuple[Mamba2, Weights]:
    """A directory that `save_mamba2` wrote of packed weights."""
    if weights is not None:
        raise ValueError(f"weights: got {weights!r}, and those of {root.name!r} are packed; takes None")
    name, kind = dtype or entries.get("dtype", "float32"), QuantizedMamba2 if entries.get(ROUNDED) else Mamba2
    model = kind(config, dtype=name)
    shapes = flatten(model.abstract_params())
    here: jax.sharding.Sharding = SingleDeviceSharding(jax.local_devices()[0])
    places = dict.fromkeys(shapes, here)
    # scales of activations stay float32
    leaves = packed_files.read(root, entries, shapes, places, None if kind is QuantizedMamba2 else name)
    return model, nested(leaves)


def load_diffusion(directory: str | os.PathLike[str]) -> Diffusion | None:
    """How the model of a directory fills masks; None: it is autoregressive.

    Raises:
        CheckpointError: its config.json says something that is not supported.
    """
    path = Path(directory) / "config.json"
    config = read_json(path)
    try:
        return read_diffusion(config)
    except ValueError as e:
        raise CheckpointError(f"{path}: {e}") from None


def dtype_name(dtype: jax.typing.DTypeLike) -> str:
    """The name of a dtype that weights may have.

    Raises:
        ValueError: they may not.

    >>> dtype_name(np.float32)
    'float32'
    """
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    if name not in TAKEN:
        raise ValueError(f"dtype: got {name}, takes {', '.join(TAKEN)}")
    return name


def _check(where: dict[str, WeightSource], files: Files, spare: set[str], ignored: list[re.Pattern[str]]) -> None:
    """Every tensor is there, of the right shape and kind, and none but `spare` and what is `ignored` is left over."""
    wanted = {tensor: source.full for source in where.values() for tensor in source.tensors}
    missing = [tensor for tensor in wanted if tensor not in files.home]
    left = sorted(tensor for tensor in files.home.keys() - wanted.keys() - spare
                  if not any(pattern.search(tensor) for pattern in ignored))
    if missing:
        instead = f"; holds {_some([files.stored[name] for name in left])}" if left else ""
        raise CheckpointError(f"{files.name}: lacks {_some(missing)}, which the configuration asks for{instead}")
    for tensor, shape in wanted.items():
        found = tuple(files.slice(tensor).get_shape())
        if found != shape:
            raise CheckpointError(f"{files.home[tensor]}: tensor {tensor} has shape {found}, the configuration asks "
                                  f"for {shape}")
        if files.slice(tensor).get_dtype() not in DTYPES:
            raise CheckpointError(f"{files.home[tensor]}: tensor {tensor} is {files.slice(tensor).get_dtype()}, "
                                  f"supported are {', '.join(DTYPES)}")
    if left:
        raise CheckpointError(f"{files.home[left[0]]}: holds {_some(left)}, which the configuration has no place for")


def _check_tied(files: Files, embed: str, head: str) -> None:
    """An output head in the file of a model whose head is the embedding says the same as that."""
    if head not in files.home:
        return
    one, other = files.slice(embed), files.slice(head)
    rows = one.get_shape()[0]
    parts = (slice(start, min(start + 4096, rows)) for start in range(0, rows, 4096))
    same = one.get_shape() == other.get_shape() and other.get_dtype() in DTYPES and all(
        np.array_equal(one[part], other[part]) for part in parts)
    if not same:
        raise CheckpointError(f"{files.home[head]}: tensor {head} differs from {embed}, though config.json has "
                              "tie_word_embeddings = true; set that to false if the head is the model's own")


def _some(tensors: list[str]) -> str:
    more = f" and {len(tensors) - 5} more" if len(tensors) > 5 else ""
    return f"tensor{'s' if len(tensors) > 1 else ''} {', '.join(tensors[:5])}{more}"


def _load(files: Files, source: WeightSource, shape: tuple[int, ...], name: str, place: jax.sharding.Sharding,
          packing: Format | None = None, table: bool = False) -> Any:
    """One weight, each device's part read and cast by itself; devices that hold the same part share one reading.

    Args:
        name: its dtype. packing: the format to put it in. table: it is a table of embeddings, `[outputs, inputs]`.
    """
    parts: dict[Any, np.ndarray] = {}
    stored = DTYPES[files.slice(source.tensors[0]).get_dtype()]
    dtype = np.dtype(jnp.dtype(name if packing is None else stored))

    def read(index: tuple[slice, ...] | None) -> np.ndarray:
        bounds = tuple(s.indices(n)[:2] for s, n in zip(index or (), shape, strict=True))
        if bounds not in parts:
            parts[bounds] = np.ascontiguousarray(_read(files, source, bounds).astype(dtype, copy=False))
        return parts[bounds]

    whole = jax.make_array_from_callback(shape, place, read)
    return whole if packing is None else _packer(packing, table, shape, dtype, place)(whole)


@functools.lru_cache(maxsize=64)
def _packer(packing: Format, table: bool, shape: tuple[int, ...], dtype: np.dtype, place: jax.sharding.Sharding) -> Any:
    pack = lambda kernel: packing.pack(kernel.T if table else kernel)
    if not isinstance(place, NamedSharding):
        return jax.jit(pack)
    placed = lambda kernel: pack(kernel).placed(*packed_files.axes(place, table))
    shapes = jax.eval_shape(placed, jax.ShapeDtypeStruct(shape, dtype))
    return jax.jit(placed, out_shardings=packed_files.shardings(shapes, table, place))


def _read(files: Files, source: WeightSource, bounds: tuple[tuple[int, int], ...]) -> np.ndarray:
    """The part `bounds` of a weight from the file."""
    if len(bounds) > len(source.full):
        rest = tuple(slice(*b) for b in bounds[1:])
        parts = (files.slice(tensor) for tensor in source.tensors[slice(*bounds[0])])
        return np.stack([part[rest[::-1]].T if source.transpose else part[rest] for part in parts])
    if source.part is not None:
        start = source.part[0]
        bounds = (*bounds[:-1], (bounds[-1][0] + start, bounds[-1][1] + start))
    index = tuple(slice(*b) for b in bounds)
    found = files.slice(source.tensors[0])
    return found[index[::-1]].T if source.transpose else found[index]


def save_model(directory: str | os.PathLike[str], model: Transformer, params: Weights,
               config: Mapping[str, Any] | None = None, dtype: jax.typing.DTypeLike | None = None) -> None:
    """Writes `config.json` and `model.safetensors`, so that `load_model` and transformers load the model; one with
    packed weights, `load_model` alone.

    Args:
        config: entries for `config.json`. With a `model_type` it is that family's whole configuration (such as the one
            the model was loaded from; of one that also sees images the language model's is written). Without one the
            model is written as a Llama and the entries, such as `eos_token_id`, are added.
        dtype: of the stored weights that are not packed ("float32", "bfloat16", "float16"); None: as they are.

    Raises:
        ValueError: `config` does not describe this model, or the model is no Llama and no `config` says what it is.
    """
    entries = dict(text_part(config or {}))
    if "model_type" not in entries:
        entries = {**_llama_config(model.config), **entries}
    if read_config(entries) != model.config:
        raise ValueError(f"config: as a {entries['model_type']} configuration it describes another model than "
                         f"{model.config}")
    leaves = flatten(params)
    if any(isinstance(leaf, Packed) for leaf in leaves.values()):
        whole = next(leaf for leaf in leaves.values() if not isinstance(leaf, Packed))
        name = dtype_name(dtype or whole.dtype)
        own = {path: leaf if isinstance(leaf, Packed) else leaf.astype(name) for path, leaf in leaves.items()}
        packed_files.write(Path(directory), own, entries | {"dtype": name})
        return
    name = dtype_name(dtype or leaves["embed"].dtype)
    entries |= {"dtype": name, "torch_dtype": name}
    tensors: dict[str, np.ndarray] = {}
    for path, source in sources(entries["model_type"], model.config, model.abstract_params()).items():
        value = np.asarray(jax.device_get(leaves[path])).astype(jnp.dtype(name))
        if value.ndim > len(source.full):
            tensors |= {tensor: np.ascontiguousarray(row.T if source.transpose else row)
                        for tensor, row in zip(source.tensors, value, strict=True)}
            continue
        if source.part is not None:
            whole = tensors.setdefault(source.tensors[0], np.empty(source.full, value.dtype))
            (whole.T if source.transpose else whole)[..., slice(*source.part)] = value
            continue
        tensors[source.tensors[0]] = np.ascontiguousarray(value.T if source.transpose else value)
    root = Path(directory)
    root.mkdir(parents=True, exist_ok=True)
    # written beside and then renamed: an interrupted save leaves the old file whole
    save_file(tensors, root / f".{ONE}", metadata={"format": "pt"})
    os.replace(root / f".{ONE}", root / ONE)
    (root / "config.json").write_text(json.dumps(entries, indent=2) + "\n")


def save_mamba2(directory: str | os.PathLike[str], model: Mamba2, params: Weights,
                config: Mapping[str, Any] | None = None, dtype: jax.typing.DTypeLike | None = None) -> None:
    """As `save_model`; of `config` the entries are kept that do not describe the network."""
    entries = {**{key: value for key, value in (config or {}).items() if key in ("eos_token_id", "bos_token_id",
                                                                                 "pad_token_id")},
               **entries_of(model.config)}
    root, leaves = Path(directory), flatten(params)
    name = dtype_name(dtype or next((x.dtype for x in leaves.values() if not isinstance(x, Packed)), model.dtype))
    entries |= {"dtype": name}
    if any(isinstance(leaf, Packed) for leaf in leaves.values()):
        if isinstance(model, QuantizedMamba2):
            packed_files.write(root, leaves, entries | {ROUNDED: True})
        else:
            packed_files.write(root, {path: leaf if isinstance(leaf, Packed) else leaf.astype(name)
                                      for path, leaf in leaves.items()}, entries)
        return
    tensors = {}
    for path, source in mamba2_sources(model.config).items():
        value = np.asarray(jax.device_get(leaves[path])).astype(jnp.dtype(name))
        tensors[source.tensors[0]] = np.ascontiguousarray(value.T if source.transpose else value)
    root.mkdir(parents=True, exist_ok=True)
    save_file(tensors, root / f".{ONE}", metadata={"format": "pt"})
    os.replace(root / f".{ONE}", root / ONE)
    (root / "config.json").write_text(json.dumps(entries, indent=2) + "\n")


def _llama_config(c: DecoderConfig) -> dict[str, Any]:
    rope = c.layers[0].rope
    if rope is None:
        raise ValueError("config: a model without rotary embedding is no Llama; give its config.json")
    if rope.chunks is not None:
        raise ValueError("config: a model with dual chunk attention is no Llama; give its config.json")
    scaling: dict[str, Any] = {"rope_type": "default"}
    match rope.scaling:
        case LinearScaling(factor):
            scaling = {"rope_type": "linear", "factor": factor}
        case Dynamic(factor, _):
            scaling = {"rope_type": "dynamic", "factor": factor}
        case Llama3(factor, low, high, trained):
            scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
                       "original_max_position_embeddings": trained}
        case Yarn(factor, trained, fast, slow, attention, truncate):
            scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": trained,
                       "beta_fast": fast, "beta_slow": slow, "attention_factor": attention, "truncate": truncate}
        case LongRope(short, long, trained, attention):
            scaling = {"rope_type": "longrope", "short_factor": list(short), "long_factor": list(long),
                       "original_max_position_embeddings": trained, "attention_factor": attention}
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": c.vocab, "hidden_size": c.width,
        "intermediate_size": c.mlp, "num_hidden_layers": len(c.layers), "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads, "head_dim": c.head_dim, "hidden_act": "silu",
        "max_position_embeddings": c.context, "rms_norm_eps": c.norm.eps, "tie_word_embeddings": c.tied,
        "attention_bias": c.qkv_bias, "mlp_bias": c.mlp_bias, "rope_theta": rope.theta,
        # both spellings: older readers know rope_theta and rope_scaling, newer ones rope_parameters
        "rope_parameters": {**scaling, "rope_theta": rope.theta},
        "rope_scaling": None if rope.scaling is None else scaling,
    }
