"""Packing the weights of a loaded model, with data where a format goes by it, and saving models."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from decodax.io.checkpoint import place_packed, save_model
from decodax.io.files import read_json
from decodax.io.load import LM
from decodax.io.packed import ENTRY
from decodax.models.calibration import observe, watched
from decodax.models.formats import Format, kernels, read_format
from decodax.models.names import flatten
from decodax.models.packed import Packed
from decodax.models.transformer import Transformer

BESIDE = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
          "generation_config.json")
"""Files that `save` copies from where a model came from."""


def quantize(lm: LM, weights: str | Format, data: Sequence[str | Sequence[int]] | None = None, *, length: int = 512,
             sequences: int = 128, memory: int = 4 << 30, progress: bool = False) -> LM:
    """The model with its kernels packed.

    Args:
        lm: a decoder with arrays as weights, see `decodax.load`.
        weights: a format by name, or a `decodax.models.formats.Format`.
        data: texts, or their ids, of the kind that the model will see; for a format that goes by data. They are put
            one after the other and cut into sequences.
        length: tokens of a sequence; where the texts have fewer, all of them are one sequence.
        sequences: sequences at most, taken from all over the texts.
        memory: bytes that what is kept of the data may take at a time. Where all kernels need more, they are packed a
            few at a time, which goes over the data again and again.
        progress: shows a progress bar.

    Raises:
        ValueError: an unknown format, a model that cannot be packed, no data where some is needed or too little, or an
            argument out of its range, by name.
    """
    own = read_format(weights)
    if own is None:
        raise ValueError("weights: got None, takes the name of a format or a Format")
    for name, value, least in (("length", length, 2), ("sequences", sequences, 1), ("memory", memory, 1)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name}: got {value!r}, takes an int from {least}")
    if not isinstance(lm.model, Transformer):
        raise ValueError(f"lm: got {lm.name!r}, a {type(lm.model).__name__}; takes a decoder")
    leaves = flatten(lm.params)
    if any(isinstance(leaf, Packed) for leaf in leaves.values()):
        raise ValueError(f"lm: the weights of {lm.name!r} are packed; takes arrays, as decodax.load makes "
                         "them by default")
    chosen = [path for path in kernels(lm.params) if own.packs(path)]
    places = None if lm.mesh is None else flatten(lm.model.shardings(lm.mesh))
    pack = jax.jit(own.pack) if own.statistic is None else own.pack
    tokens = None if own.statistic is None else _tokens(lm, weights, data, length, sequences)
    with contextlib.nullcontext() if lm.mesh is None else jax.set_mesh(lm.mesh), \
            _bar(progress, len(chosen)) as report:
        for group in _groups(leaves, chosen, own, memory):
            seen: dict[str, Any] = {}
            if tokens is not None and own.statistic is not None:
                share, done = len(group) / len(tokens), chosen.index(group[0])
                shown = functools.partial(lambda rows, share, done: report(done + share * rows), share=share, done=done)
                seen = observe(lm.model, lm.params, tokens, own.statistic, group, lm.diffusion, shown)
            for path in group:
                table = path == "embed"
                kernel = leaves[path].T if table else leaves[path]
                made = pack(kernel) if tokens is None else pack(kernel, seen.pop(path))
                place = SingleDeviceSharding(jax.devices()[0]) if places is None else places[path]
                leaves[path] = place_packed(made, table, place)
        report(len(chosen))
    params = jax.tree.unflatten(jax.tree.structure(lm.params), leaves.values())
    return dataclasses.replace(lm, params=params)


def save(lm: LM, directory: str | os.PathLike[str]) -> None:
    """Writes a model that `decodax.load` reads: weights, configuration and tokenizer.

    Weights that are arrays are written as transformers reads them; packed ones are for `decodax.load` alone.

    Raises:
        ValueError: a model that is no decoder, or one without the configuration that it needs.
    """
    if not isinstance(lm.model, Transformer):
        raise ValueError(f"lm: got {lm.name!r}, a {type(lm.model).__name__}; takes a decoder")
    root = Path(directory)
    config: dict[str, Any] = {key: lm.generation_config[key] for key in ("bos_token_id", "eos_token_id",
                                                                         "pad_token_id") if key in lm.generation_config}
    if lm.directory is not None:
        config = {key: value for key, value in read_json(lm.directory / "config.json").items() if key != ENTRY}
    save_model(root, lm.model, lm.params, config)
    for name in BESIDE:
        if lm.directory is not None and (lm.directory / name).is_file() and lm.directory.resolve() != root.resolve():
            shutil.copyfile(lm.directory / name, root / name)


def _tokens(lm: LM, weights: str | Format, data: Sequence[str | Sequence[int]] | None, length: int,
            sequences: int) -> np.ndarray:
    """`i32[S, T]`."""
    if data is None or len(data) == 0:
        raise ValueError(f"data: got {data!r}, and {weights!r} goes by data; takes texts of the kind that the model "
                         "will see")
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
        raise ValueError(f"data: got {len(ids)} tokens, takes 2 or more")
    rows = np.asarray(ids[:len(ids) // length * length], np.int32).reshape(-1, length)
    count = min(sequences, len(rows))
    return rows[np.linspace(0, len(rows) - 1, count).round().astype(int)]


def _groups(leaves: dict[str, Any], chosen: list[str], own: Format, memory: int) -> Iterator[list[str]]:
    """The kernels, as many at a time as what is kept of the data fits in memory; twice, for it is added up."""
    group: list[str] = []
    what, size = own.statistic, 0
    for path in chosen:
        one = 0
        if what is not None:
            kernel = jax.eval_shape(lambda x, path=path: x.T if path == "embed" else x, leaves[path])
            seen = jax.eval_shape(lambda k: watched(k, what).seen, kernel)
            one = 2 * sum(math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(seen))
        if group and size + one > memory:
            yield group
            group, size = [], 0
        group.append(path)
        size += one
    if group:
        yield group


@contextlib.contextmanager
def _bar(show: bool, total: int) -> Iterator[Callable[[float], None]]:
    """A progress bar of packed kernels, or nothing."""
    if not show:
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("packing", total=total)
        yield lambda done: progress.update(task, completed=done)
