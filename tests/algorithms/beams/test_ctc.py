"""Prefix beam search over CTC outputs: against the sum over all alignments."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from decodax.algorithms.beams.ctc import ctc_beam_search

V, T, BLANK = 4, 5, 0
RNG = np.random.default_rng(0)
LM = RNG.normal(size=(V + 1, V)) - 1.5          # by the symbol before


def language(prefix: jnp.ndarray, length: jnp.ndarray) -> jnp.ndarray:
    newest = jnp.where(length > 0, prefix[jnp.maximum(length - 1, 0)], V)
    return jnp.asarray(LM, jnp.float32)[newest]


def texts(log_p: np.ndarray) -> dict[tuple[int, ...], float]:
    """The log-probability of each text, by all alignments."""
    found: dict[tuple[int, ...], float] = {}
    for path in itertools.product(range(V), repeat=len(log_p)):
        text = tuple(s for s, _ in itertools.groupby(path) if s != BLANK)
        found[text] = found.get(text, 0.0) + float(np.exp(sum(log_p[t, s] for t, s in enumerate(path))))
    return {t: float(np.log(p)) for t, p in found.items()}


def score(text: tuple[int, ...], log_ctc: float, alpha: float, beta: float, words: tuple[int, ...] | None) -> float:
    lm = sum(LM[text[i - 1] if i else V, s] for i, s in enumerate(text))
    return log_ctc + alpha * lm + beta * sum(words is None or s in words for s in text)


@pytest.mark.wide(but=("0.4-1.5-words2", "0.7-0.9-None"))
@pytest.mark.parametrize(("alpha", "beta", "words"), [(0.0, 0.0, None), (0.7, 0.9, None), (0.4, 1.5, (3,))])
def test_a_wide_beam_sums_all_alignments(alpha: float, beta: float, words: tuple[int, ...] | None) -> None:
    logits = np.random.default_rng(1).normal(size=(3, T, V)) * 2
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    frames = np.array([5, 3, 4])
    out = ctc_beam_search(jnp.asarray(log_p, jnp.float32), jnp.asarray(frames), 400, blank=BLANK, language=language,
                          alpha=alpha, beta=beta, words=words)
    for b, count in enumerate(frames):
        want = texts(log_p[b, :count])
        kept = [tuple(x[:n].tolist()) for x, n, s in zip(np.asarray(out.tokens[b]), out.lengths[b], out.scores[b],
                                                         strict=True) if s > -np.inf]
        assert len(kept) == len(set(kept)) == len(want)
        np.testing.assert_allclose(out.log_ctc[b, :len(kept)], [want[t] for t in kept], atol=1e-4)
        full = {t: score(t, p, alpha, beta, words) for t, p in want.items()}
        np.testing.assert_allclose(out.scores[b, :len(kept)], sorted(full.values(), reverse=True), atol=1e-4)
        assert kept[0] == max(full, key=lambda t: full[t])


def test_places_that_are_left_over_hold_nothing() -> None:
    """Two frames of two symbols have two texts: their probabilities add up to 1, however wide the beam is."""
    x = jnp.log(jnp.array([[[.4, .6], [.4, .6]]]))
    for width in (2, 3, 8):
        out = ctc_beam_search(x, jnp.array([2]), width)
        np.testing.assert_allclose(np.exp(out.log_ctc[0]), [.84, .16] + [0] * (width - 2), rtol=1e-6)
        assert out.tokens[0].tolist() == [[1, -1]] + [[-1, -1]] * (width - 1)


@pytest.mark.wide
def test_a_narrow_beam_finds_part_of_it_and_greedy_alignments_less() -> None:
    logits = np.random.default_rng(2).normal(size=(40, T, V))
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    out = ctc_beam_search(jnp.asarray(log_p, jnp.float32), jnp.full(40, T), 6)
    hits = greedy = 0
    for b in range(40):
        want = texts(log_p[b])
        best = max(want, key=lambda t: want[t])
        kept = tuple(np.asarray(out.tokens[b, 0])[:int(out.lengths[b, 0])].tolist())
        assert float(out.log_ctc[b, 0]) <= want[kept] + 1e-5
        hits += kept == best
        greedy += tuple(s for s, _ in itertools.groupby(log_p[b].argmax(1).tolist()) if s != BLANK) == best
    assert hits > greedy and hits >= 32


def test_the_length_is_bounded_and_arguments_are_checked() -> None:
    log_p = jnp.log(jnp.full((1, T, V), 1 / V))
    assert int(ctc_beam_search(log_p, jnp.array([T]), 50, longest=2).lengths.max()) == 2
    with pytest.raises(ValueError, match="blank: got 7, takes one of 4"):
        ctc_beam_search(log_p, jnp.array([T]), blank=7)
    with pytest.raises(ValueError, match="width: got 0"):
        ctc_beam_search(log_p, jnp.array([T]), 0)
