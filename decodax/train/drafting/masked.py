"""Training of drafters that predict all drafts of a round in one pass at masks: PARD (An et al., 2025), PARD-2 (An et
al., 2026) and P-EAGLE (Hui et al., 2026).

After every position of a text comes a chain of masks, all of a text in one pass. A mask sees the text up to the anchor
of its chain and the masks before it in the chain, as in drafting. Most deep masks are left out (the conditional drop of
both papers): depth `d` keeps `max(0.7 ** d, 0.2)` of the anchors, and only such that depth `d - 1` has kept, since a
mask sees those before it.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.algorithms.speculative.drafts.model.pard2 import hidden_states, projected
from decodax.core.types import embeddings, logits_of
from decodax.core.window import Window, causal
from decodax.models.drafters.parallel import ParallelHead
from decodax.train.drafting.blocks import key_of
from decodax.train.drafting.features import target_outputs
from decodax.train.drafting.losses import loss_of
from decodax.train.drafting.prompt_tokens import beside
from decodax.train.drafting.unrolled import acceptance, restricted, table_of
from decodax.train.loop import cast

Tree = Any


@dataclass(frozen=True)
class MaskedChains(abc.ABC):
    """Base class of training losses for drafters that predict all drafts in one pass at mask tokens: a chain of masks
    follows every position ("anchor") of a text, of which most deep ones are dropped. The mean over all drafts.

    Attributes:
        target: the target's network; its weights are the third argument of the call.
        steps: number of drafts `K` of a round: one of the text's own node, and of `K - 1` masks.
        loss: name of the loss of a token, see `decodax.train.drafting.losses`.
        ratio: share of the chains that goes on from each depth to the next.
        least: share of the chains that is kept at any depth.
        ids: the target's token for each of the drafter's logits, if it has a vocabulary of its own.
        dtype: dtype of the computation.

    Raises:
        ValueError: no draft, or a share that is not from 0 to 1.
    """

    target: Any
    steps: int = 8
    loss: str = "hard"
    ratio: float = 0.7
    least: float = 0.2
    ids: tuple[int, ...] | None = None
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.steps < 1 or not (0 <= self.ratio <= 1 and 0 <= self.least <= 1):
            raise ValueError(f"steps, ratio, least: got {self.steps}, {self.ratio} and {self.least}, take at least 1, "
                             "and shares")

    ahead = 0       # the node at position `p` predicts the token at `p + 1 + ahead`

    @abc.abstractmethod
    def logits(self, params: Tree, extra: Tree, tokens: Array, nodes: Window) -> tuple[Array, Array]:
        """Returns the target's logits for a text, `f32[B, T, V]`, and the drafter's for all nodes, `f32[B, T + M, Vd]`.

        Args:
            params: the drafter's weights.
            extra: the target's weights.
            tokens: `i32[B, T]`, the text.
            nodes: the `T` nodes of the text and the `M` masks after them. Their tokens are 0.
        """

    def __call__(self, params: Tree, batch: Array, extra: Tree) -> tuple[Array, dict[str, Array]]:
        """Returns the loss and scalars to log: "loss", and the acceptance at each depth.

        Args:
            params: the drafter's weights.
            batch: `i32[B, T + 1]`; the last token is predicted only.
            extra: the target's weights.
        """
        tokens = batch[:, :-1]
        B, T = tokens.shape
        chain, depth = kept_masks(T - self.ahead, self.steps, self.ratio, self.least)
        order = jnp.argsort(jax.random.uniform(key_of(tokens), (B, T - self.ahead)), 1).astype(jnp.int32)
        nodes = masked_nodes(T, order, chain, depth)
        truth, logits = self.logits(params, extra, tokens, nodes)
        depths = np.concatenate([np.zeros(T, np.int64), depth])
        weight = self.weights(truth, batch, nodes, depths)
        at = nodes.positions + self.ahead
        live = at < T
        take = lambda x: jnp.take_along_axis(x, jnp.minimum(at, T - 1).reshape(B, -1, *[1] * (x.ndim - 2)), 1)
        truth, labels = take(truth), take(batch[:, 1:])
        levels = depths == np.arange(self.steps)[:, None]
        accepted = jnp.where(live, acceptance(truth, logits, table_of(self.ids)), 0)
        scalars = {f"accepted_{d + 1}": (accepted * here).sum() / jnp.maximum((live & here).sum(), 1)
                   for d, here in enumerate(levels)}
        truth, labels, known = restricted(truth, labels, self.ids)
        weight = jnp.where(live & known, weight, 0)
        each = jnp.where(weight > 0, weight * loss_of(self.loss)(truth, logits, labels), 0)
        loss = each.sum() / jnp.maximum(weight.sum(), 1e-6)
        return loss, {"loss": loss, **scalars}

    def weights(self, truth: Array, batch: Array, nodes: Window, depths: np.ndarray) -> Array:
        """Returns the weight of each node's loss, `f32[B, T + M]`.

        Args:
            truth: `f32[B, T, V]`, the target's logits for a text.
            batch: `i32[B, T + 1]`, the text and the token after it.
            nodes: as in `logits`.
            depths: `i64[T + M]`, depth of each node in its chain, 0 for those of the text.
        """
        return jnp.ones(nodes.positions.shape, jnp.float32)


def kept_masks(anchors: int, steps: int, ratio: float, least: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns the `M` masks that are kept after `anchors` positions if each has a chain of masks, of which the share
    `max(ratio ** d, least)` reaches depth `d`: the number of each one's chain, `i64[M]`, and its depth from 1,
    `i64[M]`. Chains are numbered by their length, the longest first.

    >>> [x.tolist() for x in kept_masks(4, 3, 0.5, 0.25)]
    [[0, 1, 0], [1, 1, 2]]
    """
    counts = [int(anchors * max(ratio ** d, least)) for d in range(1, steps)]
    return (np.concatenate([np.arange(n) for n in counts] or [np.zeros(0, np.int64)]),
            np.repeat(np.arange(1, steps), counts))


