"""The network of SpecDec's Spec-Drafter and of GAD's non-autoregressive drafter: an encoder-decoder that predicts the
next block of a text at mask tokens after it, in one pass (Xia et al., 2023; Ge et al., 2022).

The drafter has an encoder of its own, usually deep, and few decoder layers. Its decoder has no causal mask: the text
and the masks see each other, so all of the text is read again in every round.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from decodax.core.window import Window, bidirectional
from decodax.models.encoder_decoder.config import Stack
from decodax.models.encoder_decoder.network import EncoderDecoder
from decodax.models.transformer import Weights


@dataclasses.dataclass(frozen=True)
class MaskPredictor(EncoderDecoder):
    """An encoder-decoder whose decoder reads in both directions. Weights and inputs are those of `EncoderDecoder`."""

    @classmethod
    def of(cls, network: EncoderDecoder) -> MaskPredictor:
        """Returns a `MaskPredictor` with the configuration of an encoder-decoder, whose weights it takes unchanged."""
        return cls(**{field.name: getattr(network, field.name) for field in dataclasses.fields(EncoderDecoder)})

    def _bias(self, stack: Stack, p: Weights, *, both: bool) -> Any:
        return super()._bias(stack, p, both=True)       # relative positions tell later tokens from earlier ones


def masked_block(tokens: Array, length: Array, count: int, mask: int) -> Window:
    """Returns the inputs of a forward pass over texts with `count` mask tokens appended to each; all of these tokens
    attend to one another.

    >>> w = masked_block(jnp.array([[7, 8, 9]]), jnp.array([2]), 2, 5)
    >>> w.tokens.tolist(), w.live.tolist()
    ([[7, 8, 5, 5, 5]], [[True, True, True, True, False]])

    Args:
        tokens: `i32[B, N]`, the texts.
        length: `i32[B]`, numbers of their tokens.
        count: number of masks.
        mask: the mask token's id.
    """
    at = jnp.arange(tokens.shape[1] + count, dtype=jnp.int32)
    text = jnp.pad(tokens, ((0, 0), (0, count)))
    live = at < length[:, None] + count
    return bidirectional(jnp.where(at < length[:, None], text, mask), jnp.zeros_like(length), live)


__all__ = ["MaskPredictor", "masked_block"]
