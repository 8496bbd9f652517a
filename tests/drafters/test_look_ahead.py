"""Look-ahead embeddings (PaSS) and masks without the middle layers (S3D): drafting computes what training computes, and
both what the target computes after the text."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decodax import algorithms
from decodax.algorithms.speculative.trees import Fixed
from decodax.core import drivers
from decodax.core.window import causal
from decodax.io.drafters import TrainedDrafter, load_drafter, save_drafter
from decodax.models.drafters.prompt_tokens import LookAheadHead
from decodax.train.drafting.prompt_tokens import InsertedPrompts, look_ahead
from decodax.train.tuning import SkippyLoss
from tests.drafters.test_block_heads import MIXED, plain
from tests.drafters.test_prompt_tokens import SHAPES
from tests.laws.cases import VOCABULARY, lm, model, prompts, start, texts
from tests.matrix import often

K, MASK = 3, 5
HEADS = {"pass": LookAheadHead((), VOCABULARY, width=16, heads=K),
         "s3d": LookAheadHead((), VOCABULARY, width=16, heads=K, skip=(1,))}
TREE = Fixed.of([*SHAPES["tree"].paths, (0, 0, 0, 0)])


@functools.cache
def drafter(name):
    return TrainedDrafter(name, HEADS[name], {"prompts": jax.random.normal(jax.random.key(7), (K, 16))})


@pytest.mark.wide(but=("s3d-tree",))
@pytest.mark.parametrize(("name", "shape"), often([("s3d", "tree"), ("pass", "chain")], itertools.product(
    HEADS, ["chain", "tree"])))
def test_the_output_is_plain_decodings_and_drafts_are_those_that_training_compares(name, shape):
    alg = algorithms.make(name, lm("llama"), drafter(name), **({"shape": TREE} if shape == "tree" else {}))
    assert alg.drafter.length == 1 + K
    bare, own = alg.bare(), alg.weights
    network, params, chain, s = start(bare, "llama", prompts(5), MIXED, eos=[1], draft=own)
    s = drivers.advance(bare, network, params, chain, s, jnp.int32(2))
    state, _ = jax.jit(lambda params, s: bare.draft.start(params, s, s.algo[0], 4))(params, s)
    places = np.asarray(s.length)[:, None] - 1
    _, hidden = look_ahead(network, params.target, s.tokens, jnp.asarray(places), own.head["prompts"], HEADS[name])
    np.testing.assert_allclose(state.hidden, hidden[:, 0], atol=2e-5, rtol=1e-5)
    if name == "pass":
        for row, n in enumerate(np.asarray(s.length)):
            whole = causal(jnp.pad(s.tokens[row:row + 1, :n], ((0, 0), (0, K))), jnp.zeros(1, jnp.int32)).replace(
                embeddings=jnp.pad(own.head["prompts"], ((n, 0), (0, 0)))[None], embedded=jnp.arange(n + K)[None] >= n)
            out = network.apply(params.target, whole, network.init_cache(1, 0))
            np.testing.assert_allclose(state.hidden[row], out.hidden[0, n - 1:], atol=2e-5, rtol=1e-5)
    s = drivers.advance(bare, network, params, chain, s, jnp.int32(500))
    assert texts(s) == plain()
    if name == "pass":                      # the first draft has the target's own distribution
        assert (np.asarray(s.stats.accepted) >= np.asarray(s.stats.rounds) - 1).all()



@pytest.mark.wide
def test_the_losses_are_those_of_the_passes_one_by_one():
    """The embeddings are trained for a frozen target, or the mask token is that of a tuned target."""
    network, weights = model("llama")
    tokens = jnp.asarray(np.random.default_rng(5).integers(0, VOCABULARY, (2, 9)), jnp.int32)
    head, prompt = HEADS["s3d"], drafter("s3d").params
    found, scalars = jax.jit(InsertedPrompts(network, head, places=99, loss="hard", decay=0.5))(
        prompt, tokens, weights)
    every = jnp.broadcast_to(jnp.arange(8), (2, 8))

    @jax.jit
    def log_probs(vectors):                 # by the whole target, and of the passes after each token
        out, hidden = look_ahead(network, weights, tokens[:, :-1], every, vectors, head)
        return [jax.nn.log_softmax(network.logits(weights, x)) for x in (out.hidden, hidden)]

    log_q = np.asarray(log_probs(prompt["prompts"])[1])
    each = [[] for _ in range(K)]
    for row, place, j in itertools.product(range(2), range(6), range(1, 1 + K)):
        if place + j < 8:                   # a place where the target predicts, too; the last one has no label
            each[j - 1].append(-log_q[row, place, j, tokens[row, place + 1 + j]] if place + j < 7 else 0.0)
    mean = np.asarray([np.mean(x) for x in each])
    assert float(found) == pytest.approx((mean * [1, 0.5, 0.25]).sum() / 1.75, rel=1e-4)
    assert len(scalars) == 2 + K
    vectors = network.embeddings(weights, jnp.full((1, K), MASK))[0]
    learned = jnp.ones((2, 9), bool).at[:, :4].set(False)
    loss, parts = jax.jit(SkippyLoss(network, MASK, 1 + K, skip=(1,), places=99))(
        weights, (tokens, learned), jax.random.key(0))
    log_p, log_q = map(np.asarray, log_probs(vectors))
    drafts = [-log_q[row, i, j, tokens[row, 1 + i + j]] for row, i, j in itertools.product(
        range(2), range(3, 8), range(1 + K)) if 1 + i + j < 9]
    plain = [-log_p[row, i, tokens[row, i + 1]] for row in range(2) for i in range(3, 8)]
    assert float(parts["drafts"]) == pytest.approx(np.mean(drafts), rel=1e-4)
    assert float(parts["plain"]) == pytest.approx(np.mean(plain), rel=1e-4)
    assert float(loss) == pytest.approx(np.mean(drafts) + np.mean(plain), rel=1e-4)


def test_a_tuned_model_says_which_mask_and_layers_it_was_tuned_with():
    table = np.asarray(lm("llama").params["embed"])
    for name, key in (("space", "space_mask_token"), ("s3d", "s3d_mask_token")):
        tuned = dataclasses.replace(lm("llama"), entries={key: 9, "s3d_skip": [0]})
        for given, mask in (({}, 9), ({"mask": 4}, 4)):
            alg = algorithms.make(name, tuned, length=1 + K, **given)
            assert (np.asarray(alg.draft.weights.head["prompts"]) == table[mask]).all()
        if name == "s3d":
            assert alg.draft.head.skip == (0,)
            assert algorithms.make(name, tuned, skip=(1,)).draft.head.skip == (1,)


def test_they_are_stored_and_wrong_options_are_named(tmp_path):
    save_drafter(tmp_path, drafter("s3d"))
    assert load_drafter(tmp_path, lm("llama")).head == HEADS["s3d"]
    alg = algorithms.make("s3d", lm("llama"), length=1 + K, mask=MASK)
    assert alg.draft.head.heads == K and alg.drafter.length == 1 + K
    with pytest.raises(ValueError, match="skip: got \\(2,\\), takes layers from 0 to 1"):
        algorithms.make("s3d", lm("llama"), skip=(2,))
    with pytest.raises(ValueError, match="mask: got 99, takes an id below 16"):
        algorithms.make("s3d", lm("llama"), mask=99)
    with pytest.raises(ValueError, match="draft: got one of 'pass', 's3d' takes one of 's3d'"):
        algorithms.make("s3d", lm("llama"), drafter("pass"))
