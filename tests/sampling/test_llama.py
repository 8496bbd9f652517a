"""The samplers of llama.cpp against its rules, worked out in float64 with loops and sorts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decodax.core import keys
from decodax.core.keys import Purpose
from decodax.sampling import XTC, Mirostat2, TopNSigma, build
from tests.sampling.oracle import BATCH, apply, close, contexts, random_histories, random_logits, row_keys, rows


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def transform(**settings):
    """The only transform beside the temperature."""
    chain = build(BATCH, **settings).transforms
    (found,) = [t for t in chain if type(t).__name__ != "Temperature"]
    return found


@pytest.mark.parametrize("last_n", [-1, 0, 1, 6, 100])
@pytest.mark.parametrize("seed", range(2))
def test_penalties_count_the_last_tokens_with_the_prompt(last_n: int, seed: int) -> None:
    logits, ids = random_logits(seed, 60), random_histories(seed, 60)
    expected = logits.astype(np.float64)
    for row, text in zip(expected, ids, strict=True):
        window = text if last_n < 0 else text[len(text) - min(last_n, len(text)):]
        for token in set(window.tolist()):
            count = (window == token).sum()
            row[token] = row[token] * 1.3 if row[token] <= 0 else row[token] / 1.3
            row[token] -= count * 0.25 + 0.5
    ours = logits
    chain = build(BATCH, repetition_penalty=1.3, frequency_penalty=0.25, presence_penalty=0.5, penalty_last_n=last_n)
    for t in chain.transforms[:2]:
        ours = apply(t, ours, ids, 20)
    close(ours, expected)


def test_penalties_count_generated_tokens_alone_by_default() -> None:
    logits = np.zeros((BATCH, 8), np.float32)
    text = [[1, 1, 2, 3, 3, 2, 3]] * BATCH
    ours = apply(transform(presence_penalty=0.5, frequency_penalty=[0.25, 0.0, 1.0]), logits, text, 3)
    np.testing.assert_allclose(ours[0, :4], [0, 0, -0.75, -1.25])
    np.testing.assert_allclose(ours[1, :4], [0, 0, -0.5, -0.5])
    np.testing.assert_allclose(ours[2, :4], [0, 0, -1.5, -3.5])


def dry(text: list[int], logits: np.ndarray, multiplier: float, base: float, allowed: int, last_n: int,
        breakers: list[list[int]]) -> np.ndarray:
    """The rule by brute force."""
    text = text if last_n < 0 else text[max(len(text) - last_n, 0):]
    n = len(text)
    out = logits.astype(np.float64)
    if multiplier == 0 or n <= allowed:
        return out
    limit = n
    for i in range(n):                                   # from the end
        head = n - 1 - i
        tails = [len(b) - 1 for b in breakers if text[head:head + len(b)] == b]
        if tails:
            limit = i - max(tails)
            break
    if limit < allowed:
        return out
    longest: dict[int, int] = {}
    for end in range(1, n):                              # text[:end] ends as the whole text does; text[end] came next
        length = 0
        while length < end and text[end - 1 - length] == text[n - 1 - length]:
            length += 1
        length = min(length, limit)
        if length >= allowed:
            longest[text[end]] = max(longest.get(text[end], 0), length)
    most = int(88.7228391 / np.log(base)) if base > 1.000001 else 0
    for token, length in longest.items():
        if [token] not in breakers:
            exponent = length - allowed
            out[token] -= multiplier * base ** (min(exponent, most) if most else exponent)
    return out


@pytest.mark.parametrize("breakers", [[], [[0]], [[0], [1, 2], [1, 2, 3], [2, 0]]])
@pytest.mark.parametrize(("allowed", "last_n"), [(0, -1), (1, -1), (2, -1), (2, 12), (3, 30), (2, 0), (2, 2)])
def test_dry_penalises_repeats_by_their_length(breakers: list, allowed: int, last_n: int) -> None:
    rng = np.random.default_rng(allowed + 10 * len(breakers))
    one = transform(dry_multiplier=0.8, dry_base=1.5, dry_allowed_length=allowed, dry_penalty_last_n=last_n,
                    dry_sequence_breakers=breakers)
    hits = 0
    for _ in range(4):
        texts = [rng.integers(0, 4, n).tolist() for n in (40, 23, 5)]
        texts[0][-8:] = texts[0][10:18]
        logits = random_logits(int(rng.integers(1000)), 6)
        expected = np.stack([dry(t, x, 0.8, 1.5, allowed, last_n, breakers) if last_n else x
                             for t, x in zip(texts, logits, strict=True)])
        close(apply(one, logits, texts, 2), expected)
        hits += (expected != logits).sum()
    assert hits or last_n in (0, 2) or breakers


def test_dry_of_the_documented_example() -> None:
    a, b, c, y = range(4)
    text = [a, b, c, c, b, c, y, a, b, c]
    one = transform(dry_multiplier=1.0, dry_base=2.0, dry_allowed_length=1)
    np.testing.assert_allclose(apply(one, np.zeros((BATCH, 4), np.float32), [text] * BATCH)[0], [0, -1, -4, -2])


def test_dry_of_a_long_loop_stays_finite() -> None:
    one = transform(dry_multiplier=1.0, dry_base=3.0)
    text = [1] * 200
    ours = apply(one, np.zeros((BATCH, 4), np.float32), [text] * BATCH)
    close(ours[:1], dry(text, np.zeros(4), 1.0, 3.0, 2, -1, [])[None], 1e-4)
    assert np.isfinite(ours).all()


def test_a_row_without_dry_is_left_alone() -> None:
    one = transform(dry_multiplier=[0.0, None, 1.0])
    changed = apply(one, np.zeros((BATCH, 4), np.float32), [[1, 2, 3] * 5] * BATCH) != 0
    assert changed.any(1).tolist() == [False, False, True]


@pytest.mark.parametrize("seed", range(3))
def test_top_n_sigma_keeps_what_is_near_the_largest(seed: int) -> None:
    logits = random_logits(seed, 120)
    logits[:, ::7] = -np.inf
    n = [0.5, 1.5, 0.0]
    expected = logits.astype(np.float64)
    for row, width in zip(expected, n, strict=True):
        valid = row[np.isfinite(row)]
        if width > 0:
            row[row < valid.max() - width * valid.std()] = -np.inf
    close(apply(TopNSigma(rows(n)), logits), expected)


def test_top_n_sigma_does_not_depend_on_temperature() -> None:
    logits = random_logits(0, 100)
    kept = [np.isfinite(apply(TopNSigma(rows(1.0)), logits / t)) for t in (0.3, 1, 5)]
    np.testing.assert_array_equal(kept[0], kept[1])
    np.testing.assert_array_equal(kept[1], kept[2])


def xtc(logits: np.ndarray, threshold: float) -> np.ndarray:
    order = np.argsort(-logits, kind="stable")
    p = softmax(logits.astype(np.float64))[order]
    likely = int((p >= threshold).sum())
    out = logits.copy()
    out[order[:max(likely - 1, 0)]] = -np.inf
    return out


@pytest.mark.parametrize("threshold", [0.02, 0.1, 0.3, 0.51])
def test_xtc_keeps_the_least_likely_of_the_top_choices(threshold: float) -> None:
    logits = random_logits(4, 40, spread=1.5)
    logits[0, [3, 9]] = logits[0].max() + 1             # equal ones: the last stays
    always = apply(XTC(rows(1.0), rows(threshold)), logits)
    close(always, np.stack([xtc(x, threshold if threshold <= 0.5 else 2) for x in logits]))
    np.testing.assert_array_equal(apply(XTC(rows(0.0), rows(threshold)), logits), logits)


def test_xtc_tosses_the_coin_of_its_row_and_position() -> None:
    logits = np.tile(np.array([2.0, 2.1, 0, 0], np.float32), (64, 1))
    texts = [[0] * (1 + i) for i in range(64)]
    acted = np.isneginf(apply(XTC(rows(0.3, batch=64), rows(0.1, batch=64)), logits, texts)).any(1)
    coin = jax.vmap(lambda k, n: jax.random.uniform(keys.at(k, n, Purpose.TRANSFORM)))(row_keys(64), jnp.arange(1, 65))
    np.testing.assert_array_equal(acted, np.asarray(coin) < 0.3)
    assert 8 < acted.sum() < 32


@pytest.mark.parametrize("seed", range(2))
def test_dynamic_temperature_follows_the_entropy(seed: int) -> None:
    logits = random_logits(seed, 90, spread=1.0 + seed)
    logits[:, 40:60] = -np.inf
    expected = logits.astype(np.float64)
    for row in expected:
        p = softmax(row)
        entropy = -(p[p > 0] * np.log(p[p > 0])).sum() / np.log(np.isfinite(row).sum())
        row /= max(0.9 - 0.5, 0) + 2 * 0.5 * entropy**1.3
    one = transform(temperature=0.9, dynatemp_range=0.5, dynatemp_exponent=1.3)
    close(apply(one, logits), expected, 2e-5)


def test_dynamic_temperature_leaves_a_single_token_alone_and_has_a_plain_case() -> None:
    logits = np.full((BATCH, 9), -np.inf, np.float32)
    logits[:, 4] = 2
    np.testing.assert_array_equal(apply(transform(temperature=0.9, dynatemp_range=0.5), logits), logits)
    logits = random_logits(0, 9)
    close(apply(transform(temperature=0.5, dynatemp_range=[0.0] * BATCH), logits), logits / 0.5)


def test_mirostat_drops_surprising_tokens_and_follows_its_target() -> None:
    tau, eta, steps = 2.0, 0.3, 12
    one = Mirostat2(rows(tau, batch=1), rows(eta, batch=1))
    mu = float(jax.vmap(lambda t, c: t.init(c))(one, contexts([[0]], 0))[0])
    assert mu == 2 * tau
    state, expected = jnp.full(1, mu, jnp.float32), mu
    rng = np.random.default_rng(0)
    for step in range(steps):
        logits = random_logits(step, 50, 1, 2.0)
        ours = apply(one, logits, states=state)[0]
        p = softmax(logits[0].astype(np.float64))
        keep = -np.log2(p) <= expected
        keep[p.argmax()] = True
        np.testing.assert_array_equal(np.isfinite(ours), keep)
        q = np.where(keep, p, 0) / p[keep].sum()
        token = rng.choice(50, p=q)
        expected -= eta * (-np.log2(q[token]) - tau)
        log_prob = jax.nn.log_softmax(jnp.asarray(ours))[token]
        state = jax.vmap(lambda t, *x: t.advance(*x))(one, state, jnp.array([token]), log_prob[None])
        np.testing.assert_allclose(np.asarray(state), [expected], rtol=1e-4)


def test_mirostat_always_keeps_the_most_likely_token() -> None:
    logits = random_logits(0, 30)
    ours = apply(Mirostat2(rows(1.0), rows(0.1)), logits, states=rows(-1.0))
    np.testing.assert_array_equal(np.isfinite(ours).sum(1), [1] * BATCH)
    np.testing.assert_array_equal(ours.argmax(1), logits.argmax(1))
