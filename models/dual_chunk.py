"""Dual chunk attention for texts longer than a model was trained for, without training.

Source: "Training-Free Long-Context Scaling of Large Language Models", An et al., 2024; used by Qwen2.5-1M. Positions
restart in each chunk of the text, so no rotation is larger than those that the model knows. A key has its position
within its chunk. A query has three positions, one for each kind of key:

- for keys of its own chunk it has its position in that chunk, so distances are exact;
- for keys of the previous chunk, its position is larger by the length of a chunk, at most `chunk.size`, so the nearest
  keys, at least `chunk.local` of them, have their exact distances;
- for keys of all earlier chunks it has one position, the same for all queries, larger than any position within a chunk.

Within the first chunk it is plain attention. As in the authors' code and in vLLM, a chunk has `size - local` tokens.

Keys are cached as rotated within their chunk. The difference between a score with one of the query's other positions
and the score with its first one is added as a bias (`DualChunk`), so the method works with every cache that supports
such a bias, and with drafts, trees and beams.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from decodax.core.loaded import Loaded
from decodax.models.blocks.options import in_chunks
from decodax.models.changes import decoder_of, with_config
from decodax.models.config import DecoderConfig
from decodax.models.rope import Chunks, Rope
from decodax.pallas_kernels.window_attention import Added, FixedBias


@dataclasses.dataclass(frozen=True)
class DualChunk(FixedBias):
    """The bias of the scores of keys in earlier chunks: it changes a score to that of the query at its position for
    such keys.

    Attributes:
        rope: a rope with `chunks`.
        scale: factor of the attention scores.
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

            # If all keys are in the chunk of all queries, this costs nothing.
            return lax.cond((behind > 0).any(), far, lambda: jnp.zeros((B, H, W, K), jnp.float32))

        return added


def dual_chunk(config: DecoderConfig, size: int | None = None, local: int | None = None) -> DecoderConfig:
    """Returns the same network with dual chunk attention in each layer that has a rotary embedding.

    Args:
        config: the network.
        size: largest rotated position, at most the trained length. None: three quarters of `config.context`, as in the
            authors' code.
        local: distances up to this are exact across the border of two chunks. None: an eighth of `config.context`.

    Raises:
        ValueError: layers have sliding windows or a soft cap of the scores, or none has a rotary embedding.

    >>> from decodax.models.config import llama
    >>> c = dual_chunk(llama(vocab=64, width=32, layers=2, heads=4, mlp=96, context=4096))
    >>> c.layers[0].rope.chunks
    Chunks(size=3072, local=512, trained=None)
    """
    chunks = Chunks(3 * config.context // 4 if size is None else size,
                    config.context // 8 if local is None else local)
    if all(layer.rope is None for layer in config.layers):
        raise ValueError("config: takes at least one layer with a rotary embedding, got none")
    return dataclasses.replace(config, layers=in_chunks(config.layers, chunks))


def with_dual_chunk(lm: Loaded, size: int | None = None, local: int | None = None) -> Any:
    """Returns a loaded model with dual chunk attention (An et al., 2024), for texts longer than the trained length.

    The weights do not change, nor does the output for texts within one chunk.

    Args:
        lm: the result of `decodax.load`.
        size: number of tokens in a chunk; by default three quarters of the trained length.
        local: number of preceding tokens, across a chunk border, that keep their true distance; by default one eighth
            of the trained length.

    Raises:
        ValueError: the model is no `Transformer` with rotary positions, diffuses, or has a sliding window or a cap on
            its scores.
    """
    return with_config(lm, dual_chunk(decoder_of(lm, "dual chunk attention"), size, local), lm.params)
