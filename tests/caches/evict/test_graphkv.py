"""GraphKV (Li et al., 2025): scores that decay along a graph of similar keys."""

import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax import caches
from decodax.caches.evict.graphkv import GraphDecay
from decodax.caches.evict.snapkv import WindowAttention
from tests.caches.small import PROMPTS, SMALL


def by_hand(worth: np.ndarray, keys: np.ndarray, sources: int, neighbours: int, rounds: int) -> np.ndarray:
    """The paper's rule for one head, whose nodes are the tokens with a finite score."""
    nodes = [j for j in range(len(worth)) if np.isfinite(worth[j])]
    cosine = lambda i, j: keys[i] @ keys[j] / np.linalg.norm(keys[i]) / np.linalg.norm(keys[j])
    found = worth.astype(np.float64)
    for _ in range(rounds):
        for i in sorted(nodes, key=lambda j: -worth[j])[:sources]:
            others = sorted((j for j in nodes if j != i), key=lambda j: -cosine(i, j))[:neighbours]
            for j in others:
                found[j] *= 1 - cosine(i, j)
    return found


@pytest.mark.parametrize(("sources", "neighbours", "rounds"), [(3, 2, 1), (1, 5, 3), (40, 3, 2), (4, 50, 1), (3, 2, 0)])
def test_scores_decay_as_the_paper_says(sources: int, neighbours: int, rounds: int) -> None:
    draw = np.random.default_rng(0)
    worth, keys = draw.random((2, 20)).astype(np.float32), draw.normal(0.3, 1, (2, 20, 8)).astype(np.float32)
    worth[:, 15:18] = np.inf
    valid = np.arange(20) < 18
    rule = GraphDecay(WindowAttention(3), 0.3, neighbours, rounds)
    got = rule.decayed(jnp.asarray(worth), jnp.asarray(valid & np.isfinite(worth)), jnp.asarray(keys),
                       jnp.int32(sources))
    for head in range(2):
        want = by_hand(worth[head, :18], keys[head, :18], sources, neighbours, rounds)
        np.testing.assert_allclose(got[head, :18], want, rtol=2e-4, atol=1e-6)


def test_of_two_tokens_that_are_alike_one_gives_way() -> None:
    """The best three of four are two with the same key and another; the fourth takes the place of the double."""
    keys = jnp.asarray([[[1.0, 0], [1, 0], [0, 1], [0.3, -1]]])
    worth, nodes = jnp.asarray([[4.0, 3, 2, 1]]), jnp.ones((1, 4), bool)
    left = GraphDecay(WindowAttention(1), neighbours=1).decayed(worth, nodes, keys, jnp.int32(1))
    assert np.argsort(-np.asarray(left)[0])[:3].tolist() == [0, 2, 3]


@pytest.mark.wide
def test_no_rounds_are_snapkv_and_a_large_budget_is_dense() -> None:
    run = lambda cache: dx.generate(SMALL, PROMPTS, cache=cache, max_new_tokens=12, seed=5, temperature=0.8).tokens
    plain = run(caches.make("snapkv", budget=14, window_size=4))
    assert (run(caches.make("graphkv", budget=14, window_size=4, rounds=0)) == plain).all()
    assert (run(caches.make("graphkv", budget=14, window_size=4, neighbours=8, rounds=3)) != plain).any()
    assert (run(caches.make("graphkv", budget=200, window_size=4)) == run(None)).all()
