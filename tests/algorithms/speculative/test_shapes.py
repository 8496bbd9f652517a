"""Shapes: each tree is its paper's, transcribed here into plain Python, and every verifier keeps its guarantee."""

import dataclasses
import functools
import heapq
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decodax.algorithms.speculative.source import Grower
from decodax.algorithms.speculative.trees import (
    CaPE,
    Chain,
    ConfidenceChain,
    ConfidenceTree,
    DySpec,
    Fixed,
    OptTree,
    RiskThreshold,
    Sliced,
    StochasticBeam,
    probability,
)
from decodax.algorithms.speculative.trees.threshold import DraftFeatures
from decodax.common.struct import Struct, struct
from decodax.core import keys
from decodax.sampling import build
from tests.algorithms.speculative.uneven import UNEVEN
from tests.contracts.verifying import ALARM, chi_square
from tests.laws.cases import VOCABULARY, Table
from tests.matrix import often

B = 6
LOGITS = np.asarray(Table().logits_after(jnp.arange(VOCABULARY)), np.float64)


@struct
class Rows(Struct):
    """What a grower reads of a state: rows that end in the tokens 0, 1, 2, ..."""

    tokens: jax.Array
    length: jax.Array
    prompt_length: jax.Array
    key: jax.Array
    running: jax.Array
    policy: tuple = ((),)

    batch = property(lambda self: self.tokens.shape[0])
    newest = property(lambda self: jnp.take_along_axis(self.tokens, self.length[:, None] - 1, 1)[:, 0])


def rows(newest) -> Rows:
    newest = jnp.asarray(newest, jnp.int32)
    n = newest.shape[0]
    three = jnp.full(n, 3, jnp.int32)
    number = jnp.arange(n, dtype=jnp.uint32)
    return Rows(jnp.zeros((n, 16), jnp.int32).at[:, 2].set(newest), three, three,
                keys.row_keys(jnp.full(n, 5, jnp.uint32), number, number * 0), jnp.ones(n, bool))


@functools.cache
def program(shape, drawn, source):
    def grow(rows, policy):
        proposal, _, nodes = shape.grow(Grower(source, None, policy, rows, drawn), None)
        return proposal, nodes

    return jax.jit(grow)


def grow(shape, drawn="distinct", temperature=0.0, source=None, newest=tuple(range(B))):
    """A proposal, as NumPy, for rows that end in `newest`."""
    policy = build(len(newest), temperature=[temperature] * len(newest))
    proposal, nodes = program(shape, drawn, source or Table())(rows(newest), policy)
    return jax.tree.map(np.asarray, proposal), np.asarray(nodes)


def tree_of(p, row):
    """The live nodes' token paths, in window order; fails if a child stands before its parent."""
    parents = np.arange(p.tokens.shape[1])[None] if p.parents is None else p.parents
    parents = np.broadcast_to(parents, p.tokens.shape)
    paths = {0: ()}
    for i in np.flatnonzero(p.live[row]):
        assert parents[row, i] <= i
        paths[i + 1] = (*paths[parents[row, i]], int(p.tokens[row, i]))
    return list(paths.values())[1:]


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def ranked(p, path, newest):
    """What may follow a path, likeliest first."""
    q = p[path[-1] if path else newest]
    return [(int(t), q[t]) for t in np.argsort(-q, kind="stable")]


def value(p, path, newest):
    return math.prod(p[a, b] for a, b in itertools.pairwise((newest, *path)))


P = softmax(LOGITS)


# EAGLE-2 and OPT-Tree

def layers(p, newest, width, depth):
    """Candidates layer by layer: the best `width` nodes of each have their likeliest `width` children asked for."""
    frontier = [()]
    for _ in range(depth):
        layer = [(*path, t) for path in frontier for t, _ in ranked(p, path, newest)[:width]]
        yield layer
        frontier = sorted(layer, key=lambda path: -value(p, path, newest))[:width]


@pytest.mark.parametrize("shape", [ConfidenceTree(nodes=9, length=4, width=3), ConfidenceTree(30, 3, 4)])
def test_a_confidence_tree_is_eagle_2s(shape):
    p, nodes = grow(shape)
    assert p.log_q is None
    for row in range(B):
        pool = [path for layer in layers(P, row, shape.width, shape.length) for path in layer]
        best = sorted(pool, key=lambda path: -value(P, path, row))[:shape.nodes]
        assert set(tree_of(p, row)) == set(best)
    assert nodes.shape == (B, shape.width * (shape.length - 1)) and nodes.max() <= p.tokens.shape[1]


@dataclasses.dataclass(frozen=True)
class Ties(Table):
    """After an even token the next one is certain, after an odd one it is one of four, equally likely."""

    def logits_after(self, tokens):
        ahead = (jnp.arange(VOCABULARY) - tokens[..., None]) % VOCABULARY
        return jnp.where((ahead >= 1) & (ahead <= jnp.where(tokens % 2, 4, 1)[..., None]), 0.0, -jnp.inf)


