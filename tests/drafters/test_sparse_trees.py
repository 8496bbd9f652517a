"""PPD's dynamic sparse trees and its ensembles: the output is plain decoding's, guesses are those of prompt tokens
after the text alone, and the fitted trees give the most tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decodax import algorithms
from decodax.algorithms.speculative.trees import SparseTree, SparseTrees, sparse_trees
from decodax.algorithms.speculative.trees.sparse_trees import expected_tokens
from decodax.core import drivers
from decodax.io.drafters import TrainedDrafter
from decodax.models.drafters.prompt_tokens import LookAheadHead, PromptTokensHead
from decodax.train.drafting.prompt_tokens import InsertedPrompts, inserted
from decodax.train.drafting.sparse_trees import fit_sparse_trees, guess_counts
from tests.drafters.test_block_heads import MIXED, plain
from tests.laws.cases import VOCABULARY, lm, prompts, start, texts

K, E = 2, 2
HEAD = PromptTokensHead((), VOCABULARY, width=16, heads=K, ensemble=E)
TREES = SparseTrees((SparseTree(((0,), (1,), (2,)), (2, 2, 1, 1)),
                     SparseTree(((0,), (1,), (0, 0), (0, 1), (1, 0)), (1, 1, 2, 2, 1, 2))))


def drafter(head=HEAD):
    prompts = jax.random.normal(jax.random.key(7), (head.heads * head.ensemble, 16))
    return TrainedDrafter("ppd", head, {"prompts": prompts})


def test_the_output_is_plain_decodings_and_guesses_are_those_of_the_text_alone():
    alg = algorithms.make("ppd", lm("llama"), drafter(), shape=TREES)
    bare, own = alg.bare(), alg.weights
    network, params, chain, s = start(bare, "llama", prompts(5), MIXED, eos=[1], draft=own)
    s = drivers.advance(bare, network, params, chain, s, jnp.int32(3))
    state, places = s.algo[0], np.asarray(s.length)[:, None] - 2    # the newest token is not processed yet
    known = np.asarray(state.known)
    assert set(known) == {1, 2} and np.asarray(s.stats.accepted).any()
    out = jax.jit(lambda tokens, places: network.apply(params.target, inserted(tokens, places, HEAD, own.head),
                                                       network.init_cache(5, 0)).hidden)(s.tokens, jnp.asarray(places))
    wanted = np.asarray(out)[:, s.tokens.shape[1]:].reshape(5, K, E * 16)
    for row, count in enumerate(known):
        np.testing.assert_allclose(state.hidden[row, :count], wanted[row, :count], atol=2e-5, rtol=1e-5)
    s = drivers.advance(bare, network, params, chain, s, jnp.int32(500))
    assert texts(s) == plain()


def test_fitted_trees_give_the_most_tokens_for_their_nodes():
    accuracy = np.array([[0.55, 0.12, 0.05, 0.03], [0.3, 0.1, 0.05, 0.04], [0.18, 0.08, 0.05, 0.03]])
    found = sparse_trees(accuracy, 24)
    assert all(1 + len(t.paths) + sum(t.prompts) <= 24 for t in found.trees)
    full = SparseTree(((0,), (1,), (0, 0), (2,), (0, 1)), (3,) * 6)      # as many nodes, all prompt tokens after each
    full = SparseTrees((SparseTree(((0,), (1,), (2,), (3,)), (3,) * 5), full, full))
    assert expected_tokens(found, accuracy) > 1.02 * expected_tokens(full, accuracy)
    # by simulation: depths are independent, and the rank of the right token is drawn
    draw, k, total, rounds = np.random.default_rng(0), 0, 0, 20_000
    ranks = np.stack([draw.choice(5, rounds, p=[*row, 1 - row.sum()]) for row in accuracy], 1)
    for right in ranks.tolist():
        order = [(), *sorted(found.trees[k].paths, key=lambda p: (len(p), p))]
        path = max((p for p in order if list(p) == right[:len(p)]), key=len)
        total, k = total + 1 + len(path), found.trees[k].prompts[order.index(path)] - 1
    assert total / rounds == pytest.approx(expected_tokens(found, accuracy), rel=0.02)     # 4 standard deviations
    with pytest.raises(ValueError, match="size: got 3, takes at least 4"):
        sparse_trees(accuracy, 3)


@pytest.mark.wide
def test_acceptance_is_measured_on_texts_and_the_size_by_the_time(monkeypatch):
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, (3, 12))
    objective = InsertedPrompts(lm("llama").model, HEAD, places=99)
    hits, total = guess_counts(objective, lm("llama").params, drafter().params, jnp.asarray(tokens), VOCABULARY)
    assert total.tolist() == [30, 30] and hits.sum(1).tolist() == total.tolist()
    trees = fit_sparse_trees(lm("llama"), drafter(), tokens, 16)
    accuracy = np.asarray(hits)[:, :10] / np.asarray(total)[:, None]
    assert trees == sparse_trees(accuracy, 16, E) and len(trees.trees) == K
    times = {8: 1.0, 16: 1.0, 32: 4.0}        # a window of 32 takes too long for what it adds
    monkeypatch.setattr("decodax.train.drafting.sparse_trees.measure", lambda model, weights, arms, **more: (
        times[next(n for n in times if sparse_trees(accuracy, n, E) == arms[0].draft.trees)],))
    assert fit_sparse_trees(lm("llama"), drafter(), tokens, sizes=tuple(times)) == trees
    with pytest.raises(ValueError, match="tokens: got an array of shape"):
        fit_sparse_trees(lm("llama"), drafter(), [[1, 2]], 16)


def test_trees_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match="the tree of state 1 is 2 deep and has up to 1 prompt tokens"):
        SparseTrees((SparseTree(((0,), (0, 0)), (1, 1, 1)),))
    with pytest.raises(ValueError, match=r"prompts: got \(1,\) for 1 drafts; takes a number of at least 1"):
        SparseTree(((0,),), (1,))
    with pytest.raises(ValueError, match="shape: got SparseTrees of 2 states, and the drafter has 3 prompt tokens"):
        algorithms.make("ppd", lm("llama"), drafter(PromptTokensHead((), VOCABULARY, width=16)), shape=TREES)
    with pytest.raises(ValueError, match="ensemble: got 2, look-ahead embeddings take 1"):
        LookAheadHead((), VOCABULARY, width=16, ensemble=2)
