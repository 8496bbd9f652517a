"""Finds the tensor of each weight in a GGUF file, and reads its rows.

Files store kernels `[outputs, inputs]`, which is the order of packed kernels, so that rows can be selected and moved
without touching their blocks: queries and keys of a projection that holds both with the values, the rows of a rotation
of neighbours.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Self

import numpy as np

from decodax.io.files import CheckpointError, named_tensors
from decodax.io.gguf.metadata import Architecture
from decodax.io.gguf.reader import GgufFile, GgufTensor
from decodax.models.config import DecoderConfig

NAMES = {"attn_in": "attn_norm", "mlp_in": "ffn_norm", "attn_out": "post_attention_norm", "mlp_out": "post_ffw_norm",
         "attn.q": "attn_q", "attn.k": "attn_k", "attn.v": "attn_v", "attn.o": "attn_output",
         "attn.q_norm": "attn_q_norm", "attn.k_norm": "attn_k_norm", "mlp.gate": "ffn_gate", "mlp.up": "ffn_up",
         "mlp.down": "ffn_down", "mlp.router": "ffn_gate_inp"}
"""Name of a tensor within a layer, by the network's path within a layer."""

WHOLE = {"embed": "token_embd.weight", "positions": "position_embd.weight", "norm": "output_norm",
         "lm_head": "output", "layer_inputs.table": "per_layer_token_embd.weight",
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
    """

    tensor: GgufTensor
    start: int
    stop: int
    heads: int = 0
    shift: float = 0.0
    every: int = 0

    @property
    def row(self) -> int:
        """Number of bytes of a row."""
        return self.tensor.row if len(self.tensor.shape) > 1 else self.tensor.size

    @property
    def count(self) -> int:
        """Number of rows."""
        return (self.stop - self.start) * (self.tensor.shape[0] if self.every else 1)

    @property
    def unit(self) -> int:
        """Number of rows that are read together at least."""
        return (self.stop - self.start) // self.heads if self.heads else 1

    def order(self, rows: int) -> np.ndarray:
        """Returns the order of the first `rows` rows, a multiple of `unit`."""
        if not self.heads:
            return np.arange(rows)
        return np.arange(rows).reshape(-1, self.unit // 2, 2).swapaxes(1, 2).ravel()


def row_sources(file: GgufFile, architecture: Architecture, config: DecoderConfig,
                shapes: dict[str, Any]) -> dict[str, RowSource]:
    """Returns the rows of each weight.

    Args:
        file: the file.
        architecture: how it is read.
        config: the network's configuration.
        shapes: the shapes of its weights by path.

    Raises:
        CheckpointError: a tensor is missing, has another shape than the configuration says, or is not part of the
            network.
    """
    found, missing = dict[str, RowSource](), []
    for path, leaf in shapes.items():
        wanted = leaf.shape[::-1] if path.endswith(".kernel") and leaf.ndim == 2 else leaf.shape
        if leaf.ndim == 3:
            wanted = (leaf.shape[0], leaf.shape[2], leaf.shape[1])
        name, start, rows = _place(path, file, shapes, architecture.names)
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
    used = {source.tensor.name for source in found.values()}
    # Layers that predict further tokens, and keys of layers that attend to those of others.
    spare = tuple(f"blk.{i}." for i in range(len(config.layers), len(config.layers) + 8)) + tuple(
        f"blk.{i}.attn_{part}" for i, layer in enumerate(config.layers) if layer.reads is not None for part in "kv")
    left = sorted(name for name in file.tensors.keys() - used if not UNUSED.search(name) and not name.startswith(spare))
    if left:
        raise CheckpointError(f"{file.path}: holds {named_tensors(left)}, which the metadata does not describe")
    return found


def _place(path: str, file: GgufFile, shapes: dict[str, Any], own: Mapping[str, str]) -> tuple[str, int, int]:
    """Returns the name of a weight's tensor, its first row in it, and the number of rows if it has those of others.
    `own` are the names of the architecture."""
    if path in WHOLE:
        return WHOLE[path], 0, 0
    module, leaf = path.rsplit(".", 1)
    tail = "bias" if leaf == "bias" else "weight"
    if module in WHOLE:
        return f"{WHOLE[module]}.{tail}", 0, 0
    _, index, rest = path.split(".", 2)
    within, names = f"blk.{index}.", {**NAMES, **own}
    if rest in own:
        return f"{within}{own[rest]}", 0, 0
    inner = rest.rsplit(".", 1)[0]
    name = names[inner]
    size, of_all = shapes[path], f"layers.{index}.{inner}.kernel"
    if size.ndim == 3 or (leaf == "bias" and of_all in shapes and shapes[of_all].ndim == 3):
        both = f"{within}ffn_gate_up_exps.{tail}"
        if inner in ("mlp.gate", "mlp.up") and both in file.tensors:
            return both, size.shape[-1] * (inner == "mlp.up"), 2 * size.shape[-1]
        return f"{within}{name}_exps.{tail}", 0, 0
    for fused, members in TOGETHER.items():
        first = f"{within}{NAMES[members[0]]}.weight"
        if inner in members and first not in file.tensors and f"{within}{fused}.weight" in file.tensors and (
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
                yield done + first, rows[source.order(count)] if source.heads else rows

    def _read(self, tensor: GgufTensor, start: int, size: int) -> np.ndarray:
        self._data.seek(tensor.start + start)
        found, done = np.empty(size, np.uint8), 0
        while done < size:
            more = self._data.readinto(found.data[done:])
            if not more:
                raise CheckpointError(f"{self.file.path}: tensor {tensor.name}: the file ends within it")
            done += more
        return found