def test_equal_values_keep_parents_before_children_and_siblings_in_order():
    p, _ = grow(ConfidenceTree(nodes=5, length=4, width=3), source=Ties(), newest=(0, 1, 2, 3, 4, 5))
    assert tree_of(p, 0) == [(1,), (1, 2), (1, 3), (1, 4), (1, 2, 3)]       # 1, then quarters: the shallower first
    assert tree_of(p, 1) == [(2,), (3,), (4,), (2, 3), (4, 5)]


@pytest.mark.parametrize("delta", [0.2, 0.6])
def test_an_opt_tree_goes_deeper_while_the_expectation_grows(delta):
    n, depth = 6, 5
    p, _ = grow(OptTree(nodes=n, delta=delta, length=depth))
    deepest = []
    for row in range(B):
        pool, before = [], 0.0
        for layer in layers(P, row, n, depth):
            pool = sorted(pool + layer, key=lambda path: -value(P, path, row))[:n]
            total = sum(value(P, path, row) for path in pool)
            if total - before <= delta:
                break
            before = total
        assert set(tree_of(p, row)) == set(pool)
        deepest.append(max(map(len, pool)))
    assert len(set(deepest)) > 1 or delta < 0.5


# DySpec

def heap(p, newest, nodes, depth, fanout, threshold=0.0):
    """The paper's Algorithm 1, with likeliest children for draws."""
    queue, tree = [(-1.0, (), 0, 1.0)], []          # worth of a draw, its node, which child, the path's probability
    while queue and len(tree) < nodes:
        worth, path, k, reach = heapq.heappop(queue)
        token, q = ranked(p, path, newest)[k]
        if -worth < threshold:
            break
        tree.append((*path, token))
        if k + 1 < fanout:
            heapq.heappush(queue, (worth + reach * q, path, k + 1, reach))
        if len(path) + 1 < depth:
            heapq.heappush(queue, (-reach * q, (*path, token), 0, reach * q))
    return tree


@pytest.mark.wide
@pytest.mark.parametrize("shape", [DySpec(nodes=10, length=4, fanout=5), DySpec(12, 4, 5, threshold=0.25)])
def test_dyspec_by_layers_is_the_heaps_tree(shape):
    p, _ = grow(shape)
    for row in range(B):
        mine = heap(P, row, shape.nodes, shape.length, shape.fanout, shape.threshold)
        assert set(tree_of(p, row)) == set(mine)
    assert p.live.all() == (shape.threshold == 0)


SAMPLED = [DySpec(nodes=8, length=3, fanout=4), StochasticBeam(3, 3), CaPE(3, ((0.3, 4), (0.6, 3), (1.0, 1)), nodes=7),
           ConfidenceChain(4, 0.15), RiskThreshold(4, 0.8), Fixed.of(UNEVEN), Sliced(Fixed.of(UNEVEN), 0.4)]


@pytest.mark.wide
@pytest.mark.parametrize("shape", often([*SAMPLED[:3], SAMPLED[-1]], SAMPLED), ids=lambda s: type(s).__name__)
def test_reported_distributions_are_those_that_children_were_drawn_from(shape):
    p, nodes = grow(shape, temperature=0.7)
    q = softmax(LOGITS / 0.7)
    N = p.tokens.shape[1]
    parents = np.broadcast_to(np.arange(N)[None] if p.parents is None else p.parents, p.tokens.shape)
    for row in range(B):
        siblings: dict[int, list[int]] = {}
        for i in np.flatnonzero(p.live[row]):
            above = parents[row, i]
            siblings.setdefault(above, []).append(p.tokens[row, i])
            last = p.tokens[row, above - 1] if above else row
            np.testing.assert_allclose(np.exp(p.log_q[row, above]), q[last], atol=1e-5)
        assert all(len(set(s)) == len(s) for s in siblings.values())
        stands = nodes[min(row, len(nodes) - 1)]
        assert set(siblings) - {0} <= set(stands.tolist())      # who has children was expanded, and stands there


# RSD-S

@dataclasses.dataclass(frozen=True)
class Four(Table):
    """Four tokens."""

    def logits_after(self, tokens):
        return jnp.asarray(LOGITS[:4, :4], jnp.float32)[tokens]


@pytest.mark.wide
def test_the_leaves_of_a_stochastic_beam_are_draws_without_replacement_of_whole_texts():
    n = 20_000
    p, _ = grow(StochasticBeam(width=3, length=2), temperature=1.0, source=Four(), newest=(2,) * n)
    up = np.take_along_axis(p.tokens, p.parents[:, 3:] - 1, 1)
    leaves = up * 4 + p.tokens[:, 3:]                   # by their perturbed log-probability
    q = softmax(LOGITS[:4, :4])
    text = (q[2][:, None] * q).reshape(-1)
    pairs = text[:, None] * text[None] / (1 - text[:, None]) * (1 - np.eye(16))
    counts = np.bincount(leaves[:, 0] * 16 + leaves[:, 1], minlength=256)
    assert chi_square(counts, pairs.reshape(-1) * n) > ALARM


