"""Finds the tensor of each weight in a GGUF file, and reads its rows.

Files store kernels `[outputs, inputs]`, which is the order of packed kernels, so that rows can be selected and moved
without touching their blocks: queries and keys of a projection that holds both with the values, the rows of a rotation
of neighbours.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import numpy as np

from decodax.io.files import CheckpointError, named_tensors
from decodax.io.gguf.config import ROPE, Architecture
from decodax.io.gguf.reader import GgufFile, GgufTensor
from decodax.models.config import DecoderConfig

NAMES = {"attn_in": "attn_norm", "mlp_in": "ffn_norm", "attn_out": "post_attention_norm", "mlp_out": "post_ffw_norm",
         "attn.q": "attn_q", "attn.k": "attn_k", "attn.v": "attn_v", "attn.o": "attn_output",
         "attn.q_norm": "attn_q_norm", "attn.k_norm": "attn_k_norm", "mlp.gate": "ffn_gate", "mlp.up": "ffn_up",
         "mlp.down": "ffn_down", "mlp.router": "ffn_gate_inp"}
"""Name of a tensor within a layer, by the network's path within a layer."""

WHOLE = {"embed": "token_embd.weight", "positions": "position_embd.weight", "norm": "output_norm",
         "lm_head": "output"}
"""Names of tensors outside of the layers."""

TOGETHER = {"attn_qkv": ("attn.q", "attn.k", "attn.v"), "ffn_up": ("mlp.gate", "mlp.up")}
"""Tensors that hold the rows of several weights, in this order. For the second one, `ffn_gate` is missing."""

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
        shift: added to the numbers.
    """

    tensor: GgufTensor
    start: int
    stop: int
    heads: int = 0
    shift: float = 0.0

    @property
    def row(self) -> int:
        """Number of bytes of a row."""
        return self.tensor.row if len(self.tensor.shape) > 1 else self.tensor.size

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
        name, start, rows = _place(path, file, shapes)
        tensor = file.tensors.get(name)
        if tensor is None:
            missing.append(name)
            continue
        full = (rows, *wanted[1:]) if rows else wanted
        if tensor.block > 1 and len(tensor.shape) == 1:
            raise CheckpointError(f"{file.path}: tensor {name}: has type {tensor.type}, takes one of floats, since it "
                                  "is no matrix")
        if tensor.shape != full and not (len(full) == 2 and full[0] == 1 and tensor.shape == full[1:]):
            raise CheckpointError(f"{file.path}: tensor {name} has shape {tensor.shape}, the metadata requires {full}")
        permuted = architecture.permuted and re.search(r"\.attn\.[qk]\.", path)
        heads = (config.heads if ".q." in path else config.kv_heads) if permuted else 0
        count = math.prod(wanted[:-1] if len(wanted) > 1 else wanted)
        shift = -1.0 if architecture.shifted and path.endswith(".scale") else 0.0
        found[path] = RowSource(tensor, start, start + count, heads, shift)
    if missing:
        raise CheckpointError(f"{file.path}: lacks {named_tensors(missing)}, which the metadata requires")
    used = {source.tensor.name for source in found.values()}
    left = sorted(name for name in file.tensors.keys() - used if not UNUSED.search(name))
    if left:
        raise CheckpointError(f"{file.path}: holds {named_tensors(left)}, which the metadata does not describe")
    return found


def _place(path: str, file: GgufFile, shapes: dict[str, Any]) -> tuple[str, int, int]:
    """Returns the name of a weight's tensor, its first row in it, and the number of rows if it has those of others."""
    if path in WHOLE:
        return WHOLE[path], 0, 0
    module, leaf = path.rsplit(".", 1)
    tail = "bias" if leaf == "bias" else "weight"
    if module in WHOLE:
        return f"{WHOLE[module]}.{tail}", 0, 0
    _, index, inner = module.split(".", 2)
    name, within = NAMES[inner], f"blk.{index}."
    if shapes[path].ndim == 3:
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
        tensor, unit, row = source.tensor, source.unit, source.row
        step = max(CHUNK // (row * unit), 1) * unit
        for first in range(source.start, source.stop, step):
            count = min(step, source.stop - first)
            rows = self._read(tensor, first * row, count * row).reshape(count, row)
            yield first - source.start, rows[source.order(count)] if source.heads else rows

    def _read(self, tensor: GgufTensor, start: int, size: int) -> np.ndarray:
        self._data.seek(tensor.start + start)
        found, done = np.empty(size, np.uint8), 0
        while done < size:
            more = self._data.readinto(found.data[done:])
            if not more:
                raise CheckpointError(f"{self.file.path}: tensor {tensor.name}: the file ends within it")
            done += more
        return found
