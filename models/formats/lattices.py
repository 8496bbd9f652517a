"""Lattices for groups of weights, and the optimization of them (Zhang, Wu, Wang and Lin, 2025); see `glvq`."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

CURVATURE = (10.0, 255.0)
"""The smallest and the largest `mu`, from the paper."""

WIDTHS = tuple(float(2 ** (i / 4)) for i in range(-6, 7))
"""Scales of the initial lattice that are tried, relative to `4 / 2^b` standard deviations."""

WIDER = 4.0
"""Singular values of `G` stay between the smallest one of `G0` divided by this and the largest one times this."""


def compand(w: Array, mu: Array) -> Array:
    """Computes the companding function `F(w) = sign(w) ln(1 + mu |w|) / ln(1 + mu)`."""
    return jnp.sign(w) * jnp.log1p(mu * jnp.abs(w)) / jnp.log1p(mu)


def expand(y: Array, mu: Array) -> Array:
    """Computes the inverse of the companding function, `F^-1(y)`."""
    return jnp.sign(y) * jnp.expm1(jnp.abs(y) * jnp.log1p(mu)) / mu


def babai(lattice: Array, y: Array, bits: Array | int) -> Array:
    """Returns the codes of vectors by Babai's rounding.

    Args:
        lattice: `f[d, d]`, whose columns are the basis.
        y: `f[..., d]`.
        bits: number of bits of a code, int or `f[]`.

    Returns:
        `f[..., d]`, integers from 0 to `2^bits - 1`. The point of codes `u` is `lattice @ (u - (2^bits - 1) / 2)`.
    """
    half = 2.0 ** (jnp.asarray(bits) - 1)
    return jnp.clip(jnp.floor(y @ jnp.linalg.inv(lattice).T + half), 0, 2 * half - 1)


@jax.jit
def salience(w: Array, moments: Array) -> Array:
    """Returns the salience of each group, `f32[E, groups]`, from its weights `f32[E, groups, N, size]` and `X X^T` of
    its inputs."""
    factor = jnp.linalg.cholesky(jnp.linalg.inv(moments))
    u = jnp.diagonal(factor, axis1=-2, axis2=-1)
    return (w ** 2 / u[..., None, :] ** 2).sum((-2, -1))


@functools.partial(jax.jit, static_argnames="dimension")
def start_errors(w: Array, moments: Array, bits: Array | int, dimension: int) -> Array:
    """Returns the squared error of the outputs that the quantization of each group with its initial lattice causes,
    `f32[E, groups]`.

    Args:
        w: `f32[E, groups, N, size]`, the weights.
        moments: `f32[E, groups, size, size]`, `X X^T` of the inputs of each group.
        bits: number of bits of a code.
        dimension: dimension `d` of the lattice.
    """
    flat = (w.reshape(-1, *w.shape[2:]), moments.reshape(-1, *moments.shape[2:]))

    def one(group: tuple[Array, Array]) -> Array:
        lattice, mu = _start(*group, bits, dimension)
        return _error(*group, lattice, mu, bits)[0]

    return lax.map(one, flat).reshape(w.shape[:2])


@functools.partial(jax.jit, static_argnames="dimension")
def learn(w: Array, moments: Array, bits: Array, dimension: int, steps: Array | int, rate: Array | float,
          penalty: Array | float, tolerance: Array | float) -> tuple[Array, Array, Array]:
    """Optimizes the lattices of groups and returns the codes of their weights.

    Args:
        w: `f32[E, groups, N, size]`, the weights.
        moments: `f32[E, groups, size, size]`, `X X^T` of their inputs.
        bits: `f32[groups]`, number of bits of a code.
        dimension, steps, rate, penalty, tolerance: options of `GLVQ`.

    Returns:
        `u8[E, groups, N, size]`, `f16[E, groups, d, d]` and `f16[E, groups]`: codes, lattices and curvatures.
    """
    E, groups = w.shape[:2]
    flat = jax.tree.map(lambda a: a.reshape(E * groups, *a.shape[2:]),
                        (w, moments, jnp.broadcast_to(bits, (E, groups))))

    def one(group: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        own, moment, b = group
        lattice, mu = _learned(own, moment, b, dimension, steps, rate, penalty, tolerance)
        codes = _error(own, moment, lattice, mu, b)[1]
        return codes.astype(jnp.uint8), lattice.astype(jnp.float16), mu.astype(jnp.float16)

    return jax.tree.map(lambda a: a.reshape(E, groups, *a.shape[1:]), lax.map(one, flat))


def _learned(w: Array, moment: Array, bits: Array, d: int, steps: Array | int, rate: Array | float,
             penalty: Array | float, tolerance: Array | float) -> tuple[Array, Array]:
    """Returns the optimized `G` and `mu` of one group, rounded to float16."""
    import optax  # only needed for conversion

    lattice, mu = _start(w, moment, bits, d)
    singular = jnp.linalg.svd(lattice, compute_uv=False)
    least, most = singular[-1] / WIDER, singular[0] * WIDER
    # A step moves the outermost points by the same share of the distance between neighbours, whatever the bits.
    fine = 4 / 2 ** bits
    unit = singular[0] * fine
    whole = ((w @ moment) * w).sum()
    whole = jnp.where(whole > 0, whole, 1)
    adam = optax.scale_by_adam()

    def parts(params: tuple[Array, Array]) -> tuple[Array, Array]:
        moved, curved = params
        return lattice + unit * moved, mu * jnp.exp(fine * curved)

    def loss(params: tuple[Array, Array]) -> Array:
        own, curvature = parts(params)
        away = ((own - lattice) ** 2).sum() / (lattice ** 2).sum()
        return _error(w, moment, _half(own), _half(curvature), bits)[0] / whole + penalty * away

    def projected(params: tuple[Array, Array]) -> tuple[Array, Array]:
        own, curvature = parts(params)
        u, s, v = jnp.linalg.svd(own)
        return (u * jnp.clip(s, least, most) @ v - lattice) / unit, jnp.log(
            jnp.clip(curvature, *CURVATURE) / mu) / fine

    def going(carry: Any) -> Array:
        step, _, _, _, (last, before) = carry
        return (step < steps) & ~(jnp.abs(last - before) < tolerance * before)

    def body(carry: Any) -> Any:
        step, params, state, (best, kept), (last, _) = carry
        now, gradient = jax.value_and_grad(loss)(params)
        kept = jax.tree.map(lambda new, old: jnp.where(now < best, new, old), params, kept)
        updates, state = adam.update(gradient, state)
        own = rate * (1 + jnp.cos(jnp.pi * step / steps)) / 2
        params = projected(jax.tree.map(lambda p, u: p - own * u, params, updates))
        return step + 1, params, state, (jnp.minimum(now, best), kept), (now, last)

    params = (jnp.zeros_like(lattice), jnp.zeros_like(mu))
    endless = jnp.full((), jnp.inf, w.dtype)
    *_, (_, kept), _ = lax.while_loop(going, body, (jnp.int32(0), params, adam.init(params), (endless, params),
                                                    (endless, endless)))
    return jax.tree.map(_half, parts(kept))


def _start(w: Array, moment: Array, bits: Array | int, d: int) -> tuple[Array, Array]:
    """Returns the initial lattice and curvature."""
    deviations = w - w.mean()
    kurtosis = (deviations ** 4).mean() / jnp.maximum((deviations ** 2).mean() ** 2, 1e-30)
    mu = _half(jnp.clip(100 * jnp.tanh(kurtosis / 10), *CURVATURE))
    vectors = compand(w, mu).reshape(-1, d)
    covariance = jnp.cov(vectors, rowvar=False).reshape(d, d) if len(vectors) > 1 else jnp.zeros((d, d))
    mean = jnp.maximum(jnp.trace(covariance) / d, 1e-8)
    factor = jnp.linalg.cholesky(covariance + 1e-3 * mean * jnp.eye(d)) * 4 / 2.0 ** jnp.asarray(bits)
    tried = _half(jnp.asarray(WIDTHS)[:, None, None] * factor)
    errors = lax.map(lambda lattice: _error(w, moment, lattice, mu, bits)[0], tried)
    return tried[jnp.argmin(errors)], mu


def _error(w: Array, moment: Array, lattice: Array, mu: Array, bits: Array | int) -> tuple[Array, Array]:
    """Returns `|W X - W' X|^2` and the codes. The codes have no gradient."""
    d = len(lattice)
    codes = lax.stop_gradient(babai(lattice, compand(w, mu).reshape(-1, d), bits))
    points = (codes - (2.0 ** jnp.asarray(bits) - 1) / 2) @ lattice.T
    off = w - expand(points.reshape(w.shape), mu)
    weighted = lax.stop_gradient(off @ moment)      # the gradient is twice this, which saves a second product
    return 2 * (weighted * off).sum() - lax.stop_gradient((weighted * off).sum()), codes.reshape(w.shape)


def _half(x: Array) -> Array:
    """Rounds to float16; the gradient is that of the identity."""
    return x + lax.stop_gradient(x.astype(jnp.float16).astype(x.dtype) - x)