@pytest.mark.wide
def test_the_stochastic_beam_of_a_greedy_row_is_beam_search():
    p, _ = grow(StochasticBeam(3, 3))
    for row in range(B):
        beam = [path for layer in layers(P, row, 3, 3)
                for path in sorted(layer, key=lambda path: -value(P, path, row))[:3]]
        assert tree_of(p, row) == beam


# CaPE

@pytest.mark.wide
def test_cape_puts_more_candidates_where_confidence_is_low():
    bins = ((0.3, 4), (0.6, 3), (1.0, 1))
    for nodes in (None, 7):
        p, _ = grow(CaPE(3, bins, nodes))
        sizes = set()
        for row in range(B):
            chain, beside = [], []
            for _ in range(3):
                follows = ranked(P, tuple(chain), row)
                count = next(n for bound, n in bins if follows[0][1] <= bound)
                sizes.add(count)
                beside += [(*chain, t) for t, _ in follows[1:count]]
                chain.append(follows[0][0])
            comb = [tuple(chain[:i + 1]) for i in range(3)] + beside
            assert tree_of(p, row) == comb[:nodes]
        assert sizes == {1, 3, 4}


# thresholds

@dataclasses.dataclass(frozen=True)
class ByEntropy:
    """A predictor with a number of its own."""

    scale: float

    def __call__(self, draft):
        return jnp.exp(-self.scale * draft.entropy) * jnp.where(draft.place < 2, 1.0, 0.5)


DOUBTS = {
    "confidence": (ConfidenceChain(6, 0.2), lambda f, h, i: f[i] < 0.2),
    "risk": (RiskThreshold(6, 0.9), lambda f, h, i: 1 - f[:i + 1].prod() > 0.9),
    "predictor": (ConfidenceChain(6, 0.4, ByEntropy(0.5)),
                  lambda f, h, i: np.exp(-0.5 * h[i]) * (1 if i < 2 else 0.5) < 0.4)}


@pytest.mark.wide
@pytest.mark.parametrize("name", often(["risk"], DOUBTS))
def test_a_threshold_ends_the_chain_after_the_first_doubtful_draft(name):
    shape, stop = DOUBTS[name]
    whole, _ = grow(Chain(6), temperature=1.0)
    p, nodes = grow(shape, temperature=1.0)
    counts = []
    for row in range(B):
        tokens = np.concatenate([[row], whole.tokens[row]])
        f = P[tokens[:-1], tokens[1:]]
        entropy = -(P * np.log(P)).sum(-1)[tokens[:-1]]
        count = next((i + 1 for i in range(6) if stop(f, entropy, i)), 6)
        assert p.live[row].tolist() == [i < count for i in range(6)]
        assert p.tokens[row, :count].tolist() == whole.tokens[row, :count].tolist()
        counts.append(count)
    assert len(set(counts)) > 1
    assert (nodes[0] >= 0).sum() == max(counts) - 1         # drafting ended with the longest row


@pytest.mark.wide
@pytest.mark.parametrize(("least", "predictor", "depths"), [(0.0, probability, {4}), (0.15, probability, {2, 3}),
                                                            (0.3, ByEntropy(0.5), {2, 3}), (1.0, probability, {1})])
def test_a_sliced_tree_is_the_trees_first_levels(least, predictor, depths):
    tree = Fixed.of(UNEVEN)
    inner = [[q for q in tree.order if len(q) == d and (*q, 0) in tree.order] for d in (1, 2, 3)]
    whole, _ = grow(tree, temperature=1.0)
    p, nodes = grow(Sliced(tree, least, predictor), temperature=1.0)
    found, entropy = [], -(P * np.log(P)).sum(-1)
    for row in range(B):
        tokens, chance = dict(zip(tree.order, tree_of(whole, row), strict=True)), {(): 1.0}
        for q in tree.order:
            last, token = (row, *tokens[q])[-2:]
            features = DraftFeatures(np.log(P[last, token]), entropy[last], len(q) - 1)
            chance[q] = chance[q[:-1]] * float(predictor(features))
        found.append(1 + next((d for d in range(3) if sum(chance[q] for q in inner[d]) < least), 3))
        assert tree_of(p, row) == [tokens[q] for q in tree.order if len(q) <= found[-1]]
    assert set(found) == depths, found
    assert (nodes >= 0).sum() == sum(map(len, inner[:max(found) - 1]))      # drafting ended with the longest row


@pytest.mark.wide(but=("ConfidenceChain", "OptTree"))
@pytest.mark.parametrize("shape", [ConfidenceChain(6, 0.2), OptTree(6, 0.6, 5), DySpec(12, 4, 5, threshold=0.25),
                                   Sliced(Fixed.of(UNEVEN), 0.4)],
                         ids=lambda s: type(s).__name__)
def test_a_rows_tree_does_not_depend_on_its_batch_mates(shape):
    p, _ = grow(shape)
    for mates in ((2,) * 5, (4, 5, 1, 0, 3)):
        other, _ = grow(shape, newest=(3, *mates))
        assert tree_of(other, 0) == tree_of(p, 3)
