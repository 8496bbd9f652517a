"""Caches whose queries find tokens by codes of their keys."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decodax.cache import KVLayer
from decodax.cache.entry import KVEntry
from decodax.caches import Constant, KeyBooks
from decodax.caches.rotation import rotated
from decodax.caches.sparse.a2ats import A2ATSCache, A2ATSConfig
from decodax.core.window import causal
from decodax.models.rope import Rope
from decodax.train import fit_key_books
from decodax.train.query_aware import metric
from tests.caches.small import PROMPTS, SMALL

WANTED = json.loads((Path(__file__).parents[1] / "expected" / "a2ats.json").read_text())
T = 70


def given() -> tuple[np.ndarray, ...]:
    """Keys, values and queries of `T + 1` tokens, before their rotation; centroids; queries that say what matters."""
    r = np.random.RandomState(20)
    draw = lambda *size: r.standard_normal(size).astype(np.float32).round(3)
    keys, values, q = draw(T + 1, 2, 8), draw(T + 1, 2, 8), draw(T + 1, 4, 8) * np.float32(1.5)
    return keys, values, q, draw(2, 48, 8), draw(2, 100, 8) * np.linspace(0.3, 2, 8).astype(np.float32)


@pytest.mark.wide
def test_codes_and_what_is_read_by_them_are_the_authors() -> None:
    """The factors of the metric, the codes of all keys but the newest, and attention of the newest token, in a batch
    with a shorter text and behind chunks of any width."""
    keys, values, q, centroids, asked = given()
    factors = np.stack([metric(x) for x in asked])
    np.testing.assert_allclose(factors, WANTED["factors"], atol=2e-5)
    books = KeyBooks(Constant(centroids[None]), Constant(factors[None]))
    kind = A2ATSConfig(books, 0.2, sinks=2, recent=11, distance=50)
    shape = KVLayer(2, 8, queries=4, rope=Rope(8))
    turn = lambda x: rotated(shape, jnp.asarray(x)[None], jnp.arange(T + 1)[None])[0]
    keys, q = turn(keys), turn(q)
    cache = kind([shape], 2, 96, jnp.float32)
    for start in range(0, T, 14):
        at = start + jnp.arange(14)
        two = lambda x, at=at: jnp.stack([jnp.asarray(x)[at]] * 2)
        cache = cache.commit([KVEntry(two(keys), two(values))], jnp.where(at < jnp.array([[T], [9]]), at, -1))
    assert isinstance(cache, A2ATSCache) and cache.codes[0] is not None
    assert cache.codes[0][0, :, :T, 0].tolist() == np.array(WANTED["codes"])[:, :T].tolist()
    own = lambda x: jnp.asarray(x)[None, T:].repeat(2, 0)
    out, _ = cache.attend(0, own(q), own(keys), own(values), causal(jnp.zeros((2, 1), jnp.int32), cache.length),
                          scale=8 ** -0.5)
    np.testing.assert_allclose(out[0, 0], WANTED["out"], atol=1e-4)


@pytest.mark.wide
def test_a_node_takes_tokens_by_its_own_position() -> None:
    """Of what a query reads some is committed and some in its window, in any division: the same comes out."""
    keys, values, q, centroids, asked = given()
    books = KeyBooks(Constant(centroids[None]), Constant(np.stack([metric(x) for x in asked])[None]))
    shape = KVLayer(2, 8, queries=4, rope=Rope(8))
    found = []
    for n in (T, T - 3, T - 10):
        cache = A2ATSConfig(books, 5, sinks=2, recent=11, distance=50)([shape], 1, 80, jnp.float32)
        some = lambda x, a, b: jnp.asarray(x)[None, a:b]
        cache = cache.commit([KVEntry(some(keys, 0, n), some(values, 0, n))], jnp.arange(n)[None])
        window = causal(jnp.zeros((1, T + 1 - n), jnp.int32), cache.length)
        out, _ = cache.attend(0, some(q, n, T + 1), some(keys, n, T + 1), some(values, n, T + 1), window, scale=0.3)
        found.append(out[0, -1])
    np.testing.assert_allclose(found[1], found[0], atol=1e-5)
    np.testing.assert_allclose(found[2], found[0], atol=1e-5)


def test_the_metric_is_that_of_products_with_queries() -> None:
    """A code in it has the least squared error of products, which the plain distance has not."""
    r = np.random.default_rng(0)
    queries, keys, centroids = (r.standard_normal((n, 6)) * np.array([3, 1, 1, 1, 0.1, 0.1]) ** power
                                for n, power in ((400, 1), (50, 0), (7, 0)))
    factor = metric(queries)
    off = np.square((keys[:, None] - centroids) @ queries.T).mean(-1)
    plain = KeyBooks(Constant(centroids[None, None]), Constant(np.eye(6)[None, None]))
    own = KeyBooks(Constant(centroids[None, None]), Constant(factor[None, None]))
    codes = lambda books: np.asarray(books.codes(0, jnp.asarray(keys)[None]))[0]
    assert codes(own).tolist() == off.argmin(1).tolist() != codes(plain).tolist()


TEXTS = [*PROMPTS, np.random.default_rng(7).integers(0, 16, 120).tolist()]


def test_books_are_measured_on_texts() -> None:
    """More centroids say better what queries find; one for each key says it exactly, up to positions."""
    off = []
    for count in (2, 8, 200):
        books = fit_key_books(SMALL, TEXTS[:2], count, distance=30, loops=20)
        assert books.centroids.value.shape == (1, 2, count, 4)
        keys = jax.random.normal(jax.random.key(0), (2, 50, 4))
        near = np.take_along_axis(books.centroids.value[0], np.asarray(books.codes(0, keys))[..., None], 1)
        # the error in the metric of the model's queries
        off.append(float(np.square(np.einsum("gnd,gde->gne", near - keys, books.factors.value[0])).sum()))
    assert off[0] > off[1] > off[2]
