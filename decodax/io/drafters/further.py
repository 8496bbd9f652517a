"""Reads the layers for multi-token prediction inside a target's checkpoint as a drafter
(`decodax.models.drafters.further`).

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
from decodax.models.blocks.options import Layer
from decodax.models.compressed.options import Pooling
from decodax.models.config import DecoderConfig
from decodax.models.drafters.depthwise import DepthwiseHead
from decodax.models.drafters.further import FURTHER, SPECULATORS, TUNED, FurtherLayers
from decodax.models.drafters.recurrent import RecurrentHead
from decodax.models.families import FAMILIES, family_of, read_config, text_part
from decodax.models.names import (
    as_stored,
    deciding_names,
    embeddings,
    flatten,
    further_layers,
    head_tensor,
    layers_in,
    names_of,
    sources,
)
from decodax.models.weight_source import WeightSource, stored_dtype


def further_in(path: Path, config: Mapping[str, Any]) -> list[str]:
    """Returns the names of the tensors of layers for multi-token prediction in a model's directory, `path` with the
    `config.json` `config`; empty if there are none, or if the model's family is not known."""
    family, own = family_of(dict(config)), text_part(dict(config))
    if family not in FAMILIES or not _held(path):
        return []
    return further_layers(family, int(own.get("num_hidden_layers") or 0), own, _files(path, family).home)


def check_further(path: Path, config: Mapping[str, Any]) -> None:
    """Checks that a directory without layers for multi-token prediction is not that of a model that may have them.

    Raises:
        CheckpointError: it is.
    """
    family = family_of(dict(config))
    if family in FURTHER and _held(path) and layers_in(family, _files(path, family).home) > 1:
        block = FURTHER[family].block.format(stem="model.", index="N", even="N")
        raise CheckpointError(f"{path}: holds a model and no layers that predict further tokens; takes a directory "
                              f"that has them ({block}*)")


@dataclasses.dataclass(frozen=True)
class Place:
    """Names of the tensors of a layer for multi-token prediction in a checkpoint.

    Attributes:
        first: the beginning of the names of the layer's tensors.
        second: the beginning of those of its MLP.
        around: the names of the other tensors, by the paths of the weights.
    """

    first: str
    second: str
    around: dict[str, str]


