"""The MLP speculator verifies the most likely paths of a tree, as its authors' code, and changes no output."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.algorithms.plain import Autoregressive
from decodax.algorithms.speculative import Speculative
from decodax.algorithms.speculative.fixed_trees import Chain
from decodax.algorithms.speculative.heads.mlp_speculator import LikeliestPaths
from decodax.algorithms.speculative.heads.source import HeadWeights, TrainedHead
from decodax.algorithms.speculative.source import Grower
from decodax.io.drafters import TrainedDrafter
from decodax.models.drafters.stack import MLPSpeculatorHead
from tests.drafters.drafting import drafted_logits
from tests.laws.cases import VOCABULARY, decode, lm, model, prompts, start, texts

HEAD = MLPSpeculatorHead((), VOCABULARY, width=16, heads=3, inner=24)
TOP = 4, 3, 2


@functools.cache
def drafter():
    weights = jax.tree.map(lambda x: x + 0.3 * jax.random.normal(jax.random.key(x.size), x.shape),
                           HEAD.init_params(jax.random.key(0)))
    return TrainedHead(HEAD, vocab_size=VOCABULARY).for_target(model("llama")[0]), HeadWeights(weights)


def all_paths(source, params, s):
    """For each row the probabilities of all paths of the tree `TOP`, by path, from one path at a time."""
    ask = jax.jit(functools.partial(drafted_logits, source))
    found = [{} for _ in range(s.batch)]
    for ranks in itertools.product(*map(range, TOP)):
        drafts, total = np.zeros((s.batch, 3), np.int32), np.zeros(s.batch)
        for depth, rank in enumerate(ranks):
            log_p = np.asarray(jax.nn.log_softmax(ask(params, s, jnp.asarray(drafts))[0][:, depth]))
            drafts[:, depth] = np.argsort(-log_p, axis=1)[:, rank]
            total += log_p[np.arange(s.batch), drafts[:, depth]]
        for row in range(s.batch):
            found[row][tuple(drafts[row].tolist())] = total[row]
    return found


@pytest.mark.wide
def test_the_paths_are_the_most_likely_ones_with_equal_beginnings_once():
    source, weights = drafter()
    shape = LikeliestPaths(5, TOP)
    _, params, policy, s = start(Speculative(source, shape=shape), "llama", prompts(3), {}, draft=weights)
    tree, _, nodes = shape.grow(Grower(source, params, policy, s, "ranked"), s.algo[0])
    tokens, live, parents = (np.asarray(x) for x in (tree.tokens, tree.live, tree.parents))
    for row, known in enumerate(all_paths(source, params, s)):
        path = {0: ()}
        for i in np.flatnonzero(live[row]):
            assert int(parents[row, i]) in path             # parents first
            path[i + 1] = (*path[int(parents[row, i])], int(tokens[row, i]))
        best = sorted(known, key=known.get, reverse=True)[:5]
        assert len(set(path.values())) == len(path)
        assert set(path.values()) == {p[:n] for p in best for n in range(4)}
        # the window nodes of those that were expanded are those with the tokens of the first two levels
        inside = np.asarray(nodes)[row]
        assert sorted(inside[inside > 0].tolist()) == [i for i in sorted(path) if 0 < len(path[i]) < 3]


@pytest.mark.wide
def test_as_many_paths_as_one_wants_change_no_output():
    source, weights = drafter()
    mixed = dict(temperature=[0.0, 0.9, 1.3], top_p=[1, 1, 0.9])
    s = decode(Speculative(source, shape=LikeliestPaths(3, TOP)), "llama", prompts(3), mixed, eos=[1], draft=weights)
    assert texts(s) == texts(decode(Autoregressive(), "llama", prompts(3), mixed, eos=[1]))
    assert np.asarray(s.stats.drafted).sum() > 0


def test_the_entry_takes_the_numbers_of_published_files_and_is_a_chain_without_them():
    made = functools.partial(dx.algorithms.make, "mlp-speculator", lm("llama"),
                             TrainedDrafter("mlp-speculator", HEAD, drafter()[1].head))
    assert made().drafter.form == Chain(3)
    assert made(candidates=5).drafter.form == LikeliestPaths(5, (5, 4, 3))
    assert made(candidates=4, top=(3, 2)).drafter.form == LikeliestPaths(4, (3, 2))
    assert made(shape=Chain(2)).drafter.form == Chain(2)
    with pytest.raises(ValueError, match=r"^candidates, top: got 4 and None beside shape="):
        made(candidates=4, shape=Chain(2))
    assert LikeliestPaths(4, (3, 2)).least_nodes == 3 + 4
    with pytest.raises(ValueError, match=r"candidates: got 7, takes 1 to 6, the number of paths of \(3, 2\)"):
        made(candidates=7, top=(3, 2))
    with pytest.raises(ValueError, match=r"top: got \(\), takes one or more"):
        LikeliestPaths(1, ())
    with pytest.raises(ValueError, match=r"top: got \(2, 1, 1, 1\), takes at most 3 numbers"):
        made(candidates=2, top=(2, 1, 1, 1))
