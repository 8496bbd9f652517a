"""Statistics of the vocabulary and the unmasking rules against plain NumPy, written as the papers' loops."""

import jax.numpy as jnp
import numpy as np
import pytest

import decodax.algorithms.diffusion as d
from decodax.algorithms.diffusion.stats import DistributionStats, cosine, rank, statistics
from decodax.algorithms.diffusion.view import Seen, View
from decodax.common.struct import fields
from decodax.core import keys


def distributions(dtype=np.float32, rows=6, size=37):
    """Flat, peaked, tied, almost certain, and with forbidden tokens."""
    x = np.random.default_rng(0).normal(size=(rows, size)) * np.array([[0.1], [1], [5], [5], [40], [1]])
    x[3, 7] = x[3, 20] = x[3].max() + 1
    x[4, 11] = x[4].max() + 30
    x[5, ::2] = -np.inf
    return x.astype(dtype)


@pytest.mark.parametrize("chunk", [37, 8, 5])
@pytest.mark.parametrize("offset", [0.0, 300.0])
def test_statistics_are_those_of_float64(chunk, offset):
    x = distributions() + np.float32(offset)
    token = np.array([3, 0, 36, 20, 11, 1], np.int32)
    s = statistics(jnp.asarray(x), jnp.asarray(token), chunk)
    y = x.astype(np.float64)
    p = np.exp(y - y.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    chosen = np.arange(6), token
    with np.errstate(divide="ignore", invalid="ignore"):
        expected = DistributionStats(
            log_prob=np.log(p[chosen]), entropy=-np.where(p > 0, p * np.log(p), 0).sum(-1),
            lse=y.max(-1) + np.log(np.exp(y - y.max(-1, keepdims=True)).sum(-1)),
            top=np.sort(y)[:, -1], second=np.sort(y)[:, -2])
    for field in fields(DistributionStats):
        np.testing.assert_allclose(getattr(s, field.name), getattr(expected, field.name), rtol=3e-5, atol=2e-6)
    assert s.gap[3] == 0 and s.margin[3] == 0
    # a difference of logarithms rounds the doubt about a sure token to 0
    rest = np.delete(p[4], 11).sum()
    assert rest < 1e-9
    np.testing.assert_allclose(-np.asarray(s.log_prob, np.float64)[4], rest, rtol=1e-4)


def test_a_token_without_probability_has_none():
    s = statistics(jnp.asarray(distributions()[5:]), jnp.array([0]), 8)
    assert s.prob[0] == 0 and np.isfinite(s.entropy[0])


def test_ranks_break_ties_from_left_to_right_and_put_others_last():
    score = np.random.default_rng(1).integers(0, 4, (5, 9)).astype(np.float32)
    among = np.random.default_rng(2).random((5, 9)) < 0.6
    for row, few, got in zip(score, among, np.asarray(rank(jnp.asarray(score), jnp.asarray(among))), strict=True):
        order = sorted(np.flatnonzero(few), key=lambda i, row=row: (-row[i], i))
        assert [got[i] for i in order] == list(range(len(order)))
        assert sorted(got) == list(range(9))


R, W = 64, 9


def scene():
    """Regions with open positions, probabilities and entropies, all made up."""
    draw = np.random.default_rng(3)
    active = draw.random((R, W)) < 0.7
    active[:, 4] = True
    # some on the bars exactly
    p = np.where(draw.random((R, W)) < 0.3, draw.choice([0.5, 0.75], (R, W)), draw.random((R, W))).astype(np.float32)
    entropy = draw.random((R, W)).astype(np.float32)
    zero, none = jnp.zeros(R, jnp.int32), jnp.zeros((R, W))
    places = jnp.broadcast_to(jnp.arange(W, dtype=jnp.int32), (R, W))
    named = dict(positions=places, tokens=places, open=active, editable=active, active=active, end=zero + W, start=zero)
    view = View(**{f.name: named.get(f.name, zero) for f in fields(View) if f.name != "text"})
    stats = DistributionStats(log_prob=jnp.log(p), entropy=jnp.asarray(entropy), lse=none, top=none, second=none)
    seen = Seen(token=places, reached=jnp.ones((R, W), bool), model=stats, policy=None)
    return view.replace(**{k: jnp.asarray(v) for k, v in named.items()}), seen, active, p, entropy


def factor(p, f, variant):
    """How many of falling probabilities `p` are taken, the first always."""
    bars = [1 - f / (i + (1 if variant == "c" else 2)) for i in range(len(p))]
    bars[0] = -1.0
    for i, (c, bar) in enumerate(zip(p, bars, strict=True)):
        if c < bar or (variant == "c" and i and c <= bar):
            # the authors' code steps over the last one, failed or not
            return i + 1 if variant == "b" and i == len(p) - 1 else i
    return len(p)


@pytest.mark.parametrize("variant", ["a", "b", "c"])
@pytest.mark.parametrize("f", [0.0, 0.8, 1.7])
def test_the_factor_rule_is_its_loop(variant, f):
    view, seen, active, p, _ = scene()
    got = np.asarray(d.Factor(f, variant)(view, seen, seen.model.log_prob, None))
    counts = set()
    for row, few, chosen in zip(p, active, got, strict=True):
        order = sorted(np.flatnonzero(few), key=lambda i, row=row: (-row[i], i))
        # a bar that is met to the last bit may round either way
        if any(abs(row[i] - (1 - f / (r + (1 if variant == "c" else 2)))) < 1e-6 for r, i in enumerate(order) if r):
            continue
        count = factor([float(row[i]) for i in order], f, variant)
        assert set(np.flatnonzero(chosen)) == set(order[:count])
        counts.add(count)
    assert len(counts) > 1 or f == 0


@pytest.mark.parametrize("inclusive", [False, True])
@pytest.mark.parametrize("by", ["entropy", "confidence"])
def test_the_entropy_bound_is_its_loop(inclusive, by):
    view, seen, active, p, entropy = scene()
    score = -entropy if by == "entropy" else p
    got = np.asarray(d.EntropyBound(0.6, inclusive)(view, seen, jnp.asarray(score), None))
    for row, few, h, chosen in zip(score, active, entropy, got, strict=True):
        order = sorted(np.flatnonzero(few), key=lambda i, row=row: (-row[i], i))
        count = 0
        for n in range(1, len(order) + 1):
            spent = h[order[:n]]
            if spent.sum() - (0 if inclusive else spent.max()) > 0.6:
                break
            count = n
        assert set(np.flatnonzero(chosen)) == set(order[:count])
        assert inclusive or count


def test_noise_falls_evenly_and_is_gone_in_the_last_step():
    view, seen, *_ = scene()
    view = view.replace(key=keys.row_keys(*np.zeros((3, R), np.uint32)))
    at = lambda steps, step: np.asarray(d.Noisy(d.Position(), 4.5, steps)(
        view.replace(step=jnp.full(R, step, jnp.int32)), seen, None) - d.Position()(view, seen, None))
    whole = at(None, 0)
    assert whole.std() > 4
    for step in range(5):
        np.testing.assert_allclose(at(5, step), whole * (4 - step) / 5, atol=1e-4)


def test_a_confident_prefix_ends_before_the_first_doubt():
    view, seen, active, p, _ = scene()
    got = np.asarray(d.ConfidentPrefix(0.5)(view, seen, seen.model.log_prob, None)) & active
    for row, few, chosen in zip(p, active, got, strict=True):
        doubts = [i for i in np.flatnonzero(few) if row[i] < 0.5] + [W]
        assert set(np.flatnonzero(chosen)) == {i for i in np.flatnonzero(few) if i < doubts[0]}


@pytest.mark.parametrize(("schedule", "counts"), [
    # 10 positions in 4 steps: the remainder first; what a cosine leaves, 9, 7, 3; Dream rounds 2.5, 2.7 and 2.99 down;
    # ReCAP leaves 9 (of 9.7), 8 (8.2), 5 (5.1)
    ("even", [3, 3, 2, 2]), ("cosine", [1, 2, 4, 3]), ("time", [2, 2, 2, 4]), ("power", [1, 1, 3, 5])])
def test_quotas_add_up(schedule, counts):
    view, seen, *_ = scene()
    open, made = jnp.ones((R, 10), bool), []
    view = view.replace(positions=jnp.broadcast_to(jnp.arange(10), (R, 10)), end=view.end + 1, opened=view.end * 0 + 10)
    for step in range(4):
        v = view.replace(open=open, active=open, step=view.step * 0 + step)
        chosen = d.Quota(4, schedule)(v, seen, jnp.broadcast_to(-jnp.arange(10.0), (R, 10)), None)
        open = open & ~chosen
        made.append(int(chosen[0].sum()))
    assert made == counts and not open.any()


def test_dreams_quota_may_be_nothing():
    view, seen, *_ = scene()
    view = view.replace(opened=view.end * 0 + W, open=jnp.ones((R, W), bool), active=jnp.ones((R, W), bool))
    rule = d.Quota(W, "time")
    # 9 positions in 9 steps: 9 * (1 - t/s) of the first is a thousandth less than one
    assert rule.patient and not d.Quota(W).patient
    assert not rule(view, seen, seen.model.log_prob, None).any()
    assert (rule(view.replace(step=view.step + 1), seen, seen.model.log_prob, None).sum(1) == 1).all()


def test_tokens_as_sure_as_the_surest_are_unmasked_with_it():
    view, seen, active, p, _ = scene()
    got = np.asarray(d.Threshold(0.99, slack=0.05)(view, seen, None, None)) & active
    assert all(set(np.flatnonzero(g)) == {i for i in np.flatnonzero(a) if q[i] >= min(0.99, q[a].max() - 0.05)}
               for g, a, q in zip(got, active, p, strict=True))


def test_a_cosine_floors_each_norm_by_itself():
    a = np.array([[3e-6, 4e-6], [3.0, 4.0], [0.0, 0.0]], np.float32)
    # the product of the first two norms is below the floor of either
    np.testing.assert_allclose(cosine(jnp.asarray(a), jnp.asarray(a)), [1, 1, 0], rtol=1e-6)
    np.testing.assert_allclose(cosine(jnp.asarray(a[:1] * 1e-4), jnp.asarray(a[1:2])), 5e-10 / 1e-8, rtol=1e-5)
