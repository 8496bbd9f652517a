"""S3D: a model learns to predict several tokens at masks without its middle layers ("S3D: A Simple and Cost-Effective
Self-Speculative Decoding Scheme for Low-Memory GPUs", Zhong and Bharadwaj, 2024).

The model stays a language model by the ordinary loss of all its layers, to which the loss of the drafts is added. At
random places of the targets the drafting pass runs as in decoding: over a token and the masks after it, without the
middle layers, while the text before it is that of all layers. The paper's own weights of the two losses were not at
hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array

from decodax.core.types import embeddings, logits_of
from decodax.models.drafters.block_training import random_anchors
from decodax.models.drafters.prompt_tokens import LookAheadHead, middle
from decodax.train.drafting.prompt_tokens import look_ahead
from decodax.train.language_model import cross_entropy
from decodax.train.loop import cast
from decodax.train.tuning.exits import learned_mean

Tree = Any


@dataclass(frozen=True)
class SkippyLoss:
    """S3D's loss: the mean cross-entropy of next tokens by the whole model, and `weight` times that of drafts, an
    `Objective`. The third argument of a call is a random key.

    Attributes:
        network: the trained network.
        mask: id of the mask token, which must not occur in texts.
        length: number of drafts of a pass, one more than masks.
        skip: layers that the pass leaves out, counted from 0; None: the middle half.
        places: number of passes in a row.
        weight: weight of the drafts.
        dtype: dtype of the computation.

    Raises:
        ValueError: a negative id, a length below 2, or layers that the network does not have.
    """

    network: Any
    mask: int
    length: int = 5
    skip: tuple[int, ...] | None = None
    places: int = 16
    weight: float = 1.0
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.mask < 0 or self.length < 2:
            raise ValueError(f"mask, length: got {self.mask} and {self.length}, take an id, and at least 2")
        self.head.kept(self.network.depth)

    @property
    def head(self) -> LookAheadHead:
        """The drafter that the loss trains, as the decoding method takes it: `length - 1` mask tokens after the newest
        token, and the layers that the drafting pass leaves out."""
        config = self.network.config
        skip = middle(self.network.depth) if self.skip is None else tuple(sorted(set(self.skip)))
        return LookAheadHead((), config.vocab, width=config.width, heads=self.length - 1, skip=skip)

    def __call__(self, params: Tree, batch: tuple[Array, Array], extra: Array) -> tuple[Array, dict[str, Array]]:
        """Returns the loss and scalars to log, in nats: "loss", and those of next tokens and of drafts.

        Args:
            params: the weights.
            batch: tokens `i32[B, T + 1]`, and `bool[B, T + 1]`, True for tokens that are learned.
            extra: a random key.
        """
        (tokens, learned), params = batch, cast(params, self.dtype)
        places, begun = random_anchors(extra, learned[:, 1:], self.places)
        vectors = embeddings(self.network, params, jnp.full((1, self.length - 1), self.mask, jnp.int32))[0]
        out, hidden = look_ahead(self.network, params, tokens[:, :-1], places, vectors, self.head)
        plain = learned_mean(cross_entropy(out.logits(), tokens[:, 1:]), learned[:, 1:])
        at = (places[..., None] + 1 + jnp.arange(self.length)).reshape(len(tokens), -1)
        inside = jnp.minimum(at, tokens.shape[1] - 1)
        counted = (at < tokens.shape[1]) & jnp.take_along_axis(learned, inside, 1) & jnp.repeat(begun, self.length, 1)
        logits = logits_of(self.network, params, hidden.reshape(*at.shape, -1))
        drafts = learned_mean(cross_entropy(logits, jnp.take_along_axis(tokens, inside, 1)), counted)
        loss = plain + self.weight * drafts
        return loss, {"loss": loss, "plain": plain, "drafts": drafts}


__all__ = ["SkippyLoss"]
