"""SpecDec and GAD: blocks that are predicted at masks in one pass, and accepted by strict and by relaxed tests."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import decodax as dx
from decodax.algorithms.speculative.drafts import NonAutoregressive
from decodax.core.window import Window, bidirectional
from decodax.io.saving import save_encoder_decoder
from decodax.models.drafters.mask_predictor import MaskPredictor
from decodax.models.inputs import EncoderText
from decodax.models.names import flatten
from decodax.train.drafting.blocks import key_of
from decodax.train.drafting.next_block import NextBlock, pairs_of, predicted, shallow
from decodax.train.tuning import Example
from tests.laws.cases import lm as decoder_only
from tests.matrix import often
from tests.models.encoder_decoder.tiny import SOURCES, loaded, source
from tests.models.small import NEW, POLICY, score

K, MASK = 4, 1


GREEDY = dict(temperature=0.0, forced_bos_token_id=-1, forced_eos_token_id=[], eos_token_id=[], min_length=0,
              no_repeat_ngram_size=1)


@functools.cache
def plain(mixed=True):
    """Returns the output of the target, for greedy and sampled rows or for greedy rows alone."""
    return run(mixed, dx.Autoregressive()).tokens.tolist()


def run(mixed, algorithm):
    return dx.generate(loaded("bart"), [[]] * 4, inputs=source(), max_new_tokens=NEW, algorithm=algorithm,
                       **GREEDY | (POLICY if mixed else {}))


@functools.cache
def pairs():
    examples = [Example((*row, *text), len(row)) for row, text in zip(SOURCES, plain(), strict=True)]
    return pairs_of(examples, loaded("bart").start, 64)


@functools.cache
def trained():
    """A drafter with one decoder layer after some steps on the target's outputs, and the losses."""
    lm = loaded("bart")
    network, weights = shallow(lm.model, lm.params, 1)
    objective, optimizer, given = NextBlock(network, K, MASK), optax.adam(1e-2), tuple(map(jnp.asarray, pairs()))

    @jax.jit
    def steps(weights):
        def one(carry, i):
            weights, state = carry
            # the number of tokens after the end decides which places are drawn
            batch = (*given[:2], jnp.pad(given[2], ((0, 0), (0, 1))).at[:, -1].set(i), given[3])
            loss, slope = jax.value_and_grad(lambda w: objective(w, batch, i / 40)[0])(weights)
            updates, state = optimizer.update(slope, state)
            return (optax.apply_updates(weights, updates), state), loss

        (weights, _), losses = jax.lax.scan(one, (weights, optimizer.init(weights)), jnp.arange(40))
        return weights, losses

    weights, losses = steps(weights)
    return network, weights, losses


ENTRIES = dict(model_type="bart", vocab_size=64, d_model=24, encoder_layers=3, decoder_layers=1,
               encoder_attention_heads=4, decoder_attention_heads=3, encoder_ffn_dim=32, decoder_ffn_dim=28,
               max_position_embeddings=48, mask_token_id=MASK, decoder_start_token_id=2)


@pytest.fixture(scope="module")
def drafter(tmp_path_factory):
    """The trained drafter, saved and loaded."""
    network, weights, losses = trained()
    assert losses[-10:].mean() < 0.5 * losses[:5].mean()
    path = tmp_path_factory.mktemp("drafter")
    save_encoder_decoder(path, network, weights, ENTRIES)
    with pytest.raises(ValueError, match=r"^config: as a bart configuration it describes another model"):
        save_encoder_decoder(path, network, weights, {**ENTRIES, "decoder_layers": 2})
    return dx.load(path)


@pytest.mark.parametrize("case", ["bart", "t5-1.0"])
def test_stacks_of_other_depths_begin_as_the_targets_layers(case):
    lm = loaded(case)       # of 3 and 2 layers
    for depths, encoder, decoder in (((None, None), [0, 1, 2], [0, 1]), ((1, 5), [0, 0, 1, 1, 2], [0]),
                                     ((4, 2), [0, 1], [0, 0, 1, 1])):
        network, weights = shallow(lm.model, lm.params, *depths)
        own, target = flatten(weights), flatten(lm.params)
        shapes = flatten(jax.eval_shape(network.init_params, jax.random.key(0)))
        assert {name: x.shape for name, x in own.items()} == {name: x.shape for name, x in shapes.items()}
        for stack, layers in (("encoder", encoder), ("decoder", decoder)):
            for i, layer in enumerate(layers):
                kernel = f"{stack}.layers.{{}}.attn.q.kernel"
                assert np.array_equal(own[kernel.format(i)], target[kernel.format(layer)])
        assert all(np.array_equal(x, target[name]) for name, x in own.items() if ".layers." not in name)


