"""A sparse reader: a page is the ball around its mean key, and its score is a bound of the scores of all its keys."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

import decodax as dx
from decodax.caches.sparse.pages import PageCache, PageConfig, PageScore


@dataclasses.dataclass(frozen=True)
class Ball(PageScore):
    """`q c + |q| r`, which no key within the radius `r` of the centre `c` exceeds."""

    def digest(self, keys):
        centre = keys.mean(-2)
        radius = jnp.linalg.norm(keys - centre[..., None, :], axis=-1).max(-1)
        return jnp.concatenate([centre, radius[..., None]], -1)

    def __call__(self, q, digests):
        digests = digests.astype(jnp.float32)
        reach = jnp.linalg.norm(q, axis=-1)[..., None] * digests[..., -1][:, None]
        return jnp.einsum("grd,gnd->grn", q, digests[..., :-1]) + reach


@dx.caches.register("ball-pages", "An experiment", "decodax", family="sparse")
@dataclasses.dataclass(frozen=True)
class BallPages(PageConfig):
    """Keeps everything; each query reads the pages that may hold the largest scores, and the latest tokens."""

    name: ClassVar[str] = "ball-pages"
    score: ClassVar[PageScore] = Ball()

    def empty(self, shapes, batch, size, dtype, inputs):
        return PageCache(**self.parts(shapes, batch, size, dtype, inputs))
