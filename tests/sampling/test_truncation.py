"""Truncation at the edges: ties, more than there is, nothing left, broken logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decodax.sampling import (
    XTC,
    AllowedTokens,
    DynamicTemperature,
    Epsilon,
    Eta,
    ForcedEOS,
    MinP,
    Mirostat2,
    SuppressTokens,
    Temperature,
    TopH,
    TopK,
    TopNSigma,
    TopP,
    Transform,
    Typical,
    build,
)
from decodax.sampling.threshold import by_digits, by_halves, kth_largest
from tests.sampling.oracle import BATCH, apply, random_logits, rows

SHAPING: list[Transform] = [
    Temperature(rows(0.7)), TopK(rows(5, jnp.int32)), TopK(rows(5, jnp.int32), 16), TopP(rows(0.9)), MinP(rows(0.05)),
    Typical(rows(0.8)), Epsilon(rows(0.01)), Eta(rows(0.01)), TopH(rows(0.5)), TopNSigma(rows(1.0)),
    XTC(rows(1.0), rows(0.05)), DynamicTemperature(rows(0.9), rows(0.3), rows(1.0)),
]
NAMES = [type(t).__name__ for t in SHAPING]
FORBIDDING: list[Transform] = [
    SuppressTokens(jnp.full((BATCH, 4), 7)), AllowedTokens(jnp.full((BATCH, 4), 3)),
    ForcedEOS(jnp.full((BATCH, 4), 2), rows(2, jnp.int32), rows(50, jnp.int32)),
]


@pytest.mark.wide
def test_a_threshold_is_exact_at_any_scale() -> None:
    rng = np.random.default_rng(0)
    for scale in (1e-30, 1e-3, 1.0, 1e30):
        x = (rng.normal(size=64) * scale).astype(np.float32)
        order = np.sort(x)[::-1]
        found = jax.vmap(kth_largest, (None, 0))(jnp.asarray(x), jnp.arange(1, 65))
        np.testing.assert_array_equal(np.asarray(found), order)


def test_no_threshold_is_a_nan_that_removes_nothing() -> None:
    assert np.isnan(kth_largest(jnp.ones(3), jnp.int32(4)))
    for search in (by_halves, by_digits):
        assert np.isnan(search(jnp.ones(3), jnp.zeros(3), jnp.float32(0)))
        assert np.isnan(search(jnp.full(3, jnp.nan), jnp.ones(3), jnp.float32(0)))


@pytest.mark.wide
@pytest.mark.parametrize("divided", [False, pytest.param(True, marks=pytest.mark.mesh)])
def test_by_digits_finds_what_halving_does(divided: bool) -> None:
    rng = np.random.default_rng(1)
    x = (rng.normal(size=(12, 4096)) * np.float32(10) ** rng.integers(-6, 6, (12, 1))).astype(np.float32)
    x[:, ::3], x[:, 5], x[3] = -np.inf, np.inf, 0.5
    x[4] = rng.integers(-3, 3, 4096)                                        # ties
    weights = rng.integers(0, 9, x.shape).astype(np.float32)                # whole numbers, whose sums are exact
    share = rng.random(12).astype(np.float32)
    want = jax.vmap(by_halves)(x, weights, share)
    mesh = jax.make_mesh((2, 4) if divided else (1, 1), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        place = lambda a, *spec: jax.device_put(a, jax.NamedSharding(mesh, jax.P("data", *spec)))
        got = jax.jit(jax.vmap(by_digits))(place(x, "model"), place(weights, "model"), place(share))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("limit", [None, 8])
def test_top_k_keeps_ties_with_the_last(limit: int | None) -> None:
    logits = np.tile(np.array([1, 3, 2, 2, 2, 0], np.float32), (BATCH, 1))
    kept = np.isfinite(apply(TopK(rows([1, 2, 0], jnp.int32), limit), logits)).sum(1)
    assert kept.tolist() == [1, 4, 6]


@pytest.mark.parametrize("limit", [None, 128])
def test_top_k_beyond_the_vocabulary_keeps_all(limit: int | None) -> None:
    logits = random_logits(0, 6)
    np.testing.assert_array_equal(apply(TopK(rows(100, jnp.int32), limit), logits), logits)


def test_top_p_keeps_the_smallest_set_and_ties_with_its_last() -> None:
    p = np.array([0.25, 0.125, 0.25, 0.125, 0.25], np.float32)
    logits = np.tile(np.log(p), (4, 1))
    kept = np.isfinite(apply(TopP(jnp.array([0.1, 0.75, 0.76, 1.0])), logits))
    assert kept.astype(int).tolist() == [[1, 0, 1, 0, 1], [1, 0, 1, 0, 1], [1] * 5, [1] * 5]


def test_top_p_of_one_keeps_even_what_rounding_hides() -> None:
    logits = np.tile(np.array([50, 0, -50], np.float32), (BATCH, 1))
    np.testing.assert_array_equal(apply(TopP(rows(1.0)), logits), logits)


def test_top_p_at_zero_keeps_the_most_likely() -> None:
    logits = random_logits(3, 40)
    kept = np.isfinite(apply(TopP(rows(0.0)), logits))
    assert kept.sum(1).tolist() == [1] * BATCH
    np.testing.assert_array_equal(kept.argmax(1), logits.argmax(1))


@pytest.mark.parametrize("transform", SHAPING, ids=NAMES)
def test_forbidden_tokens_stay_forbidden_and_one_token_stays(transform: Transform) -> None:
    logits = random_logits(1, 30)
    logits[:, 3:] = -np.inf
    logits[0, 1:] = -np.inf
    ours = apply(transform, logits)
    assert np.isneginf(ours[:, 3:]).all() and np.isfinite(ours).any(1).all()
    assert not np.isnan(ours).any()


@pytest.mark.parametrize("transform", SHAPING, ids=NAMES)
def test_a_row_without_any_token_stays_one(transform: Transform) -> None:
    assert np.isneginf(apply(transform, np.full((BATCH, 20), -np.inf, np.float32))).all()


@pytest.mark.parametrize("transform", [*SHAPING, *FORBIDDING], ids=[*NAMES, *(type(t).__name__ for t in FORBIDDING)])
@pytest.mark.parametrize("size", [20, 5000])        # XLA's maximum on CPU passes over a NaN among more than a few
def test_a_nan_is_never_hidden(transform: Transform, size: int) -> None:
    logits = random_logits(1, size)
    for token in (0, 7, size - 1):
        broken = logits.copy()
        broken[1, token] = -np.float32(np.nan)
        ours = apply(transform, broken)
        assert np.isnan(ours[1]).any() and not np.isnan(ours[[0, 2]]).any()


@pytest.mark.parametrize("size", [20, 5000])
def test_mirostat_does_not_hide_a_nan(size: int) -> None:
    logits = random_logits(1, size)
    logits[1, 7] = np.nan
    assert np.isnan(apply(Mirostat2(rows(1.0), rows(0.1)), logits, states=rows(1.0))[1]).any()


@pytest.mark.wide
def test_neutral_rows_of_a_mixed_batch_are_left_alone() -> None:
    logits = random_logits(2, 200)
    settings = dict(top_k=[5, 0, 7], top_p=[0.5, 1.0, None], min_p=[0.2, 0, None], typical_p=[0.5, 1, None],
                    epsilon_cutoff=[0.1, 0, None], eta_cutoff=[0.1, 0, None], top_h=[0.2, None, 0.3],
                    top_n_sigma=[1.0, 0, None], xtc_probability=[1.0, 0, None], repetition_penalty=[1.2, 1, None],
                    presence_penalty=[1.0, 0, None], dry_multiplier=[1.0, 0, None], no_repeat_ngram_size=[1, 0, None],
                    encoder_no_repeat_ngram_size=[1, 0, None], encoder_repetition_penalty=[2.0, 1, None],
                    allowed_token_ids=[[1, 2], None, [3]], bad_words_ids=[[[1]], None, []],
                    suppress_tokens=[[5], None, []], logit_bias=[{1: 2.0}, {}, {}], forced_bos_token_id=[3, -1, None])
    chain = build(BATCH, do_sample=True, **settings).transforms
    assert len(chain) == len(settings) + 1
    for transform in chain:
        ours = apply(transform, logits, [[4]] * BATCH, 1)
        np.testing.assert_array_equal(ours[1], logits[1], err_msg=type(transform).__name__)
