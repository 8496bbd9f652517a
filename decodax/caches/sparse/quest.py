"""Quest: each query attends to the pages whose keys may have the largest products with it ("Quest: Query-Aware Sparsity
for Efficient Long-Context LLM Inference", Tang et al., 2024).

The digest of a page is the minimum and the maximum of each channel over its keys. They give an upper bound of the
product of a query with any key of the page, which is the score of the page. `decodax.caches.sparse.pages` describes
which tokens are attended to.

Pages are chosen for a group of heads together, and the latest 64 tokens and the page that is being filled are always
attended to. In the authors' code each query head chooses, and the latest page competes. The paper has no offloading.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from decodax.cache.key_values import KVLayer
from decodax.caches.sparse.host_pages import empty_host_pages
from decodax.caches.sparse.pages import PageCache, PageConfig, PageScore
from decodax.common.registry import CACHES
from decodax.core.cache import Cache, PyTree


@dataclasses.dataclass(frozen=True)
class KeyBounds(PageScore):
    """Scores a page by an upper bound of the products of a query with its keys."""

    def digest(self, keys: Array) -> Array:
        return jnp.concatenate([keys.min(-2), keys.max(-2)], -1)

    def __call__(self, q: Array, digests: Array) -> Array:
        low, high = jnp.split(digests.astype(jnp.float32), 2, -1)
        # max(q low, q high) is q high where q is positive and q low elsewhere
        return (jnp.einsum("grd,gnd->grn", jnp.maximum(q, 0), high)
                + jnp.einsum("grd,gnd->grn", jnp.minimum(q, 0), low))


@CACHES.register("quest", "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference", "Tang et al. 2024",
                 family="sparse")
@dataclasses.dataclass(frozen=True)
class QuestConfig(PageConfig):
    """Keeps all tokens; each query attends to the pages whose keys may have the largest products with it, and to the
    latest tokens.

    It saves the time of attention to long texts. It saves device memory only with `offload=True`, which is slower.
    Example: `decodax.generate(lm, prompt, cache="quest:budget=512")`.

    Attributes:
        budget: number of tokens of the pages that a query attends to; raised to three pages if it
            is less.
        page_size: number of tokens of a page.
        recent: number of latest tokens that are always attended to; no window may be wider.
        skip: numbers of layers that attend to all tokens; the first two, as in the authors' code.
        offload: whether full pages are stored in host memory, and only digests and the latest tokens on the device.
    """

    offload: bool = False

    name: ClassVar[str] = "quest"
    score: ClassVar[PageScore] = KeyBounds()

    def empty(self, shapes: tuple[KVLayer, ...], batch: int, size: int, dtype: Any, inputs: PyTree) -> Cache:
        if self.offload:
            return empty_host_pages(self, shapes, batch, size, dtype, inputs)
        return PageCache(**self.parts(shapes, batch, size, dtype, inputs))
