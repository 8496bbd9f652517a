"""Training of prompt tokens and of hidden transfer (`decodax.models.drafters.prompt_tokens`), beside a target that does
not change.

At random places of a text the probes are inserted, all of a text in one forward pass of the target: they see the text
up to their place and each other, and nothing sees them (PPD, Chen et al., 2024; Wu et al., 2024).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.core.window import Window
from decodax.models.drafters.block_training import random_anchors
from decodax.models.drafters.head import Weights
from decodax.models.drafters.prompt_tokens import ProbesHead
from decodax.train.drafting.blocks import key_of
from decodax.train.drafting.losses import loss_of
from decodax.train.drafting.unrolled import acceptance
from decodax.train.loop import cast

Tree = Any


@dataclass(frozen=True)
class InsertedPrompts:
    """The loss of probes, prompt tokens or transferred hidden states, at random places of a text.

    Attributes:
        target: the target's network; its weights are the third argument of the call.
        head: the probes.
        places: number of places in a text.
        loss: name of the loss of a token, see `decodax.train.drafting.losses`.
        decay: the loss of the `j`-th probe, from 0, has the weight `decay ** j`.
        dtype: dtype of the computation.
    """

    target: Any
    head: ProbesHead
    places: int = 64
    loss: str = "kl"
    decay: float = 0.8
    dtype: str = "float32"
    ids: None = None

    @property
    def steps(self) -> int:
        """Number of probes."""
        return self.head.heads

    def __call__(self, params: Tree, batch: Array, extra: Tree) -> tuple[Array, dict[str, Array]]:
        """Returns the loss, a mean over probes, and scalars to log: "loss", and the acceptance of each.

        Args:
            params: the head's weights.
            batch: `i32[B, T + 1]`; the last token is not used.
            extra: the target's weights.
        """
        tokens, K = batch[:, :-1], self.head.heads
        B, T = tokens.shape
        usable = jnp.broadcast_to(jnp.arange(T) < T - 2, (B, T))
        places, begun = random_anchors(key_of(tokens), usable, min(self.places, T - 2))
        out = self.target.apply(cast(jax.lax.stop_gradient(extra), self.dtype),
                                inserted(tokens, places, self.head, cast(params, self.dtype)),
                                self.target.init_cache(B, 0))
        flat = lambda x: x.reshape(B, -1)
        at = places[..., None] + 1 + jnp.arange(K, dtype=jnp.int32)      # the target predicts the same token there
        live = flat((at < T) & begun[..., None])
        following = jnp.where(at + 1 < T, jnp.take_along_axis(tokens, jnp.minimum(flat(at + 1), T - 1), 1).reshape(
            at.shape), -1)
        truth = jax.lax.stop_gradient(out.logits(jnp.minimum(flat(at), T - 1)))
        own = out.logits(jnp.broadcast_to(jnp.arange(T, T + live.shape[1], dtype=jnp.int32), live.shape))
        count = lambda x: jnp.where(live, x, 0).reshape(B, -1, K).sum((0, 1))
        many = jnp.maximum(count(1.0), 1)
        scalars = {f"accepted_{j + 1}": x for j, x in enumerate(count(acceptance(truth, own)) / many)}
        weights = self.decay ** jnp.arange(K)
        loss = (count(loss_of(self.loss)(truth, own, flat(following))) / many * weights).sum() / weights.sum()
        return loss, {"loss": loss, **scalars}


def inserted(tokens: Array, places: Array, head: ProbesHead, weights: Weights) -> Window:
    """Returns the window of texts with probes at some places. The nodes of the probes follow those of the text; their
    positions and the mask say where they stand.

    Args:
        tokens: `i32[B, T]`, the texts.
        places: `i32[B, A]`, positions of the tokens after which the probes stand.
        head: the probes.
        weights: the head's weights.
    """
    (B, T), A, K = tokens.shape, places.shape[1], head.heads
    prompts, transfer = head.inputs(weights, places)
    place, index = np.divmod(np.arange(A * K), K)
    here = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    at = places[:, place]
    own = (place[:, None] == place) & (index <= index[:, None])
    text = jnp.broadcast_to(jnp.tril(jnp.ones((T, T), bool)), (B, T, T))
    mask = jnp.concatenate([
        jnp.pad(text, ((0, 0), (0, 0), (0, A * K))),
        jnp.concatenate([at[:, :, None] >= here[:, None], jnp.broadcast_to(own, (B, *own.shape))], 2)], 1)
    w = Window(tokens=jnp.pad(tokens, ((0, 0), (0, A * K))), mask=mask, live=jnp.ones((B, T + A * K), bool),
               positions=jnp.concatenate([here, at + 1 + index.astype(np.int32)], 1),
               hints=() if transfer is None else (transfer,))
    if prompts is None:
        return w
    vectors = jnp.broadcast_to(prompts[index], (B, A * K, prompts.shape[1]))
    return w.replace(embeddings=jnp.pad(vectors, ((0, 0), (T, 0), (0, 0))),
                     embedded=jnp.broadcast_to(np.arange(T + A * K) >= T, (B, T + A * K)))


__all__ = ["InsertedPrompts", "inserted"]
