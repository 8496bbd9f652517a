"""Building blocks of the decoder: weights, linear layers, norms, activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from decodax.models.config import DecoderConfig, NormConfig
from decodax.models.packed import multiply

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}
"""Activations without parameters, by name."""

STD = 0.02
"""Standard deviation of a random kernel or embedding."""


def weight(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str | None, ...], std: float = STD) -> nnx.Param[Array]:
    """Returns a weight with random normal values.

    Args:
        rngs: the random generators.
        shape: shape of the weight.
        axes: the logical name of each axis, for sharding; None: never sharded.
        std: standard deviation of the values.
    """
    return nnx.Param(jax.random.normal(rngs.params(), shape) * std, axes=axes)


class Linear(nnx.Module):
    """A linear layer, `x @ kernel (+ bias)`."""

    def __init__(self, rngs: nnx.Rngs, shape: tuple[int, int], axes: tuple[str | None, ...], bias: bool,
                 std: float = STD):
        self.kernel = weight(rngs, shape, axes, std)
        self.bias = nnx.Param(jnp.zeros(shape[1]), axes=axes[1:]) if bias else None

    def __call__(self, x: Array) -> Array:
        y = multiply(x, self.kernel.get_value())
        return y if self.bias is None else y + self.bias[...]


class Norm(nnx.Module):
    """A norm over the last axis; `shape` may have leading axes with separate scales."""

    def __init__(self, config: NormConfig, shape: tuple[int, ...], axes: tuple[str | None, ...]):
        self.config = config
        self.scale = (nnx.Param(jnp.full(shape, 0.0 if config.unit_offset else 1.0), axes=axes) if config.scaled
                      else None)
        self.bias = nnx.Param(jnp.zeros(shape), axes=axes) if config.bias and config.scaled else None

    def __call__(self, x: Array) -> Array:
        y = x.astype(jnp.float32)
        if self.config.kind == "layer":
            y = y - y.mean(-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + self.config.eps)
        if self.scale is not None:
            y = y * (self.scale[...].astype(jnp.float32) + (1.0 if self.config.unit_offset else 0.0))
        if self.bias is not None:
            y = y + self.bias[...].astype(jnp.float32)
        return y.astype(x.dtype)


class Kernels(nnx.Module):
    """The kernels of one projection of all experts of a mixture, stacked to `[E, in, out]`, and their biases `[E, out]`
    if it has any."""

    def __init__(self, rngs: nnx.Rngs, shape: tuple[int, int, int], axes: tuple[str | None, ...], std: float,
                 bias: bool = False):
        self.kernel = weight(rngs, shape, axes, std)
        self.bias = nnx.Param(jnp.zeros((shape[0], shape[2])), axes=(axes[0], axes[2])) if bias else None


def head_norm(c: DecoderConfig, heads: int, width: int, axis: str) -> Norm | None:
    """Returns the norm of queries or keys that `c.qk_norm` asks for, with its initial weights, or None. `heads` and
    `width` are their shape; `axis` is the logical name of the axis of heads, for sharding."""
    norm = c.qk_norm_kind or c.norm
    match c.qk_norm:
        case None:
            return None
        case "head":
            return Norm(norm, (width,), (None,))
        case "full":
            return Norm(norm, (heads * width,), (axis,))
        case "per_head":
            return Norm(norm, (heads, width), (axis, None))


def kept(inside: Callable[[Array], Any], x: Array, keep: bool | Array) -> Any:
    """Returns `inside(x)` with zeros for the rows of the batch where `keep` is False: a bool for all rows, or `bool[B
    or 1]`. If no row is kept, `inside` does not run."""
    if keep is True:
        return inside(x)
    zeros = jax.tree.map(lambda y: jnp.zeros(y.shape, y.dtype), jax.eval_shape(inside, x))
    if keep is False:
        return zeros
    y = jax.lax.cond(keep.any(), lambda: inside(x), lambda: zeros)
    if keep.shape[0] == 1:
        return y
    return jax.tree.map(lambda a, b: jnp.where(keep.reshape(-1, *[1] * (a.ndim - 1)), a, b), y, zeros)


def optional(norm: Norm | None, x: Array) -> Array:
    """Returns `norm(x)`, or `x` without a norm."""
    return x if norm is None else norm(x)
