"""Loads model directories in Hugging Face layout: `config.json` and one or several safetensors files.

The names and shapes of all tensors are checked against the network before any tensor is read. Then each device's part
of a tensor is read separately, cast once and put on the device.
"""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, SingleDeviceSharding

from decodax.common.arguments import outside
from decodax.io import packed as packed_files
from decodax.io.files import CheckpointError, Files, named_tensors, read_json
from decodax.io.mxfp4 import mxfp4_sources, packed_tensors, packs_mxfp4
from decodax.io.quantised import read_scheme, refuse_quantised
from decodax.io.quantised.tensors import TensorReader
from decodax.io.quantised.weights import find_layers, load_weights
from decodax.io.weights import DTYPES, Loader, load_all
from decodax.models.config import DecoderConfig
from decodax.models.diffusion import Diffusion, read_diffusion
from decodax.models.drafters.further import FURTHER, MEDUSA
from decodax.models.encoder_decoder import names as encoder_decoder
from decodax.models.encoder_decoder.network import EncoderDecoder
from decodax.models.encoder_decoder.reading import read_encoder_decoder
from decodax.models.families import WITH_IMAGES, family_of, read_config, text_part
from decodax.models.fields import checked
from decodax.models.formats import Format, kernels, without_data
from decodax.models.formats.rounded_mamba2 import QuantizedMamba2
from decodax.models.names import (
    IGNORED,
    IMAGES,
    as_stored,
    embeddings,
    flatten,
    further_layers,
    head_tensor,
    layers_in,
    sources,
    unused_tensors,
)
from decodax.models.recurrent.mamba import Mamba, read_mamba
from decodax.models.recurrent.mamba import sources as mamba_sources
from decodax.models.recurrent.mamba2 import Mamba2, Mamba2Config, is_mamba2, read_mamba2
from decodax.models.recurrent.mamba2 import sources as mamba2_sources
from decodax.models.recurrent.rwkv7 import IGNORED as UNUSED
from decodax.models.recurrent.rwkv7 import Rwkv7, read_rwkv7
from decodax.models.recurrent.rwkv7 import sources as rwkv7_sources
from decodax.models.recurrent.rwkv_x import RwkvX, read_rwkv_x
from decodax.models.recurrent.rwkv_x import sources as rwkv_x_sources
from decodax.models.transformer import Transformer, Weights
from decodax.models.weight_source import WeightSource, nested, stored_dtype

ROUNDED = "rounded_states"
"""Key in config.json: True for a Mamba-2 of `decodax.models.formats.quamba2`, with 8-bit activations and states."""

TAKEN = ("float32", "bfloat16", "float16")
"""The dtypes that weights and cache can have."""


