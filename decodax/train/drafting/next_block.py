"""Training of non-autoregressive drafters (`decodax.models.drafters.mask_predictor`) on pairs of a source and a text:
SpecDec (Xia et al., 2023) and GAD (Ge et al., 2022).

A text is cut at a random place, and the next block is predicted at masks after it. The papers' texts are the target's
own outputs for the sources. In training the drafter glances at the block (Qian et al., 2021): of the more tokens of a
block it predicts wrongly, the more it is shown in a second pass, which learns the others.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.io.load import LM, load
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


MASK = "mask_token_id"
"""The entry of a drafter's `config.json` with the id of its mask token."""


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


def shallow(target: EncoderDecoder, weights: Tree, layers: int | None = None,
            encoder_layers: int | None = None) -> tuple[MaskPredictor, Tree]:
    """Returns a drafter of an encoder and a decoder like the target's, and the weights with which its training starts,
    those of the target (float32). Fewer layers than the target's are its first ones; more begin as copies of them, each
    before the next one: the papers' drafters have deep encoders, and how they begin was not at hand.

    Args:
        target: the target.
        weights: its weights.
        layers: number of decoder layers; None: 2, or as many as the target has.
        encoder_layers: number of encoder layers; None: as the target.
    """
    c = target.config
    theirs = {"decoder": c.decoder.layers, "encoder": c.encoder.layers}
    own = {"decoder": layers or min(2, c.decoder.layers), "encoder": encoder_layers or c.encoder.layers}
    config = replace(c, decoder=replace(c.decoder, layers=own["decoder"]),
                     encoder=replace(c.encoder, layers=own["encoder"]))
    kept: dict[str, Array] = {}
    for name, x in flatten(weights).items():
        found = re.fullmatch(r"(encoder|decoder)\.layers\.(\d+)\.(.+)", name)
        names = [name]
        if found is not None:
            stack, layer, part = found.groups()
            count = own[stack]
            names = [f"{stack}.layers.{i}.{part}" for i in range(count)
                     if i * min(theirs[stack], count) // count == int(layer)]
        kept |= dict.fromkeys(names, jnp.asarray(x, jnp.float32))
    return MaskPredictor(config), nested(kept)


def load_shallow(directory: str, network: MaskPredictor, mask: int | None = None) -> tuple[Tree, int | None]:
    """Returns the weights (float32) of a drafter in a directory, to train it further, and its mask token.

    Args:
        directory: a directory that `save_shallow` wrote.
        network: the drafter's network.
        mask: id of the mask token; None: that of the directory.

    Raises:
        ValueError: a drafter of another shape, or with another mask token.
    """
    lm = load(directory, dtype="float32")
    if not isinstance(lm.model, EncoderDecoder) or lm.model.config != network.config:
        raise ValueError(f"start: got {directory!r}, a model of another shape; takes an encoder-decoder with "
                         f"{network.config.encoder.layers} and {network.config.decoder.layers} layers like the target")
    known = lm.config_entries.get(MASK)
    if mask is not None and known not in (None, mask):
        raise ValueError(f"mask: got {mask}, and {directory!r} was trained with {known}; takes that one")
    return lm.params, known if mask is None else mask


def as_model(lm: LM, network: MaskPredictor, weights: Tree, mask: int) -> LM:
    """Returns a drafter as a model that `decodax.save` writes.

    Args:
        lm: the target.
        network: the drafter's network.
        weights: its weights.
        mask: the mask token's id.
    """
    t5 = "num_layers" in lm.config_entries
    names = ("num_layers", "num_decoder_layers") if t5 else ("encoder_layers", "decoder_layers")
    depths = dict(zip(names, (network.config.encoder.layers, network.config.decoder.layers), strict=True))
    return replace(lm, model=EncoderDecoder(network.config), directory=None, params=jax.tree.map(np.asarray, weights),
                   entries={**lm.config_entries, **depths, MASK: mask})


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


__all__ = ["NextBlock", "as_model", "load_shallow", "pairs_of", "predicted", "shallow"]
