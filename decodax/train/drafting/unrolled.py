"""Training of heads that draft (`decodax.models.drafters`), beside a target that does not change; with one that does,
see `decodax.train.drafting.joint`.

The target runs on a text once, and gives hidden states and the distributions that the drafter is compared with. The
head is unrolled as in drafting (the training-time test of EAGLE-3, Li et al., 2025; HASS, Zhang et al., 2024): step 0
reads the target's features, and every later step its own states. The tokens are those of the text in all steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.core.types import embeddings, logits_of
from decodax.models.drafters.head import DraftHead
from decodax.pallas_kernels.window_attention import window_attention_lse
from decodax.train.drafting.features import TargetStates, read_batch, target_outputs
from decodax.train.drafting.losses import loss_of, overlap_of
from decodax.train.loop import cast

Tree = Any


def smooth_l1(a: Array, b: Array) -> Array:
    """Returns the mean smooth L1 distance of arrays of one shape: half the square up to 1, then linear."""
    d = jnp.abs((a - b).astype(jnp.float32))
    return jnp.where(d < 1, 0.5 * d * d, d - 0.5).mean()


def mean_square(a: Array, b: Array) -> Array:
    """Returns the mean squared distance of arrays of one shape."""
    return jnp.square((a - b).astype(jnp.float32)).mean()


@dataclass(frozen=True)
class Unrolled:
    """The training loss of a drafter head that is unrolled for `steps` tokens from every position of a text: after the
    first, its own output takes the place of the target's feature, as in drafting.

    Attributes:
        target: the target's network; its weights are the third argument of the call.
        head: the head.
        steps: number of drafted tokens `K`.
        loss: name of the loss, see `decodax.train.drafting.losses`.
        decay: the loss of the `j`-th token has the weight `decay ** j`.
        features: weight of the distance between the head's hidden state and the target's next feature (EAGLE-1); for
            heads whose hidden states begin with one.
        ids: the target's token for each of the head's logits, if it has a vocabulary of its own.
        dtype: dtype of the computation.
        distance: that distance, `smooth_l1` (EAGLE-1) or `mean_square` (Chimera).
    """

    target: Any
    head: DraftHead
    steps: int = 4
    loss: str = "kl"
    decay: float = 0.8
    features: float = 0.0
    ids: tuple[int, ...] | None = None
    dtype: str = "float32"
    distance: Callable[[Array, Array], Array] = smooth_l1

    def __call__(self, params: Tree, batch: Array | TargetStates, extra: Tree) -> tuple[Array, dict[str, Array]]:
        """Returns the loss and scalars to log: "loss", and the acceptance at each depth.

        Args:
            params: the head's weights.
            batch: `i32[B, T + 1]`, or the target's states of it; the last token is not used.
            extra: the target's weights.
        """
        tokens, target, features = read_batch(self.target, self.head, extra, batch, self.dtype)
        return self.beside(params, extra, tokens[:, :-1], target, features)

    def beside(self, params: Tree, extra: Tree, tokens: Array, target: Array,
               features: Array) -> tuple[Array, dict[str, Array]]:
        """Returns what a call does, from the target's logits `f32[B, T, V]` and features `f[B, T, F]` of texts
        `tokens`, `i32[B, T]`. Gradients also go to `features` and to the target's weights `extra`."""
        steps = unrolled(self.target, self.head, cast(params, self.dtype), extra, tokens, features, self.steps)
        total, weights, scalars = jnp.float32(0), 0.0, {}
        for j, (logits, hidden) in enumerate(steps):
            # the pair at position p predicts the token at p + 2 + j, which the target predicts at p + 1 + j
            count = tokens.shape[1] - 1 - j
            logits, truth = logits[:, :count], target[:, 1 + j:]
            labels = jnp.pad(tokens[:, 2 + j:], ((0, 0), (0, 1)), constant_values=-1)
            scalars[f"accepted_{j + 1}"] = jnp.mean(acceptance(truth, logits, table_of(self.ids)))
            truth, labels, known = restricted(truth, labels, self.ids)
            each = loss_of(self.loss)(truth, logits, labels)
            one = (each * known).sum() / jnp.maximum(known.sum(), 1)
            if self.features:
                # the head's hidden state at p stands for the feature at p + 1 + j
                one = one + self.features * self.distance(hidden[:, :count, :features.shape[-1]], features[:, 1 + j:])
            total, weights = total + self.decay ** j * one, weights + self.decay ** j
        loss = total / weights
        return loss, {"loss": loss, **scalars}


