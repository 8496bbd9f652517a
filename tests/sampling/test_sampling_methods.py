"""Sampling rules of papers: Bregman top-k against the exhaustive minimum, ends in time, arithmetic sampling's law."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.stats import chi2

import decodax as dx
from decodax.core import keys
from decodax.sampling import BregmanTopK, Context, NonMonotonicEnd
from decodax.sampling.arithmetic import evenly
from tests.matrix import often
from tests.small_models import PROMPTS, net


def divergence(x: np.ndarray, y: np.ndarray, a: float) -> np.ndarray:
    if a == 1:
        return x * np.log(x / y) - x + y
    return x ** a / (a * (a - 1)) - y ** a / (a * (a - 1)) - y ** (a - 1) / (a - 1) * (x - y)


@pytest.mark.wide
@pytest.mark.parametrize(("alpha", "dual"), often([(1.5, False), (2.0, True)],
                                                  [(a, d) for a in (1.0, 1.2, 1.5, 2.0, 3.0) for d in (False, True)
                                                   if a > 1 or not d]))
def test_bregman_top_k_is_the_least_of_its_objective_over_all_supports(alpha: float, dual: bool) -> None:
    for seed, cost in enumerate((0.1, 0.02, 0.005)):
        p = np.random.default_rng(seed).dirichlet(np.full(6, 0.7))
        best: tuple[float, Any] = np.inf, None
        for size in range(1, 7):
            for kept in map(list, itertools.combinations(range(6), size)):
                rest = [i for i in range(6) if i not in kept]

                def objective(z: np.ndarray, p: Any = p, kept: list[int] = kept, rest: list[int] = rest) -> float:
                    q = np.maximum(np.exp(z - z.max()) / np.exp(z - z.max()).sum(), 1e-300)
                    if dual:
                        return (divergence(p[kept], q, alpha).sum() + (p[rest] ** alpha / (alpha * (alpha - 1))).sum())
                    return divergence(q, p[kept], alpha).sum() + (p[rest] ** alpha / alpha).sum()

                found = minimize(objective, np.log(p[kept]), method="BFGS", options=dict(gtol=1e-9))
                if found.fun + cost * size < best[0]:
                    q = np.zeros(6)
                    q[kept] = np.exp(found.x - found.x.max()) / np.exp(found.x - found.x.max()).sum()
                    best = found.fun + cost * size, q
        link = BregmanTopK(jnp.float32(cost), jnp.float32(alpha), dual)
        got = np.exp(np.asarray(link.logits(None, None, jnp.log(jnp.asarray(p, jnp.float32)))))  # type: ignore[arg-type]
        np.testing.assert_allclose(got, best[1], atol=2e-3)


@pytest.mark.wide
def test_bregman_top_k_leaves_bad_rows_and_a_cost_of_0_alone() -> None:
    link = BregmanTopK(jnp.float32(0), jnp.float32(1.5))
    x = jnp.array([1.0, 2.0, -jnp.inf])
    assert np.array_equal(link.logits(None, None, x), x)      # type: ignore[arg-type]
    held = BregmanTopK(jnp.float32(0.1), jnp.float32(1.5))
    assert np.isnan(held.logits(None, None, jnp.array([1.0, jnp.nan]))).any()       # type: ignore[arg-type]
    assert (held.logits(None, None, jnp.full(3, -jnp.inf)) == -jnp.inf).all()        # type: ignore[arg-type]
    alone = held.logits(None, None, jnp.array([0.0, -jnp.inf, -jnp.inf]))       # type: ignore[arg-type]
    assert alone[0] == 0 and (alone[1:] == -jnp.inf).all()


def ending(logits: np.ndarray, t: int, epsilon: float) -> np.ndarray:
    """The distribution of the `t`-th token, of which token 1 ends the text."""
    ctx = Context(jnp.zeros(0, jnp.int32), jnp.int32(4 + t), jnp.int32(5), jax.random.key(0))
    link = NonMonotonicEnd(jnp.array([1, -1]), jnp.float32(epsilon))
    return np.asarray(jax.nn.softmax(link.logits(None, ctx, jnp.asarray(logits, jnp.float32))))


def test_an_end_comes_as_likely_as_the_papers_formula_says() -> None:
    """With others that are normalised, as its head leaves them: figures by hand of the formula of NMST."""
    others = np.log([0.5, 0.3, 0.2])
    head = np.insert(others, 1, -np.log(3.0))       # s is the sigmoid of the end's logit: a quarter
    # 1 - 0.9 = 0.1: 0.75 * 0.1 + 0.25; 1 - 0.9 ** 2 = 0.19: 0.75 * 0.19 + 0.25
    for t, end in ((1, 0.325), (2, 0.3925)):
        want = [0.5 * (1 - end), end, 0.3 * (1 - end), 0.2 * (1 - end)]
        np.testing.assert_allclose(ending(head, t, 0.1), want, rtol=1e-5)


def test_a_constant_added_to_all_logits_leaves_the_end_as_likely() -> None:
    for seed in range(8):
        logits = np.random.default_rng(seed).normal(size=6) * 3
        for t in (1, 30):
            np.testing.assert_allclose(ending(logits + 25, t, 0.02), ending(logits, t, 0.02), rtol=1e-4)


def test_an_end_is_no_likelier_than_the_model_and_the_bound_make_it() -> None:
    """So a small epsilon leaves a model as it is, and in the end every text ends."""
    for seed in range(8):
        logits = np.random.default_rng(seed).normal(size=6) * 3 + 12
        plain = np.asarray(jax.nn.softmax(jnp.asarray(logits, jnp.float32)))
        for t, epsilon in ((1, 1e-6), (50, 1e-6), (5, 0.1), (200, 0.1)):
            bound, end = 1 - (1 - epsilon) ** t, ending(logits, t, epsilon)[1]
            assert max(plain[1], bound) - 1e-6 <= end <= plain[1] + bound + 1e-6
    assert ending(np.array([9.0, -30.0, 9.0]), 400, 0.1)[1] > 0.999999


@pytest.mark.wide
def test_a_real_model_goes_on_as_it_would_where_the_bound_is_low() -> None:
    lm = dx.load("pycode")
    prompts = ["def add(a, b):\n", "import os\n", "class Tree:\n"]
    options: dict[str, Any] = dict(max_new_tokens=24, min_new_tokens=0, seed=3)
    for temperature in (0.0, 0.8):
        plain, ended = (dx.generate(lm, prompts, temperature=temperature, **given, **options)
                        for given in ({}, {"nmst_epsilon": 1e-6}))
        assert ended.tokens.tolist() == plain.tokens.tolist()
        assert plain.lengths.min() > 1
    soon = dx.generate(lm, prompts, temperature=0.8, nmst_epsilon=0.5, **options)
    assert soon.lengths.max() < 24


@pytest.mark.parametrize("samples", [1, 3, 8])
def test_each_even_sample_is_a_draw_and_all_of_them_are_even(samples: int) -> None:
    V, steps, groups = 5, 3, 12_000
    p = np.random.default_rng(0).dirichlet(np.ones(V), size=steps).astype(np.float32)
    seeds: Any = np.stack([np.zeros(groups, np.uint32), np.arange(groups, dtype=np.uint32)], 1)
    link = jax.tree.map(jnp.asarray, evenly(seeds, np.zeros(groups, np.uint32), samples))
    count = groups * samples
    address = keys.row_keys(jnp.repeat(jnp.asarray(seeds), samples, 0), jnp.zeros(count, jnp.uint32),
                            jnp.tile(jnp.arange(samples), groups).astype(jnp.uint32))

    def text(t: Any, key: jax.Array) -> jax.Array:
        state, out = t.init(None), []
        for i in range(steps):
            ctx = Context(jnp.zeros(0, jnp.int32), jnp.int32(i), jnp.int32(0), key)
            logits = jnp.log(jnp.asarray(p[i]))
            out.append(t.logits(state, ctx, logits).argmax())
            state = t.advance(t.note(state, ctx, logits), out[-1], 0.0)
        return jnp.stack(out)

    tokens = np.asarray(jax.jit(jax.vmap(text))(link, address)).reshape(groups, samples, steps)
    want = np.einsum("a,b,c->abc", *p) * groups
    some = want > 5
    for i in range(samples):            # of each sample by itself; false alarms: 1e-4 for each
        seen: Any = np.zeros((V,) * steps)
        np.add.at(seen, tuple(tokens[:, i].T), 1)
        assert chi2.sf(((seen - want) ** 2 / want)[some].sum(), some.sum()) > 1e-4, i
    counts = np.stack([(tokens[..., 0] == v).sum(1) for v in range(V)], 1)
    # an interval of width p holds the codes of p N samples, less than one more or less
    assert (np.abs(counts - p[0] * samples) < 1 + 1e-3).all()


@pytest.mark.wide
def test_even_samples_are_more_different_and_the_same_with_drafts() -> None:
    options: dict[str, Any] = dict(max_new_tokens=4, temperature=1.0, num_samples=8, eos_token_id=[])
    different: Any = lambda out: np.mean([len({tuple(t) for t in out.tokens[i:i + 8]}) for i in range(0, len(out), 8)])
    short = {**options, "max_new_tokens": 1}
    spread = [[different(dx.generate(net(), PROMPTS, arithmetic_sampling=even, seed=seed, **short))
               for seed in range(6)] for even in (True, False)]
    assert np.mean(spread[0]) > np.mean(spread[1])
    even = dx.generate(net(), PROMPTS, arithmetic_sampling=True, **options)
    drafted = dx.generate(net(), PROMPTS, arithmetic_sampling=True, algorithm="prompt-lookup:length=3", **options)
    assert np.array_equal(drafted.tokens, even.tokens)
    alone = dx.generate(net(), PROMPTS[1], arithmetic_sampling=True, request_ids=[1], **options)
    assert np.array_equal(alone.tokens, even.tokens[8:16])
