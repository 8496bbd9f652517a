"""The tuning of an autoregressive model to fill blocks of masks after a causal text: set block decoding (SBD: Gat et
al., 2025) and SDLM (Liu et al., 2025).

The losses are those of `decodax.train.masked_diffusion` and `decodax.train.sdlm`; here they read examples. Blocks are
counted from the beginning of the target, as in decoding. If the target ends within a block, the block is filled up with
masks, so that their number does not tell the model how long the target is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array

from decodax.models import Diffusion
from decodax.train.masked_diffusion import Batch, Bound
from decodax.train.sdlm import NextSequence

Tree = Any

LOSSES: dict[str, type[Bound]] = {"sbd": Bound, "sdlm": NextSequence}
"""The loss of each decoding method."""


def block_batch(tokens: Array, learned: Array, kind: Diffusion) -> Batch:
    """Returns rows of examples as the losses of blocks take them, with `kind.block - 1` more positions.

    Args:
        tokens: `i32[B, T]`.
        learned: `bool[B, T]`, True for the tokens of the target, which is in one piece and ends the example.
        kind: the kind of diffusion model.

    >>> batch = block_batch(jnp.array([[5, 6, 7, 8, 0]]), jnp.array([[0, 1, 1, 1, 0]], bool),
    ...                     Diffusion(9, attention="causal-prefix", block=2))
    >>> batch.tokens.tolist(), batch.answer.sum(1).tolist(), batch.live.astype(int).tolist()
    ([[5, 6, 7, 8, 9, 9]], [3], [[1, 1, 1, 1, 1, 0]])
    """
    size = kind.block or 1
    tokens, learned = (jnp.pad(x, ((0, 0), (0, size - 1))) for x in (tokens, learned))
    first, count = learned.argmax(1)[:, None], learned.sum(1)[:, None]
    place = jnp.arange(tokens.shape[1])
    whole = (count + size - 1) // size * size
    tokens = jnp.where(place < first + count, tokens, kind.mask_token)
    return Batch(tokens, learned & (tokens != kind.mask_token), place < first + whole)


@dataclass(frozen=True)
class SetBlockLoss:
    """The loss of set block decoding or SDLM on examples, an `Objective`. Only tokens of targets count. The third
    argument of a call is a random key.

    Attributes:
        method: "sbd" or "sdlm".
        network: the trained network.
        mask: id of the mask token; where it occurs in a text, it is not learned.
        block: number of positions of a block.
        dtype: dtype of the computation.

    Raises:
        ValueError: another method, a network with recurrent layers, a negative id, or no block.
    """

    method: str
    network: Any
    mask: int
    block: int
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.method not in LOSSES:
            raise ValueError(f"method: got {self.method!r}, takes {' or '.join(LOSSES)}")
        if self.network.config.recurrent:
            raise ValueError(f"target: got a network with recurrent layers, which cannot read blocks beside a text; "
                             f"{self.method} takes one with attention alone")
        _ = self.kind

    @property
    def kind(self) -> Diffusion:
        """The kind of diffusion model that the network becomes."""
        return Diffusion(self.mask, self.method == "sdlm", "causal-prefix", self.block)

    @property
    def bound(self) -> Bound:
        """The loss of a `Batch`."""
        return LOSSES[self.method](self.network, self.kind, self.dtype)

    def __call__(self, params: Tree, batch: tuple[Array, Array], extra: Array) -> tuple[Array, dict[str, Array]]:
        """Returns the loss and scalars to log, in nats: those of `Bound`.

        Args:
            params: the weights.
            batch: tokens `i32[B, T]`, and `bool[B, T]`, True for tokens that are learned.
            extra: a random key.
        """
        return self.bound(params, block_batch(*batch, self.kind), extra)

    def measure(self, params: Tree, batch: tuple[Array, Array], key: Array) -> Array:
        """Returns means over the tokens that are learned, in nats: for "sbd" the bound at masks and the cross-entropy
        of next tokens, `f32[2]`; for "sdlm" the cross-entropy in blocks, `f32[1]`. Arguments are those of a call."""
        made = block_batch(*batch, self.kind)
        nats, counted, levels, _, following = self.bound.parts(params, made, key)
        if self.method == "sdlm":
            return (nats.sum() / jnp.maximum(counted.sum(), 1))[None]
        return jnp.stack([(nats / levels).sum(), following.sum()]) / jnp.maximum(made.answer.sum(), 1)


__all__ = ["SetBlockLoss", "block_batch"]
