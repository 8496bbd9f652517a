"""Window attention: to the window's own keys and to what the cache holds, merged by their softmax sums."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from decodax.axes import DATA, MODEL, platform, shardwise
from decodax.pallas_kernels.window_attention import reference
from decodax.pallas_kernels.window_attention.reference import MASKED

Implementation = Literal["xla", "mosaic_tpu"]

Bias = Callable[[Array, Array], Array]
"""What is added to the scores, from positions alone: those of the queries `i32[B, 1, W, 1]` and of the keys
`i32[B or 1, G or 1, 1, K]` (apart for each key/value head where a cache keeps other tokens in each) to
`f32[B or 1, H or 1, W, K]`."""


def window_attention(q: Array, k: Array, v: Array, mask: Array, positions: Array, cache: Array | None = None,
                     length: Array | None = None, *, scale: float,
                     sliding: int | None = None, softcap: float | None = None,
                     key_positions: Array | None = None, cached: Array | None = None,
                     slot_positions: Array | None = None, bias: Bias | None = None,
                     implementation: Implementation | None = None) -> Array:
    """Attention of window queries to verified cache entries and to the window.

    Args:
        q: `f[B, W, H, d]` queries. k, v: `f[B, K, G, d]` and `f[B, K, G, e]` keys and values of the window, `H` a
            multiple of `G`; `K` is `W` unless nodes of earlier windows stand before its own.
        mask: `bool[B or 1, W, K]`, who sees whom inside the window; each node sees at least one.
        positions: `i32[B, W]`.
        cache: `f[B, G, S, d + e]`, each entry's key and behind it its value; None without a cache (training, scoring).
        length: `i32[B]` verified entries of a cache whose slots are positions.
        scale: factor of the scores before softcap and softmax.
        sliding: a query sees positions above its own minus this.
        softcap: scores become `softcap * tanh(scores / softcap)` (Gemma 2).
        key_positions: `i32[B, K]` of `k`; default `positions`.
        cached: `bool[B, S]` the verified entries that a row sees; None: all of them; `bool[B, 0]`: none.
        slot_positions: `i32[B, G or 1, S]` the position of the token in each slot, -1 where there is none, of a cache
            whose slots are not positions; in place of `length` and `cached`.
        bias: what is added to the scores, after softcap: relative position biases (T5), slopes (ALiBi).
        implementation: how the cache is read: "xla", or the kernel "mosaic_tpu", which runs interpreted on a CPU; None:
            the fastest that can be had (see `choose`).

    Returns:
        `f[B, W, H, e]` in the dtype of `q`. Scores and sums are float32.
    """
    return window_attention_lse(q, k, v, mask, positions, cache, length, scale=scale, sliding=sliding,
                                softcap=softcap, key_positions=key_positions, cached=cached,
                                slot_positions=slot_positions, bias=bias, implementation=implementation)[0]


def merge(*parts: tuple[Array, Array]) -> tuple[Array, Array]:
    """Attention to several sets of keys as attention to all of them. Each part, and the result, is what
    `window_attention_lse` gives."""
    return functools.reduce(_merge, parts)


def _merge(one: tuple[Array, Array], other: tuple[Array, Array]) -> tuple[Array, Array]:
    (a, x), (b, y) = one, other
    top = jnp.maximum(x, y)
    left, right = jnp.exp(x - top), jnp.exp(y - top)
    total = left + right
    return ((a * left[..., None] + b * right[..., None]) / total[..., None]).astype(a.dtype), top + jnp.log(total)


def window_attention_lse(q: Array, k: Array, v: Array, mask: Array, positions: Array, cache: Array | None = None,
                         length: Array | None = None, *, scale: float,
                         sliding: int | None = None, softcap: float | None = None,
                         key_positions: Array | None = None, cached: Array | None = None,
                         slot_positions: Array | None = None, bias: Bias | None = None,
                         implementation: Implementation | None = None) -> tuple[Array, Array]:
    """As `window_attention`, with the logarithm of each query's softmax sum, `f32[B, W, H]`: the weight of a key with
    score `s` is `exp(s - lse)`, and `merge` adds attention to other keys. About -1e30 where a query sees nothing."""
    if implementation not in (None, "xla", "mosaic_tpu"):
        raise ValueError(f"implementation: got {implementation!r}, takes 'xla' or 'mosaic_tpu'")
    if bias is not None and implementation == "mosaic_tpu":
        raise ValueError("implementation: got 'mosaic_tpu', which takes no bias")
    arrays = q, k, v, mask, positions, cache, length, key_positions, cached, slot_positions
    if bias is not None:        # it closes over weights: no static value, and made for all heads
        return _attention(*arrays, scale=scale, sliding=sliding, softcap=softcap, bias=bias, implementation="xla")
    return _attention_once(*arrays, scale=scale, sliding=sliding, softcap=softcap,
                           implementation=implementation or choose(cache))


def choose(cache: Array | None) -> Implementation | None:
    """The implementation for a cache `f[B, G, S, D]`: "xla", or None for the TPU's kernel wherever the program is
    lowered for a TPU.

    The kernel wants slots in blocks of 128, and to know the mesh: the compiler cannot divide it over devices by itself.
    """
    if platform() != "tpu" or cache is None:
        return "xla"
    alone = jax.sharding.get_abstract_mesh().empty
    return "xla" if cache.shape[2] % 128 or (alone and jax.device_count() > 1) else None


# traced and lowered once for all layers of a kind
@functools.partial(jax.jit, static_argnames=("scale", "sliding", "softcap", "implementation"))
def _attention_once(*arrays: Any, implementation: Implementation | None, **options: Any) -> tuple[Array, Array]:
    q, _, _, mask, _, _, _, _, _, slot_positions = arrays
    heads, rows = P(DATA, None, MODEL), P(DATA)
    cache = P(DATA, MODEL)
    slots = P(DATA, MODEL if slot_positions is not None and slot_positions.shape[1] > 1 else None)
    specs = (heads, heads, heads, rows if mask.shape[0] == q.shape[0] else P(), rows, cache, rows, rows, rows, slots)
    local = functools.partial(_attention, bias=None, implementation=implementation, **options)
    return shardwise(local, specs, (heads, heads), *arrays, whole=implementation != "xla")


def _attention(q: Array, k: Array, v: Array, mask: Array, positions: Array, cache: Array | None, length: Array | None,
               key_positions: Array | None, cached: Array | None, slot_positions: Array | None, *, scale: float,
               sliding: int | None, softcap: float | None, bias: Bias | None,
               implementation: Implementation | None) -> tuple[Array, Array]:
    """See `window_attention_lse`."""
    B, W, H, d = q.shape
    G, e = k.shape[2], v.shape[3]
    dtype, q = q.dtype, q.reshape(B, W, G, H // G, d).transpose(0, 2, 3, 1, 4).reshape(B, G, H // G * W, d)
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)

    def biases(where: Array) -> Array:       # of keys at `where` [B or 1, G or 1, K]
        assert bias is not None
        more = bias(positions[:, None, :, None], where[:, :, None])
        return jnp.broadcast_to(more, (B, H, W, where.shape[2])).reshape(B, G, -1, where.shape[2])

    where = positions if key_positions is None else key_positions
    if sliding is not None:
        mask = mask & (positions[:, :, None] - where[:, None, :] < sliding)
    s = jnp.einsum("bgqd,bgkd->bgqk", q, k, preferred_element_type=jnp.float32) * scale
    s = s if softcap is None else softcap * jnp.tanh(s / softcap)
    s = s if bias is None else s + biases(where[:, None])
    s = jnp.where(mask[:, None, None], s.reshape(B, G, H // G, W, -1), MASKED).reshape(s.shape)
    top = s.max(-1, keepdims=True)
    weights = jnp.exp(s - top)
    total = weights.sum(-1, keepdims=True)
    out = jnp.einsum("bgqk,bgkd->bgqd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32) / total
    lse = (top + jnp.log(total))[..., 0]

    blind = cached is not None and cached.shape[1] == 0
    if cache is not None and cache.shape[2] and not blind:
        slots = cache.shape[2]
        place, held = jnp.arange(slots, dtype=jnp.int32), slot_positions
        if held is not None:
            length = jnp.where((held >= 0).any(1), place + 1, 0).max(1)
        assert length is not None
        if cached is not None:      # what is read ends behind the last entry that a row sees
            held = jnp.where(cached & (place < length[:, None]), place, -1)[:, None]
            length = jnp.where(held >= 0, place + 1, 0).max((1, 2))
        at = jnp.broadcast_to(positions[:, None], (B, H // G, W)).reshape(B, -1)
        options: dict[str, Any] = dict(scale=scale, value_width=e, sliding=sliding, softcap=softcap)
        plain: Callable[..., Any] = functools.partial(reference.cache_attention, **options,
                                                      bias=None if bias is None else biases)
        if implementation == "xla":
            part = plain(q, cache, length, at, held)
        else:
            from decodax.pallas_kernels.window_attention import tpu  # imports what the others do without

            kernel: Callable[..., Any] = functools.partial(tpu.cache_attention, **options)
            if implementation is None:
                given = (q, cache, length, at) if held is None else (q, cache, length, at, held)
                part = lax.platform_dependent(*given, tpu=kernel, default=plain)
            else:
                part = kernel(q, cache, length, at, held, interpret=platform() == "cpu")
        out, lse = merge((out, lse), part)

    out = out.astype(dtype).reshape(B, G, H // G, W, e).transpose(0, 3, 1, 2, 4).reshape(B, W, H, e)
    return out, lse.reshape(B, G, H // G, W).transpose(0, 3, 1, 2).reshape(B, W, H)
