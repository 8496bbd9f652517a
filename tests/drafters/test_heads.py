"""Trained heads draft what training computes, learn from the target's features alone, and change no output."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decodax.algorithms.plain import Autoregressive
from decodax.algorithms.speculative import MultiRound, Rejection, Speculative
from decodax.algorithms.speculative.heads.source import HeadWeights, TrainedHead
from decodax.algorithms.speculative.trees import Chain, Fixed
from decodax.core import drivers
from decodax.models.drafters.chimera import ChimeraHead
from decodax.models.drafters.clover import CloverHead
from decodax.models.drafters.hydra import HydraHead
from decodax.models.drafters.recurrent import RecurrentHead
from decodax.models.drafters.stack import BlockwiseHead, MedusaHead, MLPSpeculatorHead
from decodax.train.drafting.features import target_outputs
from decodax.train.drafting.unrolled import unrolled
from tests.algorithms.speculative.uneven import UNEVEN
from tests.contracts.verifying import ALARM, PROMPT, chi_square, joint
from tests.contracts.verifying import POLICIES as LAW_POLICIES
from tests.drafters.drafting import drafted_logits
from tests.laws.cases import VOCABULARY, decode, model, prompts, start, texts
from tests.matrix import often

CONFIG = model("llama")[0].config
ONE = dataclasses.replace(CONFIG, layers=CONFIG.layers[:1])
recurrent = functools.partial(RecurrentHead, vocab=VOCABULARY, config=ONE)
HEADS = {
    "eagle": recurrent(taps=(), fuse="fc", bias=True, first_norm=False, final_norm=False),
    "eagle3": recurrent(taps=(0, 1), project=True, own_head=True, feeds_back="before norm"),
    "eagle3-each": recurrent(taps=(0, 1), project=True, own_head=True, tap_norm="each", norm_residual=True),
    "eagle3-two": recurrent(taps=(1, 0), project=True, own_head=True, own_table=True, tap_norm="all", config=CONFIG),
    "mtp": recurrent(taps=(), fuse="norms"),
    "mtp-mimo": recurrent(taps=(), fuse="norms", hidden_first=True, drop_first=True, final_norm=False),
    "medusa": MedusaHead((), VOCABULARY, width=16, heads=4, blocks=2),
    "blockwise": BlockwiseHead((), VOCABULARY, width=16, heads=4, inner=12),
    "hydra": HydraHead((), VOCABULARY, width=16, heads=4, blocks=2),
    "hydra-plus-plus": HydraHead((), VOCABULARY, width=16, blocks=4, own_head=False, prefix=ONE),
    "clover": CloverHead((), VOCABULARY, width=16, heads=4, prefix=ONE),
    "clover-2": CloverHead((), VOCABULARY, width=16, heads=4, prefix=CONFIG, tokens_first=True),
    "chimera": ChimeraHead((), VOCABULARY, config=ONE, heads=4),
    "mlp-speculator": MLPSpeculatorHead((), VOCABULARY, width=16, heads=4, inner=24, scale_input=True),
    "mlp-speculator-tied": MLPSpeculatorHead((), VOCABULARY, width=16, heads=4, inner=12, tied=True),
    "mlp-speculator-shared": MLPSpeculatorHead((), VOCABULARY, width=16, heads=4, inner=16, own_head=False),
}
SHOWN = ("eagle", "eagle3", "eagle3-two", "mtp", "hydra", "mlp-speculator")
OF_TEXT = (*SHOWN, "hydra-plus-plus", "chimera")
"""Those whose states are compared; the output of every system is in tests/contracts/test_algorithm.py."""
MIXED = dict(temperature=[0.0, 0.9, 1.3, 0.8, 0.0], top_p=[1, 1, 0.9, 1, 1], repetition_penalty=[1, 1, 1, 1.4, 1.6])
SHAPES = {"chain": Chain(4), "tree": Fixed.of(UNEVEN)}


@functools.cache
def drafter(name, target="llama"):
    """A head with weights large enough that its guesses differ, and its source."""
    head = HEADS[name]
    weights = jax.tree.map(lambda x: x + 0.3 * jax.random.normal(jax.random.key(x.size), x.shape),
                           head.init_params(jax.random.key(0)))
    return TrainedHead(head).for_target(model(target)[0]), HeadWeights(weights)


@functools.cache
def plain():
    return texts(decode(Autoregressive(), "llama", prompts(5), MIXED, eos=[1]))


@pytest.mark.wide(but=("eagle3-chain",))
@pytest.mark.parametrize(("name", "shape"), often([("eagle3", "chain"), *((name, "tree") for name in SHOWN)],
                                                  itertools.product(HEADS, SHAPES)))
def test_with_seed_exact_the_output_is_plain_decodings(name, shape):
    """Greedy, sampled, truncated and penalised rows in one batch."""
    source, weights = drafter(name)
    s = decode(Speculative(source, shape=SHAPES[shape]), "llama", prompts(5), MIXED, eos=[1], draft=weights)
    assert texts(s) == plain()
    assert np.asarray(s.stats.drafted).sum() > 0


@pytest.mark.wide
@pytest.mark.parametrize("name", often(OF_TEXT, HEADS))
def test_drafting_computes_the_logits_of_training(name):
    source, weights = drafter(name)
    network, target = model("llama")
    whole = jnp.asarray(np.random.default_rng(3).integers(0, VOCABULARY, (3, 20)), jnp.int32)
    _, features = target_outputs(network, source.head, target, whole, "float32")
    trained = unrolled(network, source.head, weights.head, target, whole, features, 4)
    given = [5, 11, 16]
    _, params, _, s = start(Speculative(source, shape=Chain(4)), "llama",
                            [row[:n].tolist() for row, n in zip(np.asarray(whole), given, strict=True)], {},
                            draft=weights, width=4)
    following = jnp.stack([row[n:n + 3] for row, n in zip(whole, given, strict=True)])
    drafted, _ = jax.jit(functools.partial(drafted_logits, source))(params, s, following)
    for row, n in enumerate(given):
        for found, (x, _) in zip(drafted[row], trained, strict=True):
            # EAGLE-1 feeds its state back without a norm: it grows to 99 and logits to 55 at the fourth token, where
            # features changed in their last bit change logits by 6e-5. In float64 throughout, drafts and training
            # differ by 3e-14, so what differs here is rounding, in proportion to the logits of a depth.
            size = float(jnp.abs(x).max())
            np.testing.assert_allclose(found, x[row, n - 2], atol=max(2e-5, 4e-6 * size), rtol=1e-5)


@pytest.mark.wide
@pytest.mark.parametrize("name", often(OF_TEXT, HEADS))
def test_after_any_rounds_the_state_is_that_of_the_text(name):
    """Rounds that accept and reject leave the state of a head that has read the text as a prompt, in other chunks."""
    source, weights = drafter(name)
    alg = Speculative(source, shape=Fixed.of(UNEVEN))
    network, params, chain, s = start(alg, "llama", prompts(5), MIXED, new=30, draft=weights)
    s = drivers.advance(alg, network, params, chain, s, jnp.int32(6))
    rows = [row[:n].tolist() for row, n in zip(np.asarray(s.tokens), np.asarray(s.length), strict=True)]
    assert np.asarray(s.running).all() and np.asarray(s.stats.accepted).any()
    fresh = start(alg, "llama", rows, {}, draft=weights, width=5)[3]
    for got, wanted in ((s.algo[0].hidden, fresh.algo[0].hidden), (s.algo[0].state, fresh.algo[0].state)):
        np.testing.assert_allclose(got, wanted, atol=2e-5, rtol=1e-5)
    if s.algo[0].cache is not None:
        np.testing.assert_array_equal(s.algo[0].cache.length, s.length - 1)
        for row, n in enumerate(np.asarray(s.length)):
            for held, new in zip(s.algo[0].cache.kv, fresh.algo[0].cache.kv, strict=True):
                np.testing.assert_allclose(held[row, :, :n - 1], new[row, :, :n - 1], atol=2e-5, rtol=1e-5)


TREES = 25_000


@pytest.mark.wide
@pytest.mark.parametrize(("shape", "verify", "ids"), [
    (Chain(3), Rejection(), None), (Fixed.balanced(2, 2), MultiRound(), None), (Chain(3), Rejection(), range(5, 12))])
def test_drafts_of_a_head_keep_the_targets_distribution(shape, verify, ids):
    """Also those of a head that knows only some of the tokens."""
    head = MLPSpeculatorHead((), VOCABULARY if ids is None else len(ids), width=8, heads=3, inner=16)
    if ids is not None:         # it reads all tokens and predicts some
        head = MedusaHead((), len(ids), width=8, heads=3)
    weights = jax.tree.map(lambda x: x + 0.3 * jax.random.normal(jax.random.key(x.size), x.shape),
                           head.init_params(jax.random.key(0)))
    own = HeadWeights(weights, None if ids is None else jnp.asarray(ids, jnp.int32))
    alg = Speculative(TrainedHead(head, vocab_size=VOCABULARY), verify, shape)
    s = decode(alg, "toy", [PROMPT] * TREES, LAW_POLICIES["temperature"], new=3, size=16, draft=own)
    made, wanted = np.asarray(s.tokens)[:, len(PROMPT):len(PROMPT) + 3], joint("temperature")
    for n in (1, 2, 3):
        counts = np.bincount(made[:, :n] @ VOCABULARY ** np.arange(n)[::-1], minlength=VOCABULARY**n)
        assert chi_square(counts, wanted.reshape(VOCABULARY**n, -1).sum(1) * TREES) > ALARM
    assert 0 < np.asarray(s.stats.accepted).sum() < np.asarray(s.stats.drafted).sum()


def test_a_fresh_medusa_head_predicts_what_the_target_does():
    network, target = model("llama")
    head = MedusaHead((), VOCABULARY, width=16, heads=3, own_head=False)
    tokens = jnp.asarray([[3, 1, 4, 1, 5]], jnp.int32)
    logits, features = target_outputs(network, head, target, tokens, "float32")
    for found, _ in unrolled(network, head, head.init_params(jax.random.key(0)), target, tokens, features, 3):
        np.testing.assert_array_equal(found, logits)
