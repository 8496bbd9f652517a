"""Prompt tokens and hidden transfer: drafting computes what training computes, and both what the target computes after
the text alone."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decodax import algorithms
from decodax.algorithms.plain import Autoregressive
from decodax.algorithms.speculative import Speculative
from decodax.algorithms.speculative.adaptive.fit_trees import begun
from decodax.algorithms.speculative.heads import HeadWeights
from decodax.algorithms.speculative.heads.prompted.source import PromptTokens
from decodax.algorithms.speculative.trees import Chain, Fixed
from decodax.core import drivers
from decodax.core.window import Window, causal
from decodax.models.drafters.prompt_tokens import HiddenTransferHead, PromptTokensHead
from decodax.pallas_kernels.window_attention import window_attention
from decodax.train.drafting.prompt_tokens import InsertedPrompts, inserted
from tests.laws.cases import VOCABULARY, decode, lm, model, prompts, start, texts
from tests.matrix import often

K = 3
SHAPES = {"chain": Chain(K), "tree": Fixed.of([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]])}
MIXED = dict(temperature=[0.0, 0.9, 1.3, 0.8, 0.0], top_p=[1, 1, 0.9, 1, 1], repetition_penalty=[1, 1, 1, 1.4, 1.6])


HEADS = {"prompts": PromptTokensHead((), VOCABULARY, width=16, heads=K),
         "transfer": HiddenTransferHead((0, 0, 1), VOCABULARY, width=16, heads=K),
         "transfer-below": HiddenTransferHead((0,), VOCABULARY, width=16, heads=K)}


@functools.cache
def drafter(kind="prompts"):
    shapes = HEADS[kind].abstract_params()
    weights = jax.tree.map(lambda x: jax.random.normal(jax.random.key(7), x.shape) * x.shape[-2] ** -0.5, shapes)
    if kind == "prompts":
        weights = {"prompts": jax.random.normal(jax.random.key(7), (K, 16))}
    return PromptTokens(HEADS[kind], vocab_size=VOCABULARY).for_target(model("llama")[0]), HeadWeights(weights)


LONGEST = 60


@functools.cache
def after(kind):
    """A function that returns the target's hidden states at the probes after the first T tokens of a text, `f[K, D]`.
    Transferred nodes are added where they begin."""
    network, weights = model("llama")
    head, source = drafter(kind)[1].head, HEADS[kind]

    def causal_nodes(T, made):
        """Positions and mask of the text and of `made` probes after its first T tokens."""
        at = jnp.concatenate([jnp.arange(LONGEST), T + jnp.arange(made)])[None].astype(jnp.int32)
        probe = jnp.arange(LONGEST + made) >= LONGEST
        seen = jnp.where(probe[:, None], probe | (jnp.arange(LONGEST + made) < T), ~probe)
        return at, (at[:, :, None] >= at[:, None]) & seen

    def states(tokens, T):
        if kind == "prompts":
            at, mask = causal_nodes(T, K)
            w = Window(tokens=jnp.pad(tokens, ((0, 0), (0, K))), positions=at, mask=mask, live=at >= 0,
                       embeddings=jnp.pad(head["prompts"][None], ((0, 0), (LONGEST, 0), (0, 0))),
                       embedded=jnp.arange(LONGEST + K)[None] >= LONGEST)
            return network.apply(weights, w, network.init_cache(1, 0)).hidden[0, LONGEST:]
        net, taps = network.pieces(weights).network, [*source.taps, *source.taps * K][:K]
        x = net.embedded(tokens, jnp.arange(LONGEST)[None])
        for i in range(network.depth):
            at, mask = causal_nodes(T, x.shape[1] - LONGEST)
            near = lambda layer, q, k, v, at=at, mask=mask, **o: (window_attention(q, k, v, mask, at, **o), ())
            x, _ = net.layers[str(i)](i, x, net.tables(at, None), near)
            x = jnp.concatenate([x, *(x[:, T - 1][:, None] @ head["maps"][j] for j in range(K) if taps[j] == i)], 1)
        return net.norm(x)[0, LONGEST:]

    return jax.jit(states)


def alone(tokens, kind="prompts"):
    return after(kind)(jnp.asarray([np.pad(tokens, (0, LONGEST - len(tokens)))], jnp.int32), len(tokens))


@pytest.mark.wide(but=("prompts-tree",))
@pytest.mark.parametrize(("kind", "shape"), often(
    [("prompts", "chain"), ("prompts", "tree"), ("transfer", "tree")], itertools.product(HEADS, SHAPES)))
def test_the_output_is_plain_decodings_and_guesses_are_those_of_the_text_alone(kind, shape):
    source, weights = drafter(kind)
    alg = Speculative(source, shape=SHAPES[shape])
    assert texts(decode(alg, "llama", prompts(5), MIXED, eos=[1], draft=weights)) == texts(
        decode(Autoregressive(), "llama", prompts(5), MIXED, eos=[1]))
    network, params, chain, s = start(alg, "llama", prompts(5), MIXED, new=30, draft=weights)
    s = drivers.advance(alg, network, params, chain, s, jnp.int32(6))
    assert np.asarray(s.running).all() and np.asarray(s.stats.accepted).any()
    for row, n in enumerate(np.asarray(s.length)):
        # the newest token is not processed yet: the prompt tokens stand after the one before it
        np.testing.assert_allclose(s.algo[0].hidden[row], alone(s.tokens[row, :n - 1].tolist(), kind),
                                   atol=2e-5, rtol=1e-5)


@pytest.mark.wide(but=("transfer",))
@pytest.mark.parametrize("kind", ["prompts", "transfer"])
def test_training_inserts_probes_at_many_places_as_if_alone(kind):
    network, weights = model("llama")
    tokens = jnp.asarray(np.random.default_rng(3).integers(0, VOCABULARY, (2, 12)), jnp.int32)
    places = jnp.asarray([[0, 5, 10], [2, 3, 11]], jnp.int32)
    source, own = drafter(kind)
    out = network.apply(weights, inserted(tokens, places, source.head, own.head), network.init_cache(2, 0))
    whole = network.apply(weights, causal(tokens, jnp.zeros(2, jnp.int32)), network.init_cache(2, 0))
    np.testing.assert_allclose(out.hidden[:, :12], whole.hidden, atol=1e-5)
    for row in range(2):
        for i, place in enumerate(np.asarray(places[row])):
            np.testing.assert_allclose(out.hidden[row, 12 + i * K:12 + (i + 1) * K],
                                       alone(tokens[row, :place + 1].tolist(), kind), atol=2e-5, rtol=1e-5)


def test_the_loss_compares_each_prompt_token_with_the_target_where_it_predicts_the_same_token():
    network, weights = model("llama")
    tokens = np.random.default_rng(5).integers(0, VOCABULARY, (2, 9))
    objective = InsertedPrompts(network, drafter()[0].head, places=99, decay=0.5)
    prompt = drafter()[1].head
    found, scalars = objective(prompt, jnp.asarray(tokens, jnp.int32), weights)
    truth = jax.nn.log_softmax(network.apply(weights, causal(jnp.asarray(tokens[:, :-1]), jnp.zeros(2, jnp.int32)),
                                             network.init_cache(2, 0)).logits())
    project = lambda x: jax.nn.log_softmax(network.logits(weights, x[None])[0])
    each = [[] for _ in range(K)]
    for row in range(2):
        for place in range(6):              # of 8 positions, those with a prediction to compare with at depth 0
            own = project(alone(tokens[row, :place + 1].tolist()))
            for j in range(K):
                if place + 1 + j < 8:
                    p, q = truth[row, place + 1 + j], own[j]
                    each[j].append([float((jnp.exp(p) * (p - q)).sum()),
                                    float(jnp.minimum(jnp.exp(p), jnp.exp(q)).sum())])
    mean = np.asarray([np.mean(x, 0) for x in each])
    assert float(found) == pytest.approx((mean[:, 0] * [1, 0.5, 0.25]).sum() / 1.75, rel=1e-4)
    assert [float(scalars[f"accepted_{j + 1}"]) for j in range(K)] == pytest.approx(mean[:, 1].tolist(), rel=1e-4)
    slope = jax.grad(lambda p: objective(p, jnp.asarray(tokens, jnp.int32), weights)[0])(prompt)["prompts"]
    assert np.isfinite(slope).all() and (np.abs(slope).max(1) > 0).all()


@pytest.mark.full
def test_space_reads_the_target_at_mask_tokens_after_the_text():
    """And a training that puts masks in place of tokens reads the same."""
    alg, params, policy, s = begun(lm("llama"), algorithms.make("space", lm("llama"), length=K, mask=5), prompts(3), 30)
    s = drivers.advance(alg, lm("llama").model, params, policy, s, jnp.int32(5))
    assert np.asarray(s.running).all()
    for row, n in enumerate(np.asarray(s.length)):
        text = jnp.asarray([[*np.asarray(s.tokens[row, :n - 1]), *[5] * K]], jnp.int32)
        out = lm("llama").model.apply(lm("llama").params, causal(text, jnp.zeros(1, jnp.int32)),
                                      lm("llama").model.init_cache(1, 0))
        np.testing.assert_allclose(s.algo[0].hidden[row], out.hidden[0, -K:], atol=2e-5, rtol=1e-5)
