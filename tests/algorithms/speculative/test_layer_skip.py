"""Drafting with the target's own layers: exact, accepted where it should be, and the papers' rules."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decodax.algorithms.plain import Autoregressive
from decodax.algorithms.speculative import Speculative
from decodax.algorithms.speculative.drafts.self.clasp import CLaSp, skip_set
from decodax.algorithms.speculative.drafts.self.dynamic_exit import DynamicExit, tokens_per_layer
from decodax.algorithms.speculative.drafts.self.knn_ssd import Anchors, KNNSkip, fit_anchors
from decodax.algorithms.speculative.drafts.self.layer_skip import LayerSkip
from decodax.algorithms.speculative.trees import Chain, Fixed
from decodax.core import drivers
from decodax.core.target import for_target
from decodax.core.window import causal
from decodax.models import Transformer, llama
from decodax.sampling.guidance import Guided, GuidedCache, NegativePrompt
from tests.laws import cases
from tests.laws.cases import POLICIES, decode, prompts, texts
from tests.matrix import often

NETWORK, WEIGHTS = cases.model("llama")


MIXED = POLICIES["together"] | dict(temperature=[0.0, 0.7, 0.9, 0.0, 1.2])
TREE = Fixed.of([[0], [1], [0, 0], [1, 0], [1, 1], [0, 0, 0]])


@functools.cache
def plain() -> list[list[int]]:
    return texts(decode(Autoregressive(), "llama", prompts(5), MIXED, eos=[1]))


def test_a_skipped_model_is_the_network_without_those_layers() -> None:
    config = dataclasses.replace(NETWORK.config, layers=NETWORK.config.layers[:1])
    weights = {**WEIGHTS, "layers": {"0": WEIGHTS["layers"]["1"]}}
    tokens = jnp.asarray(prompts(2, longest=12)[1])[None]
    window = causal(tokens, jnp.zeros(1, jnp.int32))
    cache = NETWORK.init_cache(1, 0)
    expected = jax.jit(Transformer(config).forward)(weights, tokens)
    given = lambda keep: NETWORK.apply(WEIGHTS, window, cache, keep)
    entries = []

    @jax.jit
    def logits(keep: Any) -> Any:
        fixed = given(((False, False), (True, True)))
        entries.append(fixed.entries[0])
        return fixed.logits(), given(keep).logits()

    for found in logits(jnp.array([[[False, False], [True, True]]])):
        np.testing.assert_allclose(found, expected, atol=1e-5)
    assert entries == [()]


@pytest.mark.full
# in a tree each sees its own ancestors
@pytest.mark.parametrize("shape", often([TREE], [Chain(3), TREE]), ids=["chain", "tree"])
def test_a_draft_that_skips_nothing_is_accepted_whole(shape: Fixed) -> None:
    """And the verification, which has no layers left to run, says what plain decoding says."""
    s = decode(Speculative(LayerSkip(NETWORK.depth), shape=shape), "llama", prompts(5), MIXED, eos=[1])
    assert (1 + np.asarray(s.stats.accepted) / np.asarray(s.stats.rounds)).tolist() == [4.0] * 5      # K + 1
    assert texts(s) == plain()


DEEP = Transformer(llama(vocab=16, width=16, layers=3, heads=2, kv_heads=1, mlp=24, context=256))
DEEP_WEIGHTS = jax.tree.map(lambda x: x * 8 if x.ndim > 1 else x, DEEP.init_params(jax.random.key(3)))
POLICY = POLICIES["sampled"]


@pytest.fixture
def deep(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Three layers in the place of the laws' model; called with layers that are to do nothing."""
    def use(*idle: int) -> Any:
        layers = DEEP_WEIGHTS["layers"] | {str(i): jax.tree.map(jnp.zeros_like, DEEP_WEIGHTS["layers"][str(i)])
                                           for i in idle}
        monkeypatch.setattr(cases, "model", lambda which: (DEEP, {**DEEP_WEIGHTS, "layers": layers}))

    use()
    return use


@pytest.mark.full
@pytest.mark.parametrize("shape", often([TREE], [Chain(3), TREE]), ids=["chain", "tree"])
def test_the_verification_goes_on_from_what_drafting_has_computed(deep: Any, shape: Fixed) -> None:
    """After an exit behind two of three layers these are not run again. Another network begins anew, and so does the
    other branch of guidance, whose positions are its own."""
    alg = Speculative(LayerSkip(2), shape=shape)
    _, params, chain, s = cases.start(alg, "deep", prompts(5), POLICY)
    broken = {i: jax.tree.map(lambda x: x * jnp.nan, DEEP_WEIGHTS["layers"][i]) for i in "01"}
    first, *rest = DEEP.config.layers
    other = Transformer(dataclasses.replace(DEEP.config, layers=(dataclasses.replace(first, sliding=3), *rest)))

    @jax.jit
    def forwards(s: Any) -> Any:
        window, _ = for_target(alg, DEEP).propose(params, chain, s)
        anew, two = window.replace(hints=()), jnp.full(5, 2, jnp.int32)
        guided = GuidedCache(s.cache, s.cache, NegativePrompt(s.prompt_length - 1, s.newest, two), scale=jnp.ones(5))
        run = lambda network, window, cache=s.cache, weights=DEEP_WEIGHTS: network.apply(weights, window, cache)
        resumed = run(DEEP, window, weights={**DEEP_WEIGHTS, "layers": {**DEEP_WEIGHTS["layers"], **broken}})
        pairs = [(run(DEEP, anew), resumed), (run(Guided(DEEP), anew, guided), run(Guided(DEEP), window, guided)),
                 (run(other, anew), run(other, window))]
        return window.live, [[(out.hidden, out.entries, out.layers) for out in pair] for pair in pairs]

    live, (one, under_guidance, another) = forwards(s)
    assert live.all()
    for pair in (one, under_guidance):
        jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-4, rtol=1e-4), *pair)
    jax.tree.map(np.testing.assert_array_equal, *another)
    assert np.abs(one[0][0] - another[0][0]).max() > 0.1