def masked_nodes(length: int, order: Array, chain: np.ndarray, depth: np.ndarray) -> Window:
    """Returns the nodes of texts and of chains of masks after their positions, without tokens.

    Args:
        length: number of tokens of a text `T`.
        order: `i32[B, A]`, the anchors, positions of the text; those of the longest chains come first.
        chain, depth: the masks, see `kept_masks`.
    """
    positions, mask = beside(length, order[:, chain], chain, depth - 1)
    shape = positions.shape
    return Window(tokens=jnp.zeros(shape, jnp.int32), positions=positions, mask=mask, live=jnp.ones(shape, bool))


@dataclass(frozen=True)
class TunedDraftModel(MaskedChains):
    """PARD's loss, of an ordinary draft model that learns to predict at mask tokens (An et al., 2025). The defaults are
    the authors': cross-entropy with the text's own tokens.

    Attributes:
        draft: the draft model's network.
        mask: id of the mask token.

    The others are those of `MaskedChains`.
    """

    draft: Any = field(kw_only=True)
    mask: int = field(kw_only=True)

    def logits(self, params: Tree, extra: Tree, tokens: Array, nodes: Window) -> tuple[Array, Array]:
        B, T = tokens.shape
        text = causal(tokens, jnp.zeros(B, jnp.int32))
        truth = self.target.apply(cast(extra, self.dtype), text, self.target.init_cache(B, 0)).logits()
        more = nodes.positions.shape[1] - T
        own = nodes.replace(tokens=jnp.pad(tokens, ((0, 0), (0, more)), constant_values=self.mask))
        out = self.draft.apply(cast(params, self.dtype), own, self.draft.init_cache(B, 0))
        return jax.lax.stop_gradient(truth), out.logits()


