"""GGML's K-quants: blocks of 256 inputs of several groups, whose scales and minima are small integers times 16-bit
floats of the block."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.models.formats.ggml.blocks import GgmlBlocks, blocks

BLOCK = 256
"""Number of inputs of a block in files. Kernels that are packed here may have smaller ones."""

GROUPS = {"q4_k": 32, "q5_k": 32, "q6_k": 16}
"""Number of inputs of a group by format."""

BITS = {"q4_k": 4, "q5_k": 5, "q6_k": 6}
"""Number of bits of a code by format."""


def pack(kind: str, w: Array) -> GgmlBlocks:
    """Packs weights by rounding each to the nearest code of its group's range. llama.cpp, which also tries other
    ranges, has smaller errors.

    Args:
        kind: a key of `BITS`.
        w: `f32[..., N, G, group]`.
    """
    bits, G = BITS[kind], w.shape[-2]
    shared = lambda x: x.reshape(*x.shape[:-1], -1, math.gcd(G, BLOCK // GROUPS[kind]))
    if kind == "q6_k":
        most = jnp.take_along_axis(w, jnp.abs(w).argmax(-1, keepdims=True), -1)[..., 0]
        own = shared(most / -32)
        d = _half(jnp.take_along_axis(own, jnp.abs(own).argmax(-1, keepdims=True), -1) / -128)
        steps = jnp.clip(jnp.round(_divided(own, d)), -128, 127)
        scale = (steps * d).reshape(*w.shape[:-1], 1)
        codes = jnp.clip(jnp.round(_divided(w, scale)), -32, 31) + 32
        return blocks(codes.astype(jnp.int32), d[..., 0].astype(jnp.float16), bits, offset=32,
                      steps=steps.reshape(w.shape[:-1]).astype(jnp.int8))
    low = -jnp.minimum(w.min(-1), 0)
    own, floor = shared((w.max(-1) + low) / (2 ** bits - 1)), shared(low)
    d, dmin = (_half(x.max(-1, keepdims=True) / 63) for x in (own, floor))
    steps, floors = (jnp.clip(jnp.round(_divided(x, by)), 0, 63) for x, by in ((own, d), (floor, dmin)))
    scale, least = ((n * by).reshape(*w.shape[:-1], 1) for n, by in ((steps, d), (floors, dmin)))
    codes = jnp.clip(jnp.round(_divided(w + least, scale)), 0, 2 ** bits - 1)
    small = lambda x: x.reshape(w.shape[:-1]).astype(jnp.uint8)
    return blocks(codes.astype(jnp.int32), d[..., 0].astype(jnp.float16), bits, steps=small(steps),
                  minima=-dmin[..., 0].astype(jnp.float16), minimum_steps=small(floors))


def unpack(kind: str, raw: np.ndarray, by_group: bool = False) -> GgmlBlocks:
    """Returns the kernel of a file's blocks, `u8[N, S, bytes]`, with NumPy arrays; `by_group` as in `GgmlBlocks`."""
    return _q6_k(raw, by_group) if kind == "q6_k" else _q4_k(raw, kind == "q5_k", by_group)


def _q4_k(raw: np.ndarray, five: bool, by_group: bool) -> GgmlBlocks:
    """Returns a kernel of Q4_K blocks: two floats, 12 bytes of 6-bit scales and minima, 128 bytes of codes; in Q5_K
    with 32 bytes of fifth bits before the codes."""
    N, S, _ = raw.shape
    head = np.ascontiguousarray(raw[..., :4]).view(np.float16)
    a, b, c = raw[..., 4:8], raw[..., 8:12], raw[..., 12:16]
    steps = np.concatenate([a & 63, (c & 15) | (a >> 2 & 48)], -1).reshape(N, S * 8)
    floors = np.concatenate([b & 63, (c >> 4) | (b >> 2 & 48)], -1).reshape(N, S * 8)
    high = None
    if five:
        bits = np.unpackbits(raw[..., 16:48], axis=-1, bitorder="little").reshape(N, S, 32, 8)
        high = np.packbits(np.swapaxes(bits, -1, -2), axis=-1, bitorder="little").view(np.uint32).reshape(N, S * 8)
    both = raw[..., 48 if five else 16:].reshape(N, S, 4, 1, 32)       # two groups of 32 in each 32 bytes
    codes = np.concatenate([both & 15, both >> 4], -2).reshape(N, S * 8, 32)
    return GgmlBlocks(codes=_nibbles(codes, by_group), scales=np.ascontiguousarray(head[..., 0]),     # type: ignore[arg-type]
                      minima=-head[..., 1], high=high, steps=steps, minimum_steps=floors, by_group=by_group)   # type: ignore[arg-type]


def _q6_k(raw: np.ndarray, by_group: bool) -> GgmlBlocks:
    """Returns a kernel of Q6_K blocks: 128 bytes of low bits, 64 of high bits, 16 scales, a float."""
    N, S, _ = raw.shape
    low = raw[..., :128].reshape(N, S, 2, 1, 64)
    codes = np.concatenate([low & 15, low >> 4], -2).reshape(N, S * 16, 16)
    pairs = raw[..., 128:192].reshape(N, S, 2, 1, 32)
    pairs = np.concatenate([pairs >> shift & 3 for shift in (0, 2, 4, 6)], -2).reshape(N, S * 16, 4, 4)
    high = pairs[..., 0] | pairs[..., 1] << 2 | pairs[..., 2] << 4 | pairs[..., 3] << 6
    return GgmlBlocks(codes=_nibbles(codes, by_group), high=high.view(np.uint32)[..., 0],             # type: ignore[arg-type]
                      steps=raw[..., 192:208].reshape(N, S * 16).view(np.int8),             # type: ignore[arg-type]
                      scales=np.ascontiguousarray(raw[..., 208:]).view(np.float16)[..., 0],     # type: ignore[arg-type]
                      offset=32, by_group=by_group)


def _nibbles(codes: np.ndarray, by_group: bool) -> np.ndarray:
    """Returns 4-bit codes `u8[N, G, group]`, two in a byte; see `GgmlBlocks`."""
    half = codes.shape[-1] // 2
    both = codes[..., :half] | codes[..., half:] << 4
    return both if by_group else np.ascontiguousarray(np.swapaxes(both, -1, -2))


def _divided(x: Array, by: Array) -> Array:
    """Returns `x / by`, and 0 for a divisor of 0."""
    return x * jnp.where(by == 0, 0, 1 / jnp.where(by == 0, 1, by))


def _half(x: Array) -> Array:
    """Rounds to 16 bits."""
    return x.astype(jnp.float16).astype(jnp.float32)
