"""Rules that draw what a chain unmasks or masks again keep its published chances; 4.5 standard deviations."""

import itertools
import math
from collections import Counter

import jax.numpy as jnp
import numpy as np
import pytest

import decodax.algorithms.diffusion as d
from tests.algorithms.diffusion.toy import MASK, run
from tests.algorithms.diffusion.views import view_of


@pytest.mark.full
def test_ancestral_sampling_takes_as_many_forwards_as_its_chain_has_changes():
    rows, n, steps = 20_000, 6, 4
    rule, view = d.Ancestral(steps), view_of(rows, n)
    sizes, forwards = [], np.zeros(rows, int)
    for _ in range(steps):
        taken = rule(view, None, None, None)
        sizes.append(np.asarray(taken.sum(1)))
        forwards += np.asarray(view.active.any(1))
        view = view.replace(open=view.open & ~taken, active=view.active & ~taken, step=view.step + 1)
    assert not np.asarray(view.open).any()
    # six positions at uniform times fall into k of four steps: surjections
    ways = {k: math.comb(steps, k) * sum((-1) ** j * math.comb(k, j) * (k - j) ** n for j in range(k + 1))
            for k in range(1, steps + 1)}
    for k, count in ways.items():
        p = count / steps ** n
        assert abs((forwards == k).mean() - p) < 4.5 * math.sqrt(p * (1 - p) / rows) + 1e-9
    # and the first step that changes anything takes as many as a binomial that is not 0, of steps gone by
    first = Counter(sizes[0].tolist())
    chance = lambda m: sum(math.comb(n, m) * (1 / steps) ** m * (1 - (t + 1) / steps) ** (n - m) for t in range(steps))
    for m in range(1, n + 1):
        p = chance(m)
        assert abs(first[m] / rows - p) < 4.5 * math.sqrt(p * (1 - p) / rows) + 1e-9


@pytest.mark.wide
def test_coins_that_all_fall_on_the_other_side_unmask_nothing():
    remask = d.ReMDM(40, 0.0)
    alg = d.MaskedDiffusion(d.Adapter(MASK), d.Whole(4), d.Random(), d.Coins(40, remask), remask, stops=())
    assert run(alg, 4)[1] == [40] * 3


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["cap", "rescale", "loop"])
def test_remdm_keeps_the_share_of_masks_that_its_chain_has(kind):
    rows, n, steps, eta = 4_000, 8, 20, 0.08
    remask = d.ReMDM(steps, eta, kind, 0.62, 0.22, 0.8)
    rule, view = d.Coins(steps, remask), view_of(rows, n)
    everything = jnp.ones((rows, n), bool)
    view = view.replace(editable=everything)
    expected, time = 1.0, np.linspace(1, 1e-5, steps + 1)
    time[-1] = 0        # the authors' loop goes on with what is left, which is decided in the last step here
    for i, (t, s) in enumerate(itertools.pairwise(time)):
        now = view.replace(step=view.step * 0 + i, round=view.round * 0 + i)
        taken = rule(now, None, None, None) & view.open
        view = view.replace(open=remask(now, None, now.replace(open=view.open & ~taken), None).open)
        # the published chain: what happens to a masked and to a decided position from t to s
        if kind == "loop":
            sigma = 0.0 if t > 0.62 or t <= 0.22 else eta
            a, b = ((1 - t) * 0.8 / 0.38, (1 - s) * 0.8 / 0.38) if t > 0.62 else \
                (1 - t * 0.2 / 0.22, 1 - s * 0.2 / 0.22) if t <= 0.22 else (0.8, 0.8)
        else:
            a, b = 1 - t, 1 - s
            bound = min(1, (1 - b) / a) if a else 1
            sigma = min(eta, bound) if kind == "cap" else eta * bound
        stays = (1 - b - sigma * a) / (1 - a)
        expected = expected * stays + (1 - expected) * sigma
        open = float(np.asarray(view.open).mean())
        assert abs(open - expected) <= 4.5 * math.sqrt(max(expected * (1 - expected), 1e-12) / (rows * n)) + 1e-6
        assert i > 0 or open < 1
    assert open == 0


def test_maskgit_keeps_a_position_for_its_last_step():
    from decodax.algorithms.diffusion.rules.unmasking import remaining
    view = view_of(1, 7)
    left = [int(remaining(view.replace(step=view.step + i), 24)[0]) for i in range(24)]
    assert left == [max(math.floor(7 * math.cos(math.pi / 2 * (i + 1) / 24)), 1) for i in range(23)] + [0]
