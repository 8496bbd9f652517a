"""Attention of a long chunk of text whose positions are divided over devices (Ring Attention: Liu et al., 2023), in the
two lossless forms of "Context Parallelism for Scalable Million-Token Inference" (Yang et al., 2024).

Each of `N` devices has a part of the chunk's queries, keys and values, and a part of the cached ones. *pass-KV* sends
keys and values around the ring: each device computes attention of its own queries to the keys that pass by. *pass-Q*
sends the queries around the ring and returns the partial results to their devices in one exchange. Both merge partial
results by the logarithms of their softmax sums.

The queries of a device are two pieces of the text, an early and a late one (`decodax.caches.context.context_parallel`),
so that each of the `N` turns costs the same. Queries and keys are split into halves, and the products that the causal
mask hides are skipped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.common.axes import CONTEXT
from decodax.pallas_kernels.window_attention import merge, window_attention_lse

Mode = Literal["auto", "pass-kv", "pass-q"]

Partial = tuple[Array, Array]
"""Attention to some of the keys: `f32[B, W, H, e]`, and the logarithms of the softmax sums `f32[B, W, H]`."""


@dataclasses.dataclass(frozen=True)
class RingChoice:
    """Chooses between pass-KV and pass-Q from sizes alone (Yang et al., 2024, algorithm 1 and its refinement for the
    exchange at the end of pass-Q).

    Pass-KV sends keys and values between devices, pass-Q queries. With `T` new tokens after `P` cached ones, `N`
    devices, `H` query heads and `G` key heads, pass-KV is chosen if one of these holds, else pass-Q:

    1. `T >= N C G e / (2 H BW)`: the computation takes longer than sending keys and values, which is then hidden.
    2. `T / (T + P) >= 2 G / H - 4 T BW / (N C e)`: the time of sending that computation does not hide is shorter than
       the time that pass-Q takes to return its results.

    `C` is in operations per second, `BW` in bytes per second, and `e` in bytes per number.

    Attributes:
        mode: "auto" to choose, "pass-kv" or "pass-q" for always the same form.
        flops: `C`, of one device. The default is that of a TPU v5e.
        bandwidth: `BW`, of a link in one direction. The default is that of a TPU v5e.
    """

    mode: Mode = "auto"
    flops: float = 197e12
    bandwidth: float = 4.5e10

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ValueError(f"mode: got {self.mode!r}, takes one of {', '.join(get_args(Mode))}")
        if self.flops <= 0 or self.bandwidth <= 0:
            raise ValueError(f"flops, bandwidth: got {self.flops} and {self.bandwidth}, takes numbers above 0")

    def passes_kv(self, new: int, cached: Array | int, parts: int, queries: int, heads: int, size: int) -> Array | bool:
        """Returns True for pass-KV, False for pass-Q.

        Args:
            new, cached: numbers of tokens, `T` and `P`.
            parts: number of devices, `N`.
            queries, heads: numbers of query heads `H` and of key/value heads `G`.
            size: bytes per number, `e`.

        >>> choose = RingChoice(flops=8e14, bandwidth=2e11)
        >>> [bool(choose.passes_kv(t, 128_000 - t, 4, 128, 8, 2)) for t in (640, 12_800, 128_000)]
        [False, True, True]
        """
        if self.mode != "auto":
            return self.mode == "pass-kv"
        ratio = 2 * heads / queries
        if new >= parts * self.flops * heads * size / (2 * queries * self.bandwidth):
            return True
        hidden = 4 * new * self.bandwidth / (parts * self.flops * size)
        return new / (new + cached) >= ratio - hidden


class Keys(NamedTuple):
    """Keys `f[B, K, G, d]` and values `f[B, K, G, e]` that are sent between devices, and their positions `i32[B, K]`;
    -1: empty."""

    k: Array
    v: Array
    at: Array


class Queries(NamedTuple):
    """Queries `f[B, W, H, d]` that are sent between devices, and their positions `i32[B, W]`."""

    q: Array
    at: Array


def seen(queries: Queries, keys: Keys, options: dict[str, Any]) -> Partial:
    """Returns causal attention of the queries to the keys at positions up to their own: output `f32[B, W, H, e]` and
    logarithms of the softmax sums `f32[B, W, H]`. Pairs of halves in which no query attends to a key are skipped."""
    parts = [_seen(half, keys, options) for half in _halves(queries)]
    return jax.tree.map(lambda *x: jnp.concatenate(x, 1), *parts)


def _seen(queries: Queries, keys: Keys, options: dict[str, Any]) -> Partial:
    return merge(*(_product(queries, half, options) for half in _halves(keys)))


def _halves(x: Any) -> list[Any]:
    size = x[0].shape[1]
    if size % 2:
        return [x]
    return [type(x)(*(y[:, a:a + size // 2] for y in x)) for a in (0, size // 2)]


def _product(queries: Queries, keys: Keys, options: dict[str, Any]) -> Partial:
    mask = (keys.at >= 0)[:, None] & (keys.at[:, None] <= queries.at[:, :, None])

    def attend() -> Partial:
        out, lse = window_attention_lse(queries.q, keys.k, keys.v, mask, queries.at, key_positions=keys.at,
                                        implementation="xla", **options)
        # a query that sees none of them has the mean of all values, and a sum that weighs nothing in a merge
        return out.astype(jnp.float32), lse

    shapes = jax.eval_shape(attend)
    none = lambda: (jnp.zeros(shapes[0].shape, jnp.float32), jnp.full(shapes[1].shape, -1e30, jnp.float32))
    return lax.cond(mask.any(), attend, none)


def _turn(x: Any, parts: int) -> Any:
    """Receives the arrays of the device before this one."""
    return jax.tree.map(lambda y: lax.ppermute(y, CONTEXT, [(i, (i + 1) % parts) for i in range(parts)]), x)


def _around(keys: Keys, queries: Queries, found: Partial, parts: int, options: dict[str, Any]) -> Partial:
    """Merges `found` with attention to the keys of all devices. While a device computes attention, the next keys are
    sent."""

    def turn(_: Array, carry: tuple[Keys, Partial]) -> tuple[Keys, Partial]:
        keys, found = carry
        coming = _turn(keys, parts)
        return coming, merge(found, seen(queries, keys, options))

    keys, found = lax.fori_loop(0, parts - 1, turn, (keys, found))
    return merge(found, seen(queries, keys, options))


def pass_kv(queries: Queries, keys: Keys, cached: Callable[[Array], Keys], blocks: Array, parts: int,
            options: dict[str, Any]) -> Partial:
    """Computes attention of one device's queries to the keys of all devices, by pass-KV: sends the chunk's keys and
    values around the ring, then the cached ones block by block.

    Args:
        queries, keys: queries and keys of the chunk on this device.
        cached: returns block `i` of this device's part of the cache.
        blocks: `i32[]`, number of blocks that hold tokens; the same on all devices.
        parts: number of devices.
        options: options of `window_attention_lse`.
    """
    B, W, H, _ = queries.q.shape
    none = (jnp.zeros((B, W, H, keys.v.shape[3]), jnp.float32), jnp.full((B, W, H), -1e30, jnp.float32))
    found = _around(keys, queries, none, parts, options)
    more = lambda i, found: _around(cached(i), queries, found, parts, options)
    return lax.fori_loop(0, blocks, more, found)


def pass_q(queries: Queries, keys: Keys, local: Callable[[Queries], Partial], parts: int,
           options: dict[str, Any]) -> Partial:
    """Computes attention of one device's queries to the keys of all devices, by pass-Q: sends the queries around the
    ring, and each device computes attention to its own keys.

    Args:
        queries, keys: queries and keys of the chunk on this device.
        local: computes attention of queries to this device's part of the cache.
        parts: number of devices.
        options: options of `window_attention_lse`.
    """
    me = lax.axis_index(CONTEXT)

    def look(queries: Queries) -> Array:
        out, lse = merge(seen(queries, keys, options), local(queries))
        return jnp.concatenate([out, lse[..., None]], -1)

    def turn(queries: Queries, _: None) -> tuple[Queries, Array]:
        coming = _turn(queries, parts)
        return coming, look(queries)

    last, found = lax.scan(turn, queries, None, length=parts - 1)
    found = jnp.concatenate([found, look(last)[None]])
    # what was found in turn `t` is that of the device `t` places before this one
    for_device = found[(me - jnp.arange(parts)) % parts]
    mine = lax.all_to_all(for_device, CONTEXT, 0, 0)
    return gathered(mine)


def gathered(parts: Array) -> Partial:
    """Merges partial results of attention from `N` devices, `f32[N, B, W, H, e + 1]` with the logarithm of the softmax
    sum in the last channel. Returns the output `f32[B, W, H, e]` and the logarithms of the total sums, `f32[B, W,
    H]`."""
    out, lse = parts[..., :-1], parts[..., -1]
    top = lse.max(0)
    weights = jnp.exp(lse - top)
    total = weights.sum(0)
    return (out * weights[..., None]).sum(0) / total[..., None], top + jnp.log(total)
