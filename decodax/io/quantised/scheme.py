"""Base classes of the readers of quantised checkpoints, and the packed kernels that they make.

A reader finds the tensors of a linear layer by the layer's name and checks them; the layer then returns the kernel of
some of its outputs. Everything is NumPy until the whole kernel is placed on its devices.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, Self

import jax.numpy as jnp
import numpy as np

from decodax.io.files import CheckpointError
from decodax.io.quantised.tensors import TensorReader
from decodax.models.formats.published import ZeroPoints
from decodax.models.formats.scaled import Scaled
from decodax.models.packed import Packed
from decodax.models.weight_source import WeightSource

SCALES = ("F32", "F16", "BF16")
"""Dtypes of scales."""


@dataclasses.dataclass(frozen=True)
class StoredLinear(abc.ABC):
    """A quantised linear layer in a file.

    Attributes:
        file: the file.
        stem: name of the layer.
        outputs, inputs: its sizes.
        tensors: names of the tensors that belong to it.
    """

    file: TensorReader
    stem: str
    outputs: int
    inputs: int
    tensors: tuple[str, ...]

    @property
    def zeroed(self) -> bool:
        """True if the layer has zero points that are not all the middle code, so that they have to be stored."""
        return False

    @property
    def order(self) -> np.ndarray | None:
        """Order of the inputs in which those that share a scale (a group) are consecutive, `i32[K]`; None: they are
        consecutive in the file."""
        return None

    @abc.abstractmethod
    def read(self, which: np.ndarray, zeroed: bool, ordered: bool) -> Packed:
        """Returns the kernel of the outputs at ascending indices, with NumPy arrays.

        Args:
            which: the indices.
            zeroed: True for a kernel with zero points, which other layers of the same weight have.
            ordered: True for inputs in the order of `order`.
        """


@dataclasses.dataclass(frozen=True)
class Scheme(abc.ABC):
    """A quantised format, as the configuration of a checkpoint describes it."""

    @classmethod
    @abc.abstractmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Reads the entry `quantization_config`.

        Raises:
            ValueError: it asks for something that is not read; the message begins with the entry's key.
        """

    @abc.abstractmethod
    def linear(self, file: TensorReader, stem: str, outputs: int, inputs: int) -> StoredLinear | None:
        """Returns the quantised layer of a name, or None if the file does not have the layer in quantised form.

        Raises:
            CheckpointError: it has, but a tensor is missing or does not fit.
        """

    def expert(self, file: TensorReader, name: str, expert: int, sizes: tuple[int, int, int], turned: bool
               ) -> StoredLinear | None:
        """Returns the layer of an expert in a tensor of all experts, or None if the tensor is not quantised.

        Args:
            file: the file.
            name: the tensor.
            expert: index of the expert.
            sizes: number of experts, outputs and inputs.
            turned: True if the tensor is `[E, K, N]`, False if it is `[E, N, K]`.

        Raises:
            CheckpointError: it is quantised, but a tensor is missing or does not fit.
        """
        return None

    def table(self, file: TensorReader, source: WeightSource) -> StoredLinear | None:
        """Returns the table of embeddings of n-grams that the tensors of `source` hold together, or None if it is not
        quantised.

        Raises:
            CheckpointError: it is quantised, but a tensor is missing or does not fit.
        """
        return None

    def unused(self, stem: str) -> tuple[str, ...]:
        """Returns the names of tensors beside a layer that are not needed, such as scales of activations."""
        return ()

    def notes(self) -> tuple[str, ...]:
        """Returns remarks about the format for the log when a checkpoint is loaded, such as that codes take more bits
        in memory than they need."""
        return ()


