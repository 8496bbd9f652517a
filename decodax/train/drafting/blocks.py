"""Training of block heads (`decodax.models.drafters.block`), beside a target that does not change.

Blocks begin at random anchors of a text and are computed as in drafting; a correction gets the text's own tokens as the
drafts before (DFlash, Chen, Liang and Liu, 2026; DSpark, Cheng et al., 2026).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from decodax.core.types import embeddings, logits_of
from decodax.models.drafters.block import BlockHead
from decodax.models.drafters.block_training import BlockPredictions, blocks_at, random_anchors
from decodax.models.drafters.corrections import CandidateSelector
from decodax.train.drafting.features import TargetStates, read_batch
from decodax.train.drafting.losses import LOSSES, loss_of
from decodax.train.drafting.unrolled import acceptance, known_as, restricted, table_of
from decodax.train.loop import cast

Tree = Any


class Scheduled(NamedTuple):
    """The third argument of a loss that changes during a run: the target's weights, and the finished share of the run,
    `f32[]` from 0 to 1. The weights alone, without this tuple, stand for the end of the run."""

    weights: Tree
    share: Array | float = 1.0

    @classmethod
    def of(cls, extra: Any) -> Scheduled:
        return extra if isinstance(extra, cls) else cls(extra)


@dataclass(frozen=True)
class AnchoredBlocks:
    """The training loss of a block head, which predicts the block of tokens after each of some random positions
    ("anchors") of a text; the defaults are DSpark's.

    Attributes:
        target: the target's network; its weights are the third argument of the call.
        head: the head.
        anchors: number of blocks in a text.
        loss: name of the loss, see `decodax.train.drafting.losses`.
        gamma: the loss of the `k`-th draft of a block, from 0, has the weight `exp(-k / gamma)`.
        chance: weight of the cross-entropy of the predicted acceptance, for heads that predict it.
        base: share of the loss for the logits before the correction at the beginning of the run; it falls linearly to
            0 (Domino's lambda, from 1).
        selector: if the correction leaves tokens out (DFlash2's candidates), `loss` is that of the logits before it,
            and this is the weight of the cross-entropy over its candidates, of which the text's token is always one.
        ids: the target's token for each of the head's logits, if it has a vocabulary of its own.
        dtype: dtype of the computation.
    """

    target: Any
    head: BlockHead
    anchors: int = 64
    loss: str = "0.9*tv+0.1*hard"
    gamma: float = 4.0
    chance: float = 1.0
    base: float = 0.0
    selector: float = 1.0
    ids: tuple[int, ...] | None = None
    dtype: str = "float32"

    @property
    def steps(self) -> int:
        """Number of tokens that a block drafts."""
        return self.head.longest

    def __call__(self, params: Tree, batch: Array | TargetStates, extra: Tree) -> tuple[Array, dict[str, Array]]:
        """Returns the loss, a mean over drafts, and scalars to log: "loss", and the acceptance at each depth.

        Args:
            params: the head's weights.
            batch: `i32[B, T + 1]`, or the target's states of it; the last token is not used.
            extra: the target's weights, or `Scheduled`.
        """
        share = Scheduled.of(extra).share
        blocks, accepted, live, truth, labels = self.blocks(params, batch, extra)
        count = jnp.maximum(live.sum((0, 1)), 1)
        scalars = {f"accepted_{k + 1}": x for k, x in enumerate(jnp.where(live, accepted, 0).sum((0, 1)) / count)}
        truth, labels, known = restricted(truth, labels, self.ids)
        one = loss_of(self.loss)
        selects = isinstance(self.head.correction, CandidateSelector)
        each = one(truth, blocks.base if selects else blocks.logits, labels)
        if selects:
            each = each + self.selector * LOSSES["hard"](truth, blocks.learned, labels)
        if self.base:
            part = self.base * (1 - share)
            each = (1 - part) * each + part * one(truth, blocks.base, labels)
        mean = lambda x, live: jnp.where(live, x * jnp.exp(-jnp.arange(x.shape[-1]) / self.gamma), 0).sum() / (
            jnp.maximum(live.sum(), 1))         # by their number, as in the authors' code, not by the weights' sum
        loss = mean(each, live & known)
        if blocks.chance is not None and self.chance:
            y = jax.lax.stop_gradient(accepted)
            entropy = -y * jax.nn.log_sigmoid(blocks.chance) - (1 - y) * jax.nn.log_sigmoid(-blocks.chance)
            loss = loss + self.chance * mean(entropy, live)
        return loss, {"loss": loss, **scalars}

    def blocks(self, params: Tree, batch: Array | TargetStates, extra: Tree
               ) -> tuple[BlockPredictions, Array, Array, Array, Array]:
        """Runs the head at `A` random anchors in each text of a batch; `K` is the number of drafts of a block.

        Returns the predictions; the probability that each draft is accepted at temperature 1, `f32[B, A, K]`; True for
        drafts that count, `bool[B, A, K]`; and at the drafted positions the target's logits, `f32[B, A, K, V]`, and the
        text's tokens, `i32[B, A, K]`. The arguments are those of calling the object.
        """
        weights, _ = Scheduled.of(extra)
        tokens, target, features = read_batch(self.target, self.head, weights, batch, self.dtype)
        tokens = tokens[:, :-1]
        B, T = tokens.shape
        usable = jnp.broadcast_to((jnp.arange(T) >= 1) & (jnp.arange(T) < T - 1), (B, T))
        anchors, begun = random_anchors(key_of(tokens), usable, self.anchors)
        weights = jax.lax.stop_gradient(weights)
        blocks = blocks_at(self.head, cast(params, self.dtype), features.astype(self.dtype), tokens, anchors,
                           lambda x: embeddings(self.target, weights, x).astype(self.dtype),
                           lambda x: logits_of(self.target, weights, x),
                           known_as(tokens, self.ids, target.shape[-1]))
        live = (blocks.positions < T) & begun[..., None]
        at = jnp.minimum(blocks.positions, T - 1)
        row = jnp.arange(B)[:, None, None]
        truth, labels = target[row, at - 1], tokens[row, at]
        return blocks, acceptance(truth, blocks.logits, table_of(self.ids)), live, truth, labels


def key_of(tokens: Array) -> Array:
    """Returns a random key that is computed from a batch of tokens `i32[B, T]` alone, so that a resumed run draws the
    same random positions for the same batch."""
    mixed = tokens.astype(jnp.uint32) * (jnp.arange(tokens.shape[1], dtype=jnp.uint32) * 2 + jnp.uint32(0x9E3779B1))
    return jax.random.key(mixed.sum().astype(jnp.uint32))


@partial(jax.jit, static_argnames="objective")
def block_acceptances(objective: Any, weights: Tree, params: Tree, tokens: Array) -> Array:
    """Returns the mean probability, `f32[K]`, that each of the `K` drafts of a block is accepted at temperature 1, on
    texts `tokens`, `i32[B, T]`, if all drafts before it are the text's tokens. `objective` is the loss, from whose
    logged scalars the figures come; `weights` are the target's, `params` the head's."""
    scalars = objective(params, jnp.pad(tokens, ((0, 0), (0, 1))), weights)[1]
    return jnp.stack([scalars[f"accepted_{k + 1}"] for k in range(objective.steps)])


__all__ = ["AnchoredBlocks", "Scheduled", "block_acceptances", "key_of"]
