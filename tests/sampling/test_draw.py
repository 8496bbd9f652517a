"""Drawing through a policy: the right frequencies, never a forbidden token, and names for what is no distribution."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decodax.core.types import DEAD_END, INVALID
from decodax.core.window import causal
from decodax.sampling import build
from tests.matrix import often
from tests.sampling.draws import DRAWS, VOCAB, chi_square, draw, frequencies
from tests.sampling.lifted import Decoding, log_probs
from tests.sampling.oracle import row_keys

# false-alarm rate 1e-5 each: the 0.99999 quantile of chi-square with 15 degrees of freedom is 51.5
LIMIT = 51.5


@pytest.mark.wide
@pytest.mark.parametrize("settings", [
    dict(temperature=1.0), dict(temperature=0.6), dict(temperature=1.0, top_k=5), dict(temperature=1.3, top_p=0.8),
    dict(temperature=1.0, min_p=0.1, repetition_penalty=1.5), dict(temperature=1.0, typical_p=0.7),
], ids=lambda s: " ".join(s))
def test_tokens_are_drawn_as_often_as_the_policy_says(settings: dict) -> None:
    logits = np.random.default_rng(0).normal(size=VOCAB) * 1.2
    policy = build(1, **settings)
    key, one = row_keys(1), jnp.ones(1, jnp.int32)
    s = Decoding(jnp.zeros((1, 4), jnp.int32), one, one, key, policy.init(jnp.zeros((1, 4), jnp.int32), one, one, key))
    window = causal(jnp.zeros((1, 1), jnp.int32), one - 1)
    p = np.exp(np.asarray(log_probs(policy, s, window, np.float32(logits)[None, None]), np.float64))[0, 0]
    assert chi_square(frequencies(logits, **settings), p / p.sum()) < LIMIT


@pytest.mark.wide
def test_a_token_of_probability_zero_is_never_drawn() -> None:
    rng = np.random.default_rng(1)
    for size in (3, 300):
        logits = np.full(size, -np.inf)
        allowed = rng.choice(size, 2, replace=False)
        logits[allowed] = [0.0, -12.0]
        counts = frequencies(logits, temperature=1.0, top_p=1.0)
        assert counts[allowed].sum() == DRAWS


def test_greedy_takes_the_first_of_equal_logits() -> None:
    logits = np.zeros((3, 600), np.float32)
    logits[0, [300, 599]] = 2
    logits[1, [0, 1]] = 2
    tokens = draw(build(3, temperature=0.0), jnp.asarray(logits), row_keys(3))
    assert tokens.tolist() == [300, 0, 0]


def test_greedy_and_sampled_rows_share_a_batch() -> None:
    logits = np.random.default_rng(2).normal(size=(3, 40)).astype(np.float32)
    mixed = draw(build(3, temperature=[0.0, 1.0, 0.0], top_p=0.9), jnp.asarray(logits), row_keys(3))
    greedy = draw(build(3, temperature=0.0, top_p=0.9), jnp.asarray(logits), row_keys(3))
    warm = draw(build(3, temperature=1.0, top_p=0.9), jnp.asarray(logits), row_keys(3))
    assert mixed.tolist() == [int(greedy[0]), int(warm[1]), int(greedy[2])]
    assert greedy.tolist() == logits.argmax(1).tolist()


WAYS = [
    dict(), dict(temperature=0.8), dict(temperature=0.8, top_k=4, top_p=0.9, min_p=0.01, typical_p=0.9, top_h=0.9),
    dict(temperature=0.8, mirostat_tau=3.0), dict(temperature=1.0, dynatemp_range=0.4, xtc_probability=0.5),
    dict(repetition_penalty=1.2, presence_penalty=0.4, dry_multiplier=1.0, no_repeat_ngram_size=2)]
SIZES = [20, 5000]       # XLA's maximum on CPU passes over a NaN among more than a few


@pytest.mark.parametrize(("settings", "size"), often(
    [*((way, 20) for way in WAYS[2:]), *((way, 5000) for way in WAYS[:3])], itertools.product(WAYS, SIZES)),
    ids=lambda x: x if isinstance(x, int) else " ".join(x) or "greedy")
def test_broken_logits_and_dead_ends_are_named(settings: dict, size: int) -> None:
    logits = np.random.default_rng(3).normal(size=(4, size)).astype(np.float32)
    logits[1, 13] = np.nan
    logits[2] = -np.inf
    logits[3, 5] = np.inf
    tokens = draw(build(4, **settings), jnp.asarray(logits), row_keys(4)).tolist()
    assert tokens[0] >= 0 and tokens[1:] == [INVALID, DEAD_END, INVALID]


def test_a_policy_that_forbids_everything_is_a_dead_end() -> None:
    policy = build(2, allowed_token_ids=[[3], [4]], suppress_tokens=[3])
    assert draw(policy, jnp.zeros((2, 8)), row_keys(2)).tolist() == [DEAD_END, 4]


@pytest.mark.parametrize(("settings", "fused"), [
    (dict(), True), (dict(top_p=0.8), True), (dict(top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.5), True),
    (dict(top_p=0.8, min_tokens_to_keep=2), False), (dict(top_p=0.8, typical_p=0.7), False)], ids=str)
def test_a_fused_kernel_draws_the_tokens_of_the_chain(monkeypatch: pytest.MonkeyPatch, settings: dict,
                                                             fused: bool) -> None:
    """Greedy rows among them. Chains of which it does only a part are left whole."""
    from decodax.pallas_kernels import vocabulary

    logits = jnp.asarray(np.random.default_rng(1).normal(size=(500, VOCAB)) * 2, jnp.float32)
    policy = build(500, temperature=[0.8, 0.0, 1.5, 0.3] * 125, **settings)
    want = draw(policy, logits, row_keys(500))
    calls, one = [], vocabulary.draw

    def counted(*args, **options):
        calls.append(set(options))
        return one(*args, **options)

    monkeypatch.setattr(vocabulary, "choose", lambda logits: None)
    monkeypatch.setattr(vocabulary, "draw", counted)
    got = jax.jit(lambda *x: draw.__wrapped__(*x))(policy, logits, row_keys(500))
    assert len(calls) == fused
    np.testing.assert_array_equal(got, want)
