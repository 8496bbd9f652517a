"""QoQ, the quantization of QServe: 4-bit weights and 8-bit activations (W4A8).

Source: Lin, Tang, Yang, Zhang, Xiao, Gan and Han, 2024, "QServe: W4A8KV4 Quantization and System Co-design for
Efficient LLM Serving". Weights are quantized progressively. A scale per output maps them to 8-bit integers. Then each
group of 128 inputs has 4-bit codes, and an integer step and an integer zero that map them back to 8 bits. The first
range is -119 to 119, so that the result fits in 8 bits in spite of rounding (the protective range). In the other form
an output's weights have 4-bit codes with one scale and one zero, and no groups.

Activations are quantized when they are multiplied: to -127 to 127, by the largest of each row. So the product is one of
integers, which is exact, and is scaled afterwards.

Scales and codes are those of the authors' quantizer, deepcompressor, with rounding to nearest; scales of rows are not
rounded to float16. `read_tensors` reads their checkpoints in the order of OmniServe. `rotated` spreads outliers of few
inputs over all, before weights are packed. Not implemented: GPTQ, smoothing, reordering, the search for ranges.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec

from decodax.common.axes import platform
from decodax.common.hadamard import hadamard
from decodax.common.options import Range
from decodax.common.struct import struct
from decodax.models.formats.format import Format
from decodax.models.names import flatten
from decodax.models.packed import Packed, dot, partial_sums, total
from decodax.models.transformer import Transformer, Weights

PROTECTED = {"pre-scale": 119, "post-scale": 120}
"""Largest 8-bit weight of the first step, by kind of zero. Steps are at most 16, so the result is off by at most 8."""

EXACT = 1024
"""Number of inputs multiplied at a time on CPU: their sum is exact in float32, since 1024 * 127 * 128 < 2 ** 24."""


@struct
class Nibbles(Packed):
    """A kernel of 8-bit integers stored as 4-bit codes: an integer is its code, or its code times the step of its
    group, plus the zero.

    Products with rows of integers from -127 to 127 are exact.

    Attributes:
        codes: `u8[..., N, K // 2]`, codes of the first half of the inputs in the low bits and of the second half in the
            high bits.
        steps: `i8[..., N, groups]`, at least 1, one per `K // groups` consecutive inputs; None: 1.
        zeros: `i8[..., N, groups]`, added after the step: minus the zero point; None: 0.
    """

    codes: Array
    steps: Array | None = None
    zeros: Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        *above, half = self.codes.shape
        return *above, 2 * half

    @property
    def group(self) -> int:
        """Number of inputs of a group."""
        return 1 if self.steps is None else self.shape[-1] // self.steps.shape[-1]

    def values(self, dtype: Any) -> Array:
        half = self.codes.shape[-1]
        return jnp.concatenate([self._integers(0, half, high, dtype) for high in (False, True)], -1)

    def product(self, x: Array, dtype: Any) -> Array:
        """Multiplies rows `f[R, K]` by the kernel: `[R, N]` in `dtype`, which may be int32."""
        half = size = self.codes.shape[-1]
        own, sums = jnp.int8, jnp.int32
        if platform() == "cpu":     # XLA has no fast integer products there
            size = min(EXACT // self.group * self.group, half)
            own = sums = jnp.float32
        parts = []
        for first in range(0, half, size):
            last = min(first + size, half)
            for high in (False, True):
                rows = x[:, high * half + first:high * half + last].astype(own)
                part = lambda start, stop, first=first, high=high: self._integers(first + start, first + stop, high,
                                                                                  own)
                parts.append(total(partial_sums(rows, part, group=None if self.steps is None else self.group))
                             if self.by_sums(x) else dot(rows, part(0, last - first), sums))
        parts = lax.optimization_barrier(parts)     # if they were fused, XLA would write converted kernels to memory
        return functools.reduce(jnp.add, [part.astype(jnp.int32) for part in parts]).astype(dtype)

    def specs(self, outputs: str | None, inputs: str | None, sizes: dict[str, int]) -> Any:
        # A group must be on one device.
        divides = inputs is not None and (self.steps is None or self.steps.shape[-1] // 2 % sizes[inputs] == 0)
        return super().specs(outputs, inputs if divides else None, sizes)

    def _integers(self, start: int, stop: int, high: bool, dtype: Any) -> Array:
        """Returns the integers `[..., N, stop - start]` of bytes from `start` to `stop`, which hold whole groups or a
        part of one."""
        half, codes = self.codes.shape[-1], self.codes[..., start:stop]
        # Converted by way of int32, which XLA's CPU backend vectorises.
        codes = (codes >> 4 if high else codes & 15).astype(jnp.int32).astype(dtype)
        if self.steps is None or self.zeros is None:
            return codes
        first, last = (start + high * half) // self.group, -(-(stop + high * half) // self.group)
        steps, zeros = (a[..., first:last, None].astype(dtype) for a in (self.steps, self.zeros))
        # In int8 a code times its step may overflow; adding the zero reverses this.
        return (codes.reshape(*steps.shape[:-1], -1) * steps + zeros).reshape(codes.shape)


@struct
class W4A8(Packed):
    """A kernel of integers with a scale per output, whose rows are quantized to 8 bits when they are multiplied.

    Attributes:
        kernel: the integers.
        scales: `f32[..., N, 1]`, float16 numbers.
        zeros: `f32[..., N, 1]`, subtracted after scaling, float16 numbers; None: nothing.
    """

    kernel: Nibbles
    scales: Array
    zeros: Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.kernel.shape

    def values(self, dtype: Any) -> Array:
        whole = self.kernel.values(jnp.float32) * self.scales
        return (whole if self.zeros is None else whole - self.zeros).astype(dtype)

    def product(self, x: Array, dtype: Any) -> Array:
        return self._scaled(x, dtype, self.kernel.product)

    def times(self, x: Array, dtype: Any) -> Array:
        return self._scaled(x, dtype, self.kernel.times)

    def specs(self, outputs: str | None, inputs: str | None, sizes: dict[str, int]) -> Any:
        def own(a: Array | None) -> Any:
            return None if a is None else PartitionSpec(*[None] * (a.ndim - 2), outputs, None)

        return W4A8(kernel=self.kernel.specs(outputs, inputs, sizes), scales=own(self.scales), zeros=own(self.zeros))

    def _scaled(self, x: Array, dtype: Any, multiply: Callable[[Array, Any], Array]) -> Array:
        x = x.astype(jnp.float32)
        rows, scales = quantised(x)
        y = multiply(rows, jnp.int32).astype(jnp.float32) * (self.scales[:, 0] * scales)
        # As in the authors' kernel the sum is that of the row itself, not of its codes.
        return (y if self.zeros is None else y - self.zeros[:, 0] * x.sum(-1, keepdims=True)).astype(dtype)


def quantised(x: Array) -> tuple[Array, Array]:
    """Quantizes rows to 8-bit integers: integers from -127 to 127, `f32[R, K]`, and their scales, `f32[R, 1]`.

    The authors' kernel rounds the scales to float16; here they stay float32.

    >>> rows, scales = quantised(jnp.array([[0.5, -2.0, 0.26]]))
    >>> rows.tolist(), round(float(scales[0, 0]) * 127, 4)
    ([[32.0, -127.0, 17.0]], 2.0)
    """
    most = jnp.abs(x).max(-1, keepdims=True)
    most = jnp.where(most < 1e-30, 1, most)     # an empty row; a NaN stays one
    return jnp.round(x * (127 / most)), most / 127


@dataclasses.dataclass(frozen=True)
class QServe(Format):
    """4-bit weights and 8-bit activations, rounded to nearest; embeddings and head are not quantized.

    Attributes:
        group: number of inputs of a group; if it does not divide the number of inputs, their greatest common divisor;
            -1: no groups, with a scale and a zero per output. The authors use 128 and -1.
        zero: "pre-scale", as in the paper: the zero is a code from 0 to 15, subtracted before scaling, and the range of
            a group includes 0. "post-scale", as in the authors' later configurations: it is subtracted after scaling,
            an 8-bit integer, or a float16 without groups, and ranges need not include 0.
    """

    group: Annotated[int, Range(-1)] = 128
    zero: Literal["pre-scale", "post-scale"] = "pre-scale"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group != -1 and (not 2 <= self.group <= EXACT or self.group % 2):
            raise ValueError(f"group: got {self.group}, takes an even number from 2 to {EXACT}, or -1 for none")

    def packs(self, path: str) -> bool:
        return path.startswith("layers.")

    def pack(self, kernel: Array, seen: Any = None) -> W4A8:
        """Packs a kernel.

        Raises:
            ValueError: an odd number of inputs.
        """
        w = jnp.swapaxes(kernel, -1, -2).astype(jnp.float32)
        K = w.shape[-1]
        if K % 2:
            raise ValueError(f"kernel: got {K} inputs, {self} takes an even number, since two codes share a byte")
        if self.group == -1:
            low, high = self._range(w)
            scales = _or_one(_half((high - low) / 15))
            codes, zeros = self._codes(w, low, scales, _half)
            return W4A8(kernel=Nibbles(codes=_packed(codes)), scales=scales, zeros=zeros)
        most, group = PROTECTED[self.zero], math.gcd(self.group, K)
        scales = _or_one(_half(jnp.abs(w).max(-1, keepdims=True) / most))
        integers = jnp.clip(w / scales, -most, most).reshape(*w.shape[:-1], K // group, group)
        low, high = self._range(integers)
        steps = _or_one(jnp.round((high - low) / 15))
        codes, zeros = self._codes(integers, low, steps, jnp.round)
        return W4A8(kernel=_grouped(codes.reshape(w.shape), steps[..., 0], -zeros[..., 0]), scales=scales)

    def _range(self, w: Array) -> tuple[Array, Array]:
        """Returns the smallest and the largest entry along the last axis, which is kept."""
        low, high = w.min(-1, keepdims=True), w.max(-1, keepdims=True)
        return (jnp.minimum(low, 0), jnp.maximum(high, 0)) if self.zero == "pre-scale" else (low, high)

    def _codes(self, w: Array, low: Array, scales: Array, number: Callable[[Array], Array]) -> tuple[Array, Array]:
        """Returns codes `u8` of a range from `low`, and the amount to subtract after scaling, rounded by `number`."""
        if self.zero == "post-scale":
            zeros = number(-low)
            return _code((w + zeros) / scales), zeros
        zeros = jnp.clip(jnp.round(-low / scales), 0, 15)
        return _code(w / scales + zeros), number(zeros * scales)


def _half(x: Array) -> Array:
    return x.astype(jnp.float16).astype(jnp.float32)


def _or_one(scales: Array) -> Array:
    """Replaces scales of 0, for ranges that contain only 0, by 1."""
    return jnp.where(scales == 0, 1, scales)


def _code(x: Array) -> Array:
    return jnp.clip(jnp.round(x), 0, 15).astype(jnp.uint8)


def _packed(codes: Array) -> Array:
    """Returns `u8[..., N, K // 2]` from codes `u8[..., N, K]`."""
    low, high = jnp.split(codes, 2, -1)
    return low | (high << 4)


def _grouped(codes: Array, steps: Array, zeros: Array) -> Nibbles:
    """Packs codes `u8[..., N, K]` with steps and zeros, integers `[..., N, groups]`."""
    if steps.shape[-1] % 2:      # a group must lie within the half whose codes share a byte's low or high bits
        steps, zeros = (jnp.repeat(a, 2, -1) for a in (steps, zeros))
    return Nibbles(codes=_packed(codes), steps=steps.astype(jnp.int8), zeros=zeros.astype(jnp.int8))


def read_tensors(tensors: Mapping[str, np.ndarray]) -> W4A8:
    """Reads a kernel from the tensors of the authors' checkpoints (OmniServe, `W4A8OF16LinearDynamicInputScale`).

    Args:
        tensors: by their names there. "qweight", `i8[N, K // 2]`: codes in the order in which a warp of their kernel
            reads them, tiles of 32 outputs and 32 inputs, whose bytes have outputs 0 to 15 in the low bits and 16 to 31
            in the high bits. "s1_scales", `f16[N]`. "s2_scales", `i8[groups, N]`: steps, with each 32 outputs in the
            order 0, 8, 16, 24, 1, 9, ... "s2_zeros", `i8[groups, N]` in the same order, added after the step. The form
            without groups has "s1_szeros", `f16[N]`, in place of the last two.

    Raises:
        ValueError: shapes do not belong together, tensors are of both forms or of none, or integers exceed 8 bits.
    """
    qweight, s1_scales = tensors["qweight"], tensors["s1_scales"]
    s2_scales, s2_zeros, s1_szeros = (tensors.get(name) for name in ("s2_scales", "s2_zeros", "s1_szeros"))
    N, half = qweight.shape
    K = 2 * half
    if N % 32 or K % 32:
        raise ValueError(f"qweight: got a kernel of {N} outputs and {K} inputs, takes multiples of 32")
    if s1_scales.shape != (N,):
        raise ValueError(f"s1_scales: got shape {s1_scales.shape}, takes {(N,)}")
    scales = jnp.asarray(s1_scales, jnp.float32)[:, None]
    # Tiles of outputs and inputs, 8 outputs, 4 inputs, 2 inputs, 2 outputs, 4 inputs; then the halves of a byte.
    tiles = qweight.view(np.uint8).reshape(N // 32, K // 32, 8, 4, 2, 2, 4)
    both = np.stack([tiles & 15, tiles >> 4], -1)
    codes = both.transpose(0, 7, 5, 2, 1, 4, 3, 6).reshape(N, K)
    if s1_szeros is not None:
        if s2_scales is not None or s2_zeros is not None:
            raise ValueError("s1_szeros: cannot be combined with s2_scales or s2_zeros; takes one form or the other")
        if s1_szeros.shape != (N,):
            raise ValueError(f"s1_szeros: got shape {s1_szeros.shape}, takes {(N,)}")
        return W4A8(kernel=Nibbles(codes=_packed(jnp.asarray(codes))), scales=scales,
                    zeros=jnp.asarray(s1_szeros, jnp.float32)[:, None])
    if s2_scales is None or s2_zeros is None:
        raise ValueError("s2_scales, s2_zeros: got none or one of them without s1_szeros, takes both")
    for name, given in (("s2_scales", s2_scales), ("s2_zeros", s2_zeros)):
        if given.ndim != 2 or given.shape[1] != N or not len(given) or K % len(given):
            raise ValueError(f"{name}: got shape {given.shape}, takes (groups, {N}) whose groups divide {K} inputs")
    if s2_scales.shape != s2_zeros.shape:
        raise ValueError(f"s2_zeros: got shape {s2_zeros.shape}, takes that of s2_scales, {s2_scales.shape}")
    steps, zeros = (a.reshape(-1, N // 32, 8, 4).swapaxes(2, 3).reshape(-1, N).T for a in (s2_scales, s2_zeros))
    groups = codes.reshape(*steps.shape, -1).astype(np.int32)
    integers = groups * steps[..., None] + zeros[..., None].astype(np.int32)
    if integers.min() < -128 or integers.max() > 127:
        raise ValueError(f"s2_scales, s2_zeros: make integers from {integers.min()} to {integers.max()}, take 8 bits")
    return W4A8(kernel=_grouped(jnp.asarray(codes), jnp.asarray(steps), jnp.asarray(zeros)), scales=scales)


def rotated(model: Transformer, params: Weights) -> tuple[Transformer, Weights]:
    """Returns an equivalent network with its residual stream rotated by a Hadamard matrix, and the values of each head
    by another.

    The scales of norms are merged into the kernels after them, so that norms and rotation commute; each kernel is
    rotated on the side of the stream (QuaRot: Ashkboos et al., 2024). Logits are the same up to rounding. A tied head
    becomes a separate one, since the last norm's scale is merged into it.

    Raises:
        ValueError: packed weights, a network whose norms are not RMS norms before attention and MLP, or a width without
            a Hadamard matrix, see `hadamard`.
    """
    c, found = model.config, flatten(params)
    if any(isinstance(leaf, Packed) for leaf in found.values()):
        raise ValueError("params: got packed weights, takes arrays")
    if c.norm.kind != "rms" or c.norm.bias or c.block not in ("pre", "parallel"):
        raise ValueError(f"model: got {c.block} blocks with {c.norm.kind} norms, takes RMS norms before attention and "
                         "MLP alone")
    if c.value_norm or c.layer_inputs or c.last_norm_kind or any(
            layer.head_dim or layer.keys_as_values or layer.output_gate for layer in c.layers):
        raise ValueError("model: got heads that differ or have a gate, values with a norm, inputs of layers or a last "
                         "norm of another kind, takes one without")
    stream, head = hadamard(c.width), hadamard(wide := c.value_width(c.layers[0]))
    leaves = {path: np.asarray(jax.device_get(leaf), np.float64) for path, leaf in found.items()}
    leaves |= {"lm_head.kernel": leaves["embed"].T} if c.tied else {}
    made = {}
    for path, leaf in leaves.items():
        *above, part, kind = ["", *path.split(".")]
        norm = {"q": "attn_in", "k": "attn_in", "v": "attn_in", "gate": "mlp_in", "up": "mlp_in", "router": "mlp_in",
                "lm_head": "norm"}.get(part)
        if kind == "scale" and part in ("attn_in", "mlp_in", "norm"):
            leaf = np.full_like(leaf, 0 if c.norm.unit_offset else 1)
        if kind == "kernel" and norm is not None:
            place = "norm" if norm == "norm" else f"layers.{above[2]}.{'attn_in' if c.block == 'parallel' else norm}"
            scale = leaves[f"{place}.scale"] + c.norm.unit_offset
            leaf = stream.T @ (scale[:, None] * leaf)
        if part == "v":
            leaf = (leaf.reshape(*leaf.shape[:-1], -1, wide) @ head).reshape(leaf.shape)
        if part == "o" and kind == "kernel":
            leaf = (head.T @ leaf.reshape(-1, wide, c.width)).reshape(leaf.shape)
        if kind in ("embed", "positions") or part in ("o", "down"):
            leaf = leaf @ stream
        like = found.get(path, found["embed"])
        made[path] = jnp.asarray(leaf, like.dtype) if path not in found else jax.device_put(
            leaf.astype(like.dtype), like.sharding)
    untied = dataclasses.replace(model, config=dataclasses.replace(c, tied=False))
    shapes = untied.abstract_params()
    return untied, jax.tree.unflatten(jax.tree.structure(shapes), [made[path] for path in flatten(shapes)])
