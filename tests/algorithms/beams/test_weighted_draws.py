"""Stochastic beams and adaptive weighted rejection sampling: draws and their weights against enumeration."""

import dataclasses
import itertools
from typing import Any

import jax
import numpy as np
import pytest
from scipy.stats import chi2

import decodax as dx
from decodax.algorithms.beams import StochasticBeams
from decodax.algorithms.contrastive.awrs import AWRS, ranked
from tests.search.tiny import EOS, NEW, V, law, tiny
from tests.small_models import PROMPTS, net


def allowed(ids: list[int]) -> bool:
    """No 1 behind a 1, and no 3 first."""
    return ids[0] != 3 and not any(a == b == 1 for a, b in itertools.pairwise(ids))


@pytest.mark.wide
def test_weights_are_the_allowed_probability_on_average() -> None:
    prompt, count = (1, 2), 4000
    out = dx.generate(tiny(), [list(prompt)], algorithm=AWRS(allowed), num_samples=count, temperature=1.0,
                      max_new_tokens=NEW)
    weights = np.exp(out.findings["log_weight"].astype(float))
    held = {t: p for t, p in law(prompt).items() if allowed(list(t))}
    total = sum(held.values())
    assert 0.1 < total < 0.95
    assert abs(weights.mean() - total) < 4 * weights.std() / np.sqrt(count)
    found: dict[tuple[int, ...], float] = {}
    for i in range(count):
        text = tuple(out.row(i).tolist())
        assert allowed(list(text))
        found[text] = found.get(text, 0) + weights[i] / count
    assert sum(abs(found.get(t, 0) - p) for t, p in held.items()) / 2 < 0.08 * total
    calls = out.findings["calls"]
    assert (calls >= 2).all() and calls.mean() < NEW * V * 0.8          # far from the whole vocabulary each time


@pytest.mark.wide
def test_stochastic_beams_draw_without_replacement() -> None:
    prompt, count = (1, 2), 4000
    out = dx.generate(tiny(), [list(prompt)] * count, algorithm=StochasticBeams(2), temperature=1.0, max_new_tokens=3)
    p: dict[tuple[int, ...], float] = {}
    for text, chance in law(prompt).items():        # texts of three tokens
        p[text[:3]] = p.get(text[:3], 0) + chance
    pairs: dict[Any, int] = {}
    for i in range(count):
        first, second = (tuple(out.row(2 * i + j).tolist()) for j in range(2))
        assert first != second
        pairs[first, second] = pairs.get((first, second), 0) + 1
    want = {(a, b): count * p[a] * p[b] / (1 - p[a]) for a in p for b in p if a != b}
    some = [pair for pair, n in want.items() if n > 5]
    statistic = sum((pairs.get(pair, 0) - want[pair]) ** 2 / want[pair] for pair in some)
    rest = sum(want[pair] for pair in want) - sum(want[pair] for pair in some)
    seen = count - sum(pairs.get(pair, 0) for pair in some)
    assert chi2.sf(statistic + (seen - rest) ** 2 / rest, len(some)) > 1e-4
    # the estimate of a mean is without bias: here of the number of threes
    threes = np.array([sum(t == 3 for t in out.row(i)) for i in range(2 * count)])
    weights = np.exp(out.findings["log_weight"].astype(float))
    each = (threes * weights).reshape(count, 2).sum(1)
    mean = sum(chance * sum(t == 3 for t in text) for text, chance in p.items())
    assert abs(each.mean() - mean) < 4 * each.std() / np.sqrt(count)
    chances = [p[tuple(out.row(i).tolist())] for i in range(50)]
    np.testing.assert_allclose(np.exp(out.findings["log_prob"][:50]), chances, rtol=1e-4)


@pytest.mark.wide
def test_more_draws_than_texts_and_broken_logits() -> None:
    out = dx.generate(tiny(), [[1, 2]], algorithm=StochasticBeams(9), temperature=1.0, max_new_tokens=1)
    assert sorted(out.row(i).tolist() for i in range(5)) == [[t] for t in range(V)]
    assert out.status[5:] == [dx.Status.DEAD_END] * 4
    np.testing.assert_allclose(np.exp(out.findings["log_weight"][:5]), np.exp(out.findings["log_prob"][:5]))
    broken = dataclasses.replace(tiny(), params=jax.tree.map(lambda x: x * np.nan, tiny().params))
    assert set(dx.generate(broken, [[1, 2]], algorithm=StochasticBeams(2), max_new_tokens=2).status) == {
        dx.Status.INVALID}


def test_one_token_by_complete_enumeration() -> None:
    """Over all orders in which tokens can be drawn, the mean weight of each allowed token is its probability."""
    rng = np.random.default_rng(0)
    for _ in range(5):
        p, ok = rng.dirichlet(np.ones(5)), rng.random(5) < 0.5
        alg, mean = AWRS(lambda ids, ok=ok: bool(ok[ids[-1]])), np.zeros(5)
        for order in itertools.permutations(range(5)):
            chance, left, rank = 1.0, 1.0, np.zeros(5)
            for k, t in enumerate(order):
                chance, left, rank[t] = chance * p[t] / left, left - p[t], -k
            token, log_weight, _ = alg.draw_one([], rank, np.log(p))
            if token >= 0:
                mean[token] += chance * np.exp(log_weight)
        np.testing.assert_allclose(mean, np.where(ok, p, 0), atol=1e-9)


@pytest.mark.wide
def test_the_check_holds_in_every_case() -> None:
    greedy = dx.generate(tiny(), [[1, 2]], algorithm=AWRS(allowed), max_new_tokens=NEW)
    banned = dx.generate(tiny(), [[1, 2]], bad_words_ids=[[1, 1]], begin_suppress_tokens=[3], max_new_tokens=NEW)
    assert greedy.row(0).tolist() == banned.row(0).tolist() and greedy.findings["log_weight"][0] == 0
    free = AWRS(lambda ids: True)
    plain = dx.generate(net(), PROMPTS, temperature=1.0, max_new_tokens=8)
    assert np.array_equal(dx.generate(net(), PROMPTS, algorithm=free, temperature=1.0, max_new_tokens=8).tokens,
                          plain.tokens)
    nothing = dx.generate(tiny(), [[1, 2]], algorithm=AWRS(lambda ids: False), temperature=1.0, max_new_tokens=3)
    assert nothing.status == [dx.Status.DEAD_END] and nothing.findings["log_weight"][0] == -np.inf
    few = dx.generate(tiny(), [[1, 2]], algorithm=AWRS(lambda ids: ids[-1] == EOS, most=1), num_samples=20,
                      temperature=1.0, max_new_tokens=2)
    assert dx.Status.DEAD_END in few.status
    with pytest.raises(ValueError, match="'awrs' needs check="):
        dx.generate(tiny(), [[1, 2]], algorithm="awrs")
    x = np.random.default_rng(0).normal(size=1000)
    assert list(ranked(x)) == np.argsort(-x).tolist() and list(ranked(x[:5])) == np.argsort(-x[:5]).tolist()
