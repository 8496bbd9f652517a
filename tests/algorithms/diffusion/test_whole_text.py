"""Dimple and coherent contextual decoding, which fill the whole text at once, against plain transcriptions."""

import numpy as np
import pytest

import decodax.algorithms.diffusion as d
from decodax.common.registry import ALGORITHMS
from tests.algorithms.diffusion.toy import MASK, PROMPTS, forward, lm, run

NEW = 16


def made(name, **options):
    return ALGORITHMS[name].make(lm(), **options)


def agrees(alg, transcription):
    texts, rounds = run(alg, NEW)
    expected = [transcription(p) for p in PROMPTS]
    assert texts == [t for t, _ in expected] and rounds == [r for _, r in expected]
    return rounds


def dimple(prompt, threshold, steps):
    """Confident decoding: all above the threshold, or what the next step of time that gives anything gives."""
    x, times = np.array(prompt + [MASK] * NEW), np.linspace(1, 1e-3, steps + 1)
    for i in range(steps):
        masked = np.flatnonzero(x == MASK)
        if not len(masked):
            return x[len(prompt):].tolist(), i
        lp = forward(x)
        order = masked[np.argsort(-lp.max(-1)[masked], kind="stable")]
        count = int((np.exp(lp.max(-1)[masked]) > threshold).sum())
        if i == steps - 1:
            count = len(masked)
        elif not count:
            t = len(masked) / NEW
            later = [int(len(masked) * (1 - s / t)) for s in times[i + 1:-1] if s < t]
            count = next(n for n in [*later, len(masked)] if n)
        x[order[:count]] = lp.argmax(-1)[order[:count]]
    return x[len(prompt):].tolist(), steps


@pytest.mark.wide
@pytest.mark.parametrize(("threshold", "steps"), [(0.4, 16), pytest.param(0.95, 6, marks=pytest.mark.full)])
def test_dimple_decodes_all_that_it_is_sure_of_or_a_share(threshold, steps):
    options = dict(threshold=threshold, order="confidence", steps=None if steps == NEW else steps)
    rounds = agrees(made("dimple", prefill=False, **options), lambda p: dimple(p, threshold, steps))
    assert max(rounds) < NEW
    # entries of this model do not depend on what they see, so a prompt that is computed once changes nothing
    assert run(made("dimple", **options)) == run(made("dimple", prefill=False, **options))


def ccd(prompt, steps, adaptive, grow):
    """Coherent contextual decoding by agreement: what this step and the one before it say of their surest positions."""
    x, quota, step = np.array(prompt + [MASK] * NEW), max(NEW // steps, 1), 0
    kept, before, size = [], None, 1
    while (x == MASK).any():
        lp = forward(x)
        best, entropy = lp.argmax(-1), -(np.exp(lp) * np.where(lp > -np.inf, lp, 0)).sum(-1)
        order = sorted(np.flatnonzero(x == MASK), key=lambda i, h=entropy: (h[i], i))
        size = 1 if step < 4 else min((1 if len(order) <= 0.1 * NEW else size) + 1, quota + int(quota * grow))
        agree = [i for i in order[:size] if i in kept and best[i] == before[i]]
        if 5 <= step < steps - 1 and set(order[:quota]) & set(kept) and len(agree) >= quota:
            taken = agree if adaptive else agree[:quota]
        else:
            taken = order[:quota]
        x[taken] = best[taken]
        kept, before, step = [i for i in order if i not in taken][:size], best, step + 1
    return x[len(prompt):].tolist(), step


@pytest.mark.wide
@pytest.mark.parametrize(("adaptive", "grow"), [
    (True, 4.0), pytest.param(True, 1.0, marks=pytest.mark.full), (False, 4.0)])
def test_ccd_decides_what_two_steps_agree_on(adaptive, grow):
    rounds = agrees(made("ccd", adaptive=adaptive, grow=grow), lambda p: ccd(p, NEW, adaptive, grow))
    assert min(rounds) < NEW if adaptive else rounds == [NEW] * 3


def test_parts_out_of_range_are_named():
    for make, message in ((lambda: d.Confident(steps=0), "steps: got 0"), (lambda: d.Agreeing(steps=0), "steps: got 0"),
                          (lambda: d.Agreeing(grow=-1), "grow, warmup: got -1, 5"),
                          (lambda: d.Turns(0), "every, lead: got 0, 0"),
                          (lambda: ALGORITHMS.make("flashdlm", lm(), lm(), window_size=1), "window_size: got 1, takes"),
                          (lambda: d.GuidedDiffusion(lm(), relative=2.0), "relative: got 2.0, takes 0 to 1")):
        with pytest.raises(ValueError, match=message):
            make()