def clasp_by_hand(run: Any, h: list[np.ndarray], skips: int) -> list[bool]:
    """The paper's recursion for one token, cell by cell. h: streams before the first layer and after each."""
    cosine = lambda a, b: float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
    cells = {(0, 0): (h[0], ())}
    for i in range(1, len(h)):
        for j in range(min(i, skips) + 1):
            options = []
            if (i - 1, j) in cells:
                x, path = cells[i - 1, j]
                options.append((run(i - 1, x), (*path, False)))
            if j and (i - 1, j - 1) in cells:
                x, path = cells[i - 1, j - 1]
                options.append((x, (*path, True)))
            cells[i, j] = max(options, key=lambda o: cosine(o[0], h[i]))
    return list(cells[len(h) - 1, skips][1])


@pytest.mark.wide
@pytest.mark.parametrize("skips", often([3], [1, 3, 6]))
def test_the_skip_set_is_that_of_the_papers_recursion(skips: int) -> None:
    rng = np.random.default_rng(skips)
    turns = rng.normal(size=(7, 6, 6)) / 2
    run = lambda i, x: x + np.tanh(x @ turns[i])
    found = []
    for _ in range(20):
        h = [rng.normal(size=6)]
        for i in range(7):
            h.append(run(i, h[-1]))
        chosen = skip_set(lambda i, x: x + jnp.tanh(x @ turns[i]), jnp.tile(jnp.array(h[0]), (1, skips + 1, 1)),
                          jnp.array(h[1:])[None], jnp.ones(1), skips)
        assert chosen.tolist() == clasp_by_hand(run, h, skips)
        assert chosen.sum() == skips
        found.append(tuple(chosen.tolist()))
    assert len(set(found)) > 1


CLASP = Speculative(CLaSp(skips=1, interval=3), shape=Chain(3))


@pytest.mark.full
def test_clasp_skips_the_layer_that_does_nothing(deep: Any) -> None:
    deep(1)
    s = decode(CLASP, "deep", prompts(5), POLICY, eos=[1])
    assert s.algo[0].keep.tolist() == [[True, False, True]] * 5
    # from the first round on, which follows the prompt's last cached token
    assert (np.asarray(s.stats.accepted) == 3 * np.asarray(s.stats.rounds)).all()


@pytest.mark.wide
def test_clasp_searches_every_so_many_rounds(deep: Any) -> None:
    network, params, chain, s = cases.start(CLASP, "deep", prompts(5), POLICY, eos=[1])
    waits, sets = [], []
    for _ in range(4):
        s = drivers.advance(CLASP, network, params, chain, s, jnp.int32(1))
        waits.append(int(s.algo[0].wait[0]))
        sets.append(np.asarray(s.algo[0].keep[0]))
    assert waits == [2, 1, 0, 2]
    assert all((sets[i] == sets[0]).all() and (~sets[i]).sum() == 1 for i in range(3))


EXIT = Speculative(DynamicExit(length=3, decay=0.5))


@jax.jit
def shallow(tokens: Any) -> Any:
    """What an exit after one layer and one after two give next to each token: `f32[2, B, N, V]`."""
    each = (DEEP.features(DEEP_WEIGHTS, tokens, keep=LayerSkip(layer).for_target(DEEP).keep) for layer in (1, 2))
    return jnp.stack([jax.nn.softmax(head(hidden)) for hidden, head in each])


