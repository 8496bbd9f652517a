"""Packs (quantizes) the weights of a loaded model, with calibration data if the format needs them, and saves models."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from decodax.common.progress import bar
from decodax.core.mesh import on_mesh
from decodax.io import huge_pages
from decodax.io.load import LM
from decodax.io.packed import ENTRY, place_packed
from decodax.io.row_order import by_row
from decodax.io.saving import save_encoder_decoder, save_mamba2, save_model
from decodax.io.sentence_pieces import PieceTokenizer
from decodax.models.calibration import nothing, observe
from decodax.models.encoder_decoder.network import EncoderDecoder
from decodax.models.formats import Format, ModelFormat, kernels, read_format
from decodax.models.formats.ggml import GgmlBlocks
from decodax.models.formats.scaled import Scaled
from decodax.models.names import flatten
from decodax.models.packed import Packed
from decodax.models.recurrent.mamba2 import Mamba2
from decodax.models.transformer import Transformer
from decodax.models.weight_source import is_table, kernel_of

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
             "chat_template.jinja")
"""Files that `save` copies from the directory of the tokenizer."""


def quantize(lm: LM, weights: str | Format | ModelFormat, data: Sequence[str | Sequence[int]] | None = None, *,
             length: int = 512, sequences: int = 128, memory: int = 4 << 30, progress: bool = False) -> LM:
    """Returns the model with its kernels packed.

    Args:
        lm: a decoder whose weights are arrays, a result of `decodax.load`. Kernels of a GGUF file are decoded first;
            other packed weights are refused.
        weights: the name of a format, or a `decodax.models.formats.Format` or `ModelFormat`.
        data: calibration texts or their token ids, similar to the texts that the model will process, for a format that
            needs them. They are concatenated and cut into sequences.
        length: number of tokens of a sequence; if the texts have fewer, all of them form one sequence.
        sequences: maximum number of sequences, taken at equal distances from the texts.
        memory: maximum number of bytes of calibration statistics at a time. If all kernels need more, they are packed
            in groups, with one pass over the data for each group.
        progress: True shows a progress bar.

    Raises:
        ValueError: an unknown format, a model that cannot be packed, missing or too little data, or an argument out of
            its range; the message names it.
    """
    own = read_format(weights)
    if own is None:
        raise ValueError("weights: got None, takes the name of a format or a Format")
    for name, value, least in (("length", length, 2), ("sequences", sequences, 1), ("memory", memory, 1)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name}: got {value!r}, takes an int of at least {least}")
    if not isinstance(lm.model, Transformer if isinstance(own, Format) else Transformer | Mamba2):
        raise ValueError(f"lm: got {lm.name!r}, a {type(lm.model).__name__}; takes a decoder")
    leaves = flatten(lm.params)
    if any(isinstance(leaf, Packed) and not _is_stored(leaf) for leaf in leaves.values()):
        raise ValueError(f"lm: got {lm.name!r} with packed weights, takes arrays, as decodax.load makes them from a "
                         "directory by default, or a GGUF file on a CPU; decodax.load(..., weights=) packs a GGUF file "
                         "anew on any device")
    if isinstance(own, ModelFormat):
        rows = _tokens(lm, weights, data, length, sequences) if own.data else None
        with bar(progress, "packing", 1) as report:
            model, params = own.convert(lm.model, lm.params, rows, report)
        return dataclasses.replace(lm, model=model, params=huge_pages.moved(params))
    assert isinstance(lm.model, Transformer)
    chosen = [path for path in kernels(lm.params) if own.packs(path)]
    leaves |= {path: _decoded(path, leaves[path]) for path in chosen if _is_stored(leaves[path])}
    tree = jax.tree.structure(lm.params, is_leaf=lambda leaf: isinstance(leaf, Packed))
    arrays = jax.tree.unflatten(tree, leaves.values())
    places = None if lm.mesh is None else flatten(lm.model.shardings(lm.mesh))
    pack = jax.jit(own.pack) if own.statistic is None else own.pack
    tokens = None if own.statistic is None else _tokens(lm, weights, data, length, sequences)
    packed: dict[str, Any] = {}
    with on_mesh(lm.mesh), bar(progress, "packing", len(chosen)) as report:
        for group in _groups(leaves, chosen, own, memory):
            seen: dict[str, Any] = {}
            if tokens is not None and own.statistic is not None:
                share, done = len(group) / len(tokens), chosen.index(group[0])
                shown = functools.partial(lambda rows, share, done: report(done + share * rows), share=share, done=done)
                seen = observe(lm.model, arrays, tokens, own.statistic, group, lm.diffusion, shown)
            for path in group:
                made = pack(kernel_of(path, leaves[path]), *([] if tokens is None else [seen.pop(path)]))
                packed[path] = made if places is None else place_packed(made, is_table(path), places[path])
        report(len(chosen))
    leaves |= huge_pages.moved(packed)
    return dataclasses.replace(lm, params=by_row(lm.model.config, jax.tree.unflatten(tree, leaves.values())))


def save(lm: LM, directory: str | os.PathLike[str], dtype: jax.typing.DTypeLike | None = None) -> None:
    """Writes a model to a directory that `decodax.load` can load: weights, configuration, generation config and
    tokenizer.

    Weights that are arrays can also be loaded by transformers; packed weights only by `decodax.load`.

    Args:
        lm: the model.
        directory: path to write to; it is created if necessary.
        dtype: dtype of the stored weights that are not packed ("float32", "bfloat16", "float16"); None: their own.

    Raises:
        ValueError: the model is of another kind or lacks the configuration that it needs, its tokenizer was made in
            memory, or weights cannot have this dtype.
    """
    if not isinstance(lm.model, Transformer | Mamba2 | EncoderDecoder):
        raise ValueError(f"lm: got {lm.name!r}, a {type(lm.model).__name__}; takes a decoder or an encoder-decoder")
    if lm.tokenizer is not None and lm.tokenizer.directory is None and not lm.entries:
        raise ValueError(f"lm: got {lm.name!r} with a tokenizer that was made in memory; takes one that was read from "
                         "a directory, or None")
    root = Path(directory)
    config = {key: value for key, value in lm.config_entries.items() if key != ENTRY}
    if lm.diffusion is not None:
        config["diffusion"] = dataclasses.asdict(lm.diffusion)
    if isinstance(lm.model, Mamba2):
        save_mamba2(root, lm.model, lm.params, config, dtype)
    elif isinstance(lm.model, EncoderDecoder):
        save_encoder_decoder(root, lm.model, lm.params, config, dtype)
    else:
        save_model(root, lm.model, lm.params, config, dtype)
    (root / "generation_config.json").write_text(json.dumps(lm.generation_config, indent=2) + "\n")
    if lm.tokenizer is not None and (lm.tokenizer.directory is None or isinstance(lm.tokenizer, PieceTokenizer)):
        lm.tokenizer.save(root)
    source = None if lm.tokenizer is None else lm.tokenizer.directory
    for name in TOKENIZER:
        if source is not None and (source / name).is_file() and source.resolve() != root.resolve():
            shutil.copyfile(source / name, root / name)


def _is_stored(leaf: Any) -> bool:
    """True if a kernel is in the form in which a GGUF file stores it: blocks of GGML, or floats of another dtype."""
    return isinstance(leaf, GgmlBlocks) or (isinstance(leaf, Scaled) and leaf.scales is None)


def _decoded(path: str, leaf: Packed) -> Any:
    """Returns a packed kernel as an array in the order of the network's weights."""
    return _values(leaf) if is_table(path) else jnp.swapaxes(_values(leaf), -1, -2)