def read_further(path: Path, config: Mapping[str, Any], found: list[str], dtype: Any
                 ) -> tuple[RecurrentHead | DepthwiseHead, Any]:
    """Returns the layers for multi-token prediction of a model as a head, and its weights.

    Args:
        path: the model's directory.
        config: its `config.json`.
        found: the tensors of the layers, from `further_in`.
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
    stem, table = names_of(family, files.home).stem, next(name for name in embeddings(family) if name in files.home)

    def place(i: int) -> Place:
        named = lambda text, **more: text.format(stem=stem, index=depth * rule.continued + i, even=2 * i, odd=2 * i + 1,
                                                 **more)
        first, second = named(rule.block), named(rule.second or rule.block)
        return Place(first, second, {part: named(name, layer=first, second=second)
                                     for part, name in rule.around.items()})

    count = next(i for i in itertools.count() if not any(name.startswith(place(i).first) for name in found)) or 1
    places = [place(i) for i in range(1 if rule.alone else count)]
    copied = {"embed": table, "lm_head.kernel": table if decoder.tied else head_tensor(family, files.home)}
    with TensorReader(files) as file:
        own = {part for each in places for part, name in copied.items() if (copy := each.around.get(part)) is not None
               and copy in file and not (name in file and file.equal(copy, name))}
    try:
        kind = layer_of(decoder, rule, any("experts." in name for name in found), text_part(dict(config)))
        one = head_of(decoder, rule, kind, own_table="embed" in own, own_head="lm_head.kernel" in own)
        head = repeated(one, len(places))
    except ValueError as e:
        raise CheckpointError(f"{path}: {e}") from None
    where = {f"{f'depths.{i}.' if len(places) > 1 else ''}{inside}": source for i, each in enumerate(places)
             for inside, source in _sources(one, family, rule, each, files).items()}
    copies = {each.around[part] for each in places for part in copied if part in each.around and part not in own}
    later = {name for i in range(len(places), count) for name in found if name.startswith(place(i).first)}
    unused = {rule.unused.format(layer=each.first) for each in places}
    return head, _loaded(files, read_scheme(path, dict(config)), where, head.abstract_params(),
                         files.home.keys() - set(found) | copies | later | unused, jnp.dtype(dtype).name)


def read_tuned(path: Path, config: Mapping[str, Any], dtype: Any) -> tuple[RecurrentHead, Any]:
    """Returns a layer for multi-token prediction in a directory of its own (speculators' `mtp`) as a head, and its
    weights.

    Args:
        path: the directory.
        config: its `config.json`.
        dtype: dtype of the weights.

    Raises:
        CheckpointError: it has another number of layers or is of another family, or a tensor is missing, has another
            shape, or is not known.
    """
    inside = dict(config.get("transformer_layer_config") or {})
    if (count := config.get("num_nextn_predict_layers", 1)) != 1:
        raise CheckpointError(f"{path}: num_nextn_predict_layers: got {count}, takes 1")
    if (family := family_of(inside)) not in TUNED:
        raise CheckpointError(f"{path}: transformer_layer_config: model_type: got {family!r}, supported are "
                              f"{', '.join(TUNED)}")
    try:
        decoder = read_config(inside)
    except ValueError as e:
        raise CheckpointError(f"{path / 'config.json'}: transformer_layer_config: {e}") from None
    rule, files = SPECULATORS, _files(path, family)
    prefix = rule.block.format(index=0)
    place = Place(prefix, prefix, {part: name.format(layer=prefix) for part, name in rule.around.items()})
    try:
        kind = layer_of(decoder, rule, any(name.startswith(f"{prefix}mlp.experts.") for name in files.home), inside)
    except ValueError as e:
        raise CheckpointError(f"{path / 'config.json'}: transformer_layer_config: {e}") from None
    head = head_of(decoder, rule, kind, own_table=place.around["embed"] in files.home,
                   own_head=place.around["lm_head.kernel"] in files.home)
    return head, _loaded(files, read_scheme(path, dict(config)), _sources(head, family, rule, place, files),
                         head.abstract_params(), {"verifier_lm_head.weight"}, jnp.dtype(dtype).name)


def head_of(decoder: DecoderConfig, rule: FurtherLayers, kind: Layer, own_table: bool, own_head: bool) -> RecurrentHead:
    """Returns a layer for multi-token prediction as a head.

    Args:
        decoder: the decoder's configuration.
        rule: the family's rule.
        kind: the options of the layer, from `layer_of`.
        own_table: True if it has an embedding table that is not the decoder's.
        own_head: True if it has a vocabulary matrix that is not the decoder's.
    """
    streams, depth = None if rule.one_stream else decoder.streams, len(decoder.layers)
    taps = (depth,) if streams is not None else (depth - 1,) if rule.before_norm else ()
    return RecurrentHead(taps, decoder.vocab, fuse="norms", own_table=own_table, own_head=own_head,
                         config=dataclasses.replace(decoder, layers=(kind,), streams=streams, head_bias=False),
                         hidden_first=rule.hidden_first, drop_first=rule.drop_first,
                         final_norm="norm.scale" in rule.around,
                         feeds_back="before norm" if rule.feeds_before else "after norm")


def repeated(one: RecurrentHead, count: int) -> RecurrentHead | DepthwiseHead:
    """Returns `count` layers for multi-token prediction like `one` as a head.

    Raises:
        ValueError: the later ones of several such layers cannot draft.
    """
    if count == 1:
        return one
    try:
        return DepthwiseHead(one.taps, one.vocab, layer=one, count=count)
    except ValueError as e:
        raise ValueError(f"holds {count} layers that predict further tokens: {e}") from None


def layer_of(decoder: DecoderConfig, rule: FurtherLayers, experts: bool, entries: Mapping[str, Any]) -> Layer:
    """Returns the options of a layer for multi-token prediction: those of the decoder's last layer with attention, or
    those of `rule.entries`.

    Args:
        decoder: the decoder's configuration.
        rule: the family's rule.
        experts: True if the layer has experts, False if its MLP is dense.
        entries: the entries of the `config.json` of which `decoder` was read.

    Raises:
        ValueError: the decoder has no layer of this kind.
    """
    if rule.entries:
        return read_config({**entries, **rule.entries}).layers[0]

    def attends(layer: Layer) -> bool:
        """True for layers with attention that choose tokens themselves, if they choose any."""
        shares = layer.latent is not None and layer.latent.indexer is not None and layer.latent.indexer.shared
        return layer.half != "mlp" and not shares and (layer.recurrent is None or isinstance(layer.recurrent, Pooling))

    last = next((layer for layer in reversed(decoder.layers) if attends(layer) and (
        layer.sliding is not None or not rule.sliding) and (layer.index is not None or not rule.indexed)), None)
    if last is None:
        what = "a sliding window" if rule.sliding else "an index of blocks" if rule.indexed else "attention"
        raise ValueError(f"layer_types: got no layer with {what}, takes one, which those that predict further tokens "
                         "are like")
    if last.half is not None:       # the other half is a layer of its own
        other = next((layer for layer in reversed(decoder.layers) if layer.half == "mlp" and (
            layer.experts is not None) == experts), None)
        if other is None:
            raise ValueError(f"layers_block_type: got no layer {'of experts' if experts else 'with a dense MLP'}, "
                             "takes one, which those that predict further tokens are like")
        return dataclasses.replace(last, half=None, experts=other.experts, mlp=other.mlp)
    last = dataclasses.replace(last, glu=None) if rule.unclipped else last
    mixtures = (layer.experts for layer in reversed(decoder.layers) if layer.experts is not None)
    return dataclasses.replace(last, experts=(last.experts or next(mixtures, None)) if experts else None)


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


def _held(path: Path) -> bool:
    """True if a directory has files from which a model is loaded."""
    return any((path / name).is_file() for name in (ONE, INDEX))


def _files(path: Path, family: str) -> Files:
    files = Files(path)
    files.within(embeddings(family))
    return files


def _sources(head: RecurrentHead, family: str, rule: FurtherLayers, place: Place, files: Files
             ) -> dict[str, WeightSource]:
    """Returns the tensors of each weight of one layer."""
    shapes = head.abstract_params()
    # To its family the layer is the only one of a decoder, in the same layout.
    known = embeddings(family)
    table = next((name for name in known if name in files.home), known[0])
    layout = deciding_names(family, files.home)
    within = f"{names_of(family, {table, *layout}).stem}layers.0."

    def stored(path: str, name: str) -> str:
        inner = name.removeprefix(within)
        for theirs, own in rule.renamed.items():
            inner = inner.replace(theirs, own)
        return f"{place.second if path.startswith('layers.0.mlp') else place.first}{inner}"

    here = [f"{within}{name.removeprefix(first)}" for first in (place.first, place.second) for name in files.home
            if name.startswith(first)]
    block = {path: dataclasses.replace(source, tensors=tuple(stored(path, name) for name in source.tensors))
             for path, source in sources(
                 family, head.config, {"layers": shapes["layers"]}, {table, *here, *layout}).items()}
    block = as_stored(block, lambda name: tuple(files.slice(name).get_shape()) if name in files.home else ())
    for path, leaf in flatten(shapes).items():
        if path not in block:
            turned = path.endswith("kernel")
            block[path] = WeightSource((place.around[path],), turned, None, leaf.shape[::-1] if turned else leaf.shape)
    return block
