"""Trees that are chosen once: Sequoia's, published ones, and those fitted to what was accepted."""

import dataclasses
import functools
import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decodax.algorithms.speculative import Speculative, fit_tree
from decodax.algorithms.speculative.source import Answer
from decodax.algorithms.speculative.trees import (
    EAGLE_25,
    MEDUSA_63,
    Fixed,
    OptTree,
    expected,
    from_acceptance,
    sequoia_for,
    sequoia_tree,
)
from tests.algorithms.speculative.uneven import UNEVEN
from tests.laws.cases import VOCABULARY, Table
from tests.laws.toy import Toy

# Sequoia and published trees

@functools.cache
def all_trees(nodes, depth, fanout):
    """Every tree below a node: frozensets of paths."""
    if nodes == 0:
        return {frozenset()}
    return set() if depth == 0 else {
        first | {(k, *path) for path in sub} | {(k,)}
        for k in range(fanout) for size in range(nodes)
        for first in all_trees(nodes - 1 - size, depth, fanout) if {q[0] for q in first} == set(range(k))
        for sub in all_trees(size, depth - 1, fanout)}


@pytest.mark.parametrize("accept", [(0.6, 0.2, 0.1), (0.35, 0.3, 0.28), (0.9, 0.05, 0.0), (0.2, 0.7, 0.4)])
def test_sequoias_tree_is_the_best_of_all(accept):
    for nodes, depth in itertools.product(range(1, 7), range(1, 6)):
        trees = [Fixed(tuple(t)) for t in all_trees(nodes, depth, 3)]
        if not trees:
            with pytest.raises(ValueError, match="too few"):
                sequoia_tree(accept, nodes, depth)
            continue
        found = sequoia_tree(accept, nodes, depth)
        assert len(found.paths) == nodes and found.length <= depth
        assert expected(accept, found) == pytest.approx(max(expected(accept, t) for t in trees))


def test_sequoia_for_has_the_most_expected_tokens_per_second():
    accept, draft = (0.7, 0.2, 0.1), 0.12
    for verify in ({1: 1.0, 3: 1.05, 6: 1.3}, {1: 1.0, 3: 2.0, 6: 4.0}, {1: 5.0, 3: 5.0, 6: 5.0}):
        rate = lambda t, v=verify: expected(accept, t) / (v[len(t.paths)] + t.length * draft)
        best = max(rate(Fixed(tuple(t))) for n in verify for t in all_trees(n, 4, 3))
        assert rate(sequoia_for(accept, verify, draft, length=4)) == pytest.approx(best)


@dataclasses.dataclass(frozen=True)
class OneAhead(Table):
    """The token is followed by the next number: its likeliest successor at the first draft, its second at the next."""

    def start(self, params, s, state, room):
        return state, Answer(self._after(s.newest[:, None], 0))

    def extend(self, params, s, state, level):
        return state, Answer(self._after(level.tokens, level.sees.sum(-1)[..., None] + 1))

    def _after(self, tokens, depth):
        right, wrong = (jax.nn.one_hot((tokens + n) % VOCABULARY, VOCABULARY) for n in (1, 5))
        return 6 * right + jnp.where(depth % 2, 9, 3) * wrong


@pytest.mark.wide
def test_a_fitted_tree_holds_the_positions_that_were_accepted():
    eye = jnp.eye(VOCABULARY)
    counts_up = dict(embed=eye, mix=0 * eye, place=jnp.zeros((64, VOCABULARY)), head=jnp.roll(eye, 1, 1) * 50)
    lm = SimpleNamespace(model=Toy(VOCABULARY, VOCABULARY), params=counts_up, vocab_size=VOCABULARY)
    large = Speculative(OneAhead(), shape=Fixed.balanced(3, 3, 2))
    fitted = fit_tree(lm, large, [[3, 4], [7]], nodes=4, max_new_tokens=12)
    assert fitted.order == ((0,), (0, 0), (0, 1), (0, 1, 0))        # a second child needs the first
    with pytest.raises(ValueError, match=r"algorithm: Table with shape=.* does not draft a Fixed tree"):
        fit_tree(lm, Speculative(Table(), shape=OptTree()), [[3]], nodes=4)
    with pytest.raises(ValueError, match="samples: got 0 prompts"):
        fit_tree(lm, large, [], nodes=4)


def test_a_fitted_tree_is_the_most_accepted_part_of_the_large_one():
    draw, large = np.random.default_rng(0), Fixed.of(UNEVEN)
    for _ in range(5):
        counts = draw.integers(0, 20, len(large.paths))
        of = dict(zip(large.order, counts, strict=True))
        for nodes in range(1, len(large.paths) + 1):
            parts = [t for t in itertools.combinations(large.order, nodes)
                     if all((p[:-1] in t or len(p) == 1) and (p[-1] == 0 or (*p[:-1], p[-1] - 1) in t) for p in t)]
            kept = from_acceptance(large, counts, nodes)
            assert sum(of[p] for p in kept.paths) == max(sum(of[p] for p in t) for t in parts)


def test_published_trees():
    of = lambda tree: [sum(len(p) == d for p in tree.paths) for d in range(1, tree.length + 1)]
    assert of(MEDUSA_63) == [10, 28, 23, 2] and of(EAGLE_25) == [4, 8, 8, 3, 2]
    assert sequoia_tree([0.6, 0.2, 0.1], 64).length > 4 and len(sequoia_tree([0.6, 0.2, 0.1], 64).paths) == 64
