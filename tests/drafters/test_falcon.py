"""Falcon's drafter: blocks are those of training, its state follows from the text alone, and it changes no output."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decodax.algorithms.speculative import Speculative
from decodax.algorithms.speculative.heads import HeadWeights
from decodax.algorithms.speculative.heads.falcon import SemiAutoregressive
from decodax.algorithms.speculative.trees import Chain, Fixed
from decodax.core import drivers
from decodax.core.types import embeddings, logits_of
from decodax.models.drafters.falcon import FalconHead
from decodax.train.drafting.blocks import Scheduled
from decodax.train.drafting.falcon import Glanced, blocks
from decodax.train.drafting.features import target_outputs
from tests.algorithms.speculative.uneven import UNEVEN
from tests.drafters.drafting import drafted_logits
from tests.drafters.test_heads import MIXED, ONE, plain
from tests.laws.cases import VOCABULARY, decode, model, prompts, start, texts
from tests.matrix import often


@functools.cache
def drafter(block=2):
    head = FalconHead((), VOCABULARY, config=ONE, block=block)
    weights = jax.tree.map(lambda x: x + 0.3 * jax.random.normal(jax.random.key(x.size), x.shape),
                           head.init_params(jax.random.key(0)))
    return SemiAutoregressive(head).for_target(model("llama")[0]), HeadWeights(weights)


@pytest.mark.wide
@pytest.mark.parametrize(("block", "shape"), often([(3, "tree")], [(2, "chain"), (2, "tree"), (3, "tree")]))
def test_with_seed_exact_the_output_is_plain_decodings(block, shape):
    source, weights = drafter(block)
    alg = Speculative(source, shape=Chain(5) if shape == "chain" else Fixed.of(UNEVEN))
    s = decode(alg, "llama", prompts(5), MIXED, eos=[1], draft=weights)
    assert texts(s) == plain()
    assert np.asarray(s.stats.drafted).sum() > 0


@pytest.mark.wide
@pytest.mark.parametrize("block", often([2], [2, 3]))
def test_drafting_computes_the_blocks_of_training(block):
    """Also those after a block of drafts, which take the place of the text."""
    source, weights = drafter(block)
    network, target = model("llama")
    text = jnp.asarray(np.random.default_rng(3).integers(0, VOCABULARY, (1, 12 + 1 + 2 * block)), jnp.int32)
    n = 12                                          # a multiple of both lengths of blocks
    _, params, _, s = start(Speculative(source, shape=Chain(2 * block)), "llama", text[:, :n + 1].tolist(), {},
                            draft=weights, width=5)
    drafts = text[:, n + 1:n + 2 * block]
    found, _ = jax.jit(functools.partial(drafted_logits, source))(params, s, drafts)

    def wanted(target):
        _, features = target_outputs(network, source.head, target, text[:, :n + 1], "float32")
        pairs = embeddings(network, target, text[:, 1:])
        one = blocks(source.head, weights.head, pairs[:, :n], features[:, :n])[:, -block:]
        given = jnp.concatenate([features[:, :n], one], 1)
        two = blocks(source.head, weights.head, pairs[:, :n + block], given)[:, -block:]
        return logits_of(network, target, jnp.concatenate([one, two], 1))

    np.testing.assert_allclose(found, jax.jit(wanted)(target), atol=2e-5, rtol=1e-5)


@pytest.mark.wide
def test_after_any_rounds_the_state_is_that_of_the_text():
    source, weights = drafter(3)
    alg = Speculative(source, shape=Fixed.of(UNEVEN))
    network, params, chain, s = start(alg, "llama", prompts(5), MIXED, new=30, draft=weights)
    s = drivers.advance(alg, network, params, chain, s, jnp.int32(6))
    rows = [row[:n].tolist() for row, n in zip(np.asarray(s.tokens), np.asarray(s.length), strict=True)]
    assert np.asarray(s.running).all() and np.asarray(s.stats.accepted).any()
    fresh = start(alg, "llama", rows, {}, draft=weights, width=5)[3]
    for got, wanted in ((s.algo[0].recent, fresh.algo[0].recent), (s.algo[0].carry, fresh.algo[0].carry)):
        np.testing.assert_allclose(got, wanted, atol=2e-5, rtol=1e-5)
    np.testing.assert_array_equal(s.algo[0].cache.length, s.length - 1)
    for row, n in enumerate(np.asarray(s.length)):
        np.testing.assert_allclose(s.algo[0].cache.kv[0][row, :, :n - 1], fresh.algo[0].cache.kv[0][row, :, :n - 1],
                                   atol=2e-5, rtol=1e-5)


@pytest.mark.wide
def test_a_glance_shows_truth_in_place_of_wrong_inputs_and_only_then_changes_the_loss():
    network, target = model("llama")
    source, weights = drafter()
    batch = jnp.asarray(np.random.default_rng(5).integers(0, VOCABULARY, (2, 21)), jnp.int32)
    run = jax.jit(Glanced(network, source.head, glance=1.0))
    plain, glanced = (run(weights.head, batch, Scheduled(target, share))[1] for share in (1.0, 0.0))
    assert plain["loss"] == run(weights.head, batch, target)[1]["loss"]     # at the end of the run no glance is left
    assert float(plain["loss"]) != pytest.approx(float(glanced["loss"]), rel=1e-3)
    assert all(np.isfinite(x) for x in (*plain.values(), *glanced.values())) and set(plain) == {
        "loss", "accepted_1", "accepted_2"}
