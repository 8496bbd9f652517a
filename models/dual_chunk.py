"""Dual chunk attention: texts longer than a model was trained for, without training ("Training-Free Long-Context
Scaling of Large Language Models", An et al., 2024; Qwen2.5-1M).

Positions are counted anew in each chunk of the text, so no rotation is larger than those the model knows. A key stands
where it stands in its chunk. A query has three places, one for each kind of key:

- among keys of its own chunk it stands where it stands in that chunk, so distances are the true ones;
- to keys of the chunk before it stands a chunk further on, `chunk.size` at most, so the nearest keys keep their true
  distances: at least the `chunk.local` nearest;
- to keys of all chunks before that it stands behind everything a chunk can hold, at one place for all queries.

Within the first chunk it is plain attention. As in the authors' code and in vLLM, a chunk has `size - local` tokens.

Keys are cached as they are rotated within their chunk. What the two other places of a query make of a score is added to
it (`DualChunk`), so every cache that takes such a bias serves, and so do drafts, trees and beams.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array, lax

from decodax.models.config import DecoderConfig, in_chunks
from decodax.models.rope import Chunks, Rope
from decodax.pallas_kernels.window_attention import Added, FixedBias


@dataclasses.dataclass(frozen=True)
class DualChunk(FixedBias):
    """What the scores of keys in earlier chunks have more than those of keys at the same places of a query's own chunk.

    Attributes:
        rope: with `chunks`. scale: factor of the scores.
    """

    rope: Rope
    scale: float

    def __call__(self, q: Array, positions: Array) -> Added:
        chunks = self.rope.chunks
        assert chunks is not None
        chunk, inside = positions // chunks.length, positions % chunks.length
        before = self.rope.turn(q, jnp.minimum(inside + chunks.length, chunks.size) - inside)
        earlier = self.rope.turn(q, chunks.farthest - inside)
        B, H, W, d = q.shape

        def added(k: Array, where: Array) -> Array:
            G, K = k.shape[1:3]
            behind = chunk - where // chunks.length         # [B, G or 1, W, K]

            def scores(turned: Array) -> Array:
                more = (turned - q).reshape(B, G, -1, d).astype(k.dtype)
                s = jnp.einsum("bgqd,bgkd->bgqk", more, k, preferred_element_type=jnp.float32)
                return s.reshape(B, H, W, K) * self.scale

            def far() -> Array:
                each = jnp.repeat(behind, H // G, 1) if behind.shape[1] > 1 else behind
                return jnp.where(each == 1, scores(before), jnp.where(each > 1, scores(earlier), 0))

            # keys that all stand in the chunk of all queries cost nothing more
            return lax.cond((behind > 0).any(), far, lambda: jnp.zeros((B, H, W, K), jnp.float32))

        return added


def dual_chunk(config: DecoderConfig, size: int | None = None, local: int | None = None) -> DecoderConfig:
    """The same network, with dual chunk attention in place of attention in each layer that has a rotary embedding.

    Args:
        size: positions that rotations may reach, at most the length that the model was trained at. Default: three
            quarters of `config.context`, as in the authors' code.
        local: distances that stay true across the border of two chunks. Default: an eighth of `config.context`.

    Raises:
        ValueError: layers with sliding windows, a soft cap of the scores, or no rotary embedding at all.

    >>> from decodax.models.config import llama
    >>> c = dual_chunk(llama(vocab=64, width=32, layers=2, heads=4, mlp=96, context=4096))
    >>> c.layers[0].rope.chunks
    Chunks(size=3072, local=512, trained=None)
    """
    chunks = Chunks(3 * config.context // 4 if size is None else size,
                    config.context // 8 if local is None else local)
    if all(layer.rope is None for layer in config.layers):
        raise ValueError("config: got no layer with a rotary embedding, whose positions dual chunk attention counts")
    return dataclasses.replace(config, layers=in_chunks(config.layers, chunks))