@dataclass(frozen=True)
class AlignedDraftModel(TunedDraftModel):
    """PARD-2's loss (An et al., 2026): that of PARD, of a draft model to whose embeddings a projection of the target's
    hidden states is added.

    A draft counts by the probability that the target gives to the tokens of the text between the anchor of its chain
    and the draft, since only after those it can be accepted (confidence-adaptive tokens). The weights are a dictionary
    with "draft" and "projection". The defaults are the authors'.

    Attributes:
        states: the target's hidden states, see `decodax.algorithms.speculative.drafts.AlignedDrafts`.
        scale: factor of the projection.
        without: share of the texts that are read without the projection, so that the model also drafts for other
            targets.

    The others are those of `TunedDraftModel`.
    """

    steps: int = 16
    loss: str = "kl+0.1*hard"
    least: float = 0.1
    states: tuple[int, ...] = (-1,)
    scale: float = 0.02
    without: float = 0.2

    def logits(self, params: Tree, extra: Tree, tokens: Array, nodes: Window) -> tuple[Array, Array]:
        B, T = tokens.shape
        out = self.target.apply(cast(extra, self.dtype), causal(tokens, jnp.zeros(B, jnp.int32)),
                                self.target.init_cache(B, 0))
        truth, found = jax.lax.stop_gradient((out.logits(), hidden_states(out, self.states)))
        more = nodes.positions.shape[1] - T
        params = cast(params, self.dtype)
        before = jnp.pad(found[:, :-1], ((0, 0), (1, 0), (0, 0))).astype(self.dtype)
        read = jax.random.uniform(jax.random.fold_in(key_of(tokens), 1), (B, 1, 1)) >= self.without
        added = jnp.where(read, self.scale * projected(params["projection"], before), 0)
        own = nodes.replace(tokens=jnp.pad(tokens, ((0, 0), (0, more)), constant_values=self.mask))
        # a mask has the projection of its anchor: the last node of the text that it sees
        anchor = jnp.where(nodes.mask[:, :, :T], jnp.arange(T), 0).max(-1)
        x = embeddings(self.draft, params["draft"], own.tokens)
        x = x + jnp.take_along_axis(added, anchor[..., None], 1).astype(x.dtype)
        own = own.replace(embeddings=x, embedded=jnp.ones(own.tokens.shape, bool))
        return truth, self.draft.apply(params["draft"], own, self.draft.init_cache(B, 0)).logits()

    def weights(self, truth: Array, batch: Array, nodes: Window, depths: np.ndarray) -> Array:
        log_p = jnp.take_along_axis(jax.nn.log_softmax(truth), batch[:, 1:, None], 2)[..., 0]
        so_far = jnp.pad(log_p.cumsum(1), ((0, 0), (1, 0)))         # of the tokens 1 to each position
        at = jnp.minimum(nodes.positions, truth.shape[1])
        of = lambda where: jnp.take_along_axis(so_far, where, 1)
        return jnp.exp(of(at) - of(jnp.maximum(at - depths, 0)))


@dataclass(frozen=True)
class MaskedPairs(MaskedChains):
    """P-EAGLE's loss, of a head that learns to predict at pairs of a mask token and a learned feature (Hui et al.,
    2026).

    Attributes:
        head: the head, whose `drafts` are `steps`.

    The others are those of `MaskedChains`.
    """

    head: ParallelHead = field(kw_only=True)
    ahead = 1       # the pair at a position has the token after it

    def logits(self, params: Tree, extra: Tree, tokens: Array, nodes: Window) -> tuple[Array, Array]:
        head, params, weights = self.head, cast(params, self.dtype), jax.lax.stop_gradient(extra)
        truth, features = target_outputs(self.target, head, extra, tokens, self.dtype)
        B, more = tokens.shape[0], nodes.positions.shape[1] - tokens.shape[1]
        given = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1 + more)), constant_values=head.mask)
        unknown = head.unknown(params)
        state = jnp.concatenate([head.enter(params, features.astype(self.dtype)),
                                 jnp.broadcast_to(unknown, (B, more, unknown.shape[-1]))], 1)
        cache = head.init_cache(B, 0, self.dtype)
        assert cache is not None
        attend = lambda layer, q, k, v, **options: cache.attend(layer, q, k, v, nodes, **options)
        embed = lambda x: embeddings(self.target, weights, x)
        step = head.step(params, given, embed, state, nodes.positions, 0, attend)
        return truth, head.logits(params, step.hidden, 0, lambda x: logits_of(self.target, weights, x))


__all__ = ["AlignedDraftModel", "MaskedChains", "MaskedPairs", "TunedDraftModel", "kept_masks", "masked_nodes"]
