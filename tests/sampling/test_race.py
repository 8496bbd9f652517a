"""The exponential race: draws from the distribution, independent of one another, and shared by like distributions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.core import keys
from decodax.core.keys import Purpose
from decodax.sampling.draw import draw, exponentials, largest_at_once, largest_by_blocks, nan_as_largest, race
from tests.sampling.oracle import row_keys

# false-alarm rates of 1e-5 each: quantiles of chi-square with so many degrees of freedom
QUANTILE = {15: 51.5, 225: 326.0, 255: 361.0}


def chi_square(counts: np.ndarray, p: np.ndarray) -> float:
    """Pearson's statistic of `counts` for the distribution `p`."""
    expected = p * counts.sum()
    assert expected.min() > 5
    return float(((counts - expected) ** 2 / expected).sum())


@functools.partial(jax.jit, static_argnums=(2, 3))
def tokens(key: jax.Array, logits: jax.Array, positions: int, first: int = 0) -> jax.Array:
    """`i32[B, positions]`: the draws of rows at neighbouring positions, from one distribution."""
    place = jnp.broadcast_to(first + jnp.arange(positions, dtype=jnp.int32), (key.shape[0], positions))
    return draw(jnp.broadcast_to(logits, (*place.shape, logits.shape[-1])), keys.addresses(key, place, Purpose.TOKEN))


@pytest.mark.full
def test_two_million_draws_from_sixteen_tokens_have_the_right_frequencies() -> None:
    logits = np.random.default_rng(0).normal(size=16).astype(np.float32) * 1.5
    p = np.exp(logits.astype(np.float64)) / np.exp(logits.astype(np.float64)).sum()
    counts = np.zeros(16)
    for part in range(8):
        counts += np.bincount(np.asarray(tokens(row_keys(500, part), jnp.asarray(logits), 500)).ravel(), minlength=16)
    assert counts.sum() == 2_000_000
    assert chi_square(counts, p) < QUANTILE[15]


@pytest.mark.wide
@pytest.mark.parametrize(("V", "parts"), [(4_000, 2), pytest.param(32_000, 20, marks=pytest.mark.full)])
def test_draws_from_a_large_vocabulary_have_the_right_frequencies(V: int, parts: int) -> None:
    logits = np.random.default_rng(1).normal(size=V).astype(np.float32) * 2
    p = np.exp(logits.astype(np.float64))
    p /= p.sum()
    # about 256 bins of like mass, and one of all tokens that are unlikely by themselves
    rare = p < 1e-6
    bins = np.where(rare, 0, 1 + np.minimum((np.cumsum(p) * 255).astype(int), 254))
    bins = np.unique(bins, return_inverse=True)[1]
    few = np.bincount(bins, p) * 10_000 * parts < 10
    bins = np.unique(np.where(few[bins], 0, bins), return_inverse=True)[1]
    drawn = [np.asarray(tokens(row_keys(100, part), jnp.asarray(logits), 100)).ravel() for part in range(parts)]
    counts = np.bincount(bins[np.concatenate(drawn)], minlength=bins.max() + 1)
    assert counts.sum() == 10_000 * parts
    assert 150 < len(counts) <= 256
    assert chi_square(counts, np.bincount(bins, p)) < QUANTILE[255]


def test_a_token_of_one_in_a_million_is_drawn_once_in_a_million() -> None:
    n, drawn = 1_000_000, 0
    logits = jnp.array([0.0, np.log(4e-6)], jnp.float32)
    for part in range(4):
        drawn += int((np.asarray(tokens(row_keys(500, part), logits, 500)) == 1).sum())
    assert 0 < drawn < 4 + 5 * 2, f"expected {n * 4e-6:.0f}"


def pairs(a: np.ndarray, b: np.ndarray) -> float:
    """Chi-square of a 16 x 16 table of pairs against the product of its margins."""
    table = np.zeros((16, 16))
    np.add.at(table, (a.ravel(), b.ravel()), 1)
    expected = table.sum(1, keepdims=True) * table.sum(0, keepdims=True) / table.sum()
    return float(((table - expected) ** 2 / expected).sum())