@pytest.mark.wide
def test_a_glance_shows_the_more_of_a_block_the_more_of_it_is_wrong():
    """A share of 0.5 at the beginning and 0.3 at the end of the wrong tokens, as in hemingkx/SpecDec (commit abc479a);
    only hidden tokens are learned."""
    labels = np.array([[3, 5, 7, 2], [3, 5, 7, 2], [9, 4, -1, -1]])
    answers = np.array([[3, 5, 7, 2], [3, 5, 6, 6], [1, 1, 1, 1]])      # none, two of four, and both are wrong
    lm = loaded("bart")
    network, weights = shallow(lm.model, lm.params, 1)
    objective = NextBlock(network, K, MASK)
    given = jax.nn.one_hot(answers, 16), jnp.asarray(labels)
    of = jax.jit(jax.vmap(lambda key, done: objective.shown(key, *given, done), (0, None)))
    for done, most in ((0.0, 0.5), (0.5, 0.4), (1.0, 0.3)):
        share = np.asarray(of(jax.random.split(jax.random.key(1), 4000), done)).mean(0)     # standard error 0.008
        np.testing.assert_allclose(share, np.array([[0] * 4, [most / 2] * 4, [most, most, 0, 0]]), atol=0.035)
    draw = np.random.default_rng(2)
    examples = [Example((*row, *draw.integers(3, 60, 5 + i)), len(row)) for i, row in enumerate(SOURCES)]
    batch = tuple(map(jnp.asarray, pairs_of(examples, lm.start, 64)))
    key, glance = jax.random.split(key_of(batch[2]))
    place = batch[3] - (jax.random.uniform(key, batch[3].shape) * (batch[3] - 1)).astype(jnp.int32) - 1
    logits, labels = predicted(network, weights, batch, place, K, MASK)
    shown = np.asarray(objective.shown(glance, logits, labels, 0.0))
    text = np.pad(np.asarray(batch[2]), ((0, 0), (0, K)))
    losses = []
    for row in range(len(text)):
        n = int(place[row])
        block = [int(labels[row, k]) if shown[row, k] else MASK for k in range(K)]
        window = bidirectional(jnp.asarray([[*text[row, :n], *block]]), jnp.zeros(1, jnp.int32))
        cache = network.init_cache(1, 0, params=weights, inputs=EncoderText(
            tokens=batch[0][row:row + 1], length=batch[1][row:row + 1]))
        p = jax.nn.log_softmax(network.apply(weights, window, cache).logits()[0])
        losses += [-float(p[n + k, int(labels[row, k])]) for k in range(K) if labels[row, k] >= 0 and not shown[row, k]]
    assert shown.any() and float(jax.jit(objective)(weights, batch, 0.0)[0]) == pytest.approx(np.mean(losses), rel=1e-4)


@pytest.mark.wide
def test_a_trained_drafter_drafts_what_the_target_writes_and_changes_nothing(drafter):
    """Greedy and sampled rows; the mask token is that of the drafter's config.json."""
    exact = dx.algorithms.make("specdec", loaded("bart"), drafter, length=K, verify=dx.verify.SeedExact())
    assert isinstance(exact.draft, NonAutoregressive) and exact.draft.mask == MASK
    out = run(True, exact)
    assert out.tokens.tolist() == plain()
    assert out.stats.accepted.sum() > 8


@pytest.mark.wide
def test_at_the_strictest_setting_specdec_and_gad_are_greedy_decoding(drafter):
    strict = dx.algorithms.make("specdec", loaded("bart"), drafter, length=K, beta=1)
    block = NonAutoregressive(drafter, drafts=K, mask=MASK)
    gad = dx.algorithms.make("aggressive-decoding", loaded("bart"), length=3, drafter=block)
    assert gad.drafter.length == 3
    for algorithm in (strict, gad):
        out = run(False, algorithm)
        assert out.tokens.tolist() == plain(mixed=False)
        assert out.stats.accepted.sum() > 0


@pytest.mark.wide
@pytest.mark.parametrize("case", often(["bart"], ["bart", "t5-1.0"]))
def test_a_block_is_predicted_as_after_the_text_alone(case):
    lm = loaded(case)
    network = MaskPredictor.of(lm.model)
    tokens, place = np.random.default_rng(0).integers(3, 60, (4, 9)), np.array([1, 4, 9, 6])
    rows, size, *_ = pairs_of([Example((*row, 2), len(row)) for row in SOURCES], lm.start, 64)
    logits, labels = predicted(network, lm.params, tuple(map(jnp.asarray, (rows, size, tokens, np.full(4, 8)))),
                               jnp.asarray(place), 3, MASK)
    for i, n in enumerate(place):
        text = [*tokens[i, :n], *[MASK] * 3]
        window = Window(tokens=jnp.asarray([text], jnp.int32), positions=jnp.arange(n + 3, dtype=jnp.int32)[None],
                        mask=jnp.ones((1, n + 3, n + 3), bool), live=jnp.ones((1, n + 3), bool))
        alone = score(network, lm.params, window, source([SOURCES[i]]))
        np.testing.assert_allclose(logits[i], alone[0, n:], atol=2e-5, rtol=1e-5)
        assert labels[i].tolist() == [tokens[i, j] if j < 8 else -1 for j in range(n, n + 3)]
        if case == "bart":      # without relative positions, only the mask is another
            np.testing.assert_allclose(score(lm.model, lm.params, window, source([SOURCES[i]])), alone, atol=1e-6)


def test_a_drafter_with_an_encoder_takes_a_target_with_one():
    target = decoder_only("llama")
    with pytest.raises(ValueError, match=r"^draft: the drafter has an encoder, so it takes a target with one"):
        dx.generate(target, [[1, 2]], max_new_tokens=2, algorithm=dx.algorithms.make("specdec", target, loaded("bart"),
                                                                                     mask=MASK))
    with pytest.raises(ValueError, match=r"^mask: the draft model's config\.json has no mask_token_id"):
        dx.algorithms.make("specdec", target, loaded("bart"))
    with pytest.raises(ValueError, match=r'^data: takes pairs, lines with "prompt" and "target"'):
        pairs_of([Example((1, 2), 0)], 2, 9)
