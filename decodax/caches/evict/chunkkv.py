"""ChunkKV: evicts whole chunks of tokens ("ChunkKV: Semantic-Preserving KV Cache Compression for Efficient Long-Context
LLM Inference", Liu et al., 2025)."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.caches.evict.evicting import Eviction
from decodax.caches.evict.scores import HeldLayer, TokenScore
from decodax.caches.evict.selection import Budget, Every, Selection, best
from decodax.caches.evict.snapkv import WindowAttention
from decodax.common.options import Count, Odd
from decodax.common.registry import CACHES


@dataclasses.dataclass(frozen=True)
class TokenChunks(Selection):
    """Keeps chunks of consecutive tokens, the same ones in every head.

    The score of a chunk is the mean over its tokens of the score, summed over heads; the last chunk may be shorter. The
    number of chunks is the number that fits into the budget, at least one. If the budget is a share of the text, that
    share of the chunks is kept.

    Attributes:
        score: score of the tokens.
        chunk_length: number of tokens of a chunk.
    """

    score: TokenScore
    chunk_length: Count = 10

    def table(self, budget: Budget, longest: int, layer: int, depth: int) -> np.ndarray:
        """Returns the number of chunks that are kept of each text of 0 to `longest` tokens, `i32[longest + 1]`; it
        counts chunks where other selections count tokens. `layer` and `depth` are not used."""
        chunks = -(-np.arange(longest + 1) // self.chunk_length)
        if isinstance(budget, int):
            return np.minimum(chunks, max(budget // self.chunk_length, 1)).astype(np.int32)
        share = float(budget)
        return np.array([max(1, int(n * share)) if n else 0 for n in chunks.tolist()], np.int32)

    def slots(self, table: np.ndarray, heads: int) -> int:
        return int(table.max()) * self.chunk_length

    def choose(self, held: HeldLayer, count: Array) -> Array:
        n = self.chunk_length
        several = -(-held.slots // n)
        pad = ((0, 0), (0, several * n - held.slots))
        valid = jnp.pad(held.valid[0], pad[1]).reshape(several, n)
        worth = jnp.pad(jnp.where(held.valid, self.score(held), 0), pad).sum(0).reshape(several, n)
        mean = worth.sum(1) / jnp.maximum(valid.sum(1), 1)
        chosen = best(mean[None], valid.any(1)[None], count)[0]
        return jnp.broadcast_to(jnp.repeat(chosen, n)[:held.slots], held.valid.shape) & held.valid


@CACHES.register("chunkkv",
                 "ChunkKV: Semantic-Preserving KV Cache Compression for Efficient Long-Context LLM Inference",
                 "Liu et al. 2025", family="evict")
def chunkkv(budget: Budget = 2048, every: Every = None, chunk_length: Count = 10, window_size: Count = 32,
            kernel_size: Odd = 5) -> Eviction:
    """Keeps chunks of consecutive tokens, by SnapKV's scores.

    Phrases are kept or dropped as a whole, while SnapKV keeps single tokens. Each layer chooses by itself; in the
    paper, neighbouring layers may share a choice.

    Args:
        budget: tokens that each head keeps; below 1, a share of the text; or bytes such as "64MB".
        every: tokens between evictions while decoding. None: evict once, after the prompt.
        chunk_length: number of tokens of a chunk.
        window_size: number of latest queries that score the tokens; their own tokens are kept.
        kernel_size: number of neighbouring tokens whose scores are pooled, odd.
    """
    score = WindowAttention(window_size, kernel_size)
    return Eviction(TokenChunks(score, chunk_length), budget, every, name="chunkkv")
