"""Collects statistics of a model's kernels on text, for weight formats that need calibration.

An observed kernel multiplies as its array does. It has another argument `seen`, which is zeros and changes no product.
The derivative of the loss with respect to `seen` is defined to be the statistic of the kernel's inputs and of the
gradients at its outputs. So one backward pass collects the statistics of all kernels, in every network that calls
`multiply`, within loops and conditionals, on any mesh.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.common.struct import static, struct
from decodax.models.diffusion import Diffusion
from decodax.models.names import flatten
from decodax.models.packed import Packed
from decodax.models.transformer import Transformer, Weights
from decodax.models.weight_source import kernel_of


class Statistic(abc.ABC):
    """Base class of a statistic that `observe` collects for kernels, each with `K` inputs and `N` outputs, such as the
    mean square of the inputs. It is hashable and compared by value."""

    @abc.abstractmethod
    def of(self, x: Array, gradient: Array) -> Any:
        """Returns the statistic of some rows, arrays `f32[...]`, which are summed over all rows of a sequence.

        Args:
            x: `f[R, K]`, rows that were multiplied.
            gradient: `f[R, N]`, gradient of the sequence's loss with respect to the products. Padding rows, as in the
                blocks of experts, are zeros.
        """

    def each(self, total: Any) -> Any:
        """Returns the contribution of a sequence to the result, from the sum `total` over its rows."""
        return total


@struct
class Observed(Packed):
    """A kernel whose inputs and gradients are observed."""

    kernel: Array
    seen: Any
    what: Statistic = static()

    @property
    def shape(self) -> tuple[int, ...]:
        *above, K, N = self.kernel.shape
        return *above, N, K

    def values(self, dtype: Any) -> Array:
        return jnp.swapaxes(self.kernel, -1, -2).astype(dtype)

    def rows(self, which: Array, dtype: Any) -> Array:
        return self.kernel.T[which].astype(dtype)

    def product(self, x: Array, dtype: Any) -> Array:
        return _multiplied(self.what, x, self.kernel, self.seen).astype(dtype)

    def times(self, x: Array, dtype: Any) -> Array:
        return self.product(x, dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiplied(what: Statistic, x: Array, kernel: Array, seen: Any) -> Array:
    return x @ kernel


def _forward(what: Statistic, x: Array, kernel: Array, seen: Any) -> tuple[Array, tuple[Array, Array]]:
    return x @ kernel, (x, kernel)


def _backward(what: Statistic, kept: tuple[Array, Array], gradient: Array) -> tuple[Array, Array, Any]:
    x, kernel = kept
    return gradient @ kernel.T, jnp.zeros_like(kernel), what.of(x.astype(jnp.float32), gradient.astype(jnp.float32))


_multiplied.defvjp(_forward, _backward)


def nothing(shape: tuple[int, ...], what: Statistic) -> Any:
    """Returns the statistic of a kernel of shape `[K, N]`, or `[E, K, N]`, without any data: zeros."""
    *experts, K, N = shape
    shapes = jax.eval_shape(what.of, *(jax.ShapeDtypeStruct((1, n), jnp.float32) for n in (K, N)))
    return jax.tree.map(lambda s: jnp.zeros((*experts, *s.shape), s.dtype), shapes)


def observe(model: Transformer, params: Weights, tokens: np.ndarray, what: Statistic, paths: Collection[str],
            diffusion: Diffusion | None = None, report: Callable[[int], None] = lambda done: None) -> dict[str, Any]:
    """Returns the statistic of each kernel, summed over sequences.

    The loss of a sequence is the mean of its tokens' cross-entropies. For a masked diffusion model it is the mean over
    masked tokens, whose share is drawn for each sequence between 15% and all, from a fixed seed.

    Args:
        model: the network.
        params: its weights.
        tokens: `i32[S, T]`, one sequence in each row, `T` at least 2.
        what: the statistic.
        paths: dotted paths of kernels.
        diffusion: masked diffusion settings; None: the model is autoregressive.
        report: called with the number of sequences that are done.

    Raises:
        ValueError: a masked diffusion model with a kind of attention for which no loss is defined.
    """
    if diffusion is not None and diffusion.attention not in ("full", "block-causal"):
        raise ValueError(f"lm: got {diffusion.attention} attention, takes a model with full or block-causal attention, "
                         "or an autoregressive one")
    leaves, structure = flatten(params), jax.tree.structure(params, is_leaf=lambda x: isinstance(x, Packed))
    zeros = {path: nothing(kernel_of(path, leaves[path]).shape, what) for path in paths}
    total = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype),
                         jax.eval_shape(lambda: {path: what.each(seen) for path, seen in zeros.items()}))

    @jax.jit
    def one(leaves: dict[str, Any], zeros: dict[str, Any], total: dict[str, Any], row: Array,
            key: Array) -> dict[str, Any]:
        def loss(seen: dict[str, Any]) -> Array:
            own = {path: Observed(kernel=kernel_of(path, leaf), seen=seen[path], what=what) if path in seen else leaf
                   for path, leaf in leaves.items()}
            return mean_loss(model, jax.tree.unflatten(structure, own.values()), row, diffusion, key)

        added = jax.grad(loss)(zeros)
        return jax.tree.map(jnp.add, total, {path: what.each(found) for path, found in added.items()})

    for i, row in enumerate(tokens):
        total = one(leaves, zeros, total, jnp.asarray(row[None], jnp.int32), jax.random.key(i))
        report(i + 1)
    return total


def mean_loss(model: Transformer, params: Weights, tokens: Array, diffusion: Diffusion | None, key: Array) -> Array:
    """Returns the mean cross-entropy of one sequence `i32[1, T]`, `f32[]`: of all next tokens, or for a masked
    diffusion model of the tokens that are masked, which `key` draws."""
    if diffusion is None:
        return _cross_entropy(model.forward(params, tokens[:, :-1]), tokens[:, 1:]).mean()
    T = tokens.shape[1]
    some, one, share = jax.random.split(key, 3)
    hidden = jax.random.uniform(some, tokens.shape) < jax.random.uniform(share, (), minval=0.15, maxval=1.0)
    hidden = hidden.at[:, jax.random.randint(one, (), int(diffusion.shift), T)].set(True)       # at least one
    block = jnp.arange(T) // (diffusion.block or T)
    logits = model.forward(params, jnp.where(hidden, diffusion.mask_token, tokens),
                           mask=(block[:, None] >= block)[None])
    if diffusion.shift:
        logits, tokens, hidden = logits[:, :-1], tokens[:, 1:], hidden[:, 1:]
    return (_cross_entropy(logits, tokens) * hidden).sum() / hidden.sum()


def _cross_entropy(logits: Array, tokens: Array) -> Array:
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1)[..., 0]
