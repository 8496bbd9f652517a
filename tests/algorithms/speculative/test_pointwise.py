"""Rules that keep no distribution: what each accepts, by example."""

import numpy as np
import pytest

from decodax.algorithms.speculative.trees import Chain, Fixed
from decodax.algorithms.speculative.verify import (
    Distance,
    Greedy,
    MinimumBlock,
    SeedExact,
    SpecVerification,
    TopKAcceptance,
    TypicalAcceptance,
)
from tests.algorithms.speculative.judging import V, judge


def chained(rule, drafts, p, temperature=1.0):
    """Decided tokens and how many drafts hold, for one chain below token 0 under `p` `[1 + N, V]`."""
    with np.errstate(divide="ignore"):
        logits = np.log(np.pad(np.asarray(p, np.float64), ((0, 0), (0, V - 4))))[None]
    made, accepted = judge(rule, Chain(len(drafts)), [[0, *drafts]], logits, temperature=temperature)
    return made[0, :accepted[0] + 1].tolist(), int(accepted[0])


SHARP = [0.9, 0.06, 0.03, 0.01]          # H = 0.42 nats, 0.3 exp(-H) = 0.197: the bound is epsilon, 0.09
FLAT = [0.28, 0.26, 0.24, 0.22]          # H = 1.38, 0.3 exp(-H) = 0.075: that is the bound


def test_typical_asks_less_of_a_flat_distribution():
    assert chained(TypicalAcceptance(), [0, 3], [SHARP, FLAT, SHARP]) == ([0, 3, 0], 2)
    assert chained(TypicalAcceptance(), [1, 3], [SHARP, FLAT, SHARP]) == ([0], 0)                     # 0.06 < 0.09
    assert chained(TypicalAcceptance(), [1, 3], [[0.85, 0.12, 0.02, 0.01], FLAT, SHARP]) == ([1, 3, 0], 2)
    rule = TypicalAcceptance(epsilon=0.5, delta=0.95)
    assert chained(rule, [0, 3], [SHARP, FLAT, SHARP]) == ([0, 0], 1)                       # 0.22 < 0.239
    assert chained(TypicalAcceptance(), [0, 3], [SHARP, FLAT, SHARP], temperature=0) == ([0, 0], 1)   # greedy decoding


@pytest.mark.wide
def test_top_k_takes_ranks_and_margin_also_asks_for_a_log_probability():
    p = [[0.5, 0.3, 0.15, 0.05], [0.1, 0.6, 0.2, 0.1], [0.2, 0.2, 0.2, 0.4]]
    rule = SpecVerification(beta=2, tau=1.0)
    near, third = [0.05, 0.64, 0.24, 0.07], [0.4, 0.3, 0.2, 0.1]
    for temperature in (1.0, 0.0):
        assert chained(TopKAcceptance(2), [1, 2], p, temperature) == ([1, 2, 3], 2)
        assert chained(TopKAcceptance(2), [2, 2], p, temperature) == ([0], 0)
        assert chained(TopKAcceptance(9), [2, 2], p, temperature) == ([2, 2, 3], 2)
        assert chained(rule, [1, 2], p, temperature) == ([1, 1], 1)              # ln(0.6 / 0.2) = 1.099
        assert chained(rule, [1, 2], [p[0], near, p[2]], temperature) == ([1, 2, 3], 2)             # 0.981
        assert chained(rule, [2, 2], [third, near, p[2]], temperature) == ([0], 0)
    assert chained(rule, [1, 2], p, 2.0) == ([1, 2, 3], 2)                      # halved by the temperature
    assert chained(TopKAcceptance(9), [2, 2], [[0.5, 0.5, 0, 0]] * 3) == ([0], 0)  # a rank among the forbidden


def test_distance_takes_neighbours_of_the_best_token():
    p = [[0.1, 0.1, 0.7, 0.1], [0.3, 0.4, 0, 0.3], [0.1, 0.1, 0.1, 0.7]]
    assert chained(Distance(1), [3, 0], p) == ([3, 0, 3], 2)
    assert chained(Distance(1), [0, 1], p) == ([2], 0)
    assert chained(Distance(1), [3, 2], p) == ([3, 1], 1)                                   # it is forbidden


def test_a_minimum_block_keeps_rejected_guesses_that_the_policy_allows():
    p = [[0.1, 0.2, 0.6, 0.1], [0.4, 0.3, 0, 0.3], [0.1, 0.1, 0.1, 0.7]]
    assert chained(Greedy(), [1, 1], p) == ([2], 0)
    assert chained(MinimumBlock(Greedy(), 1), [1, 1], p) == ([2], 0)
    assert chained(MinimumBlock(Greedy(), 2), [1, 1], p, 0.0) == ([1, 0], 1)
    assert chained(MinimumBlock(Greedy(), 3), [1, 1], p, 0.0) == ([1, 1, 3], 2)
    assert chained(MinimumBlock(Greedy(), 3), [1, 2], p, 0.0) == ([1, 0], 1)            # the second is forbidden
    assert chained(MinimumBlock(Greedy(), 9), [2, 0], p, 0.0) == ([2, 0, 3], 2)
    assert chained(MinimumBlock(TopKAcceptance(2), 2), [2, 3], p, 0.0) == ([2, 0], 1)
    assert MinimumBlock(SeedExact()).guarantee == "seed-exact"
    assert MinimumBlock(SeedExact(), 2).guarantee == "approximate"


def test_the_likeliest_of_the_longest_paths_holds():
    p = np.log([[0.4, 0.3, 0.2, 0.1]] * 5)[None]
    made, accepted = judge(TypicalAcceptance(), Fixed.of([[0], [1], [0, 0], [1, 0]]), [[0, 2, 1, 0, 0]], p)
    assert made.tolist() == [[1, 0, 0]] and accepted.tolist() == [2]
    made, accepted = judge(TypicalAcceptance(), Fixed.of([[0], [1], [0, 0], [1, 0]]), [[0, 2, 1, 0, 0]], p,
                           live=[[True, True, True, False]])
    assert made.tolist() == [[2, 0, 0]] and accepted.tolist() == [2]