def table_of(ids: tuple[int, ...] | None) -> Array | None:
    """Returns the tokens of `Unrolled.ids` as `i32[Vd]`, or None."""
    return None if ids is None else jnp.asarray(ids, jnp.int32)


def known_as(tokens: Array, ids: tuple[int, ...] | None, vocab: int) -> Array:
    """Returns tokens `i32[...]` of a vocabulary of `vocab`, -1 for none, as indices of a drafter's (`Unrolled.ids`); -1
    for those that it does not know."""
    own = table_of(ids)
    if own is None:
        return tokens
    inverse = jnp.full(vocab, -1, jnp.int32).at[own].set(jnp.arange(len(own), dtype=jnp.int32))
    return jnp.where(tokens < 0, -1, inverse[tokens])


def restricted(target: Array, labels: Array, ids: tuple[int, ...] | None) -> tuple[Array, Array, Array]:
    """Returns the target's logits and the labels over a drafter's vocabulary, and the positions that count.

    Args:
        target: `f32[..., V]`, the target's logits.
        labels: `i32[...]`, tokens; -1: none.
        ids: see `Unrolled`; None: the vocabulary is the target's.

    Returns:
        `f32[..., Vd]`; `i32[...]`, -1 for a token that the drafter does not know; `bool[...]`, True where it knows the
        target's most likely token.
    """
    own = table_of(ids)
    if own is None:
        return target, labels, jnp.ones(labels.shape, bool)
    known = lambda tokens: known_as(tokens, ids, target.shape[-1])
    return target[..., own], known(labels), known(target.argmax(-1)) >= 0


def acceptance(target: Array, logits: Array, ids: Array | None = None) -> Array:
    """Returns the probability that a sampled draft is accepted at temperature 1, `f32[...]`: the sum over tokens of the
    smaller of the two probabilities, from logits of the target, `f32[..., V]`, and of the drafter, `f32[..., Vd]`.
    `ids`, `i32[Vd]`, are the drafter's tokens, others count as never drafted; None: all of the target's."""
    if ids is None:
        return overlap_of(target, logits)
    return jnp.minimum(jax.nn.softmax(target)[..., ids], jax.nn.softmax(logits)).sum(-1)


def unrolled(target: Any, head: DraftHead, params: Tree, weights: Tree, tokens: Array, features: Array,
             steps: int) -> list[tuple[Array, Array]]:
    """Returns the head's logits `f32[B, T, Vd]` and hidden states `f[B, T, h]` after 1 to `steps` drafted tokens, at
    every position of a text.

    Entry `j` at position `p` is what drafting computes after the tokens up to `p + 1`, of which the last `j` are
    drafts; it predicts the token at `p + 2 + j`. The last `1 + j` positions are meaningless.

    Args:
        target: the target's network.
        head: the head.
        params: the head's weights.
        weights: the target's weights.
        tokens: `i32[B, T]`.
        features: `f[B, T, F]`, see `target_outputs`.
        steps: number of drafted tokens.
    """
    B, T = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    embed = lambda x: embeddings(target, weights, x)
    project = lambda x: logits_of(target, weights, x)
    dtype = jnp.result_type(*(x.dtype for x in jax.tree.leaves(params)))
    edge = jnp.broadcast_to(tokens[:, :1], (B, head.tokens_before))
    before = [jnp.concatenate([edge, tokens], 1)[:, 1 + i:1 + i + T] for i in range(head.tokens_before)]
    features = jnp.concatenate([features, *map(embed, before)], -1)
    state, held, found = head.enter(params, features.astype(dtype)), _Columns(), []
    for j in range(steps):
        token = jnp.pad(tokens[:, 1 + j:], ((0, 0), (0, 1 + j)))
        attend = held.step(j, positions) if j == 0 or head.drafts_attend else None
        step = head.step(params, token, embed, state, positions + j, j, attend)
        found.append((head.logits(params, step.hidden, j, project), step.hidden))
        state = step.state
    return found


