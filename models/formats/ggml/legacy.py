"""GGML's first block formats: 32 inputs share a scale and, in Q4_1 and Q5_1, a minimum, both 16-bit floats."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.models.formats.ggml.blocks import GgmlBlocks, blocks

GROUP = 32
"""Number of inputs of a block."""

BITS = {"q4_0": 4, "q4_1": 4, "q5_0": 5, "q5_1": 5, "q8_0": 8}
"""Number of bits of a code by format."""


def pack(kind: str, w: Array) -> GgmlBlocks:
    """Packs weights as `gguf.quants.quantize` does.

    Args:
        kind: a key of `BITS`.
        w: `f32[..., N, G, 32]`.
    """
    bits = BITS[kind]
    if kind == "q8_0":
        d = jnp.abs(w).max(-1, keepdims=True) / 127
        codes = _times(w, d)
        codes = jnp.trunc(codes + jnp.where(codes < 0, -0.5, 0.5))      # rounds halves away from zero
        return blocks(codes.astype(jnp.int32), _half(d), bits)
    top = 2 ** bits - 1
    if kind.endswith("_1"):
        low = w.min(-1, keepdims=True)
        d = (w.max(-1, keepdims=True) - low) / top
        codes = jnp.clip(jnp.trunc(_times(w - low, d) + 0.5), 0, top)
        return blocks(codes.astype(jnp.int32), _half(d), bits, minima=_half(low))
    middle = 2 ** (bits - 1)
    most = jnp.take_along_axis(w, jnp.abs(w).argmax(-1, keepdims=True), -1)
    d = most / -middle
    codes = jnp.clip(jnp.trunc(_times(w, d) + (middle + 0.5)), 0, top)
    return blocks(codes.astype(jnp.int32), _half(d), bits, offset=middle)


def unpack(kind: str, raw: np.ndarray, by_group: bool = False) -> GgmlBlocks:
    """Returns the kernel that a file's blocks encode, with NumPy arrays as fields.

    Args:
        kind: a key of `BITS`.
        raw: `u8[N, G, bytes]`, the bytes of `G` blocks of inputs for each of `N` outputs.
        by_group: the order of the codes, as in `GgmlBlocks`.
    """
    starts = 4 if kind.endswith("_1") else 2
    head = np.ascontiguousarray(raw[..., :starts]).view(np.float16)
    more: dict[str, object] = dict(minima=np.ascontiguousarray(head[..., 1])) if starts == 4 else {}
    if BITS[kind] == 5:
        more["high"] = np.ascontiguousarray(raw[..., starts:starts + 4]).view(np.uint32)[..., 0]
        starts += 4
    if kind in ("q4_0", "q5_0"):
        more["offset"] = 2 ** (BITS[kind] - 1)
    codes = np.ascontiguousarray(raw[..., starts:] if by_group else np.swapaxes(raw[..., starts:], -1, -2))
    return GgmlBlocks(codes=codes.view(np.int8) if kind == "q8_0" else codes, by_group=by_group,   # type: ignore[arg-type]
                      scales=np.ascontiguousarray(head[..., 0]), **more)           # type: ignore[arg-type]


def _times(w: Array, d: Array) -> Array:
    """Returns `w / d` by way of the inverse, as in the reference, and 0 for a scale of 0."""
    return w * jnp.where(d == 0, 0, 1 / d)


def _half(d: Array) -> Array:
    return d[..., 0].astype(jnp.float16)
