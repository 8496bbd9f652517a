"""Inputs of models beside tokens, for each row: embeddings, the text of an encoder, adapters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.common.struct import Struct, struct
from decodax.core.window import take


@struct
class Embeddings(Struct):
    """Inputs of a `Transformer`: embeddings that replace those of tokens at the first positions of each row.

    They may be a soft prompt or an image. The token ids at these positions are only visible to the sampling policy.

    Attributes:
        values: `f[B, T, D]`, with the scale of the rows of the embedding table.
        given: `bool[B, T]`, True where an embedding replaces the token's.
    """

    values: Array
    given: Array

    def at(self, positions: Array) -> tuple[Array, Array]:
        """Returns the embeddings `f[B, W, D]` at positions `i32[B, W]`, and `bool[B, W]`, True where there is one."""
        T = self.values.shape[1]
        index = jnp.minimum(positions, T - 1)
        return take(self.values, index), take(self.given, index) & (positions < T)


@struct
class EncoderText(Struct):
    """Inputs of a `T5`, and of a `Transformer` with prefix linear attention: the text of the encoder for each row.

    Attributes:
        tokens: `i32[B, T]`, left-aligned.
        length: `i32[B]`, number of tokens, at least 1.
    """

    tokens: Array
    length: Array

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> EncoderText:
        """Makes the inputs from lists of token ids."""
        most = max(map(len, rows))
        return cls(tokens=np.array([[*row, *[0] * (most - len(row))] for row in rows], np.int32),       # type: ignore[arg-type]
                   length=np.array([len(row) for row in rows], np.int32))       # type: ignore[arg-type]


@struct
class AdapterRows(Struct):
    """Inputs of a `Transformer` with several adapters: the adapter of each row; see `decodax.adapters`.

    Attributes:
        which: `i32[B]`, the adapter's number; 0 is none.
    """

    which: Array


def named(inputs: Any) -> str:
    """Returns the description of inputs of a wrong type, for errors. An array that is being traced is called "an
    array"."""
    return "an array" if isinstance(inputs, (Array, np.ndarray)) else f"a {type(inputs).__name__}"
