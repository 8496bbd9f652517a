"""Draws a token from logits: temperature, truncation and the exponential race in one pass."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from decodax.common.axes import DATA, MODEL, free_axes, platform, shardwise
from decodax.pallas_kernels.vocabulary import reference

Implementation = Literal["xla", "mosaic_tpu"]

FAST = 64 << 20
"""Bytes of fast memory that the kernel may use: half of a v5e's or v6e's, all of a v5p's."""


def draw(logits: Array, address: Array, temperature: Array, k: Array | None = None, p: Array | None = None,
         min_p: Array | None = None, *, implementation: Implementation | None = None) -> tuple[Array, Array]:
    """Draws one token for each node by the exponential race of `decodax.sampling.draw`, after temperature, top-k, top-p
    and min-p in this order.

    Args:
        logits: `f32[B, W, V]`.
        address: address of the noise, `u32[B, W, 2]`.
        temperature: `f32[B]`; 0 takes the largest logit, the first of equal ones.
        k: `i32[B]`, number of tokens that top-k keeps; below 1: all. None: all in every row.
        p: `f32[B]`, probability mass that top-p keeps; 1: all. None: all in every row.
        min_p: `f32[B]`, minimum probability of kept tokens, divided by the largest one; 0: all are kept. None: all in
            every row.
        implementation: "xla", or the kernel "mosaic_tpu", which runs in interpreter mode on a CPU. None: see `choose`.

    Returns:
        Tokens `i32[B, W]` and their scores in the race, `f32[B, W]`: +inf if a logit is NaN or +inf, -inf if all are
        -inf.
    """
    if implementation not in (None, "xla", "mosaic_tpu"):
        raise ValueError(f"implementation: got {implementation!r}, takes 'xla' or 'mosaic_tpu'")
    implementation = implementation or choose(logits)
    B, W, V = logits.shape
    numbers = [None if x is None else jnp.broadcast_to(x[:, None], (B, W)) for x in (temperature, k, p, min_p)]
    size = free_axes().get(MODEL, 1)
    divided = size > 1 and V % size == 0

    def rows(logits: Array, address: Array, *numbers: Array | None) -> tuple[Array, Array]:
        each = (None if x is None else x.reshape(-1) for x in numbers)
        flat: Any = logits.reshape(-1, V), address.reshape(-1, 2), *each
        if implementation == "xla":
            return reference.draw(*flat)
        from decodax.pallas_kernels.vocabulary import tpu  # imports modules that other platforms do not need

        if implementation is None:
            return lax.platform_dependent(*flat, tpu=tpu.draw, default=reference.draw)
        return tpu.draw(*flat, interpret=platform() == "cpu")

    def local(logits: Array, address: Array, *numbers: Array | None) -> tuple[Array, Array]:
        shape = logits.shape[:2]
        if not divided or implementation == "xla":
            token, first = rows(logits, address, *numbers)
            return token.reshape(shape), first.reshape(shape)
        # Exchange: each device gets the whole vocabulary of some rows for its part of the vocabulary of all rows.
        each = -(-shape[0] * W // size)
        fill = lambda x: jnp.pad(x, [(0, each * size - shape[0] * W)] + [(0, 0)] * (x.ndim - 1), mode="edge")
        own: Any = lambda x: None if x is None else lax.dynamic_slice_in_dim(
            fill(x.reshape(shape[0] * W, *x.shape[2:])), lax.axis_index(MODEL) * each, each)
        whole = lax.all_to_all(fill(logits.reshape(shape[0] * W, -1)), MODEL, 0, 1, tiled=True)
        token, first = rows(whole[:, None], own(address)[:, None],
                            *(None if x is None else own(x)[:, None] for x in numbers))
        gather = lambda x: lax.all_gather(x, MODEL, tiled=True)[:shape[0] * W].reshape(shape)
        return gather(token), gather(first)

    if implementation == "xla":
        return local(logits, address, *numbers)
    specs = (P(DATA, None, MODEL), P(DATA), *[P(DATA)] * 4)
    return shardwise(local, specs, (P(DATA), P(DATA)), logits, address, *numbers, whole=True)


def choose(logits: Array | jax.ShapeDtypeStruct) -> Implementation | None:
    """Returns the implementation for logits `f32[B, W, V]`: "xla", or None for the kernel if the program is lowered for
    a TPU.

    The kernel needs float32 logits, fast memory for 8 rows of the vocabulary, which TPUs before v5 lack, and the mesh.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if platform() != "tpu" or logits.dtype != jnp.float32 or (mesh.empty and jax.device_count() > 1):
        return "xla"
    kind = str(mesh.abstract_device.device_kind if mesh.abstract_device else jax.devices()[0].device_kind)
    from decodax.pallas_kernels.vocabulary.tpu import bytes_of

    small = any(name in kind for name in ("v2", "v3", "v4"))
    return "xla" if small or bytes_of(logits.shape[-1]) > FAST else None
