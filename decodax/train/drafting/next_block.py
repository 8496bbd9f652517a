"""Training of non-autoregressive drafters (`decodax.models.drafters.mask_predictor`) on pairs of a source and a text:
SpecDec (Xia et al., 2023) and GAD (Ge et al., 2022).

A text is cut at a random place, and the next block is predicted at masks after it. The papers' texts are the target's
own outputs for the sources. In training the drafter glances at the block (Qian et al., 2021): of the more tokens of a
block it predicts wrongly, the more it is shown in a second pass, which learns the others.
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
        glance: probability with which a token is shown in a block whose tokens are all predicted wrongly, at the
            beginning of the run and at its end; between them it is linear. Those of the authors' code.
    """

    network: MaskPredictor
    drafts: int
    mask: int
    dtype: str = "float32"
    glance: tuple[float, float] = (0.5, 0.3)

    @property
    def steps(self) -> int:
        """Number of tokens that the drafter predicts at a place, one for each mask."""
        return self.drafts

    def __call__(self, params: Tree, batch: Batch, extra: Any) -> tuple[Array, dict[str, Array]]:
        """Returns the cross-entropy, a mean over masks with a token to predict, and scalars to log: "loss", and for
        each mask the share of likeliest tokens that are the text's, without a glance, "accepted_1" and so on.

        Args:
            params: the drafter's weights.
            batch: the pairs.
            extra: share of the run that is done, `f32[]`; None: the loss is without a glance.
        """
        _, _, tokens, length = batch
        key, glance = jax.random.split(key_of(tokens))
        share = jax.random.uniform(key, length.shape)
        place = length - (share * (length - 1)).astype(jnp.int32) - 1          # 1 to length - 1
        own = cast(params, self.dtype)
        logits, labels = predicted(self.network, own, batch, place, self.drafts, self.mask)
        live = labels >= 0
        many = jnp.maximum(live.sum(0), 1)
        right = ((logits.argmax(-1) == labels) & live).sum(0) / many
        if extra is not None:
            shown = self.shown(glance, jax.lax.stop_gradient(logits), labels, extra)
            logits, live = predicted(self.network, own, batch, place, self.drafts, self.mask, shown)[0], live & ~shown
        loss = jnp.where(live, cross_entropy(logits, jnp.maximum(labels, 0)), 0).sum() / jnp.maximum(live.sum(), 1)
        return loss, {"loss": loss, **{f"accepted_{k + 1}": x for k, x in enumerate(right)}}

    def shown(self, key: Array, logits: Array, labels: Array, done: Array) -> Array:
        """Returns the tokens of a block that are shown, `bool[B, K]`, each with a probability that is the share of
        wrong predictions in its block times `glance`.

        Args:
            key: a random key.
            logits: `f32[B, K, V]`, predictions without a glance.
            labels: `i32[B, K]`, the tokens, -1 after the end of the text.
            done: share of the run that is done, `f32[]`.
        """
        live = labels >= 0
        wrong = ((logits.argmax(-1) != labels) & live).sum(1) / jnp.maximum(live.sum(1), 1)
        most = self.glance[0] + (self.glance[1] - self.glance[0]) * done
        return live & (jax.random.uniform(key, labels.shape) < (most * wrong)[:, None])


def predicted(network: MaskPredictor, params: Tree, batch: Batch, place: Array, count: int, mask: int,
              shown: Array | None = None) -> tuple[Array, Array]:
    """Runs the drafter on mask tokens in place of the `count` tokens from position `place` (`i32[B]`) on of each text,
    after the text before. Returns its logits `f32[B, K, V]` and the text's tokens `i32[B, K]`, -1 after its end; `K` is
    `count`. Where `shown` (`bool[B, K]`) is True, the input is the token and not a mask."""
    source, size, tokens, length = batch
    cache = network.init_cache(tokens.shape[0], 0, params=params, inputs=EncoderText(tokens=source, length=size))
    window = masked_block(tokens, place, count, mask)
    at = place[:, None] + jnp.arange(count, dtype=jnp.int32)
    labels = jnp.take_along_axis(tokens, jnp.minimum(at, tokens.shape[1] - 1), 1)
    if shown is not None:
        given = jnp.where(shown, labels, mask)
        window = window.replace(tokens=jax.vmap(lambda row, at, x: row.at[at].set(x))(window.tokens, at, given))
    out = network.apply(params, window, cache)
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