class _Columns:
    """Attention of an unrolled head: the queries of step `j` at position `p` attend to the keys of step 0 up to `p`,
    and of later steps to those at `p` alone. So nothing of the size `(K T) ** 2` is made."""

    def __init__(self) -> None:
        self.keys: dict[int, list[tuple[Array, Array]]] = {}

    def step(self, j: int, positions: Array) -> Any:
        """Returns the attention function of step `j`."""
        def attend(layer: int, q: Array, k: Array, v: Array, *, scale: float, sliding: int | None = None,
                   softcap: float | None = None, sinks: Array | None = None, **options: Any) -> tuple[Array, Any]:
            if softcap is not None or any(x is not None for x in options.values()):
                raise ValueError("head: its layers cannot have a soft cap or a bias in training")
            held = self.keys.setdefault(layer, [])
            held.append((k, v))
            (first, values), T = held[0], q.shape[1]
            mask = jnp.tril(jnp.ones((1, T, T), bool))
            out, lse = window_attention_lse(q, first, values, mask, positions + j, scale=scale, sliding=sliding,
                                            key_positions=positions, sinks=sinks)
            if j == 0:
                return out, ()
            wide = lambda x: jnp.repeat(x, q.shape[2] // x.shape[2], 2).astype(jnp.float32)
            scores = jnp.stack([lse, *((q.astype(jnp.float32) * wide(k)).sum(-1) * scale for k, _ in held[1:])])
            parts = jnp.stack([out.astype(jnp.float32), *(wide(v) for _, v in held[1:])])
            return (jax.nn.softmax(scores, 0)[..., None] * parts).sum(0).astype(out.dtype), ()

        return attend


@partial(jax.jit, static_argnames=("target", "head", "steps"))
def acceptances(target: Any, head: DraftHead, weights: Tree, params: Tree, tokens: Array, steps: int,
                ids: Array | None = None) -> Array:
    """Returns the mean probability, `f32[steps]`, that the 1st to `steps`-th drafted token is accepted at temperature
    1, on texts `tokens`, `i32[B, T]`, if all drafts before it are the text's tokens. `weights` are the target's,
    `params` the head's, and `ids` is as in `acceptance`."""
    logits, features = target_outputs(target, head, weights, tokens, "float32")
    found = unrolled(target, head, params, weights, tokens, features, steps)
    return jnp.stack([acceptance(logits[:, 1 + j:], x[:, :tokens.shape[1] - 1 - j], ids).mean()
                      for j, (x, _) in enumerate(found)])


def expected_tokens(accepted: Any) -> float:
    """Returns the expected tokens of a round from the acceptance at each depth: 1 plus the sum of their products.

    >>> expected_tokens([0.5, 0.5])
    1.75
    """
    return float(1 + np.cumprod(np.asarray(accepted)).sum())


def frequent_tokens(stream: np.ndarray, count: int, vocab: int) -> np.ndarray:
    """Returns the `count` most frequent tokens of a stream `i32[N]`, ascending, for a head with a vocabulary of its
    own."""
    often = np.bincount(stream, minlength=vocab)
    return np.sort(np.argsort(-often, kind="stable")[:count]).astype(np.int32)

