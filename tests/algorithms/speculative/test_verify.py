"""Verification rules: their formulas enumerated in float64, the code against them, and examples of each rule."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decodax.algorithms.speculative.trees import Chain
from decodax.algorithms.speculative.verify import (
    BlockVerification,
    KSeq,
    MultiRound,
    Rejection,
)
from decodax.algorithms.speculative.verify.spectr import smallest
from decodax.core import keys
from decodax.core.keys import Purpose
from tests.algorithms.speculative.judging import LENGTH, ROWS, TREE, V, drafts, judge, sample, simplex
from tests.contracts.verifying import ALARM, chi_square
from tests.matrix import often

# the rules as formulas: exact by enumeration


def tuples(q, k, replacement):
    """Every outcome of drawing k children from q, with its probability."""
    for xs in itertools.product(range(len(q)), repeat=k):
        left, chance = q.copy(), 1.0
        for x in xs:
            chance *= left[x] / left.sum() if left[x] > 0 else 0
            if not replacement:
                left[x] = 0
        if chance > 0:
            yield xs, chance


def multi_round(p, q, xs, replacement):
    """Chances to accept each child in turn, and what the token is drawn from if none is."""
    p, q, chances = p.copy(), q.copy(), []
    for x in xs:
        chances.append(min(1, p[x] / q[x]))
        p = np.maximum(p - q, 0)
        p = p / p.sum() if p.sum() > 0 else p
        if not replacement:
            q[x] = 0
            q = q / q.sum() if q.sum() > 0 else q
    return chances, p


def k_seq(p, q, xs, rho):
    common = np.minimum(q, p / rho)
    beta = common.sum()
    left = p - common * (1 - (1 - beta) ** len(xs)) / beta
    assert left.min() > -1e-6
    return [min(1, p[x] / (rho * q[x])) for x in xs], left / left.sum()


def output(V, outcomes):
    """The distribution of a token: `outcomes` gives children, their probability, and what a rule says of them."""
    out = np.zeros(V)
    for xs, chance, (chances, left) in outcomes:
        for x, accept in zip(xs, chances, strict=True):
            out[x] += chance * accept
            chance *= 1 - accept
        out += chance * left
    return out


@pytest.mark.parametrize("replacement", [True, False])
def test_multi_round_keeps_p_by_enumeration(replacement):
    draw = np.random.default_rng(0)
    for k in (1, 2, 3):
        p, q = simplex(draw, 2, 5)
        made = output(5, ((xs, c, multi_round(p, q, xs, replacement)) for xs, c in tuples(q, k, replacement)))
        assert np.abs(made - p).max() < 1e-12


def test_k_seq_keeps_p_by_enumeration_and_its_rho_is_the_smallest_that_does():
    draw = np.random.default_rng(1)
    for k, power in itertools.product((1, 2, 3, 4), (0.3, 2.0)):
        p, q = simplex(draw, 2, 5, power=power)
        rho = float(smallest(jnp.asarray(p, jnp.float32), jnp.asarray(q, jnp.float32), jnp.int32(k)))
        beta = lambda rho: np.minimum(q, p / rho).sum()                                     # noqa: B023
        surplus = lambda rho: rho * beta(rho) - (1 - (1 - beta(rho)) ** k)                  # noqa: B023
        assert 1 <= rho <= k
        assert surplus(rho) > -1e-6 and (rho == 1 or surplus(rho - k / 2048) < 1e-6)
        made = output(5, ((xs, c, k_seq(p, q, xs, rho)) for xs, c in tuples(q, k, True)))
        assert np.abs(made - p).max() < 1e-6                # float32 found rho


def test_k_seq_accepts_at_least_1_minus_1_over_e_of_what_any_rule_can():
    draw = np.random.default_rng(8)
    for k in (2, 4):
        p, q = simplex(draw, 2, V)
        rho = float(smallest(jnp.asarray(p, jnp.float32), jnp.asarray(q, jnp.float32), jnp.int32(k)))
        rate = 1 - (1 - np.minimum(q, p / rho).sum()) ** k
        # the best coupling of a token with k draws, by minimum cut: what p has outside must be drawn from outside
        sets = [list(c) for n in range(V + 1) for c in itertools.combinations(range(V), n)]
        best = min(p[c].sum() + 1 - q[c].sum() ** k for c in sets)
        assert np.minimum(p, q).sum() < rate and (1 - 1 / np.e) * best <= rate <= best + 1e-6


@pytest.mark.wide(but=("rule1", "rule2", "rule3"))
@pytest.mark.parametrize("rule", [MultiRound(), MultiRound(replacement=True), KSeq(), KSeq(rho=2.5)])
def test_siblings_are_judged_by_the_formulas(rule):
    draw, k, tries = np.random.default_rng(2), 3, 4000
    p, q = simplex(draw, 2, tries, V)
    xs = np.array([draw.choice(V, k, rule.drawn == "independent", q[i]) for i in range(tries)])
    u = draw.random((tries, k))
    run = jax.jit(jax.vmap(lambda *x: rule.siblings(*x[:3], jnp.ones(k, bool), jnp.zeros(k, bool), x[3])))
    child, accepted, left = map(np.asarray, run(*(jnp.asarray(x, jnp.float32) for x in (p, q)), jnp.asarray(xs),
                                                jnp.asarray(u, jnp.float32)))
    find = jax.jit(jax.vmap(smallest, (0, 0, None)))
    rhos = np.asarray(find(jnp.asarray(p, jnp.float32), jnp.asarray(q, jnp.float32), jnp.int32(k)), np.float64)
    for i in range(tries):
        if isinstance(rule, KSeq):
            rho = rhos[i] if rule.rho == "auto" else max(rhos[i], rule.rho)
            chances, rest = k_seq(p[i], q[i], xs[i], rho)
        else:
            chances, rest = multi_round(p[i], q[i], xs[i], rule.replacement)
        if np.abs(u[i] - chances).min() < 1e-5:             # too close to call in float32
            continue
        passed = u[i] < chances
        assert accepted[i] == passed.any()
        if passed.any():
            assert child[i] == passed.argmax()
        else:
            assert np.allclose(left[i] / left[i].sum(), rest, atol=1e-3)
    assert 0.05 < accepted.mean() < 0.98


def test_deterministic_children_are_accepted_with_their_probability():
    draw = np.random.default_rng(3)
    p = jnp.asarray(simplex(draw, 6), jnp.float32)
    xs, n = np.array([0, 4, 0, 2]), 50_000                  # one stands twice, one is no child
    children = jnp.array([True, True, True, False])
    run = jax.jit(jax.vmap(lambda u: KSeq().siblings(p, None, jnp.asarray(xs), children, ~children, u)))
    child, accepted, left = map(np.asarray, run(jnp.asarray(draw.random((n, 4)), jnp.float32)))
    made = np.bincount(np.where(accepted, xs[child], sample(draw, left / left.sum(1, keepdims=True))), minlength=6)
    assert chi_square(made, np.asarray(p) * n) > ALARM
    assert abs(accepted.mean() - p[0] - p[4]) < 0.02 and not (accepted & (child > 1)).any()


def block(P, Q, xs):
    """Chances that draft i passes, i = 1 .. n, and the residuals of i = 0 .. n, for drafts `xs` after token `xs[0]`."""
    n, w = len(xs) - 1, 1.0
    chances, lefts = [], []
    for i, x in enumerate(xs):
        if i:
            w = min(1, w * P[xs[i - 1], x] / Q[xs[i - 1], x])
        left = P[x] if i == n else np.maximum(w * P[x] - Q[x], 0)
        chances.append(w if i == n else left.sum() / (left.sum() + 1 - w))
        lefts.append(left / left.sum() if left.sum() > 0 else P[x])
    return chances[1:], lefts


def outcomes_of_block(P, Q, K):
    """Every draft of K tokens after token 0, how many of them hold, its probability, and the residual behind them."""
    for xs in itertools.product(range(len(P)), repeat=K):
        xs = (0, *xs)
        chance = np.prod([Q[a, b] for a, b in itertools.pairwise(xs)])
        chances, lefts = block(P, Q, xs)
        for i in range(K, -1, -1):
            last = chances[i - 1] if i else 1.0
            yield xs, i, chance * last, lefts[i]
            chance *= 1 - last


def test_block_keeps_p_by_enumeration_and_accepts_at_least_as_many_as_token_by_token():
    draw, V, K = np.random.default_rng(4), 4, 3
    more = []
    for power in (0.5, 1.0, 2.0) * 4:
        P, Q = simplex(draw, 2, V, V, power=power)
        made, accepted = np.zeros((V,) * (K + 1)), 0.0
        for xs, i, chance, left in outcomes_of_block(P, Q, K):
            accepted += chance * i
            rest = chance * left
            for _ in range(K - i):
                rest = rest[..., None] * P
            made[xs[1:1 + i]] += rest
        wanted = P[0]
        for _ in range(K):
            wanted = wanted[..., None] * P
        assert np.abs(made - wanted).max() < 1e-12
        reach = np.eye(V)[0]                                # token by token: i hold if each of them does
        plain = sum((reach := reach @ np.minimum(P, Q)).sum() for _ in range(K))
        more.append(accepted - plain)
    assert min(more) > -1e-12 and max(more) > 0.01


@pytest.mark.wide
def test_block_judges_by_the_formulas_and_accepts_more_than_rejection():
    draw, K = np.random.default_rng(5), 2
    P, Q = simplex(draw, 2, V, V)
    tokens = drafts(draw, Q, Chain(K), ROWS, False)
    given = Chain(K), tokens, np.log(P)[tokens], np.log(Q)[tokens[:, :K]]
    key = keys.row_keys(jnp.zeros(ROWS, jnp.uint32), jnp.arange(ROWS, dtype=jnp.uint32), jnp.zeros(ROWS, jnp.uint32))
    at = jnp.broadcast_to(LENGTH + jnp.arange(K), (ROWS, K))
    u = np.asarray(keys.uniforms(key, at, Purpose.ACCEPT, jnp.full(ROWS, LENGTH, jnp.int32)))[..., 0]
    for live in (np.arange(K) < draw.integers(0, K + 1, ROWS)[:, None], np.ones((ROWS, K), bool)):
        _, accepted = judge(BlockVerification(), *given, live)
        for i in range(3000):
            m = live[i].sum()
            chances = np.array(block(P, Q, tokens[i, :m + 1])[0])
            if m == 0 or np.abs(chances - u[i, :m]).min() > 1e-5:
                assert accepted[i] == max([j + 1 for j in range(m) if u[i, j] < chances[j]], default=0)
    _, plain = judge(Rejection(), *given)
    assert accepted.mean() > plain.mean() + 0.005


# the code against the target's distribution


CASES = {
    "block": (BlockVerification(), Chain(2)), "k-seq-tree": (KSeq(), TREE), "multi-round-tree": (MultiRound(), TREE),
    "multi-round-replacement-tree": (MultiRound(replacement=True), TREE),
    "block-certain": (BlockVerification(), Chain(2)), "multi-round-certain-tree": (MultiRound(), TREE),
    "rejection": (Rejection(), Chain(2)), "rejection-certain": (Rejection(), Chain(2)),
}
SHORT = ["rejection", "rejection-certain"]      # whole chains: the law of distribution


@pytest.mark.wide(but=("multi-round-tree-0.2", "k-seq-tree-0.2", "rejection-0.2", "block-0.0"))
@pytest.mark.parametrize(("case", "dead"), often(
    [*((case, 0.0) for case in CASES if case not in SHORT), ("multi-round-tree", 0.2), ("k-seq-tree", 0.2),
     *((case, 0.2) for case in SHORT)],
    [*itertools.product(CASES, (0.0, 0.2))]))
def test_the_joint_distribution_of_three_tokens_is_the_targets(case, dead):
    """`dead`: the share of drafts that are dropped at random; those behind them in a tree may live, a chain ends."""
    rule, shape = CASES[case]
    draw = np.random.default_rng(6)
    P, Q = simplex(draw, 2, V, V)
    P[1, 2] = Q[2, 3] = 0                                   # supports differ
    P, Q = P / P.sum(-1, keepdims=True), Q / Q.sum(-1, keepdims=True)
    if "certain" in case:
        likely = np.argsort(-P)                             # children by rank
        tokens = [0]
        for path in shape.order:
            tokens.append(likely[tokens[shape.parents[len(tokens) - 1]], path[-1]])
        tokens, log_q = np.broadcast_to(tokens, (ROWS, len(tokens))), None
    else:
        tokens = drafts(draw, Q, shape, ROWS, rule.drawn == "distinct")
        log_q = np.log(np.maximum(Q, 1e-30))[tokens[:, :1 + shape.parents.max()]]
    live = draw.random((ROWS, len(shape.parents))) >= dead
    made, accepted = judge(rule, shape, tokens, np.log(np.maximum(P, 1e-30))[tokens], log_q, live)
    for i in range(1, 3):
        made[:, i] = np.where(i <= accepted, made[:, i], sample(draw, P[made[:, i - 1]]))
    counts = np.bincount(made @ [V * V, V, 1], minlength=V**3)
    wanted = (P[0][:, None, None] * P[:, :, None] * P[None]).reshape(-1)
    assert chi_square(counts, wanted * ROWS) > ALARM
    assert 0.2 < accepted.mean() < 1.9


@pytest.mark.wide
def test_a_single_child_makes_multi_round_and_k_seq_plain_rejection():
    draw = np.random.default_rng(7)
    P, Q = simplex(draw, 2, V, V)
    tokens = drafts(draw, Q, Chain(2), ROWS, False)
    given = Chain(2), tokens, np.log(P)[tokens], np.log(Q)[tokens[:, :2]]
    plain, count = judge(Rejection(), *given)
    for rule in (MultiRound(), KSeq()):
        made, accepted = judge(rule, *given)
        assert (accepted == count).mean() > 0.9999          # they use the same noise, so all but rounding agrees
        assert (made == plain).all(1).mean() > 0.9999


def test_chains_only():
    with pytest.raises(ValueError, match="BlockVerification takes chains, got a tree of 9 drafts, 2 deep"):
        judge(BlockVerification(), TREE, np.zeros((1, 10)), np.zeros((1, 10, 4)))
