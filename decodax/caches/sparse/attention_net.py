"""The network of AttentionPredictor, which predicts the attention of the next token from that of earlier tokens (Yang
et al., 2025; see `decodax.caches.sparse.attention_predictor`)."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from decodax.caches.constant import Constant


@dataclasses.dataclass(frozen=True)
class AttentionNet:
    """A small network that predicts which blocks of tokens will get attention: two convolutions over time (latest
    tokens) and blocks, then the mean over time, then a weighted sum of the channels.

    Attributes:
        first, first_bias: `f32[c, 1, 3, 3]` and `f32[c]`, the first convolution; `c` is 16 in the paper.
        second, second_bias: `f32[c', c, 3, 3]` and `f32[c']`, the second convolution; `c'` is 32 in the paper.
        last, last_bias: `f32[c']` and `f32[]`, the weights of the sum.
    """

    first: Constant
    first_bias: Constant
    second: Constant
    second_bias: Constant
    last: Constant
    last_bias: Constant

    @classmethod
    def of(cls, arrays: Sequence[Any]) -> AttentionNet:
        """Returns the network with the given arrays, in the order of the attributes."""
        return cls(*(Constant(np.asarray(x, np.float32)) for x in arrays))

    @property
    def arrays(self) -> tuple[Array, ...]:
        """All arrays, in the order of the attributes."""
        return tuple(jnp.asarray(getattr(self, field.name).value) for field in dataclasses.fields(self))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the arrays to a file `.npz`, by their names."""
        np.savez(path, **{field.name: getattr(self, field.name).value for field in dataclasses.fields(self)})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> AttentionNet:
        """Reads a file that `save` wrote.

        Raises:
            ValueError: the file lacks one of the arrays.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        with np.load(path, allow_pickle=False) as found:
            if lacking := [name for name in names if name not in found]:
                raise ValueError(f"net: {os.fspath(path)} has no {' and no '.join(lacking)}, takes a file that "
                                 "AttentionNet.save wrote")
            return cls.of([found[name] for name in names])


def expected(arrays: Sequence[Array], image: Array, real: Array) -> Array:
    """Returns the scores of blocks that an `AttentionNet` predicts, `f32[N, n]`.

    Args:
        arrays: the arrays of the network.
        image: `f32[N, t, n]`, images over time and blocks.
        real: `bool[t, n]` or `bool[N, t, n]`, the part of each array that belongs to the image; the rest counts as 0,
            like the padding of a convolution.
    """
    first, first_bias, second, second_bias, last, last_bias = arrays
    real = jnp.broadcast_to(real, image.shape)[:, None]

    def convolve(x: Array, kernel: Array, bias: Array) -> Array:
        x = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", precision=lax.Precision.HIGHEST)
        return jnp.where(real, jax.nn.relu(x + bias[:, None, None]), 0)

    x = convolve(convolve(jnp.where(real, image[:, None], 0), first, first_bias), second, second_bias)
    mean = x.sum(2) / jnp.maximum(real.sum(2), 1)
    return jnp.einsum("ncw,c->nw", mean, last) + last_bias