@dataclasses.dataclass(frozen=True)
class GroupedLinear(StoredLinear):
    """A layer of integers with a scale, and perhaps a zero point, for each group of inputs.

    Derived classes return codes and zero points as they are counted in the file, from 0 on.

    Attributes:
        bits: number of bits of a code.
        groups: number of groups.
    """

    bits: int
    groups: int

    @abc.abstractmethod
    def codes(self, which: np.ndarray) -> np.ndarray:
        """Returns the codes of the outputs at the indices `which`, `u8[n, K]`, one for each weight."""

    def pairs(self, which: np.ndarray) -> np.ndarray | None:
        """Returns the 4-bit codes of the outputs at indices `which`, two consecutive inputs in a byte with the first
        one in the low bits, `u8[n, K // 2]`; None if the file does not store them in this order."""
        return None

    @abc.abstractmethod
    def scales(self, which: np.ndarray) -> np.ndarray:
        """Returns the scales of the outputs at the indices `which`, `f[n, groups]`, one for each group of inputs."""

    @property
    @abc.abstractmethod
    def zeros(self) -> np.ndarray | None:
        """The zero points of all outputs as they are counted in the file, from 0 on, `u8[N, groups]`; None: all are the
        middle code, `2 ** (bits - 1)`."""

    @functools.cached_property
    def zeroed(self) -> bool:
        return self.zeros is not None and bool((self.zeros != self.middle).any())

    @property
    def middle(self) -> int:
        return 1 << (self.bits - 1)

    def read(self, which: np.ndarray, zeroed: bool, ordered: bool) -> Packed:
        order = self.order if ordered else None
        pairs = None if order is not None or self.bits != 4 or self.inputs % 4 else self.pairs(which)
        if pairs is not None:
            codes = halves_of_pairs(pairs)
        else:
            found = self.codes(which)
            found = found if order is None else found[:, order]
            codes = halves(found, self.middle) if self.bits <= 4 else (found ^ 128 if self.bits == 8 else
                                                                      found - self.middle).view(np.int8)
        kernel = Scaled(codes=codes, scales=self.scales(which))     # type: ignore[arg-type]
        if not zeroed:
            return kernel
        zeros = np.full((len(which), self.groups), self.middle, np.uint8) if self.zeros is None else self.zeros[which]
        return ZeroPoints(kernel=kernel, zeros=(zeros.astype(np.int16) - self.middle).astype(    # type: ignore[arg-type]
            np.int8))


