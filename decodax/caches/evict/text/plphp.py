"""PLPHP: evicts image tokens of a prompt, more of them in layers that attend to them less ("PLPHP: Per-Layer Per-Head
Vision Token Pruning for Efficient Large Vision-Language Models", Meng et al., 2025).

After a prompt, a layer is judged by the attention of the newest token to all image tokens, in the mean over heads. An
attentive layer keeps a larger share of the image tokens, an indifferent one a smaller share. Each head chooses its own
tokens, by the same attention. Text tokens are kept.

No code is public; what the paper leaves open is an option.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array

from decodax.cache.key_values import KVLayer
from decodax.caches.evict.evicting import Evicting, Eviction
from decodax.caches.evict.scores import Gathered, HeldLayer, TokenScore, by_slot
from decodax.caches.evict.selection import Budget, Selection, best, whole
from decodax.common.options import Share, TokenId, Whole
from decodax.common.registry import CACHES
from decodax.core.capabilities import ReadPrompt

EVERYTHING = 1 << 30
"""A budget in tokens that no text has."""


@dataclasses.dataclass(frozen=True)
class ImageAttention(TokenScore):
    """Scores a token by the attention of the newest query, in the mean over a group of heads. `Gathered.slots` is True
    for image tokens.

    Attributes:
        image: first and last id of the range of image tokens.
    """

    image: tuple[int, int]

    @property
    def latest(self) -> int:
        return 1

    def start(self, shape: KVLayer, batch: int, slots: int) -> Gathered:
        return Gathered(slots=jnp.zeros((batch, shape.heads, slots), bool))

    def consult(self, cache: Evicting, prompt: ReadPrompt) -> Sequence[Gathered]:
        first, last = self.image
        return by_slot(cache, (prompt.tokens >= first) & (prompt.tokens <= last))

    def __call__(self, held: HeldLayer) -> Array:
        return held.attention()[:, :, -1].mean(1)


@dataclasses.dataclass(frozen=True)
class ImageShares(Selection):
    """Keeps all text tokens, and a share of the image tokens that depends on the layer.

    Attributes:
        score: score of the tokens.
        rate: share of image tokens that a layer keeps.
        change: added to `rate` in attentive layers, subtracted from it in indifferent ones.
        attentive: minimum attention to image tokens of an attentive layer.
        indifferent: maximum attention to image tokens of an indifferent layer.
    """

    score: ImageAttention
    rate: Share
    change: Share
    attentive: Share
    indifferent: Share

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.rate - self.change <= self.rate + self.change <= 1:
            raise ValueError(f"rate, change: got {self.rate} and {self.change}, takes shares from 0 to 1, and 0 or "
                             "more")
        if not self.indifferent < self.attentive:
            raise ValueError(f"indifferent, attentive: got {self.indifferent} and {self.attentive}, takes a smaller "
                             "and a larger share of attention")

    def choose(self, held: HeldLayer, count: Array) -> Array:
        paid, valid = self.score(held), held.valid
        image = held.gathered.slots & valid
        seen = jnp.where(image, paid, 0).sum(-1).mean()
        share = self.rate + self.change * ((seen >= self.attentive).astype(jnp.float32) - (seen <= self.indifferent))
        # if there is no room for all of these, image tokens go first, and then the first ones of the text
        text = best(jnp.zeros(valid.shape), valid & ~image, count)
        number = jnp.minimum(whole(image.sum(-1), share), count - text.sum(-1))     # type: ignore[arg-type]
        return text | best(paid, image, number)


@CACHES.register("plphp", "PLPHP: Per-Layer Per-Head Vision Token Pruning for Efficient Large Vision-Language Models",
                 "Meng et al. 2025", family="evict")
def plphp(image: tuple[TokenId, TokenId] | None = None, rate: Share | None = None, change: Share | None = None,
          attentive: Share | None = None, indifferent: Share | None = None, budget: Budget | None = None,
          skip: tuple[Whole, ...] = ()) -> Eviction:
    """Keeps all text, and the image tokens of a prompt that the newest token attends to; attentive layers keep more of
    them.

    For vision-language models. Evicts once, after the prompt. The numbers in the paper are tuned to its models, so the
    first five arguments are required.

    Args:
        image: first and last id of the model's image tokens.
        rate: share of image tokens that a layer keeps (`r` in the paper).
        change: added to `rate` in an attentive layer, subtracted in an indifferent one (`delta r`).
        attentive: minimum attention to image tokens of an attentive layer (`alpha`).
        indifferent: maximum attention to image tokens of an indifferent layer (`beta`).
        budget: bound of the tokens that each head keeps; below 1, a share of the text; or bytes. None: no bound.
        skip: numbers of layers that keep all tokens.
    """
    if image is None or len(image) != 2 or not 0 <= image[0] <= image[1]:
        raise ValueError(f"image: got {image!r}, takes the first and the last id of the model's image tokens")
    if rate is None or change is None or attentive is None or indifferent is None:
        raise ValueError(f"rate, change, attentive, indifferent: got {rate}, {change}, {attentive} and {indifferent}; "
                         "plphp takes all four: the numbers of the paper hold for its models only")
    shares = ImageShares(ImageAttention(image), rate, change, attentive, indifferent)
    return Eviction(shares, EVERYTHING if budget is None else budget, None, skip, name="plphp")