@pytest.mark.wide
def test_dynamic_exit_learns_from_shadow_tokens(deep: Any) -> None:
    """The faded counts and confidences of three rounds, worked out from whole forwards by hand."""
    network, params, chain, s = cases.start(EXIT, "deep", prompts(5), POLICY)
    matched, nodes, sure = (np.array(x) for x in (s.algo[0].matched, s.algo[0].nodes, s.algo[0].sure))
    for _ in range(3):
        before = np.asarray(s.length)
        s = drivers.advance(EXIT, network, params, chain, s, jnp.int32(1))
        p, tokens = np.asarray(shallow(s.tokens)), np.asarray(s.tokens)
        matched, nodes, sure = matched / 2, nodes / 2, sure / 2
        for row, exit in np.ndindex(5, 2):
            for i in range(before[row], int(s.length[row])):
                right = p[exit, row, i - 1].argmax() == tokens[row, i]
                matched[row, exit] += right
                sure[row, exit, 0 if right else 1] += p[exit, row, i - 1].max()
        nodes += s.length - before
    for name, value in (("matched", matched), ("nodes", nodes), ("sure", sure)):
        np.testing.assert_allclose(getattr(s.algo[0], name), value, rtol=1e-5)
    exit = np.asarray(s.algo[0].layer) - 1
    wrong = nodes[:, None] - matched
    doubt = (sure[..., 0] / np.maximum(matched, 1e-6) + sure[..., 1] / np.maximum(wrong, 1e-6)) / 2
    np.testing.assert_allclose(s.algo[0].least, doubt[np.arange(5), exit], rtol=1e-4)
    rate = matched / nodes[:, None]
    by_hand = lambda a, layer, d: (d + 1 if a == 1 else (1 - a ** (d + 1)) / (1 - a)) / (d * layer + 3)
    table = np.array([[[by_hand(a, i + 1, d) for d in (1, 2, 3)] for i, a in enumerate(row)] for row in rate])
    found = tokens_per_layer(jnp.asarray(rate), jnp.arange(1, 3), 3, 3)
    np.testing.assert_allclose(found, table, rtol=1e-5)
    chosen = np.asarray(s.algo[0].layer) - 1, np.asarray(s.algo[0].length) - 1
    np.testing.assert_allclose(table[np.arange(5), *chosen], table.max((1, 2)), rtol=1e-5)


@pytest.mark.wide
def test_dynamic_exit_drafts_no_further_after_a_draft_in_doubt(deep: Any) -> None:
    network, params, chain, s = cases.start(EXIT, "deep", prompts(5), POLICY, seed=2)
    propose, ends = jax.jit(lambda s: for_target(EXIT, DEEP).propose(params, chain, s)[0]), []
    for _ in range(3):
        s = drivers.advance(EXIT, network, params, chain, s, jnp.int32(1))
        window, state, tokens = propose(s), s.algo[0], np.array(s.tokens)
        for row, length in enumerate(np.asarray(s.length)):
            tokens[row, length:length + 3] = window.tokens[row, 1:]
        p = np.asarray(shallow(tokens))
        for row in range(5):
            at = int(s.length[row]) - 1 + np.arange(3)
            sure = p[int(state.layer[row]) - 1, row, at, tokens[row, at + 1]] >= state.least[row]
            count = int(window.live[row].sum()) - 1
            assert sure[:count - 1].all() and (count == state.length[row] or not sure[count - 1])
            ends.append(bool(count == state.length[row]))
    assert {True, False} == set(ends)


@pytest.mark.wide
def test_dynamic_exit_finds_out_how_deep_it_must_draft(deep: Any) -> None:
    """Where layers behind the first do nothing, every exit is the target."""
    deep(1, 2)
    s = decode(EXIT, "deep", prompts(5), POLICY, new=24)
    assert (s.algo[0].layer == 1).all()
    assert s.stats.accepted.tolist() == s.stats.drafted.tolist()


@pytest.mark.full
def test_the_nearest_anchor_decides_for_each_row() -> None:
    ids = prompts(5)
    padded = np.array([np.resize(row, 24) for row in ids])
    hidden = np.asarray(jax.jit(lambda tokens: NETWORK.features(WEIGHTS, tokens)[0])(padded.astype(np.int32)))
    vectors = [x[:len(row) - 1].sum(0) * 0.3 for x, row in zip(hidden, ids, strict=True)]
    order = np.array([3, 1, 4, 0, 2])
    keep = jnp.ones((5, 2, 2), bool).at[jnp.arange(5), jnp.arange(5) % 2, jnp.arange(5) // 2 % 2].set(False)
    anchors = Anchors(vectors=jnp.asarray(np.stack(vectors)[order]), keep=keep)
    alg = Speculative(KNNSkip(anchors), shape=Chain(3))
    network, params, chain, s = cases.start(alg.bare(), "llama", ids, MIXED, eos=[1], draft=alg.weights)
    assert order[anchors.nearest(s.algo[0].vector)].tolist() == [0, 1, 2, 3, 4]
    s = drivers.advance(alg.bare(), network, params, chain, s, jnp.int32(100))
    assert texts(s) == plain()


@pytest.mark.wide
def test_anchors_are_fitted_to_what_a_domain_can_miss() -> None:
    layers = DEEP_WEIGHTS["layers"] | {"2": jax.tree.map(jnp.zeros_like, DEEP_WEIGHTS["layers"]["2"])}
    domains = [[[1, 2, 3, 4], list(range(14)), [9, 9]], [[7, 8, 7, 8, 7, 1, 2, 5]]]
    anchors = fit_anchors(DEEP, domains, {**DEEP_WEIGHTS, "layers": layers}, per_domain=2, skips=2)
    assert anchors.vectors.shape == (3, 16) and anchors.keep.shape == (3, 3, 2)
    assert not anchors.keep[0, 2].any() and anchors.keep[0].sum() == 4      # what does nothing goes first
    assert (anchors.keep[0] == anchors.keep[1]).all()