@dataclasses.dataclass(frozen=True)
class ByteLinear(StoredLinear):
    """A layer with one number of 8 bits for each weight in the tensor `weight`, `[N, K]`, and scales.

    Attributes:
        scale: name of the tensor of scales: one number, one for each output, or one for each block.
        block: sizes of a block, in outputs and inputs; None: there are no blocks.
        factor: multiplies the scales.
        zero: name of the tensor of zero points, of the shape of the scales; None: 0.
    """

    scale: str
    block: tuple[int, int] | None = None
    factor: float = 1.0
    zero: str | None = None

    @property
    def zeroed(self) -> bool:
        return self.zero is not None

    def read(self, which: np.ndarray, zeroed: bool, ordered: bool) -> Packed:
        codes = self.file.rows(f"{self.stem}.weight", which)
        scales = self._spread(self.scale, which).astype(np.float32) * np.float32(self.factor)
        kernel = Scaled(codes=codes, scales=scales)         # type: ignore[arg-type]
        if not zeroed:
            return kernel
        zeros = np.zeros(scales.shape, np.int8) if self.zero is None else self._spread(self.zero, which)
        return ZeroPoints(kernel=kernel, zeros=np.ascontiguousarray(zeros))     # type: ignore[arg-type]

    def _spread(self, name: str, which: np.ndarray) -> np.ndarray:
        """Returns the numbers of some outputs, `[n, groups]`."""
        found = self.file.whole(name)
        if found.dtype == np.uint8:     # exponents
            found = found.view(jnp.float8_e8m0fnu)
        if self.block is None:
            found = found.reshape(-1, 1)
            return found[which] if len(found) > 1 or self.outputs == 1 else np.repeat(found, len(which), 0)
        rows, columns = self.block
        # A last block that is not full is divided into smaller groups, like all others.
        group = math.gcd(columns, self.inputs)
        return found[which // rows][:, np.arange(0, self.inputs, group) // columns]


def byte_linear(file: TensorReader, stem: str, outputs: int, inputs: int, scales: tuple[str, ...],
                dtypes: tuple[str, ...], blocks: tuple[tuple[int, int], ...] = (), factor: float = 1.0,
                zero: str = "") -> ByteLinear | None:
    """Returns the layer of a name, or None if its weights do not have 8 bits.

    Args:
        file: the file.
        stem: name of the layer.
        outputs, inputs: its sizes.
        scales: possible last parts of the name of the tensor of scales.
        dtypes: dtypes of weights that have scales.
        blocks: possible sizes of blocks. There may be one scale for each of them, for each output, or for all.
        factor: multiplies the scales.
        zero: last part of the name of a tensor of zero points, which there may be.

    Raises:
        CheckpointError: a tensor is missing or does not fit.
    """
    name = f"{stem}.weight"
    if name not in file or file.dtype(name) not in dtypes:
        return None
    file.require(name, ((outputs, inputs),), dtypes)
    scale = next((f"{stem}.{tail}" for tail in scales if f"{stem}.{tail}" in file), f"{stem}.{scales[0]}")
    by_block: dict[tuple[int, ...], tuple[int, int]] = {
        (-(-outputs // rows), -(-inputs // columns)): (rows, columns) for rows, columns in blocks}
    whole: tuple[tuple[int, ...], ...] = ((outputs, 1), (outputs,), (1,), (), (1, 1))
    shapes = tuple(shape for shape in whole if shape not in by_block)
    file.require(scale, (*by_block, *shapes), (*SCALES, "F8_E8M0", "U8"))
    block = by_block.get(file.shape(scale))
    names: tuple[str, ...] = (name, scale)
    found = f"{stem}.{zero}"
    if zero and found in file:
        names = (*names, file.require(found, (file.shape(scale),), ("I8",)))
    return ByteLinear(file, stem, outputs, inputs, names, scale, block, factor, found if len(names) == 3 else None)


def unpack(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Returns the codes in rows of 32-bit words, `u8[n, count]` from `i32[n, words]`. The first code has the lowest
    bits; a code may lie in two words.

    >>> unpack(np.array([[0x21, 0x43]], np.int32), 4, 10).tolist()
    [[1, 2, 0, 0, 0, 0, 0, 0, 3, 4]]
    """
    raw = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return raw[:, :count]
    if bits == 4:
        return np.stack([raw & 15, raw >> 4], -1).reshape(len(raw), -1)[:, :count]
    ones = np.unpackbits(raw, axis=-1, bitorder="little")[:, :count * bits].reshape(len(raw), count, bits)
    return np.packbits(ones, axis=-1, bitorder="little")[..., 0]


def halves(codes: np.ndarray, middle: int) -> np.ndarray:
    """Returns codes of at most 4 bits in the order of `Scaled`: `u8[n, K // 2]` from `u8[n, K]`, or `i8[n, K]` for an
    odd number of inputs.

    >>> halves(np.array([[8, 9, 7, 0]], np.uint8), 8).tolist()
    [[240, 129]]
    """
    whole = codes - np.uint8(middle)        # wraps around, as numbers of two's complement do
    half, odd = divmod(codes.shape[-1], 2)
    return whole.view(np.int8) if odd else (whole[:, :half] & 15) | (whole[:, half:] << 4)


def halves_of_pairs(pairs: np.ndarray, middle: int = 8) -> np.ndarray:
    """Returns `halves(codes, middle)`, with a middle of 0 or 8, from bytes with the codes of two consecutive inputs,
    `u8[n, K // 2]`, of which `K` is a multiple of 4. Bytes are moved without unpacking them.

    >>> halves_of_pairs(np.array([[0x98, 0x07]], np.uint8)).tolist()
    [[240, 129]]
    """
    low, high = np.split(pairs, 2, -1)
    made = np.empty_like(pairs)
    made[:, ::2] = (low & 15) | (high << 4)
    made[:, 1::2] = (low >> 4) | (high & 0xF0)
    made ^= 0x11 * middle       # a code less 8, in two's complement
    return made


def order_of(file: TensorReader, name: str, group: int) -> np.ndarray | None:
    """Returns the order of inputs in which those of a group are consecutive, from a tensor with the group of each
    input; None if they are in the file.

    Raises:
        CheckpointError: the groups are not all of the size `group`.
    """
    found = file.whole(name)
    if (found[1:] >= found[:-1]).all() and (found == np.arange(len(found)) // group).all():
        return None
    wrong = found.min() < 0 or (np.bincount(found, minlength=-(-len(found) // group)) != group).any()
    if wrong:
        raise CheckpointError(f"{file.where(name)}: takes {group} inputs for each of {len(found) // group} groups")
    return np.argsort(found, kind="stable").astype(np.int32)
