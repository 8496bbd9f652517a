"""Training of Falcon's head (`decodax.models.drafters.falcon`), beside a target that does not change: coupled
sequential glancing distillation (Gao et al., 2024).

A first pass shows how many tokens the head predicts wrongly. In the second, whose loss counts, the true tokens and
features that should have been predicted take the place of a part of its inputs, at random blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from decodax.core.types import embeddings, logits_of
from decodax.models.drafters.falcon import FalconHead
from decodax.models.drafters.head import Weights
from decodax.pallas_kernels.window_attention import window_attention
from decodax.train.drafting.blocks import Scheduled, key_of
from decodax.train.drafting.features import TargetStates, read_batch
from decodax.train.drafting.losses import loss_of
from decodax.train.drafting.unrolled import acceptance, smooth_l1
from decodax.train.loop import cast

Tree = Any


@dataclass(frozen=True)
class Glanced:
    """The training loss of Falcon's head with glancing: at the beginning of random blocks, the more of them the more
    tokens the head predicts wrongly, the inputs are replaced by the true token and hidden state that should be
    predicted there.

    Attributes:
        target: the target's network; its weights are the third argument of the call.
        head: the head.
        loss: name of the loss of a token, see `decodax.train.drafting.losses`.
        features: weight of the smooth L1 distance to the target's hidden states; 10, since the paper weights the loss
            of tokens by 0.1.
        glance: number of replaced blocks for each wrong token at the beginning of the run, `lambda`; it falls linearly
            to 0.
        dtype: dtype of the computation.
    """

    target: Any
    head: FalconHead
    loss: str = "0.9*kl+0.1*hard"
    features: float = 10.0
    glance: float = 0.4
    dtype: str = "float32"
    ids: None = None

    @property
    def steps(self) -> int:
        """Number of tokens that the head drafts in one pass."""
        return self.head.block

    def __call__(self, params: Tree, batch: Array | TargetStates, extra: Tree) -> tuple[Array, dict[str, Array]]:
        """Returns the loss and scalars to log: "loss", and the acceptance at each place in a block.

        Args:
            params: the head's weights.
            batch: `i32[B, T + 1]`, or the target's states of it; the last token is not used.
            extra: the target's weights, or `Scheduled`.
        """
        weights, share = Scheduled.of(extra)
        tokens, target, features = read_batch(self.target, self.head, weights, batch, self.dtype)
        tokens, k = tokens[:, :-1], self.head.block
        T = tokens.shape[1]
        weights, own = jax.lax.stop_gradient(weights), cast(params, self.dtype)
        embed = lambda x: embeddings(self.target, weights, x).astype(features.dtype)
        project = lambda x: logits_of(self.target, weights, x)
        # the pair at p has the token at p + 1; it predicts the feature at p + k and the token at p + k + 1
        count = T - k
        pairs, truth = tokens[:, 1:1 + count], target[:, k:]
        labels = jnp.pad(tokens[:, k + 1:], ((0, 0), (0, 1)), constant_values=-1)
        first = project(jax.lax.stop_gradient(blocks(self.head, own, embed(pairs), features[:, :count])))
        wrong = (first.argmax(-1) != truth.argmax(-1)).sum(1)
        begins = jnp.broadcast_to((jnp.arange(count) % k == 0) & (jnp.arange(count) < count - 1), pairs.shape)
        order = jnp.where(begins, jax.random.uniform(key_of(tokens), pairs.shape), 2.0).argsort(1).argsort(1)
        glanced = begins & (order < self.glance * (1 - share) * wrong[:, None])
        pairs = jnp.where(glanced, jnp.maximum(labels, 0), pairs)
        given = jnp.where(glanced[..., None], features[:, k:], features[:, :count])
        hidden = blocks(self.head, own, embed(pairs), given)
        logits = project(hidden)
        accepted, place = acceptance(truth, logits), jnp.arange(count) % k
        scalars = {f"accepted_{j + 1}": jnp.where(place == j, accepted, 0).sum() / ((place == j).sum() * len(tokens))
                   for j in range(k)}
        loss = loss_of(self.loss)(truth, logits, labels).mean() + self.features * smooth_l1(hidden, features[:, k:])
        return loss, {"loss": loss, **scalars}


def blocks(head: FalconHead, weights: Weights, embedded: Array, features: Array) -> Array:
    """Runs Falcon's head on whole texts whose blocks begin at multiples of `head.block`. Returns its hidden states
    `f[B, T, D]` for all pairs of a feature and the next token.

    Args:
        head: the head.
        weights: its weights.
        embedded: `f[B, T, D]`, the embeddings of the pairs' tokens.
        features: `f[B, T, D]`, their features.
    """
    B, T = embedded.shape[:2]
    x, _ = head.read(weights, embedded, features, jnp.zeros((B, head.carry_width), embedded.dtype))
    at = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    mask = (at[:, :, None] // head.block >= at[:, None] // head.block)
    attend = lambda layer, q, k, v, **options: (window_attention(q, k, v, mask, at, **options), ())
    return head.step(weights, at, lambda x: x, x, at, 0, attend).hidden


__all__ = ["Glanced", "blocks"]