def load_model(directory: str | os.PathLike[str], dtype: jax.typing.DTypeLike | None = None, mesh: Mesh | None = None,
               context: int | None = None, weights: str | Format | None = None) -> tuple[Transformer, Weights]:
    """Loads a decoder from a model directory.

    Args:
        directory: path of the model directory.
        dtype: dtype of weights and cache, "float32", "bfloat16" or "float16"; None: the stored dtype of the embedding.
        mesh: the weights are sharded over its axis "model" where their dimensions are divisible, and replicated
            otherwise. None: the first device.
        context: number of positions for which rotary scalings that depend on the length are set; None: the trained
            number.
        weights: the format of the kernels, see `decodax.models.formats`; None: arrays of `dtype`.

    Returns:
        The model, and its weights as a nested dict.

    Raises:
        CheckpointError: a file is missing or broken, the architecture is unknown, or a tensor is missing, unexpected or
            has a shape that does not fit the configuration. The error is raised before anything is read into memory or
            compiled.
        ValueError: `dtype`, `context` or `weights` is out of its range.
    """
    asked, packing = checked_options(dtype, weights, context)
    root = Path(directory)
    config = read_json(root / "config.json")
    try:
        decoder, family = read_config(config), family_of(config)
    except ValueError as e:
        raise CheckpointError(f"{root / 'config.json'}: {e}") from None
    if packed_files.ENTRY in config:
        return _load_packed(root, config, decoder, asked, mesh, context, weights)
    scheme = None if packs_mxfp4(config) else read_scheme(root, config)
    if scheme is not None:
        _no_format(root, weights)
    files = Files(root)
    files.within(embeddings(family))
    # This comes before the network is laid out, which takes long if a wrong number asks for very many layers.
    stored = layers_in(family, files.home)
    if not stored:
        raise CheckpointError(f"{files.name}: holds {named_tensors(sorted(files.stored.values()))}, and no layer "
                              f"under the names of model_type {family!r}; takes {', '.join(embeddings(family)[:2])} "
                              "and layers beside it, all with the same prefix or none")
    if stored < len(decoder.layers):
        key = next((key for key in ("n_layer", "n_layers", "num_layers") if key in config), "num_hidden_layers")
        raise CheckpointError(f"{root / 'config.json'}: {key}: got {len(decoder.layers)}, {files.name} holds {stored} "
                              "layers")
    shapes = Transformer(decoder).abstract_params()
    where = as_stored(sources(family, decoder, shapes, files.home),
                      lambda tensor: tuple(files.slice(tensor).get_shape()) if tensor in files.home else ())
    head, ignored = head_tensor(family, files.home), [IGNORED]
    if config["model_type"] in WITH_IMAGES:
        ignored.append(IMAGES)
        if seen := sorted(filter(IMAGES.search, files.home)):
            warnings.warn(f"{files.name}: skips {len(seen)} tensors of images or sound, such as {seen[0]}",
                          stacklevel=outside())
    if len(later := further_layers(family, len(decoder.layers), text_part(config), files.home)):
        use = "; the algorithm 'mtp' drafts with them" if family in FURTHER else ", which are not read"
        warnings.warn(f"{files.name}: skips {len(later)} tensors of layers that predict further tokens, such as "
                      f"{min(later)}{use}", stacklevel=outside())
        ignored.append(re.compile("|".join(f"^{re.escape(tensor)}$" for tensor in later)))
    if medusa := [tensor for tensor in files.home if tensor.startswith(MEDUSA)]:
        warnings.warn(f"{files.name}: skips {len(medusa)} tensors of Medusa's heads, such as {min(medusa)}; the "
                      "algorithm 'medusa' drafts with them", stacklevel=outside())
        ignored.append(re.compile(f"^{re.escape(MEDUSA)}"))
    coded = mxfp4_sources(where, files, config)
    plan = None if scheme is None else find_layers(files, scheme, where, shapes)
    apart, spare = (coded, packed_tensors(coded)) if plan is None else (plan.layers, plan.tensors)
    heads = ({head} if decoder.tied else set()) | unused_tensors(family, decoder, files.home)
    check_tensors({path: where[path] for path in where if path not in apart}, files, spare | heads, ignored)
    if decoder.tied:
        _check_tied(files, where["embed"].tensors[0], head)
    name = asked or DTYPES.get(files.slice(where["embed"].tensors[0]).get_dtype(), "bfloat16")
    model = Transformer(decoder, dtype=name, context=context)
    on = places(model, shapes, mesh)
    if plan is not None:
        return model, load_weights(files, plan, where, shapes, name, on)
    chosen = [path for path in kernels(shapes) if packing.packs(path)] if packing is not None else []
    leaves = flatten(shapes)
    arrays = [leaf.shape for path, leaf in leaves.items() if path not in coded]
    with Loader(files, arrays, name) as loader, TensorReader(files) as reader:
        loaded = [coded[path].load(reader, on[path]) if path in coded else
                  loader.load(where[path], leaf.shape, stored_dtype(path, name), on[path],
                              packing if path in chosen else None, path == "embed") for path, leaf in leaves.items()]
    return model, jax.tree.unflatten(jax.tree.structure(shapes), loaded)


def checked_options(dtype: jax.typing.DTypeLike | None, weights: str | Format | None,
                    context: int | None = None) -> tuple[str | None, Format | None]:
    """Returns the name of a dtype and the format of weights that a call asks for, each None if it asks for none.

    Raises:
        ValueError: `dtype`, `weights` or `context` is out of its range.
    """
    asked, packing = None if dtype is None else dtype_name(dtype), without_data(weights)
    if context is not None and (not isinstance(context, int) or isinstance(context, bool) or context < 1):
        raise ValueError(f"context: got {context!r}, takes a number of tokens of at least 1")
    return asked, packing


def local_device() -> jax.sharding.Sharding:
    """Returns the sharding of arrays that lie on the first local device."""
    return SingleDeviceSharding(jax.local_devices()[0])


