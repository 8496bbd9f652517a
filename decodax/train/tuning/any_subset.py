"""The training of any-subset models (Guo and Ermon, 2025), as in their paper with the order of decoding from left to
right: a random share of the target is hidden, and each hidden token is predicted after the known ones and the hidden
ones before it. A row takes one forward pass in two streams (`decodax.algorithms.diffusion.samplers.assd`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from decodax.core.window import Window
from decodax.train.language_model import cross_entropy
from decodax.train.loop import cast
from decodax.train.tuning.examples import spare_tokens, unused_tokens
from decodax.train.tuning.exits import learned_mean

Tree = Any


def two_stream(tokens: Array, ranks: Array, live: Array, asked: Array, limits: Array, mask: int) -> Window:
    """Returns the input of a forward pass over texts with `K` further nodes: mask tokens at whose positions the model
    is to predict the text's token.

    Args:
        tokens: `i32[B, N]`.
        ranks: `i32[B, N]`, place of each token in the order of decoding; 0 for given tokens. A token attends to those
            of its own rank and below.
        live: `bool[B, N]`, the tokens that are known.
        asked: `i32[B, K]`, positions of the tokens that are asked for.
        limits: `i32[B, K]`; a further node attends to the text's tokens of ranks below this, and to itself.
        mask: id of the mask token.
    """
    (B, N), K = tokens.shape, asked.shape[1]
    own = jnp.broadcast_to(jnp.eye(K, dtype=bool), (B, K, K))
    text = jnp.pad(ranks[:, None, :] <= ranks[:, :, None], ((0, 0), (0, 0), (0, K)))
    asking = jnp.concatenate([ranks[:, None, :] < limits[:, :, None], own], 2)
    here = jnp.broadcast_to(jnp.arange(N, dtype=jnp.int32), (B, N))
    return Window(tokens=jnp.pad(tokens, ((0, 0), (0, K)), constant_values=mask),
                  positions=jnp.concatenate([here, asked], 1), mask=jnp.concatenate([text, asking], 1),
                  live=jnp.pad(live, ((0, 0), (0, K)), constant_values=True))


@dataclass(frozen=True)
class AnySubsetLoss:
    """The cross-entropy of hidden tokens, an `Objective`. The third argument of a call is a random key.

    Attributes:
        network: the trained network.
        mask: id of the mask token; where it occurs in a text, it is never hidden.
        least: smallest share of a target that is hidden; the share of a row is uniform from there to 1.
        dtype: dtype of the computation.

    Raises:
        ValueError: a negative id, or a share out of range.
    """

    network: Any
    mask: int
    least: float = 0.0
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.mask < 0 or not 0 <= self.least <= 1:
            raise ValueError(f"mask, least: got {self.mask} and {self.least}, take an id, and 0 to 1")

    def hidden(self, key: Array, learned: Array) -> Array:
        """Returns True for tokens that are replaced by masks, `bool[B, T]`: a random choice among those where
        `learned`, `bool[B, T]`, is True, with a random share in each row."""
        share, which = jax.random.split(key)
        shares = jax.random.uniform(share, (len(learned), 1), minval=self.least)
        return learned & (jax.random.uniform(which, learned.shape) < shares)

    def __call__(self, params: Tree, batch: tuple[Array, Array], extra: Array) -> tuple[Array, dict[str, Array]]:
        """Returns the loss and scalars to log, in nats.

        Args:
            params: the weights.
            batch: tokens `i32[B, T]`, and `bool[B, T]`, True for tokens that are learned.
            extra: a random key.
        """
        tokens, learned = batch
        hidden = self.hidden(extra, learned & (tokens != self.mask))
        ranks = jnp.where(hidden, jnp.cumsum(hidden, 1), 0)
        # no token is known after the end of an example
        live = jnp.flip(jnp.flip(learned, 1).astype(jnp.int32).cumsum(1), 1) > 0
        asked = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        out = self.network.apply(cast(params, self.dtype), two_stream(tokens, ranks, live, asked, ranks, self.mask),
                                 self.network.init_cache(len(tokens), 0))
        logits = out.logits(asked + tokens.shape[1]).at[..., self.mask].set(-jnp.inf)      # as in decoding
        loss = learned_mean(cross_entropy(logits, tokens), hidden)
        return loss, {"loss": loss}


def mask_token(lm: Any, texts: Iterable[int], mask: int | None = None) -> int:
    """Returns the mask token of a model that is tuned to predict at masks: `mask` if it is given, the padding token, or
    if that begins or ends texts or is in them, an unused one. Only if the texts have all tokens may the given one be
    in them, too.

    Args:
        lm: the model, with a tokenizer.
        texts: the tokens of all texts.
        mask: the token's id.

    Raises:
        ValueError: the model has no token with the given id, or the texts have it and not all others; or no id is given
            and they have all tokens.
    """
    known = set(texts)
    if mask is None:
        return unused_tokens(lm, known)[0] if lm.pad in (*lm.eos, lm.bos, *known) else int(lm.pad)
    if not 0 <= mask < lm.vocab_size:
        raise ValueError(f"mask: got {mask}, takes an id from 0 to {lm.vocab_size - 1}")
    if mask in known and (spare := spare_tokens(lm, known)):
        raise ValueError(f"mask: got {mask}, which the data has; takes an id that it does not have, such as {spare[0]}")
    return mask


__all__ = ["AnySubsetLoss", "mask_token"]
