"""Refined block drafts: the best paths of a lattice, tokens rescored one by one, and the output of plain decoding."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.algorithms.speculative import Speculative
from decodax.algorithms.speculative.drafts import DraftModel
from decodax.algorithms.speculative.drafts.text.ngram import NGramModel
from decodax.algorithms.speculative.heads.block_draft_refinement import BlockLattice, Rescored, best_paths
from decodax.algorithms.speculative.trees import Chain
from decodax.core import drivers
from decodax.io.drafters import TrainedDrafter
from tests.drafters.drafting import drafted_logits
from tests.drafters.test_heads import MIXED, drafter, plain
from tests.laws.cases import VOCABULARY, decode, lm, model, prompts, start, texts
from tests.matrix import often

K = 3


def witten_bell(text, context, vocab, order):
    """Distribution of the token after a context, by counting n-grams of a text with loops."""
    p = np.full(vocab, 1 / vocab)
    for n in range(order):
        suffix = context[len(context) - n:]
        seen = np.zeros(vocab)
        for i in range(n, len(text)):
            if text[i - n:i] == suffix:
                seen[text[i]] += 1
        kinds = (seen > 0).sum()
        if kinds:
            p = (seen + kinds * p) / (seen.sum() + kinds)
    return p


@functools.cache
def parts(kind):
    """Heads with a model that rescores their drafts, and the weights of both."""
    heads, weights = drafter("blockwise")
    heads = heads.for_vocabulary(VOCABULARY)
    if kind == "lattice":
        return BlockLattice(heads, NGramModel(VOCABULARY, 3), K, paths=3, candidates=4, weight=0.7), (weights, None)
    small, own = model("sliding")
    return Rescored(heads, DraftModel(small, vocab_size=VOCABULARY), 4, 0.7), (weights, own)


@pytest.mark.parametrize("order", [2, 3])
def test_the_best_paths_are_those_of_all_paths(order):
    draw = np.random.default_rng(order)
    tokens = np.stack([[draw.permutation(9)[:3] for _ in range(4)] for _ in range(2)])
    scores = draw.normal(size=tokens.shape)
    scores[1, 1, 2] = -np.inf
    context, table = draw.integers(0, 9, (2, order - 1)), draw.normal(size=(9,) * order)
    look = lambda contexts: jnp.asarray(table)[tuple(jnp.moveaxis(contexts, -1, 0))]
    find = jax.jit(functools.partial(best_paths, model=look, count=5))
    found, best = find(jnp.asarray(tokens), jnp.asarray(scores, jnp.float32), jnp.asarray(context))
    for row in range(2):
        every = {}
        for path in itertools.product(range(3), repeat=4):
            text = [*context[row], *(tokens[row, i, j] for i, j in enumerate(path))]
            every[tuple(text[order - 1:])] = sum(scores[row, i, j] for i, j in enumerate(path)) + sum(
                table[tuple(text[i:i + order])] for i in range(4))
        wanted = sorted(every, key=every.get, reverse=True)[:5]
        assert [tuple(path) for path in np.asarray(found[row]).tolist()] == wanted
        np.testing.assert_allclose(best[row], [every[path] for path in wanted], rtol=1e-5)


@pytest.mark.wide
@pytest.mark.parametrize("kind", often(["lattice"], ["lattice", "rescored"]))
def test_the_output_is_plain_decodings(kind):
    draft, weights = parts(kind)
    alg = Speculative(draft, shape=Chain(K) if kind == "rescored" else None)
    s = decode(alg, "llama", prompts(5), MIXED, eos=[1], draft=weights)
    assert texts(s) == plain()
    assert np.asarray(s.stats.accepted).sum() > 0


@pytest.mark.wide
def test_the_drafts_are_the_paths_that_heads_and_counts_like_best():
    draft, weights = parts("lattice")
    alg = Speculative(draft)
    network, params, chain, s = start(alg, "llama", prompts(3), {}, new=30, draft=weights)
    s = drivers.advance(alg, network, params, chain, s, jnp.int32(4))
    proposal, _ = jax.jit(lambda params, s: draft.propose(params, chain, s, s.algo[0], "ranked"))(params, s)
    own = params.replace(draft=weights[0])
    logits = drafted_logits(draft.heads, own, s, jnp.zeros((3, K - 1), jnp.int32))[0]
    scores = np.asarray(jax.nn.log_softmax(logits), np.float64)
    for row in range(3):
        text = np.asarray(s.tokens[row, :int(s.length[row])]).tolist()
        every = {}
        for path in itertools.product(*(np.argsort(-x, kind="stable")[:4].tolist() for x in scores[row])):
            whole = [*text, *path]
            every[path] = sum(scores[row, i, x] + 0.7 * np.log(witten_bell(text, whole[:len(text) + i][-2:], VOCABULARY,
                                                                           3)[x]) for i, x in enumerate(path))
        wanted = sorted(every, key=every.get, reverse=True)[:3]
        up, live = np.asarray(proposal.parents[row]), np.asarray(proposal.live[row])
        found, tokens = {0: ()}, np.asarray(proposal.tokens[row])
        for i in np.flatnonzero(live):
            found[i + 1] = (*found[up[i]], int(tokens[i]))
        assert sorted(x for x in found.values() if len(x) == K) == sorted(wanted)


@pytest.mark.full
def test_a_small_model_rescores_the_candidates_of_each_head():
    draft, weights = parts("rescored")
    alg = Speculative(draft, shape=Chain(K))
    network, params, chain, s = start(alg, "llama", prompts(2), {}, new=30, draft=weights)
    s = drivers.advance(alg, network, params, chain, s, jnp.int32(3))
    following = jnp.asarray([[3, 4], [5, 9]], jnp.int32)
    both = [jax.nn.log_softmax(drafted_logits(part, params.replace(draft=w), s.replace(algo=(x, None)), following)[0])
            for part, w, x in zip((draft.heads, draft.model), weights, (s.algo[0].heads, s.algo[0].model), strict=True)]
    found = np.asarray(drafted_logits(draft, params, s, following)[0])
    heads, small = map(np.asarray, both)
    kept = heads >= np.sort(heads, -1)[..., -4:-3]
    np.testing.assert_allclose(found, np.where(kept, heads + 0.7 * small, -np.inf), atol=1e-4)


def test_what_cannot_be_refined_is_refused():
    heads, weights = drafter("blockwise")
    made = TrainedDrafter("blockwise-parallel", heads.head, weights.head)
    build = lambda **options: dx.algorithms.make("block-draft-refinement", lm("llama"), made, **options)
    assert isinstance(build().draft, BlockLattice) and build(length=9).draft.length == 4
    small = DraftModel(lm("sliding"))
    assert isinstance(build(rescore=small).draft, Rescored)
    with pytest.raises(ValueError, match=r"^order: got 6 with 8 candidates, takes at least 2, and at most 16384"):
        build(order=6)
    with pytest.raises(ValueError, match=r"^length: got 5, takes 1 to 4 drafts"):
        BlockLattice(heads, NGramModel(VOCABULARY, 3), 5)
    with pytest.raises(ValueError, match=r"^candidates: got 0"):
        Rescored(heads, small, 0)
    with pytest.raises(ValueError, match=r"^heads: got a HydraHead, which reads the tokens drafted before"):
        BlockLattice(drafter("hydra")[0], NGramModel(VOCABULARY, 3), 2)
