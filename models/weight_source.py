"""The place of a weight in a checkpoint's file."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from jax import Array

from decodax.models.compressed.names import HYPER

WRAPPERS = frozenset({"_orig_mod", "module", "_fsdp_wrapped_module", "_fpw_module", "_checkpoint_wrapped_module",
                      "_forward_module", "base_layer"})
"""Parts of names that torch.compile, DDP, FSDP, activation checkpoints, Lightning and peft add to the saved state of a
model that they wrap."""


def unwrapped(tensor: str) -> str:
    """Returns a tensor's name without the parts that wrapper modules add.

    >>> unwrapped("_orig_mod.model.layers.0._checkpoint_wrapped_module.mlp.up_proj.weight")
    'model.layers.0.mlp.up_proj.weight'
    """
    return ".".join(part for part in tensor.split(".") if part not in WRAPPERS)


@dataclasses.dataclass(frozen=True)
class WeightSource:
    """The place of a weight in a file.

    Attributes:
        tensors: name of the tensor; several tensors are stacked along a new first axis.
        transpose: True if the file stores `[out, in]`.
        part: the weight is columns of the tensor (after transposing); None: all of them.
        full: shape of the tensor in the file (of each, if several are stacked).
        leading: True if the tensor has an axis of experts before those that `transpose` is about.
        ids: number of things that the entries number, which may be whole numbers in the file; 0: they are no numbers of
            things.
        after: number of last axes of length 1 that the weight does not have; it may lack first ones, too.
        joined: several tensors are not stacked, but joined along their first axis, of which each but the last has this
            number of entries; `full` is the shape of all of them. 0: they are stacked.
    """

    tensors: tuple[str, ...]
    transpose: bool
    part: Columns | None
    full: tuple[int, ...]
    leading: bool = False
    ids: int = 0
    after: int = 0
    joined: int = 0

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor."""
        if not self.joined:
            return dict.fromkeys(self.tensors, self.full)
        return {tensor: (min(self.joined, self.full[0] - i * self.joined), *self.full[1:])
                for i, tensor in enumerate(self.tensors)}

    def in_shards(self, present: Collection[str]) -> WeightSource:
        """Returns the source as a file has it that divides the one tensor `NAME.weight` into `NAME.shard_0.weight`,
        `NAME.shard_1.weight` and so on, equally long except for the last ones; unchanged if it does not. `present` has
        the names of all tensors."""
        start, _, tail = self.tensors[0].rpartition(".")
        names = (f"{start}.shard_{i}.{tail}" for i in itertools.count())
        found = tuple(itertools.takewhile(present.__contains__, names))
        # As torch.chunk divides an axis; with fewer rows than asked for, there are fewer tensors.
        return dataclasses.replace(self, tensors=found, joined=-(-self.full[0] // len(found))) if found else self

    def turned(self, x: Any) -> Any:
        """Converts between the tensor of the file and the weight, in either direction: swaps the last two axes if
        `transpose`, else returns `x`. `x` is an array, or a tuple with an entry for each axis, such as a shape or an
        index."""
        if not self.transpose:
            return x
        if isinstance(x, tuple):
            return (*x[:1], *x[:0:-1]) if self.leading else x[::-1]
        return x.swapaxes(-1, -2) if self.leading else x.T

    @property
    def index(self) -> Any:
        """The weight's place in the tensor after transposing, as a NumPy index: selects its columns, or is `...` for
        all of it."""
        if self.part is None:
            return ...
        total = self.turned(self.full)[-1]
        return ..., self.part.indices(0, total // self.part.period * (self.part.stop - self.part.start))


@dataclasses.dataclass(frozen=True)
class Columns:
    """Columns `start` to `stop` of every `period` columns of a tensor."""

    start: int
    stop: int
    period: int

    def indices(self, low: int, high: int) -> np.ndarray:
        """Returns the indices in the tensor of the columns `low` to `high`, counted among these columns.

        >>> Columns(2, 4, 6).indices(1, 4).tolist()
        [3, 8, 9]
        """
        own = np.arange(low, high)
        width = self.stop - self.start
        return own // width * self.period + self.start + own % width


def shape_of(source: WeightSource) -> tuple[int, ...]:
    """Returns the shape of a weight in the network that is one whole tensor: that of the tensor in the file, with its
    axes in reverse order if `source.transpose`."""
    return source.full[::-1] if source.transpose else source.full


def kernel(tensor: str, out: int, into: int) -> WeightSource:
    """Returns the source of a projection's weights: the checkpoint's tensor `{tensor}.weight`, `[out, into]`,
    transposed."""
    return WeightSource((f"{tensor}.weight",), True, None, (out, into))


def plain(tensor: str, *shape: int) -> WeightSource:
    """Returns the source of a tensor with the given shape that is used unchanged."""
    return WeightSource((tensor,), False, None, shape)


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a nested dict from dotted paths.

    >>> nested({"a.b": 1, "c": 2})
    {'a': {'b': 1}, 'c': 2}
    """
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *above, last = path.split(".")
        node = tree
        for name in above:
            node = node.setdefault(name, {})
        node[last] = leaf
    return tree


def is_table(path: str) -> bool:
    """Returns True for the path of a weight whose rows are looked up, `[outputs, inputs]`, which may be packed: the
    embedding table, or one of n-grams."""
    return path == "embed" or path.endswith(".ngrams.table")


def kernel_of(path: str, weight: Array) -> Array:
    """Returns a weight as a kernel `f[..., K, N]`; a table is transposed."""
    return weight.T if is_table(path) else weight


def stored_dtype(path: str, name: str) -> str:
    """Returns the dtype of an array of the weights, where those of the model have dtype `name`.

    A correction of experts' scores decides between nearly equal ones, errors of a recurrence's decays, of rotary
    frequencies and of the shares of hyper-connections add up, and a table of experts has whole numbers. They stay
    float32, as in published files.

    >>> stored_dtype("layers.1.mlp.correction", "bfloat16"), stored_dtype("norm.scale", "bfloat16")
    ('float32', 'bfloat16')
    """
    kept = path.endswith((".correction", ".A_log", ".dt_bias", ".hashed", "rope_factors", *(
        f"_hc.{part}" for part in HYPER)))
    return "float32" if kept or re.fullmatch(r"(depths\.\d+\.)?streams\.\w+", path) else name