@pytest.mark.wide
def test_draws_of_neighbours_are_independent() -> None:
    logits = jnp.zeros(16)
    drawn = np.asarray(tokens(row_keys(400), logits, 500))
    assert pairs(drawn[:, :-1], drawn[:, 1:]) < QUANTILE[225], "neighbouring positions"
    assert pairs(drawn[:-1], drawn[1:]) < QUANTILE[225], "neighbouring rows"
    assert pairs(drawn, np.asarray(tokens(row_keys(400, 1), logits, 500))) < QUANTILE[225], "neighbouring seeds"
    other = keys.addresses(row_keys(400), jnp.broadcast_to(jnp.arange(500, dtype=jnp.int32), (400, 500)), Purpose.DRAFT)
    again = np.asarray(jax.jit(draw)(jnp.zeros((400, 500, 16)), other))
    assert pairs(drawn, again) < QUANTILE[225], "other purposes"


@pytest.mark.wide
def test_times_of_neighbouring_ids_are_independent() -> None:
    address = keys.addresses(row_keys(64), jnp.broadcast_to(jnp.arange(64, dtype=jnp.int32), (64, 64)), Purpose.TOKEN)
    e = np.asarray(exponentials(address, 256))
    bins = np.minimum((-np.expm1(-e.astype(np.float64)) * 16).astype(int), 15)
    assert chi_square(np.bincount(bins.ravel(), minlength=16), np.full(16, 1 / 16)) < QUANTILE[15]
    for apart in (1, 2, 16, 128):
        assert pairs(bins[..., :-apart], bins[..., apart:]) < QUANTILE[225], apart


@pytest.mark.wide
def test_the_order_of_arrival_is_a_draw_without_replacement() -> None:
    p = np.array([0.5, 0.3, 0.15, 0.05])
    address = keys.addresses(row_keys(400), jnp.broadcast_to(jnp.arange(500, dtype=jnp.int32), (400, 500)),
                             Purpose.TOKEN)
    order = np.asarray(jax.lax.top_k(race(jnp.log(jnp.asarray(p, jnp.float32)) * jnp.ones((400, 500, 1)), address),
                                     2)[1]).reshape(-1, 2)
    expected = np.array([[0 if i == j else p[i] * p[j] / (1 - p[i]) for j in range(4)] for i in range(4)])
    table = np.zeros((4, 4))
    np.add.at(table, (order[:, 0], order[:, 1]), 1)
    off = ~np.eye(4, dtype=bool)
    assert chi_square(table[off], expected[off]) < QUANTILE[15]


def test_like_distributions_draw_the_same_token() -> None:
    # at least (1 - d) / (1 + d) of the time, where d is their total variation distance
    rng = np.random.default_rng(2)
    for spread in (0.1, 0.5, 1.5):
        p = rng.normal(size=64)
        q = p + rng.normal(size=64) * spread
        one, other = (np.exp(x) / np.exp(x).sum() for x in (p, q))
        distance = 0.5 * np.abs(one - other).sum()
        a, b = (np.asarray(tokens(row_keys(100), jnp.asarray(x, jnp.float32), 100)) for x in (p, q))
        assert (a == b).mean() > (1 - distance) / (1 + distance) - 0.02


@pytest.mark.full
def test_seed_exact_speculation_accepts_almost_what_rejection_accepts() -> None:
    # the shipped pair, one draft a round. Rejection accepts the sum of min(p, q); the bars are 0.84 and 0.91 of it
    lm, draft = dx.load("pycode"), dx.load("pycode-draft")
    prompts = ["def fib(n):", "class Stack:", "import os", "with open(path) as f:"] * 10
    for temperature, bar in ((1.0, 0.84), (0.7, 0.91)):
        share = [dx.generate(lm, prompts, algorithm=dx.algorithms.make(name, draft=draft, length=1), max_new_tokens=48,
                             seed=1,
                             temperature=temperature, eos_token_id=[]).stats.draft_acceptance_rate
                 for name in ("seed-exact", "speculative-decoding")]
        assert share[0] > bar * share[1]


@pytest.mark.parametrize("size", [7, 256, 5000])
def test_the_accelerators_way_to_the_first_maximum_is_the_cpus(size: int) -> None:
    x = np.random.default_rng(size).normal(size=(6, size)).astype(np.float32).round(1)      # many equal ones
    x[1, size // 2:] = np.nan
    x[2] = -np.inf
    x[3, size - 1] = np.inf
    x[4, 0] = -np.nan
    cpu, other = jax.jit(largest_by_blocks)(nan_as_largest(x)), jax.jit(largest_at_once)(nan_as_largest(x))
    np.testing.assert_array_equal(cpu[0], other[0])
    np.testing.assert_array_equal(other[0], np.where(np.isnan(x).any(1), np.isnan(x).argmax(1), x.argmax(1)))
    np.testing.assert_array_equal(cpu[1], other[1])
    assert np.isinf(np.asarray(cpu[1])[1:5]).all()
