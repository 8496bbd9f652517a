"""Times the forms of window attention: kernel, XLA reference, and one einsum over the whole capacity.

Kernels are timed where they run: Mosaic on TPUs, Triton on GPUs. A program is a loop of `--inner` calls, each of which
needs the result of the call before, so that the start of a program does not count. Implementations run in turn. The
columns are the median time of a call, the bytes of live cache entries over that time, the speed relative to the einsum,
and the largest difference from its result.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.bench.figures import show_table
from decodax.bench.timing import in_turn, median, seconds
from decodax.pallas_kernels.window_attention import prefix_attention, quantized, slot_weights, window_attention_lse

SCALE = 0.1


def sides(form: str, args: argparse.Namespace) -> tuple[dict[str, Callable[[Array, Any], Array]], Array, Any, int]:
    """Returns the functions to compare, their queries and other arguments, and the bytes of live entries."""
    B, W, G, S, d = args.batch, args.window, args.kv_heads, args.capacity, args.width
    rows = 1 if form == "prefix" else B
    keys = jax.random.split(jax.random.key(0), 4)
    q = jax.random.normal(keys[0], (B, W, args.heads, d), args.dtype)
    own = jax.random.normal(keys[1], (2, B, W, G, d), args.dtype)
    cache = jax.random.normal(keys[2], (rows, G, S, 2 * d), args.dtype)
    entry = G * 2 * d * cache.dtype.itemsize
    length = jnp.full(rows, args.live, jnp.int32)
    positions = jnp.broadcast_to(args.live + jnp.arange(W, dtype=jnp.int32), (B, W))
    mask = jnp.tril(jnp.ones((1, W, W), bool))
    given: dict[str, Array] = {}
    if form == "int8":
        cache, scales = quantized(cache, d)
        given, entry = dict(scales=scales), G * (2 * d + 8)
    if form == "pages":
        table = jax.random.permutation(keys[3], B * (S // args.page)).astype(jnp.int32)
        pages = cache.reshape(B, G, -1, args.page, 2 * d).swapaxes(1, 2).reshape(-1, G, args.page, 2 * d)
        cache, given = jnp.zeros_like(pages).at[table].set(pages), dict(table=table.reshape(B, -1))

    def ours(q: Array, rest: Any, implementation: Any) -> Array:
        own, cache, length, given = rest
        if form == "prefix":
            return prefix_attention(q, positions, cache, length, scale=SCALE, implementation=implementation)[0]
        if form == "weights":
            return slot_weights(q, jnp.full(q.shape[:3], 8.0), positions, cache, length, scale=SCALE,
                                implementation=implementation)
        return window_attention_lse(q, *own, mask, positions, cache, length, scale=SCALE,
                                    implementation=implementation, **given)[0]

    def einsum(q: Array, rest: Any) -> Array:
        (k, v), cache, length, given = rest
        if "table" in given:
            cache = cache[given["table"]].swapaxes(1, 2).reshape(B, G, S, 2 * d)
        if "scales" in given:
            scales = jnp.repeat(given["scales"].swapaxes(2, 3), d, 3, total_repeat_length=2 * d)
            cache = (cache * scales).astype(q.dtype)
        cache = jnp.broadcast_to(cache, (B, *cache.shape[1:]))
        folded = q.reshape(B, W, G, -1, d)
        s = jnp.einsum("bwgrd,bgsd->bgrws", folded, cache[..., :d], preferred_element_type=jnp.float32) * SCALE
        s = jnp.where((jnp.arange(S) < length[:, None])[:, None, None, None], s, -jnp.inf)
        if form == "weights":
            return jnp.exp(s - 8.0).sum((2, 3))
        values = cache[..., d:]
        if form != "prefix":
            more = jnp.einsum("bwgrd,bkgd->bgrwk", folded, k, preferred_element_type=jnp.float32) * SCALE
            s = jnp.concatenate([s, jnp.where(mask, more, -jnp.inf)], -1)
            values = jnp.concatenate([values, v.swapaxes(1, 2)], 2)
        p = jax.nn.softmax(s, -1).astype(q.dtype)
        return jnp.einsum("bgrws,bgsd->bwgrd", p, values).reshape(q.shape)

    names = ["xla", *({"tpu": ["mosaic_tpu"], "gpu": ["triton"]}.get(jax.default_backend(), []))]
    fns = {"einsum": einsum, **{name: functools.partial(ours, implementation=name) for name in names}}
    return fns, q, (own, cache, length, given), rows * args.live * entry


def loop(fn: Callable[[Array, Any], Array], calls: int) -> Callable[[Array, Any], Array]:
    """Returns a program of `calls` calls."""

    def body(_: Array, q: Array, rest: Any) -> Array:
        q, rest = lax.optimization_barrier((q, rest))       # nothing may be done once for all calls
        out = fn(q, rest)
        return (out if out.shape == q.shape else q + 1e-6 * out.sum()).astype(q.dtype)

    return jax.jit(lambda q, rest: lax.fori_loop(0, calls, lambda i, q: body(i, q, rest), q))


def main(args: argparse.Namespace) -> None:
    """Times the forms and prints a table."""
    args.live = args.capacity // 2 if args.live is None else args.live
    if not 0 < args.live <= args.capacity:
        raise ValueError(f"--live: got {args.live}, takes 1 to the capacity of {args.capacity}")
    for size in (128, *([args.page] if "pages" in args.form else [])):
        if args.capacity % size:
            raise ValueError(f"--capacity: got {args.capacity}, takes a multiple of {size}")
    rows = []
    for form in args.form:
        fns, q, rest, live = sides(form, args)
        results = {name: jax.jit(fn)(q, rest).astype(jnp.float32) for name, fn in fns.items()}
        programs = {name: loop(fn, args.inner) for name, fn in fns.items()}
        call = lambda run: seconds(lambda: jax.block_until_ready(run(q, rest)))      # noqa: B023
        times = in_turn({name: call(run) for name, run in programs.items()}, args.repeats, form)
        first = next(iter(fns))
        for name, spent in times.items():
            each = median(spent) / args.inner
            off = float(jnp.abs(results[name] - results[first]).max())
            rows.append((form, name, f"{1e3 * each:.3f}", f"{live / each / 1e9:.1f}",
                         f"{median(times[first]) / median(spent):.2f}", f"{off:.1e}"))
    show_table(("form", "implementation", "ms", "GB/s", "times the first", "difference"), rows,
               f"{jax.devices()[0].device_kind}, jax {jax.__version__}; batch {args.batch}, window {args.window}, "
               f"{args.heads}/{args.kv_heads} heads of {args.width}, {args.live} of {args.capacity} slots live, "
               f"{args.dtype}; median of {args.repeats}", markdown=True)
