"""Examples as blocks of masks after a causal text, against the loss by hand."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decodax.models import Diffusion
from decodax.train.masked_diffusion import corrupt
from decodax.train.tuning import SetBlockLoss, mask_token, set_blocks
from tests.laws.cases import MASK, VOCABULARY, model

SIZE, T = 4, 12
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(1, MASK, (3, T)).astype(np.int32)
FIRST, END = np.array([3, 1, 6]), np.array([8, 12, 9])
PLACE = np.arange(T)
LEARNED = (PLACE >= FIRST[:, None]) & (PLACE < END[:, None])
BATCH = jnp.asarray(np.where(PLACE < END[:, None], TOKENS, 0)), jnp.asarray(LEARNED)


@pytest.mark.wide
def test_set_blocks_are_learned_with_masks_behind_the_end_of_a_target():
    """Each block by itself: it sees the text before it and all its own positions, of which those after the target are
    masks without a loss. The next tokens of the causal text are learned, too."""
    network, params = model("llama")
    objective, key = SetBlockLoss("sbd", network, MASK, SIZE), jax.random.key(2)
    batch = set_blocks.block_batch(*BATCH, objective.kind)
    noisy, masked, levels = map(np.asarray, corrupt(key, batch, objective.kind))
    forward = jax.jit(lambda tokens, mask: network.forward(params, tokens, mask=mask).at[..., MASK].set(-jnp.inf))
    place, nats, following = np.arange(T + SIZE - 1), [], []

    def log_p(text, sees):
        found = forward(jnp.asarray(text)[None], jnp.asarray(sees)[None])[0]
        return np.asarray(jax.nn.log_softmax(found))

    for row in range(3):
        text = np.pad(TOKENS[row], (0, SIZE - 1))
        causal, total = log_p(text, place[None] <= place[:, None]), 0.0
        for begin in range(FIRST[row], END[row], SIZE):
            block = (place >= begin) & (place < begin + SIZE)
            given = np.where(block & (place < END[row]), noisy[row], np.where(block, MASK, text))
            found = log_p(given, np.where(block[:, None], (place < begin) | block, place[None] <= place[:, None]))
            total -= sum(found[i, text[i]] / levels[row, i] for i in np.flatnonzero(block & masked[row]))
        nats.append(total)
        following.append(-sum(causal[i - 1, text[i]] for i in range(FIRST[row], END[row])))
    assert not masked[:, :T][~LEARNED].any() and not masked[:, T:].any() and masked.sum() > 4
    counts = END - FIRST
    loss, _ = jax.jit(objective)(params, BATCH, key)
    assert float(loss) == pytest.approx(np.mean((np.add(nats, following)) / counts), rel=1e-4)
    assert jax.jit(objective.measure)(params, BATCH, key).tolist() == pytest.approx(
        [sum(nats) / counts.sum(), sum(following) / counts.sum()], rel=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("method", ["sbd", "sdlm"])
def test_masks_in_a_text_are_not_learned(method):
    network, params = model("llama")
    tokens = BATCH[0].at[:, 7].set(MASK)
    run = jax.jit(jax.value_and_grad(lambda p: SetBlockLoss(method, network, MASK, SIZE)(
        p, (tokens, BATCH[1]), jax.random.key(1))[0]))
    loss, slope = run(params)
    assert np.isfinite(loss) and all(np.isfinite(x).all() for x in jax.tree.leaves(slope))


def test_next_sequences_count_the_tokens_of_targets_alone():
    network, params = model("llama")
    objective, key = SetBlockLoss("sdlm", network, MASK, SIZE), jax.random.key(2)
    parts = jax.jit(lambda batch: objective.bound.parts(params, set_blocks.block_batch(*batch, objective.kind), key))
    nats, counted, *_ = map(np.asarray, parts(BATCH))
    # a block that begins before the text is left out
    assert (counted[2, :T] == LEARNED[2]).all() and not (counted[:, :T] & ~LEARNED).any() and counted.any(1).all()
    assert not counted[:, T:].any() and ((nats > 0) == counted).all()
    assert float(jax.jit(objective.measure)(params, BATCH, key)[0]) == pytest.approx(nats.sum() / counted.sum(), 1e-5)
    other = jnp.where(jnp.asarray(PLACE >= END[:, None]), 7, BATCH[0]), BATCH[1]
    np.testing.assert_array_equal(parts(other)[0], nats)        # what follows a target is not read


def test_the_mask_is_a_token_that_no_text_has():
    words = SimpleNamespace(special_tokens={"bos_token": "<s>"}, encode=lambda text, **more: [VOCABULARY - 2])
    target = SimpleNamespace(tokenizer=words, vocab_size=VOCABULARY, eos=[3], bos=VOCABULARY - 3, pad=5)
    assert mask_token(target, [1, 2]) == 5                              # the padding token
    assert mask_token(target, [1, 5]) == VOCABULARY - 1                 # texts have it
    target.pad = 3
    assert mask_token(target, [1, VOCABULARY - 1]) == VOCABULARY - 4    # it ends texts; others begin them or are named
    assert mask_token(target, [1], 0) == 0
    with pytest.raises(ValueError, match="mask: got 1, which the data has; takes an id that it does not have, such as"):
        mask_token(target, [1], 1)
    assert mask_token(target, range(VOCABULARY), 1) == 1                # there is no other
    batch = set_blocks.block_batch(jnp.array([[4, 1, 5, 6]]), jnp.array([[False, True, True, True]]),
                                   Diffusion(5, attention="causal-prefix", block=2))
    assert batch.answer.tolist() == [[False, True, False, True, False]]


def test_models_and_methods_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match="method: got 'llada', takes sbd or sdlm"):
        SetBlockLoss("llada", model("llama")[0], MASK, SIZE)
    with pytest.raises(ValueError, match=r"target: got a network with recurrent layers.*sdlm takes one with attention"):
        SetBlockLoss("sdlm", SimpleNamespace(config=SimpleNamespace(recurrent=(0,))), MASK, SIZE)
