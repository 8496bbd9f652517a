"""Image tokens of a prompt go, more of them in layers that look at them less ("PLPHP: Per-Layer Per-Head Vision Token
Pruning for Efficient Large Vision-Language Models", Meng et al., 2025).

When a prompt has been read, a layer is told by the attention that its newest token pays to all image tokens, in the
mean over heads. An attentive layer keeps a larger share of them, an indifferent one a smaller share, and one between
the two the share itself; which ones, each head says for itself by the same attention. Text stays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array

from decodax.cache.key_values import KVLayer
from decodax.caches.evict.evicting import Evicting
from decodax.caches.evict.held import HeldLayer
from decodax.caches.evict.scores import Gathered, TokenScore
from decodax.caches.evict.selection import Selection, best, whole
from decodax.core.cache import ReadPrompt


@dataclasses.dataclass(frozen=True)
class ImageAttention(TokenScore):
    """The attention of the newest query to a token, in the mean over a group of heads; and whether the token is one of
    an image (`Gathered.slots`).

    Attributes:
        image: the first and the last id of image tokens.
    """

    image: tuple[int, int]

    @property
    def latest(self) -> int:
        return 1

    def start(self, shape: KVLayer, batch: int, slots: int) -> Gathered:
        return Gathered(slots=jnp.zeros((batch, shape.heads, slots), bool))

    def consult(self, cache: Evicting, prompt: ReadPrompt) -> Sequence[Gathered]:
        first, last = self.image
        image = (prompt.tokens >= first) & (prompt.tokens <= last)
        each = jax.vmap(lambda image, at: image[jnp.clip(at, 0, len(image) - 1)] & (at >= 0))
        return [own.replace(slots=each(image, at)) for own, at in zip(cache.gathered, cache.positions, strict=True)]

    def __call__(self, held: HeldLayer) -> Array:
        return held.attention()[:, :, -1].mean(1)


@dataclasses.dataclass(frozen=True)
class ImageShares(Selection):
    """All text, and of the image tokens a share by layer.

    Attributes:
        rate: the share that a layer keeps. change: how much more an attentive layer keeps, and an indifferent one less.
        attentive, indifferent: the attention to image tokens from which, and up to which, a layer is so called.
    """

    score: ImageAttention
    rate: float
    change: float
    attentive: float
    indifferent: float

    def __post_init__(self) -> None:
        if not 0 <= self.rate - self.change <= self.rate + self.change <= 1:
            raise ValueError(f"rate, change: got {self.rate} and {self.change}, takes shares from 0 to 1, and 0 or "
                             "more")
        if not 0 <= self.indifferent < self.attentive <= 1:
            raise ValueError(f"indifferent, attentive: got {self.indifferent} and {self.attentive}, takes a smaller "
                             "and a larger share of attention")

    def choose(self, held: HeldLayer, count: Array) -> Array:
        paid, valid = self.score(held), held.valid
        image = held.gathered.slots & valid
        seen = jnp.where(image, paid, 0).sum(-1).mean()
        share = self.rate + self.change * ((seen >= self.attentive).astype(jnp.float32) - (seen <= self.indifferent))
        # what there is room for: image tokens give way first, and then the first ones of the text
        text = best(jnp.zeros(valid.shape), valid & ~image, count)
        number = jnp.minimum(whole(image.sum(-1), share), count - text.sum(-1))     # type: ignore[arg-type]
        return text | best(paid, image, number)
