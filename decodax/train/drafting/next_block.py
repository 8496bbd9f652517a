"""Training of non-autoregressive drafters (`decodax.models.drafters.mask_predictor`) on pairs of a source and a text:
SpecDec (Xia et al., 2023) and GAD (Ge et al., 2022).

A text is cut at a random place, and the next block is predicted at masks after it. The papers' texts are the target's
own outputs for the sources. The authors' code also reveals part of the block in training (glancing), which is left out
here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.models.drafters.mask_predictor import MaskPredictor, masked_block
from decodax.models.encoder_decoder.network import EncoderDecoder
from decodax.models.inputs import EncoderText
from decodax.models.names import flatten
from decodax.models.weight_source import nested
from decodax.train.drafting.blocks import key_of
from decodax.train.language_model import cross_entropy
from decodax.train.loop import cast
from decodax.train.tuning import Example

Tree = Any
Batch = tuple[Array, Array, Array, Array]
"""The sources `i32[B, S]`, the numbers of their tokens `i32[B]`, the texts `i32[B, T]`, which begin with the token that
the decoder begins with, and the numbers of their tokens, at least 2."""


@dataclass(frozen=True)
class NextBlock:
    """The loss of a drafter that predicts a block at masks, at one random place of each text.

    Attributes:
        network: the drafter.
        drafts: number of masks `K`.
        mask: the mask token's id.
        dtype: dtype of the computation.
    """

    network: MaskPredictor
    drafts: int
    mask: int
    dtype: str = "float32"

    @property
    def steps(self) -> int:
        """Number of masks."""
        return self.drafts

    def __call__(self, params: Tree, batch: Batch, extra: Any) -> tuple[Array, dict[str, Array]]:
        """Returns the cross-entropy, a mean over masks with a token to predict, and scalars to log: "loss", and for
        each mask the share of likeliest tokens that are the text's, "accepted_1" and so on.

        Args:
            params: the drafter's weights.
            batch: the pairs.
            extra: not used.
        """
        _, _, tokens, length = batch
        share = jax.random.uniform(key_of(tokens), length.shape)
        place = length - (share * (length - 1)).astype(jnp.int32) - 1          # 1 to length - 1
        logits, labels = predicted(self.network, cast(params, self.dtype), batch, place, self.drafts, self.mask)
        live = labels >= 0
        many = jnp.maximum(live.sum(0), 1)
        right = ((logits.argmax(-1) == labels) & live).sum(0) / many
        loss = jnp.where(live, cross_entropy(logits, jnp.maximum(labels, 0)), 0).sum() / jnp.maximum(live.sum(), 1)
        return loss, {"loss": loss, **{f"accepted_{k + 1}": x for k, x in enumerate(right)}}


def predicted(network: MaskPredictor, params: Tree, batch: Batch, place: Array, count: int,
              mask: int) -> tuple[Array, Array]:
    """Returns the drafter's logits `f32[B, K, V]` for the `count` tokens from `place` (`i32[B]`) on, given the tokens
    before, and these tokens `i32[B, K]`, -1 after the end of the text."""
    source, size, tokens, length = batch
    cache = network.init_cache(tokens.shape[0], 0, params=params, inputs=EncoderText(tokens=source, length=size))
    out = network.apply(params, masked_block(tokens, place, count, mask), cache)
    at = place[:, None] + jnp.arange(count, dtype=jnp.int32)
    labels = jnp.take_along_axis(tokens, jnp.minimum(at, tokens.shape[1] - 1), 1)
    return out.logits(at), jnp.where(at < length[:, None], labels, -1)


def shallow(target: EncoderDecoder, weights: Tree, layers: int = 2) -> tuple[MaskPredictor, Tree]:
    """Returns a drafter with the target's encoder and the first layers of its decoder, and the weights with which its
    training starts, those of the target (float32)."""
    decoder = target.config.decoder
    config = replace(target.config, decoder=replace(decoder, layers=min(layers, decoder.layers)))
    kept = {name: jnp.asarray(x, jnp.float32) for name, x in flatten(weights).items()
            if not name.startswith("decoder.layers.") or int(name.split(".")[2]) < config.decoder.layers}
    return MaskPredictor(config), nested(kept)


def pairs_of(examples: Sequence[Example], start: int, longest: int) -> tuple[np.ndarray, ...]:
    """Returns pairs as the arrays of a batch. Sources and texts are cut to `longest` tokens; `start` is the token that
    the decoder begins with.

    Raises:
        ValueError: no examples, or one that has no prompt or no target.
    """
    if not examples or any(not 0 < example.prompt < len(example.tokens) for example in examples):
        raise ValueError('data: takes pairs, lines with "prompt" and "target" in .jsonl files')
    sources = [example.tokens[:example.prompt][:longest] for example in examples]
    texts = [(start, *example.tokens[example.prompt:])[:longest] for example in examples]
    found: list[np.ndarray] = []
    for rows in (sources, texts):
        table = np.zeros((len(rows), max(map(len, rows))), np.int32)
        for row, tokens in zip(table, rows, strict=True):
            row[:len(tokens)] = tokens
        found += [table, np.array([len(row) for row in rows], np.int32)]
    return tuple(found)


__all__ = ["NextBlock", "pairs_of", "predicted", "shallow"]
