"""Draws a token on TPUs (Mosaic).

A program instance has the whole vocabulary of 8 rows in fast memory: it is transferred once, while the rows before are
drawn, and every pass of truncation, weights and race runs there. A threshold is found bit by bit. In XLA the cost of a
pass is mostly its dispatch and its memory reads; here it is its operations, and 32 passes of three operations each cost
less than 11 passes of 21.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from decodax.pallas_kernels.vocabulary.noise import exponential
from decodax.pallas_kernels.vocabulary.temperature import FAR, LEAST, MOST
from decodax.pallas_kernels.vocabulary.threshold import of_order

ROWS, LANES = 8, 128

CHUNK = 64 * LANES
"""Number of entries of a row that one step of a pass handles. In the search, a v5e takes 21 cycles for 16 lane widths,
and 79 for 64."""

SPARE = 4 << 20
"""Bytes of fast memory that are reserved in addition to the vocabulary."""


def bytes_of(V: int) -> int:
    """Returns the bytes of fast memory that the kernel uses for a vocabulary of `V` tokens: two blocks of logits in
    transfer, the logits divided by the temperature, and the weights.

    >>> bytes_of(128_256) >> 20
    20
    """
    return 4 * ROWS * 4 * (-(-V // CHUNK) * CHUNK) + SPARE


def draw(logits: Array, address: Array, temperature: Array, k: Array | None = None, p: Array | None = None,
         min_p: Array | None = None, *, interpret: Any = False) -> tuple[Array, Array]:
    """Draws one token for each row by a TPU kernel, after temperature, top-k, top-p and min-p. Returns tokens `i32[R]`
    and their scores in the race, `f32[R]`.

    Args:
        logits: `f32[R, V]`.
        address, temperature, k, p, min_p: an entry for each row, as in `decodax.pallas_kernels.vocabulary.draw`.
        interpret: whether to run without a TPU; True, or `pltpu.InterpretParams`.
    """
    R, V = logits.shape
    rows = min(R, ROWS)
    given = {"temperature": temperature, "k": k, "p": p, "min_p": min_p}
    numbers = {name: x.astype(jnp.float32) for name, x in given.items() if x is not None}
    of_rows = lambda width: pl.BlockSpec((rows, width), lambda r: (r, 0))
    wide = pltpu.VMEM((rows, -(-V // CHUNK) * CHUNK), jnp.float32)
    passes = 4 + 32 * sum(name in numbers for name in ("k", "p"))
    token, first = pl.pallas_call(
        functools.partial(_kernel, names=tuple(numbers)),
        grid=(pl.cdiv(R, rows),),
        in_specs=[of_rows(V), of_rows(2), of_rows(len(numbers))],
        out_specs=[of_rows(1), of_rows(1)],
        out_shape=[jax.ShapeDtypeStruct((R, 1), jnp.int32), jax.ShapeDtypeStruct((R, 1), jnp.float32)],
        scratch_shapes=[wide, wide],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",), vmem_limit_bytes=bytes_of(V)),
        interpret=interpret,
        cost_estimate=pl.CostEstimate(flops=3 * passes * R * V, transcendentals=2 * R * V, bytes_accessed=4 * R * V),
        name="draw",
    )(logits, address, jnp.stack(list(numbers.values()), 1))
    return token[:, 0], first[:, 0]


def _kernel(logits: Any, address: Any, numbers: Any, token: Any, first: Any, scaled: Any, weights: Any, *,
            names: tuple[str, ...]) -> None:
    rows, V = logits.shape
    chunks, begun = scaled.shape[1] // CHUNK, V // CHUNK * CHUNK
    # Values with one entry for each row are broadcast over the lanes once rather than in each step of each pass.
    lanes = lambda value: jnp.broadcast_to(jnp.asarray(value), (rows, LANES))
    given = {name: lanes(numbers[:, i:i + 1]) for i, name in enumerate(names)}
    words = lanes(address[:, :1]), lanes(address[:, 1:])
    cold = given["temperature"] == 0
    temperature = jnp.where(cold, 1, jnp.clip(given["temperature"], LEAST, MOST))

    def over(step: Callable[[Any, Any], Any], start: Any, count: int = chunks) -> Any:
        """Returns the result of `step(at, carry)` over all chunks."""
        if not count:
            return start
        return lax.fori_loop(0, count, lambda c, carry: step(pl.ds(pl.multiple_of(c * CHUNK, CHUNK), CHUNK), carry),
                             start)

    def largest_of(parts: list[Array], so_far: Array) -> Array:
        # A NaN counts as +inf: both are errors, and the result is dropped in the end.
        return jnp.maximum(so_far, _fold(jnp.maximum, [jnp.where(jnp.isnan(x), jnp.inf, x) for x in parts]))

    # As in `cooled`.
    top = over(lambda at, so_far: largest_of(_parts(logits[:, at]), so_far), lanes(-jnp.inf), V // CHUNK)
    if begun < V:
        top = largest_of([logits[:, begun:].max(1, keepdims=True)], top)
    top = lanes(top.max(1, keepdims=True))
    shift = jnp.where(jnp.isfinite(top) & (jnp.abs(top) > FAR * temperature), top, 0)

    def scale(at: Any, so_far: Array) -> Array:
        found = [(x - shift) / temperature for x in _parts(logits[:, at])]
        scaled[:, at] = jnp.concatenate(found, 1)
        return largest_of(found, so_far)

    top = over(scale, lanes(-jnp.inf), V // CHUNK)
    if begun < V:       # the padding of the last chunk is -inf
        scaled[:, begun:] = jnp.full((rows, CHUNK), -jnp.inf, jnp.float32)
        scaled[:, begun:V] = (logits[:, begun:] - shift[:, :1]) / temperature[:, :1]
        top = largest_of(_parts(scaled[:, begun:]), top)
    top = lanes(top.max(1, keepdims=True))
    dead, broken = top == -jnp.inf, top == jnp.inf
    top = jnp.where(dead | broken, 0, top)

    def largest(weigh: Callable[[Any], list[Any]], least: Array) -> Array:
        """Returns `largest_threshold` of the rows, with `least` as the weight to reach."""

        def halve(i: Array, best: Array) -> Array:
            trial = best | lax.shift_left(jnp.uint32(1), (31 - i).astype(jnp.uint32))
            t = of_order(trial)

            def above(at: Any, sums: Array) -> Array:
                pairs = zip(_parts(scaled[:, at]), weigh(at), strict=True)
                return sums + _fold(jnp.add, [jnp.where(x >= t, w, 0) for x, w in pairs])

            mass = lanes(over(above, lanes(0.0)).sum(1, keepdims=True))
            return jnp.where((mass >= least) & (mass > 0), trial, best)

        return of_order(lax.fori_loop(0, 32, halve, lanes(jnp.uint32(0))))

    if "k" in given:
        count = jnp.where(given["k"] > 0, jnp.minimum(given["k"], V), V)
        least = largest(lambda at: [1.0] * (CHUNK // LANES), count - 0.5)

    def weigh(at: Any, total: Array) -> Array:
        parts = _parts(scaled[:, at])
        if "k" in given:
            parts = [jnp.where(x < least, -jnp.inf, x) for x in parts]
            scaled[:, at] = jnp.concatenate(parts, 1)
        found = [jnp.exp(x - top) for x in parts]
        weights[:, at] = jnp.concatenate(found, 1)
        return total + _fold(jnp.add, found)

    if len(given) > 1:
        total = lanes(over(weigh, lanes(0.0)).sum(1, keepdims=True))
    if "p" in given:
        cut = jnp.where(given["p"] < 1, largest(lambda at: _parts(weights[:, at]), given["p"] * total), -jnp.inf)

    def run(at: Any, found: tuple[Array, Array]) -> tuple[Array, Array]:
        ids = at.start + lax.broadcasted_iota(jnp.int32, (rows, LANES), 1)
        shares: list[Any] = _parts(weights[:, at]) if "min_p" in given else [None] * (CHUNK // LANES)
        for x, w in zip(_parts(scaled[:, at]), shares, strict=True):
            score = jnp.where(cold, x, -exponential(ids.astype(jnp.uint32), *words) * jnp.exp(top - x))
            if "p" in given:
                score = jnp.where((x < cut) & (x < top), -jnp.inf, score)
            if "min_p" in given:
                score = jnp.where((w < given["min_p"]) & (x < top), -jnp.inf, score)
            better = score > found[0]
            found, ids = (jnp.where(better, score, found[0]), jnp.where(better, ids, found[1])), ids + LANES
        return found

    best, where = over(run, (lanes(-jnp.inf), lanes(0)))
    most = best.max(1, keepdims=True)
    token[...] = jnp.where(best == most, where, jnp.iinfo(jnp.int32).max).min(1, keepdims=True)
    first[...] = jnp.where(broken[:, :1], jnp.inf, jnp.where(dead[:, :1], -jnp.inf, most))


def _parts(x: Array) -> list[Array]:
    """Splits a chunk into parts that are as wide as the lanes."""
    return [x[:, i:i + LANES] for i in range(0, x.shape[1], LANES)]


def _fold(combine: Callable[[Array, Array], Array], parts: list[Array]) -> Array:
    """Combines the parts of a chunk in pairs, so that the operations of a level are independent."""
    while len(parts) > 1:
        parts = [combine(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]
