"""Caches whose queries choose what they read."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.cache import KVLayer
from decodax.caches.evict.scores import Gathered, HeldLayer
from decodax.caches.evict.selection import best
from decodax.caches.evict.triforce import ChunkMeans
from decodax.caches.sparse.landmarks import LowRankKeys, Shadowed
from decodax.caches.sparse.recycling import Recycled, Recycling
from decodax.caches.sparse.retrieval import KeyBounds, PageScore, Retrieval, Retrieving
from decodax.core.cache import ReadPrompt
from decodax.core.window import causal
from decodax.models.rope import Rope, rotate
from tests.caches.test_policies import PROMPTS, SMALL, TREE

LAYER, P, RECENT = (2, 8), 4, 6
EXPECTED = Path(__file__).parents[1] / "expected" / "retrieval.json"


def filled(score: PageScore, lengths: tuple[int, ...], chunk: int) -> tuple[Retrieving, np.ndarray, np.ndarray]:
    """A cache with random tokens, taken in so many at a time, and its keys and values `[B, G, S, d]`."""
    cache = Retrieval(score, 12, P, RECENT)([LAYER], len(lengths), 64, jnp.float32)
    assert isinstance(cache, Retrieving)
    keys, values = np.random.default_rng(0).standard_normal((2, len(lengths), 64, *LAYER)).astype(np.float32)
    for start in range(0, 64, chunk):
        at = jnp.broadcast_to(start + jnp.arange(chunk), (len(lengths), chunk))
        slots = jnp.where(at < jnp.array(lengths)[:, None], at, -1)
        cache = cache.commit([(jnp.asarray(keys[:, start:start + chunk]), jnp.asarray(values[:, start:start + chunk]))],
                             slots)
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
                     length=jnp.int32(64), settled_at=jnp.int32(64), since=jnp.int32(64),
                     queries=jnp.asarray(q.swapaxes(0, 1)), gathered=Gathered(), outputs=None, layer=0, depth=1,
                     shape=KVLayer(4, 8, queries=4))
    stays = best(ChunkMeans(8)(held), held.valid, jnp.int32(24))
    found = [sorted(set((np.flatnonzero(row) // 8).tolist())) for row in np.asarray(stays)]
    assert found == wanted["triforce"]["chunks"]


@pytest.mark.wide
def test_a_query_reads_the_pages_of_highest_score_and_the_latest_tokens() -> None:
    """Against a sum written out query by query, in rows of different lengths."""
    lengths = (61, 30, 9)
    cache, keys, values = filled(KeyBounds(), lengths, 16)
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
    digests = [filled(KeyBounds(), (61, 30, 9), chunk)[0].digests[0] for chunk in (1, 16, 64)]
    whole = np.array([61, 30, 9]) // P
    for b, n in enumerate(whole):
        for other in digests[1:]:
            np.testing.assert_array_equal(other[b, :, :n], digests[0][b, :, :n])


@pytest.mark.wide
def test_what_cannot_be_had_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^cache: quest takes windows of at most its 4 recent tokens, got one of 11"):
        dx.generate(SMALL, PROMPTS[:1], cache="quest:budget=6,page=2,recent=4,skip=()", algorithm=TREE,
                    max_new_tokens=4)
    with pytest.raises(ValueError, match=r"^page: got 0, takes a number of tokens from 1"):
        dx.caches.make("quest", page=0)


@pytest.mark.wide
def test_a_query_that_reads_everything_notes_what_it_attends_to() -> None:
    """By the largest weight of a group's heads; the others read that and what has come since."""
    cache = Recycled(budget=5, stride=4)([LAYER], 2, 64, jnp.float32)
    assert isinstance(cache, Recycling)
    keys, values = np.random.default_rng(0).standard_normal((2, 2, 40, *LAYER)).astype(np.float32)
    cache = cache.commit([(jnp.asarray(keys), jnp.asarray(values))],
                         jnp.where(jnp.arange(40) < jnp.array([[40], [3]]), jnp.arange(40), -1))
    assert cache.horizon().tolist() == [1, 1]
    q = np.random.default_rng(1).standard_normal((2, 1, 4, 8)).astype(np.float32)
    own = jnp.ones((2, 1, 2, 8))
    cache = cache.commit([(own, own, jnp.asarray(q))], cache.length[:, None])
    assert cache.horizon().tolist() == [3, 3] and cache.since.tolist() == [40, 3]
    for g in range(2):
        weights = jax.nn.softmax(keys[0, :, g] @ q[0, 0, 2 * g:2 * g + 2].T, axis=0).max(1)
        assert cache.chosen[0][0, g].tolist() == np.argsort(-weights)[:5].tolist()
    assert sorted(cache.chosen[0][1, 0].tolist()) == [-1, -1, 0, 1, 2]      # a short text has no more
    some, at = cache._read(0)
    assert set(at[0, 0].tolist()) == {*cache.chosen[0][0, 0].tolist(), 40, -1}
    np.testing.assert_array_equal(some[0, 1, 0], np.concatenate([keys, values], -1)[0, int(at[0, 1, 0]), 1])


@pytest.mark.wide
def test_a_query_reads_the_chunks_of_shadowkv_by_keys_of_low_rank() -> None:
    """Attention of the authors' code to outliers, the end of the prompt, and keys that it makes anew."""
    wanted, r = json.loads(EXPECTED.read_text())["shadowkv"], np.random.RandomState(0)
    keys = r.standard_normal((131, 2, 16)).astype(np.float32).round(3)
    keys = (keys + 2 * np.sin(np.arange(131) / 9)[:, None, None]).astype(np.float32)
    values, q = (r.standard_normal(n).astype(np.float32).round(3) for n in ((131, 2, 16), (4, 16)))
    rope = Rope(16)
    cos, sin = rope.table(jnp.arange(131)[None], None)
    rotated = rotate(jnp.asarray(keys)[None], cos, sin, rope.interleaved)
    kind = LowRankKeys(24, 8, 10, 2, 4, new=4)
    shape = KVLayer(2, 16, queries=4, rope=rope)
    cache = kind([shape], 2, 160, jnp.float32).for_prompt()
    two = lambda x: jnp.concatenate([jnp.asarray(x).reshape(1, *x.shape[-3:])] * 2)
    # the other row is a shorter text
    at = jnp.arange(131)
    cache = cache.commit([(two(rotated), two(values))], jnp.where(at < jnp.array([[131], [50]]), at, -1)).settled(
        ReadPrompt(None, None, jnp.zeros((2, 0), jnp.int32)))
    assert isinstance(cache, Shadowed) and cache.shadows[0] is not None
    far = [np.flatnonzero(x).tolist() for x in np.asarray(cache.shadows[0].far[0])]
    assert far == wanted["far"] and cache.room(jnp.ones(2, bool)).tolist() == [59 - 51, 59 - 50]
    asks = two(2 * q[None])
    own = -100 * asks.reshape(2, 1, 2, 2, 16).sum(3)        # its own key is as good as not there
    out, _ = cache.attend(0, asks, own, own, causal(jnp.zeros((2, 1), jnp.int32), cache.length), scale=128 ** -0.5)
    np.testing.assert_allclose(out[0, 0], wanted["out"], atol=2e-4)
