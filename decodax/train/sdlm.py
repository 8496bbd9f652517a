"""The training of SDLM ("Sequential Diffusion Language Models", Liu et al., 2025): an autoregressive model learns to
predict the next tokens of a text at once, from its last token and masks.

Noise blocks stand beside the text: each has a copy of a token and masks in place of those after it, attends to the text
before that token and to itself, and predicts the tokens after it, each position the next one. The text is causal and
has no loss of its own; the first position of a block predicts as an autoregressive model does. One forward pass has the
blocks of a row side by side. The authors draw the beginnings of blocks at random, two times as many positions as an
answer has; here the blocks of a row follow each other from a random offset, so a step predicts every token once.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from decodax.train.language_model import cross_entropy
from decodax.train.loop import cast
from decodax.train.masked_diffusion import Batch, Bound, Tree, visible_twice


@dataclass(frozen=True)
class NextSequence(Bound):
    """SDLM's loss: the cross-entropy of the tokens of an answer, each predicted at a random place of a block of
    `kind.block` positions, averaged over a row and then over rows. With more than one token a block it is that of a
    model which writes the tokens of a block independently of one another.

    Raises:
        ValueError: another kind of model.
    """

    def __post_init__(self) -> None:
        kind = self.kind
        if kind.attention != "causal-prefix" or not kind.shift or kind.block is None or self.apart:
            raise ValueError(f"kind, apart: got {kind} and {self.apart}, take causal-prefix attention with blocks and "
                             "shift, and 0")

    def parts(self, params: Tree, batch: Batch, key: Array) -> tuple[Array, Array, Array, Array, Array]:
        """Draws the offset of each row's blocks and returns five arrays `[B, T]`.

        Returns:
            The cross-entropy in nats, 0 at positions that are not predicted; True where a token is predicted; ones;
            True where it is predicted correctly; zeros.
        """
        (B, T), size = batch.tokens.shape, self.kind.block or 1
        noisy, first = self.noise(key, batch)
        wide = noisy.shape[1]
        place = jnp.broadcast_to(jnp.arange(wide, dtype=jnp.int32), noisy.shape)
        clean, live = (jnp.pad(x, ((0, 0), (0, wide - T))) for x in (batch.tokens, batch.live))
        at = (place - first) // size
        seen = jnp.concatenate([jnp.ones_like(live), live], 1)[:, None, :] | jnp.eye(2 * wide, dtype=bool)
        hidden, head = self.network.features(
            cast(params, self.dtype), jnp.concatenate([noisy, clean], 1), jnp.concatenate([place, place], 1),
            visible_twice(jnp.ones_like(live), at, causal=True) & seen)
        logits = head(hidden[:, :T - 1]).at[..., self.kind.mask_token].set(-jnp.inf)
        # a block that begins before the text has no token to begin with
        whole = (first + at * size >= 0)[:, :T - 1]
        counted = batch.answer[:, 1:] & whole
        own = jnp.where(counted, cross_entropy(logits, jnp.where(counted, batch.tokens[:, 1:], 0)), 0.0)
        later = lambda x: jnp.pad(x, ((0, 0), (1, 0)))
        right = later(counted & (logits.argmax(-1) == batch.tokens[:, 1:]))
        return later(own), later(counted), jnp.ones((B, T)), right, jnp.zeros((B, T))

    def noise(self, key: Array, batch: Batch) -> tuple[Array, Array]:
        """Returns the text with all but the first token of each block masked, `i32[B, T + block - 1]`, padded so that
        the last block is whole, and the position at which the first block begins, `i32[B, 1]`: that of the token before
        the answer, or a random number of up to `block - 1` tokens before that."""
        B, size = len(batch.tokens), self.kind.block or 1
        offset = jax.random.randint(key, (B, 1), 0, size)
        first = jnp.maximum(batch.answer.argmax(1, keepdims=True), 1) - 1 - offset
        tokens = jnp.pad(batch.tokens, ((0, 0), (0, size - 1)))
        begins = (jnp.arange(tokens.shape[1]) - first) % size == 0
        return jnp.where(begins, tokens, self.kind.mask_token), first


__all__ = ["NextSequence"]
