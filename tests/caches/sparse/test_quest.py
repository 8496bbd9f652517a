"""Quest: queries choose pages."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decodax.cache import KVLayer
from decodax.cache.entry import KVEntry
from decodax.caches.evict.scores import Gathered, HeldLayer
from decodax.caches.evict.selection import best
from decodax.caches.evict.triforce import ChunkMeans
from decodax.caches.sparse.pages import PageCache
from decodax.caches.sparse.quest import KeyBounds, QuestConfig
from decodax.core.window import causal

LAYER, P, RECENT = (2, 8), 4, 6
EXPECTED = Path(__file__).parents[1] / "expected" / "retrieval.json"


def filled(lengths: tuple[int, ...], chunk: int) -> tuple[PageCache, np.ndarray, np.ndarray]:
    """A cache with random tokens, taken in so many at a time, and its keys and values `[B, G, S, d]`."""
    cache = QuestConfig(12, P, RECENT, ())([LAYER], len(lengths), 64, jnp.float32)
    assert isinstance(cache, PageCache)
    keys, values = np.random.default_rng(0).standard_normal((2, len(lengths), 64, *LAYER)).astype(np.float32)
    for start in range(0, 64, chunk):
        at = jnp.broadcast_to(start + jnp.arange(chunk), (len(lengths), chunk))
        slots = jnp.where(at < jnp.array(lengths)[:, None], at, -1)
        part = lambda x, start=start: jnp.asarray(x[:, start:start + chunk])
        cache = cache.commit([KVEntry(part(keys), part(values))], slots)
    return cache, keys.swapaxes(1, 2), values.swapaxes(1, 2)


def test_pages_are_worth_what_the_authors_say() -> None:
    """Of Quest, for a last page that is not full, too; and TriForce's choice of chunks."""
    wanted, random = json.loads(EXPECTED.read_text()), np.random.RandomState(0)
    q = random.standard_normal((1, 1, 32)).astype(np.float32).reshape(2, 2, 8)
    keys = random.standard_normal((1, 45, 16)).astype(np.float32).reshape(45, 2, 8).swapaxes(0, 1)
    rule = KeyBounds()
    pages = [rule.digest(jnp.asarray(keys[:, i:i + 4])) for i in range(0, 45, 4)]
    np.testing.assert_allclose(rule(jnp.asarray(q), jnp.stack(pages, 1)).reshape(4, -1), wanted["quest"]["scores"],
                               atol=1e-3)
    keys = random.standard_normal((1, 1, 64, 4, 8)).astype(np.float32)[0, 0].swapaxes(0, 1)
    q = random.standard_normal((1, 1, 4, 8)).astype(np.float32)[0].swapaxes(0, 1)
    at = jnp.broadcast_to(jnp.arange(64), (4, 64))
    held = HeldLayer(keys=jnp.asarray(keys), values=jnp.asarray(keys), positions=at, count=jnp.full(4, 64),
                     length=jnp.int32(64), prompt_length=jnp.int32(64), since=jnp.int32(64),
                     queries=jnp.asarray(q.swapaxes(0, 1)), gathered=Gathered(), outputs=None, layer=0, depth=1,
                     shape=KVLayer(4, 8, queries=4))
    stays = best(ChunkMeans(8)(held), held.valid, jnp.int32(24))
    found = [sorted(set((np.flatnonzero(row) // 8).tolist())) for row in np.asarray(stays)]
    assert found == wanted["triforce"]["chunks"]


@pytest.mark.wide
def test_a_query_reads_the_pages_of_highest_score_and_the_latest_tokens() -> None:
    """Against a sum written out query by query, in rows of different lengths."""
    lengths = (61, 30, 9)
    cache, keys, values = filled(lengths, 16)
    q = np.random.default_rng(1).standard_normal((3, 2, 4, 8)).astype(np.float32)
    k, v = np.random.default_rng(2).standard_normal((2, 3, 2, 2, 8)).astype(np.float32)
    window = causal(jnp.zeros((3, 2), jnp.int32), cache.length)
    out, _ = cache.attend(0, jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), window, scale=0.4)
    read = 0
    for b, node in np.ndindex(3, 2):
        at = lengths[b] + node
        start = max(at - RECENT, 0) // P
        for g in range(2):
            pages = keys[b, g].reshape(-1, P, 8)[:start]
            # as in the authors' code: by the signs of the query
            worth = [max(sum(max(x * page[:, c].min(), x * page[:, c].max()) for c, x in enumerate(q[b, node, h]))
                         for h in (2 * g, 2 * g + 1)) for page in pages]
            chosen = sorted(range(start), key=lambda i: -worth[i])[:3]
            seen = [i * P + j for i in chosen for j in range(P)] + list(range(start * P, lengths[b]))
            read += len(seen) < lengths[b]
            own = np.concatenate([keys[b, g, seen], k[b, :node + 1, g]]), np.concatenate([values[b, g, seen],
                                                                                          v[b, :node + 1, g]])
            for h in (2 * g, 2 * g + 1):
                weights = jax.nn.softmax(0.4 * own[0] @ q[b, node, h])
                np.testing.assert_allclose(out[b, node, h], weights @ own[1], atol=1e-5)
    assert read == 2 * 2 * 2        # the last row has no page too many


def test_digests_do_not_depend_on_how_tokens_came() -> None:
    digests = [filled((61, 30, 9), chunk)[0].digests[0] for chunk in (1, 16, 64)]
    whole = np.array([61, 30, 9]) // P
    for b, n in enumerate(whole):
        for other in digests[1:]:
            np.testing.assert_array_equal(other[b, :, :n], digests[0][b, :, :n])