@jax.jit
def _values(leaf: Packed) -> jax.Array:
    return leaf.values(jnp.float32)


def _tokens(lm: LM, weights: str | Format | ModelFormat, data: Sequence[str | Sequence[int]] | None, length: int,
            sequences: int) -> np.ndarray:
    """Returns the calibration sequences, `i32[S, T]`."""
    if data is None or len(data) == 0:
        raise ValueError(f"data: got {data!r}, but {weights!r} needs calibration data; takes texts of the kind that "
                         "the model will see")
    if isinstance(data, str):
        raise ValueError("data: got a string, takes a sequence of texts")
    ids: list[int] = []
    for i, text in enumerate(data):
        if isinstance(text, str):
            if lm.tokenizer is None:
                raise ValueError(f"data[{i}]: got a text for {lm.name!r}, which has no tokenizer; takes ids")
            ids += lm.tokenizer.encode(text)
            continue
        bad = next((t for t in text if not isinstance(t, (int, np.integer)) or not 0 <= t < lm.vocab_size), None)
        if bad is not None:
            raise ValueError(f"data[{i}]: got id {bad!r}, takes 0 to {lm.vocab_size - 1}")
        ids += map(int, text)
    if lm.model.trained_positions is not None:
        length = min(length, lm.model.trained_positions)
    length = min(length, len(ids))
    if length < 2:
        raise ValueError(f"data: got {len(ids)} tokens, takes at least 2")
    rows = np.asarray(ids[:len(ids) // length * length], np.int32).reshape(-1, length)
    count = min(sequences, len(rows))
    return rows[np.linspace(0, len(rows) - 1, count).round().astype(int)]


def _groups(leaves: dict[str, Any], chosen: list[str], own: Format, memory: int) -> Iterator[list[str]]:
    """Groups the kernels so that twice the statistics of a group fit in `memory`, since old and new sums exist at once.
    """
    group: list[str] = []
    what, size = own.statistic, 0
    for path in chosen:
        one = 0
        if what is not None:
            seen = jax.eval_shape(functools.partial(nothing, kernel_of(path, leaves[path]).shape, what))
            one = 2 * sum(math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(seen))
        if group and size + one > memory:
            yield group
            group, size = [], 0
        group.append(path)
        size += one
    if group:
        yield group
