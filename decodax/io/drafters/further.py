"""Reads the layers for multi-token prediction inside a target's checkpoint as a drafter (`decodax.models.further`).

The decoder layer in each is the target's own kind of layer: its attention, its router, and its norms.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from decodax.io.checkpoint import check_tensors, local_device
from decodax.io.files import INDEX, ONE, CheckpointError, Files, named_tensors
from decodax.io.quantised import read_scheme
from decodax.io.quantised.scheme import Scheme
from decodax.io.quantised.tensors import TensorReader
from decodax.io.quantised.weights import find_layers, load_weights
from decodax.io.weights import Loader
from decodax.models.drafters.depthwise import DepthwiseHead
from decodax.models.drafters.recurrent import RecurrentHead
from decodax.models.families import FAMILIES, family_of, read_config, text_part
from decodax.models.further import FURTHER
from decodax.models.names import (
    as_stored,
    embeddings,
    flatten,
    further_layers,
    head_tensor,
    layers_in,
    sources,
    stored_dtype,
)
from decodax.models.weight_source import WeightSource


def further_in(path: Path, config: Mapping[str, Any]) -> list[str]:
    """Returns the tensors of layers for multi-token prediction in a directory, if it is that of a model of a known
    family; otherwise none.

    Raises:
        CheckpointError: it is that of a model whose further layers could be read, and it has none.
    """
    family, own = family_of(dict(config)), text_part(dict(config))
    if family not in FAMILIES or not any((path / name).is_file() for name in (ONE, INDEX)):
        return []
    files = _files(path, family)
    found = further_layers(family, int(own.get("num_hidden_layers") or 0), own, files.home)
    if not found and family in FURTHER and layers_in(family, files.home) > 1:
        raise CheckpointError(f"{path}: holds a model and no layers that predict further tokens; takes a directory "
                              f"that has them ({FURTHER[family].block.format(stem='model.', index='N')}*)")
    return found


def read_further(path: Path, config: Mapping[str, Any], found: list[str], dtype: Any
                 ) -> tuple[RecurrentHead | DepthwiseHead, Any]:
    """Returns the layers for multi-token prediction of a model as a head, and its weights.

    Args:
        path: the model's directory.
        config: its `config.json`.
        found: the tensors of further layers, from `further_in`.
        dtype: dtype of the weights. Those of a quantised checkpoint stay packed.

    Raises:
        CheckpointError: the layers of the family are not read, or a tensor is missing or has another shape.
    """
    family = family_of(dict(config))
    if family not in FURTHER:
        raise CheckpointError(f"{path}: holds layers that predict further tokens ({named_tensors(sorted(found))}), and "
                              f"those of model_type {family!r} are not read; supported are {', '.join(FURTHER)}")
    try:
        decoder = read_config(dict(config))
    except ValueError as e:
        raise CheckpointError(f"{path / 'config.json'}: {e}") from None
    rule, files, depth = FURTHER[family], _files(path, family), len(decoder.layers)
    stem = next((name for name in embeddings(family) if name in files.home), embeddings(family)[0])
    stem, first = stem.removesuffix("embed_tokens.weight"), depth if rule.continued else 0
    prefix = lambda i: rule.block.format(stem=stem, index=first + i)
    count = next(i for i in itertools.count() if not any(name.startswith(prefix(i)) for name in found)) or 1
    around = [{part: name.format(stem=stem, layer=prefix(i)) for part, name in rule.around.items()}
              for i in range(count)]
    table = f"{stem}embed_tokens.weight"
    copied = {"embed": table, "lm_head.kernel": table if decoder.tied else head_tensor(family, files.home)}
    with TensorReader(files) as file:
        own = {names[part] for names in around for part, name in copied.items() if names.get(part) in file
               and not (name in file and file.equal(names[part], name))}
    if count > 1 and own:
        raise CheckpointError(f"{path}: holds {count} layers that predict further tokens, with tables of their own "
                              f"({named_tensors(sorted(own))}); for several layers takes copies of the target's")
    # The layers have the kind of the last one with attention.
    kind = next(layer for layer in reversed(decoder.layers) if layer.recurrent is None)
    has = lambda part: around[0].get(part) in own
    one = RecurrentHead((depth - 1,) if rule.before_norm else (), decoder.vocab, fuse="norms",
                        config=dataclasses.replace(decoder, layers=(kind,), head_bias=False),
                        hidden_first=rule.hidden_first, drop_first=rule.drop_first, own_table=has("embed"),
                        own_head=has("lm_head.kernel"))
    head = one if count == 1 else DepthwiseHead(one.taps, one.vocab, layer=one, count=count)
    where = {f"{f'depths.{i}.' if count > 1 else ''}{inside}": source for i, names in enumerate(around)
             for inside, source in _sources(one, family, prefix(i), names, files).items()}
    spare = files.home.keys() - set(found) | {names[part] for names in around for part in copied if part in names} - own
    return head, _loaded(files, read_scheme(path, dict(config)), where, head.abstract_params(), spare,
                         jnp.dtype(dtype).name)


def _loaded(files: Files, scheme: Scheme | None, where: dict[str, WeightSource], shapes: Any, spare: set[str],
            dtype: str) -> Any:
    """Returns the weights from their sources; `spare` are the tensors that need not be used."""
    where = {path: where[path] for path in flatten(shapes)}
    plan = None if scheme is None else find_layers(files, scheme, where, shapes)
    apart, more = ({}, set()) if plan is None else (plan.layers, plan.tensors)
    check_tensors({path: source for path, source in where.items() if path not in apart}, files, spare | more, [])
    leaves, here = flatten(shapes), local_device()
    if plan is not None:
        return load_weights(files, plan, where, shapes, dtype, dict.fromkeys(where, here))
    with Loader(files, [leaf.shape for leaf in leaves.values()], dtype) as loader:
        loaded = [loader.load(where[path], leaf.shape, stored_dtype(path, dtype), here)
                  for path, leaf in leaves.items()]
    return jax.tree.unflatten(jax.tree.structure(shapes), loaded)


def _files(path: Path, family: str) -> Files:
    files = Files(path)
    files.within(embeddings(family))
    return files


def _sources(head: RecurrentHead, family: str, first: str, around: Mapping[str, str], files: Files
             ) -> dict[str, WeightSource]:
    """Returns the tensors of each weight of one layer.

    Args:
        head: the network.
        family: the `model_type`.
        first: prefix of the tensors of the decoder layer.
        around: name of each other tensor, by the weight's path.
        files: the files.
    """
    shapes = head.abstract_params()
    # To its family the layer is the only one of a decoder.
    table = embeddings(family)[0]
    within = f"{table.removesuffix('embed_tokens.weight')}layers.0."
    stored = lambda name: f"{first}{name.removeprefix(within)}"
    here = [f"{within}{name.removeprefix(first)}" for name in files.home if name.startswith(first)]
    block = sources(family, head.config, {"layers": shapes["layers"]}, {table, *here})
    block = {path: dataclasses.replace(source, tensors=tuple(map(stored, source.tensors)))
             for path, source in block.items()}
    block = as_stored(block, lambda name: tuple(files.slice(name).get_shape()) if name in files.home else ())
    for path, leaf in flatten(shapes).items():
        if path not in block:
            turned = path.endswith("kernel")
            block[path] = WeightSource((around[path],), turned, None, leaf.shape[::-1] if turned else leaf.shape)
    return block
