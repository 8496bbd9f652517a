"""Finds the tensor of each weight in a GGUF file, and reads its rows.

Files store kernels `[outputs, inputs]`, which is the order of packed kernels, so that rows can be selected and moved
without touching their blocks: queries and keys of a projection that holds both with the values, the rows of a rotation
of neighbours.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self

import numpy as np

from decodax.io.files import CheckpointError, named_tensors
from decodax.io.gguf.metadata import Architecture
from decodax.io.gguf.reader import GgufFile, GgufTensor
from decodax.io.gguf.views import Stored
from decodax.models.config import DecoderConfig

NAMES = {"attn_in": "attn_norm", "mlp_in": "ffn_norm", "attn_out": "post_attention_norm", "mlp_out": "post_ffw_norm",
         "attn.q": "attn_q", "attn.k": "attn_k", "attn.v": "attn_v", "attn.o": "attn_output",
         "attn.q_norm": "attn_q_norm", "attn.k_norm": "attn_k_norm", "mlp.gate": "ffn_gate", "mlp.up": "ffn_up",
         "mlp.down": "ffn_down", "mlp.router": "ffn_gate_inp"}
"""Name of a tensor within a layer, by the network's path within a layer."""

WHOLE = {"embed": "token_embd.weight", "positions": "position_embd.weight", "norm": "output_norm",
         "lm_head": "output", "embed_norm": "token_embd_norm", "layer_inputs.table": "per_layer_token_embd.weight",
         "layer_inputs.project": "per_layer_model_proj", "layer_inputs.norm": "per_layer_proj_norm"}
"""Names of tensors outside of the layers."""

TOGETHER = {"attn_qkv": ("attn.q", "attn.k", "attn.v"), "ffn_up": ("mlp.gate", "mlp.up")}
"""Tensors that hold the rows of several weights, in this order. For the second one, `ffn_gate` is missing."""