def places(model: Transformer | EncoderDecoder, shapes: Weights, mesh: Mesh | None) -> dict[str, jax.sharding.Sharding]:
    """Returns the sharding of each weight by its path; the first local device if there is no mesh."""
    here = local_device()
    return flatten(jax.tree.map(lambda _: here, shapes) if mesh is None else model.shardings(mesh))


def _load_packed(root: Path, config: dict[str, Any], decoder: DecoderConfig, dtype: str | None, mesh: Mesh | None,
                 context: int | None, weights: str | Format | None) -> tuple[Transformer, Weights]:
    """Loads a directory of packed weights written by `save_model`."""
    _no_format(root, weights)
    name = dtype or config.get("dtype", "float32")
    model = Transformer(decoder, dtype=name, context=context)
    shapes = model.abstract_params()
    leaves = packed_files.read(root, config, flatten(shapes), places(model, shapes, mesh), name)
    return model, jax.tree.unflatten(jax.tree.structure(shapes), leaves.values())


def _no_format(root: Path, weights: str | Format | None) -> None:
    """Refuses a format for weights that have one."""
    if weights is not None:
        raise ValueError(f"weights: got {weights!r}, but the weights of {root.name!r} are packed already; takes None")


def load_encoder_decoder(directory: str | os.PathLike[str], dtype: jax.typing.DTypeLike | None = None,
                         mesh: Mesh | None = None, weights: str | Format | None = None
                         ) -> tuple[EncoderDecoder, Weights]:
    """Loads an encoder-decoder, such as a T5, from a model directory. Returns the model and its weights as a nested
    dict. For `dtype`, `mesh`, `weights` and errors see `load_model`."""
    asked, packing = checked_options(dtype, weights)
    root = Path(directory)
    entries, files = read_json(root / "config.json"), Files(root)
    refuse_quantised(root, entries)
    for prefix in ("model.", ""):       # what wraps the model is taken off first
        files.within([prefix + name for name in encoder_decoder.ANCHORS])
    try:
        config = read_encoder_decoder(entries, files.home)
    except ValueError as e:
        raise CheckpointError(f"{root / 'config.json'}: {e}") from None
    where = encoder_decoder.sources(config, files.home)
    table = where["embed"].tensors[0]
    check_tensors(where, files, {*encoder_decoder.TABLES, *(encoder_decoder.HEADS if config.tied else ())},
                  [encoder_decoder.IGNORED])
    for head in encoder_decoder.HEADS if config.tied else ():
        _check_tied(files, table, head)
    name = asked or DTYPES[files.slice(table).get_dtype()]
    model = EncoderDecoder(config, dtype=name)
    packs = lambda path: (path.endswith(".kernel") and ".conv" not in path) or (path == "embed" and config.tied)
    return model, load_all(files, where, name, packing, packs, None if mesh is None else flatten(model.shardings(mesh)))


RECURRENT: dict[str, tuple[Any, Any, Any]] = {
    "mamba": (Mamba, read_mamba, mamba_sources), "rwkv7": (Rwkv7, read_rwkv7, rwkv7_sources),
    "rwkv_x": (RwkvX, read_rwkv_x, rwkv_x_sources),
    "mamba2": (Mamba2, read_mamba2, mamba2_sources)}
"""Networks with recurrent states by `model_type`: the network, the reader of its config.json, and its weights."""


def recurrent_type(config: dict[str, Any]) -> str | None:
    """Returns the name under which `RECURRENT` has the recurrent network that a `config.json` describes; None if it
    describes a network of another kind."""
    return "mamba2" if is_mamba2(config) else name if (name := str(config.get("model_type"))) in RECURRENT else None


def load_recurrent(directory: str | os.PathLike[str], dtype: jax.typing.DTypeLike | None = None,
                   weights: str | Format | None = None) -> tuple[Mamba | Mamba2 | Rwkv7, Weights]:
    """Loads a network with recurrent states, such as a Mamba, from a model directory onto the first device. Returns the
    model and its weights as a nested dict. For `dtype`, `weights` and errors see `load_model`."""
    asked, packing = checked_options(dtype, weights)
    root = Path(directory)
    entries = read_json(root / "config.json")
    network, read, weights_of = RECURRENT[recurrent_type(entries) or "mamba2"]
    try:
        config = read(checked(entries))
    except ValueError as e:
        raise CheckpointError(f"{root / 'config.json'}: {e}") from None
    if packed_files.ENTRY in entries and network is Mamba2:
        return _load_packed_mamba2(root, entries, config, asked, weights)
    refuse_quantised(root, entries)
    files = Files(root)
    files.within([weights_of(config, ())["embed"].tensors[0], "backbone.embedding.weight"])     # Mamba-2 has two names
    where = weights_of(config, files.home)
    check_tensors(where, files, {"lm_head.weight"} if config.tied else set(),
                  [UNUSED] if issubclass(network, Rwkv7) else [])
    table = where["embed"].tensors[0]
    if config.tied:
        _check_tied(files, table, "lm_head.weight")
    name = asked or DTYPES[files.slice(table).get_dtype()]
    packs = lambda path: packing is not None and packing.packs(path) and (
        path.endswith(".kernel") or (path == "embed" and config.tied))
    return network(config, dtype=name), load_all(files, where, name, packing, packs)


