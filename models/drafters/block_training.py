"""The training forward of block heads: blocks at many places of a text in one pass, each as drafting would run it.

A block begins at an anchor, a position of the text. It attends to the context features before its anchor and to itself,
so all blocks of a text share the projections of its context.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from decodax.cache.entry import KVEntry
from decodax.common.struct import Struct, struct
from decodax.models.drafters.block import BlockHead
from decodax.models.drafters.corrections import walk
from decodax.models.drafters.head import Embed, Weights


@struct
class BlockPredictions(Struct):
    """The predictions of blocks at `A` anchors, for the `K` drafts of each.

    Attributes:
        logits: `f32[B, A, K, V]`, given the text's own tokens before each draft.
        learned: `f32[B, A, K, V]`, the same, but for a correction that leaves tokens out, with the text's token among
            its candidates.
        base: `f32[B, A, K, V]`, before the correction.
        chance: `f32[B, A, K]`, logit of the predicted probability of acceptance, or None.
        positions: `i32[B, A, K]`, the position of the token that each predicts; it may be beyond the text.
    """

    logits: Array
    learned: Array
    base: Array
    chance: Array | None
    positions: Array


def blocks_at(head: BlockHead, weights: Weights, features: Array, tokens: Array, anchors: Array, embed: Embed,
              vocabulary: Callable[[Array], Array], labels: Array | None = None) -> BlockPredictions:
    """Runs a block head at each of some positions ("anchors") of texts, as in drafting after the token there, and
    returns what it predicts for the tokens that follow.

    Args:
        head: the head.
        weights: its weights.
        features: `f[B, T, F]`, the target's features at all positions of the texts.
        tokens: `i32[B, T]`, the texts.
        anchors: `i32[B, A]`, positions of the texts.
        embed: the target's embedding table.
        vocabulary: the target's map from hidden states to logits, for heads without one.
        labels: `i32[B, T]`, the texts' tokens as indices of the head's logits, -1 for those that it does not know;
            None: `tokens`.
    """
    B, A, S, first = *anchors.shape, head.block, head.offset
    here = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    network = head.network(weights)
    context = network.context(network.enter(features), jnp.broadcast_to(here, tokens.shape))
    at = anchors[..., None] + jnp.arange(S, dtype=jnp.int32)
    text_at = lambda x, at: jnp.take_along_axis(x, jnp.minimum(at, x.shape[1] - 1).reshape(B, -1), 1).reshape(at.shape)
    text, positions = text_at(tokens, at), at[..., 1:] if first else at + 1
    given = jnp.where(jnp.arange(S) == 0, text, head.mask or 0)
    flat = lambda x: x.reshape(B, A * S, *x.shape[3:])
    attend = lambda i, q, k, v, **options: (_attention(head, q, KVEntry(k, v), context[i], at, here, **options), ())
    embedded = network.embedded(embed, flat(given)).astype(features.dtype)
    hidden = network(embedded, flat(at), attend)[0].reshape(B * A, S, -1)
    base = head.logits(weights, hidden[:, first:], 0, vocabulary)
    newest = text[:, :, 0].reshape(-1)
    before = jnp.take_along_axis(tokens, jnp.maximum(anchors - 1, 0), 1).reshape(-1)
    previous = text[:, :, :S - first].reshape(B * A, -1)
    logits, learned, seen = base, base, head.prepare(weights, hidden)
    if network.correction is not None:
        memory = head.opening(weights, seen, newest, before, embed)
        logits = walk(network.correction, base, seen[:, first:], previous, network.embedding(embed), memory, first)
        following = text_at(tokens if labels is None else labels, positions).reshape(B * A, -1)
        learned = network.correction.learned(logits, base, seen[:, first:], previous, following)
    chance = head.chance(weights, hidden[:, first:], previous, jnp.arange(S - first)[None])
    fold = lambda x: x.reshape(B, A, S - first, *x.shape[2:])
    return BlockPredictions(logits=fold(logits), learned=fold(learned), base=fold(base),
                            chance=None if chance is None else fold(chance), positions=positions)


def _attention(head: BlockHead, q: Array, own: KVEntry, context: KVEntry, at: Array, here: Array, *, scale: float,
               sliding: int | None = None, softcap: float | None = None) -> Array:
    """Returns the attention of slots `q`, `f[B, A * S, H, d]`, to the context before their anchors and to their
    blocks."""
    (B, A, S), (H, d), G = at.shape, q.shape[2:], own.keys.shape[2]
    q = q.reshape(B, A, S, G, H // G, d)
    k, v = (x.reshape(B, A, S, G, -1) for x in (own.keys, own.values))
    anchor, slots = at[:, :, :1, None], jnp.arange(S)
    far = here < anchor                                                                        # [B, A, 1, T]
    if sliding is not None:
        reach = anchor - sliding if head.window_from == "newest" else at[..., None] - sliding + 1
        far = far & (here >= reach)
    causal = head.causal if sliding is None or head.causal_sliding is None else head.causal_sliding
    near = slots <= slots[:, None] if causal else jnp.ones((S, S), bool)
    if sliding is not None and head.window_from == "slot":
        near = near & (slots > slots[:, None] - sliding)
    scores = jnp.concatenate([jnp.einsum("basgrd,btgd->basgrt", q, context.keys),
                              jnp.einsum("basgrd,baugd->basgru", q, k)], -1).astype(jnp.float32) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    far = jnp.broadcast_to(far, (B, A, S, here.shape[0]))
    seen = jnp.concatenate([far, jnp.broadcast_to(near, (B, A, S, S))], -1)[:, :, :, None, None]
    p = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), -1).astype(v.dtype)
    T = here.shape[0]
    out = (jnp.einsum("basgrt,btgd->basgrd", p[..., :T], context.values)
           + jnp.einsum("basgru,baugd->basgrd", p[..., T:], v))
    return out.reshape(B, A * S, H, -1)


def random_anchors(key: Array, usable: Array, count: int) -> tuple[Array, Array]:
    """Returns random positions without repetition, `i32[B, count]` in order, and True for those that are usable: fewer
    positions may be.

    Args:
        key: a random key.
        usable: `bool[B, T]`, True for positions at which a block may begin.
        count: number of anchors of each text.
    """
    noise = jnp.where(usable, jax.random.uniform(key, usable.shape), -1.0)
    value, at = jax.lax.top_k(noise, min(count, usable.shape[1]))
    at = jnp.sort(jnp.where(value >= 0, at, usable.shape[1]), -1).astype(jnp.int32)
    live = at < usable.shape[1]
    return jnp.where(live, at, 0), live


__all__ = ["BlockPredictions", "blocks_at", "random_anchors"]