ROPE = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors with divisors of the rotary frequencies."""

UNUSED = re.compile(r"attn_rot_embd|rope_freqs|" + "|".join(map(re.escape, ROPE)))
"""Tensors that the configuration makes unnecessary."""

CHUNK = 4 << 20
"""Number of bytes read at a time."""


@dataclasses.dataclass(frozen=True)
class RowSource:
    """The rows of a tensor that make up a weight. A tensor of one axis has rows of one entry.

    Attributes:
        tensor: the tensor.
        start, stop: the rows.
        heads: number of heads whose rows are stored in pairs; 0: the rows are in order.
        every: number of rows of each expert in a tensor that holds two projections, of which `start` to `stop` of the
            first expert, and the same rows of the others, are read; 0: rows `start` to `stop` are all.
        shift: added to the numbers.
        picks: the rows, counted from `start`, in the network's order; None: all of them in the file's.
        columns: the blocks of a row in the network's order; None: the file's.
        turn: makes the weight of the numbers `f32[rows, entries]`; None: they are the weight. Such a weight is not
            kept packed.
        values: the numbers themselves, which are no tensor's; None: they are.
    """

    tensor: GgufTensor
    start: int
    stop: int
    heads: int = 0
    shift: float = 0.0
    every: int = 0
    picks: np.ndarray | None = None
    columns: np.ndarray | None = None
    turn: Callable[[np.ndarray], np.ndarray] | None = None
    values: np.ndarray | None = None

    @property
    def row(self) -> int:
        """Number of bytes of a row."""
        return self.tensor.row if len(self.tensor.shape) > 1 else self.tensor.size

    @property
    def count(self) -> int:
        """Number of rows."""
        if self.picks is not None:
            return len(self.picks)
        return (self.stop - self.start) * (self.tensor.shape[0] if self.every else 1)

    @property
    def unit(self) -> int:
        """Number of rows that are read together at least."""
        size = self.stop - self.start
        return size if self.picks is not None else size // self.heads if self.heads else 1

    def order(self, rows: int) -> np.ndarray:
        """Returns the order of the first `rows` rows, a multiple of `unit`."""
        if self.picks is not None:
            return self.picks
        if not self.heads:
            return np.arange(rows)
        return np.arange(rows).reshape(-1, self.unit // 2, 2).swapaxes(1, 2).ravel()


def row_sources(file: GgufFile, architecture: Architecture, config: DecoderConfig,
                shapes: dict[str, Any]) -> dict[str, RowSource]:
    """Returns the rows of each weight of a file's network; see `find_rows`.

    Raises:
        CheckpointError: as there, or a tensor is not part of the network.
    """
    found = find_rows(file, architecture, config, shapes)
    # Layers that predict further tokens, and keys of layers that attend to those of others.
    spare = tuple(f"blk.{i}." for i in range(len(config.layers), len(config.layers) + 8)) + tuple(
        f"blk.{i}.attn_{part}" for i, layer in enumerate(config.layers) if layer.reads is not None for part in "kv")
    refuse_others(file, found, spare, architecture.numbers)
    return found


def refuse_others(file: GgufFile, found: Mapping[str, RowSource], spare: tuple[str, ...] = (), numbers: str = ""
                  ) -> None:
    """Raises CheckpointError if a file has tensors that are neither in `found` nor unused. `spare` are beginnings of
    further names that are unused, and `numbers` is `Architecture.numbers`."""
    used = {source.tensor.name for source in found.values() if source.values is None}
    left = sorted(name for name in file.tensors.keys() - used if not UNUSED.search(name) and not name.startswith(spare)
                  and not (numbers and re.fullmatch(numbers, name)))
    if left:
        raise CheckpointError(f"{file.path}: holds {named_tensors(left)}, which the metadata does not describe")


def find_rows(file: GgufFile, architecture: Architecture, config: Any, shapes: dict[str, Any], first: int = 0
              ) -> dict[str, RowSource]:
    """Returns the rows of each weight.

    Args:
        file: the file.
        architecture: how it is read.
        config: the network's configuration, of a decoder or another network.
        shapes: the shapes of its weights by path.
        first: number of the network's first layer in the file.

    Raises:
        CheckpointError: a tensor is missing, or has another shape than the configuration says.
    """
    found, missing = dict[str, RowSource](), []
    for path, leaf in shapes.items():
        view = architecture.views.get(path.split(".", 2)[-1]) if path.startswith("layers.") else (
            architecture.outside.get(path))
        if view is not None:
            source = _viewed(view, path, file, config, shapes, first)
            if isinstance(source, str):
                missing.append(source)
            else:
                found[path] = source
            continue
        wanted = leaf.shape[::-1] if path.endswith(".kernel") and leaf.ndim == 2 else leaf.shape
        if leaf.ndim == 3:
            wanted = (leaf.shape[0], leaf.shape[2], leaf.shape[1])
        name, start, rows = _place(path, file, shapes, architecture.names, first)
        tensor = file.tensors.get(name)
        if tensor is None:
            missing.append(name)
            continue
        merged = len(wanted) == 3 and rows > 0
        full = (wanted[0], rows, wanted[2]) if merged else (rows, *wanted[1:]) if rows else wanted
        if tensor.block > 1 and len(tensor.shape) == 1:
            raise CheckpointError(f"{file.path}: tensor {name}: has type {tensor.type}, takes one of floats, since it "
                                  "is no matrix")
        plain = lambda shape: shape[1:] if len(shape) == 2 and shape[0] == 1 else shape
        if plain(tensor.shape) != plain(full):
            raise CheckpointError(f"{file.path}: tensor {name} has shape {tensor.shape}, the metadata requires {full}")
        permuted = architecture.permuted and re.search(r"\.attn\.[qk]\.", path)
        heads = (config.heads if ".q." in path else config.kv_heads) if permuted else 0
        count = wanted[1] if merged else math.prod(wanted) // (tensor.shape[-1] if len(tensor.shape) > 1 else 1)
        shift = -1.0 if architecture.shifted and path.endswith(".scale") else 0.0
        found[path] = RowSource(tensor, start, start + count, heads, shift, rows if merged else 0)
    if missing:
        raise CheckpointError(f"{file.path}: lacks {named_tensors(missing)}, which the metadata requires")
    return found


def _viewed(view: Stored, path: str, file: GgufFile, config: Any, shapes: dict[str, Any], first: int
            ) -> RowSource | str:
    """Returns the rows of a weight with a view, or the name of its tensor if the file lacks it.

    Raises:
        CheckpointError: the tensor does not have the number of entries that the configuration says.
    """
    within, index, rest = path.split(".", 2) if path.startswith("layers.") else ("", "0", path)
    leaf, ordered = shapes[path], view.rows is not None or view.columns is not None
    layer: Any = config.layers[int(index)] if ordered else None
    if view.entry:
        # The package gguf writes the name alone, others that of the architecture before it.
        listed = np.ravel(file.metadata.get(view.name, file.metadata.get(
            f"{file.metadata['general.architecture']}.{view.name}", ())))
        return view.name if len(listed) <= int(index) else RowSource(
            next(iter(file.tensors.values())), 0, 0, values=np.asarray(listed[int(index)], np.float32))
    name, beside = (f"blk.{int(index) + first}.{view.name}", f"layers.{index}.") if within else (view.name, "")
    tensor = file.tensors.get(name)
    if tensor is None:
        older = name if view.older is None else _viewed(view.older, path, file, config, shapes, first)
        return name if isinstance(older, str) else older
    entries = tensor.shape[-1] if len(tensor.shape) > 1 else 1
    total = math.prod(tensor.shape) // entries
    widths = [math.prod(shapes[f"{beside}{other}"].shape) // entries for other in view.of] or [total]
    at = view.of.index(rest) if view.of else 0
    start, picks = sum(widths[:at]), None if view.rows is None else view.rows(config, layer)
    rows = widths[at] if picks is None else len(picks)
    if sum(widths) != total or rows * entries != math.prod(leaf.shape) or (
            picks is not None and picks.max() >= widths[at]):
        raise CheckpointError(f"{file.path}: tensor {name} has shape {tensor.shape}, which does not fit {leaf.shape} "
                              "of the metadata")
    columns, own = None if view.columns is None else view.columns(config, layer), view.turn
    turn: Callable[[np.ndarray], np.ndarray] | None = None if own is None else lambda x: own(x, config)
    if columns is not None:
        blocks = columns.reshape(-1, tensor.block)
        if (blocks[:, :1] + np.arange(tensor.block) == blocks).all() and not (blocks[:, 0] % tensor.block).any():
            columns = blocks[:, 0] // tensor.block
        else:       # blocks that reach over the border of two heads
            columns, turn = None, functools.partial(np.take, indices=columns, axis=1)
    return RowSource(tensor, start, start + widths[at], picks=picks, columns=columns, turn=turn)


def _place(path: str, file: GgufFile, shapes: dict[str, Any], own: Mapping[str, str], first: int
           ) -> tuple[str, int, int]:
    """Returns the name of a weight's tensor, its first row in it, and the number of rows if it has those of others.
    `own` are the names of the architecture, and `first` is that of `find_rows`."""
    whole = {**WHOLE, **own}
    if path in whole:
        return whole[path], 0, 0
    module, leaf = path.rsplit(".", 1)
    tail = "bias" if leaf == "bias" else "weight"
    if module in whole:
        return f"{whole[module]}.{tail}", 0, 0
    _, index, rest = path.split(".", 2)
    within, names = f"blk.{int(index) + first}.", {**NAMES, **own}
    if rest in own:
        return f"{within}{own[rest]}", 0, 0
    inner = rest.rsplit(".", 1)[0]
    several = names[inner].split("|")
    name = next((one for one in several if f"{within}{one}.{tail}" in file.tensors), several[-1])
    size, of_all = shapes[path], f"layers.{index}.{inner}.kernel"
    if size.ndim == 3 or (leaf == "bias" and of_all in shapes and shapes[of_all].ndim == 3):
        both = f"{within}ffn_gate_up_exps.{tail}"
        if inner in ("mlp.gate", "mlp.up") and both in file.tensors:
            return both, size.shape[-1] * (inner == "mlp.up"), 2 * size.shape[-1]
        return f"{within}{name}_exps.{tail}", 0, 0
    for fused, members in TOGETHER.items():
        alone = f"{within}{NAMES[members[0]]}.weight"
        if inner in members and alone not in file.tensors and f"{within}{fused}.weight" in file.tensors and (
                f"layers.{index}.{members[0]}.{leaf}" in shapes):
            widths = [shapes[f"layers.{index}.{member}.{leaf}"].shape[-1] for member in members]
            return f"{within}{fused}.{tail}", sum(widths[:members.index(inner)]), sum(widths)
    return f"{within}{name}.{tail}", 0, 0


class RowReader:
    """Reads rows of tensors from a file that it holds open. It reads instead of mapping the file, whose pages would
    count as memory of the process."""

    def __init__(self, file: GgufFile):
        self.file = file
        self._data = open(file.path, "rb", buffering=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._data.close()

    def chunks(self, source: RowSource) -> Iterator[tuple[int, np.ndarray]]:
        """Yields the rows of a weight in the network's order, `u8[rows, bytes]`, with the number of rows before."""
        tensor, unit, row, size = source.tensor, source.unit, source.row, source.stop - source.start
        step, experts = max(CHUNK // (row * unit), 1) * unit, tensor.shape[0] if source.every else 1
        for done, start in ((i * size, i * source.every + source.start) for i in range(experts)):
            for first in range(0, size, step):
                count = min(step, size - first)
                rows = self._read(tensor, (start + first) * row, count * row).reshape(count, row)
                rows = rows[source.order(count)] if source.heads or source.picks is not None else rows
                if source.columns is not None:
                    rows = rows.reshape(len(rows), -1, tensor.size)[:, source.columns].reshape(len(rows), row)
                yield done + first, rows

    def _read(self, tensor: GgufTensor, start: int, size: int) -> np.ndarray:
        self._data.seek(tensor.start + start)
        found, done = np.empty(size, np.uint8), 0
        while done < size:
            more = self._data.readinto(found.data[done:])
            if not more:
                raise CheckpointError(f"{self.file.path}: tensor {tensor.name}: the file ends within it")
            done += more
        return found