def _load_packed_mamba2(root: Path, entries: dict[str, Any], config: Mamba2Config, dtype: str | None,
                        weights: str | Format | None) -> tuple[Mamba2, Weights]:
    """Loads a directory of packed weights written by `save_mamba2`."""
    _no_format(root, weights)
    name, kind = dtype or entries.get("dtype", "float32"), QuantizedMamba2 if entries.get(ROUNDED) else Mamba2
    model = kind(config, dtype=name)
    shapes = flatten(model.abstract_params())
    here = local_device()
    # Scales of activations stay float32.
    leaves = packed_files.read(root, entries, shapes, dict.fromkeys(shapes, here),
                               None if kind is QuantizedMamba2 else name)
    return model, nested(leaves)


def load_diffusion(directory: str | os.PathLike[str]) -> Diffusion | None:
    """Returns the masked diffusion settings of the model in a directory; None if it is autoregressive.

    Raises:
        CheckpointError: config.json has an entry that is not supported.
    """
    path = Path(directory) / "config.json"
    config = read_json(path)
    try:
        return read_diffusion(config)
    except ValueError as e:
        raise CheckpointError(f"{path}: {e}") from None


def dtype_name(dtype: jax.typing.DTypeLike) -> str:
    """Returns the name of a dtype of weights.

    Raises:
        ValueError: weights cannot have this dtype.

    >>> dtype_name(jnp.float32)
    'float32'
    """
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    if name not in TAKEN:
        raise ValueError(f"dtype: got {name}, takes {', '.join(TAKEN)}")
    return name


def check_tensors(where: dict[str, WeightSource], files: Files, spare: set[str],
                  ignored: list[re.Pattern[str]]) -> None:
    """Checks that every tensor that the weights need exists with the right shape and dtype, and that there are no other
    tensors except `spare` and those that match `ignored`."""
    wanted = {tensor: shape for source in where.values() for tensor, shape in source.shapes.items()}
    numbers = {tensor for source in where.values() for tensor in source.tensors if source.ids}
    missing = [tensor for tensor in wanted if tensor not in files.home]
    left = sorted(tensor for tensor in files.home.keys() - wanted.keys() - spare
                  if not any(pattern.search(tensor) for pattern in ignored))
    if missing:
        instead = f"; holds {named_tensors([files.stored[name] for name in left])}" if left else ""
        raise CheckpointError(f"{files.name}: lacks {named_tensors(missing)}, which the configuration "
                              f"requires{instead}")
    for tensor, shape in wanted.items():
        found = tuple(files.slice(tensor).get_shape())
        if found != shape:
            raise CheckpointError(f"{files.home[tensor]}: tensor {tensor} has shape {found}, the configuration "
                                  f"requires {shape}")
        takes = (*DTYPES, "I32", "I64") if tensor in numbers else DTYPES
        if files.slice(tensor).get_dtype() not in takes:
            raise CheckpointError(f"{files.home[tensor]}: tensor {tensor}: got {files.slice(tensor).get_dtype()}, "
                                  f"takes {', '.join(takes)}")
    if left:
        raise CheckpointError(f"{files.home[left[0]]}: holds {named_tensors(left)}, which the configuration does not "
                              "describe")


def _check_tied(files: Files, embed: str, head: str) -> None:
    """Checks that a stored output head `head` equals the embedding `embed`, for a model with tied embeddings."""
    if head not in files.home:
        return
    with TensorReader(files) as file:
        same = file.dtype(head) in DTYPES and file.equal(embed, head)
    if not same:
        raise CheckpointError(f"{files.home[head]}: tensor {head} differs from {embed}, but config.json has "
                              "tie_word_embeddings = true; set it to false if the model has its own head")
