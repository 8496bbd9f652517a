"""SEC (Sun et al., 2024): a model that exits after some layers, or stops."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.contrib import sec
from decodax.core.state import Status
from decodax.core.types import Out
from decodax.train import sub_model
from tests.by_hand import logits
from tests.small_models import PROMPTS, net

lm = functools.partial(net, 3)
NEW = dict(max_new_tokens=8)
EXITS = (1, 2)


def always(*actions: int) -> sec.StopExitController:
    """A controller that takes the same action at an exit, whatever it reads."""
    sure = jnp.asarray(np.eye(3)[list(actions)] * 20, jnp.float32)
    return sec.StopExitController(kernel=jnp.zeros((2, 16, 3)), bias=sure)


def tokens(model, **more):
    out = dx.generate(model, PROMPTS, **NEW, **more)
    return [row[:n].tolist() for row, n in zip(np.asarray(out.tokens), np.asarray(out.lengths), strict=True)]


@pytest.mark.wide
def test_each_action_is_what_it_says():
    through = sec.with_controller(lm(), always(sec.CONTINUE, sec.CONTINUE), EXITS)
    assert tokens(through) == tokens(lm())
    second = sec.with_controller(lm(), always(sec.CONTINUE, sec.EXIT), EXITS)
    assert tokens(second) == tokens(sub_model(lm(), 2))
    out = dx.generate(sec.with_controller(lm(), always(sec.STOP, sec.EXIT), EXITS), PROMPTS, **NEW)
    assert all(status == Status.EOS for status in out.status)


@pytest.mark.full
def test_drafts_are_verified_by_the_same_actions():
    kernel = jnp.asarray(np.random.default_rng(1).normal(0, 1, (2, 16, 3)), jnp.float32)
    controller = sec.StopExitController(kernel=kernel, bias=jnp.zeros((2, 3)))
    quick = sec.with_controller(lm(), controller, EXITS, exit_above=0.6, stop_above=0.9)
    plain = tokens(quick, temperature=0.8, seed=3)
    assert plain not in (tokens(lm(), temperature=0.8, seed=3), tokens(sub_model(lm(), 1), temperature=0.8, seed=3))
    assert tokens(quick, temperature=0.8, seed=3, algorithm="prompt-lookup:length=3") == plain
    assert tokens(quick, temperature=0.8, seed=3, algorithm="token-recycling:nodes=6") == plain


def test_confidence_exits_where_the_likeliest_token_is_likely():
    raw = np.random.default_rng(0).normal(0, 2, (3, 5, 7)).astype(np.float32)
    out = Out(hidden=jnp.asarray(raw), entries=(), head=lambda hidden: hidden)
    largest = (np.exp(raw) / np.exp(raw).sum(-1, keepdims=True)).max(-1)
    for tau in (0.0, 0.4, 0.6, 1.0):
        wanted = np.where(largest > tau, sec.EXIT, sec.CONTINUE)
        assert sec.ConfidenceExit(tau).actions(None, 0, out).tolist() == wanted.tolist()
    assert 0 < (largest > 0.6).sum() < 15


@pytest.mark.wide
def test_a_model_exits_by_confidence():
    """Below all probabilities the model of the first exit decodes. About half of the tokens are above 0.1 at each exit;
    then drafts are verified by the same exits as in plain decoding."""
    sampled = dict(temperature=0.8, seed=3)
    first = tokens(sub_model(lm(), 1), **sampled)
    assert tokens(sec.with_exits(lm(), EXITS, sec.ConfidenceExit(0.0)), **sampled) == first
    quick = sec.with_exits(lm(), EXITS, sec.ConfidenceExit(0.1))
    plain = tokens(quick, **sampled)
    assert plain not in (first, tokens(lm(), **sampled))
    assert tokens(quick, algorithm="prompt-lookup:length=3", **sampled) == plain


def test_the_controller_learns_the_right_actions():
    """Labels in NumPy; the loss falls below that of their frequencies."""
    texts = [[*out, 5] for out in tokens(lm(), eos_token_id=[])] + [[1, 2, 3, 4, 5, 6, 7]]
    hidden, actions = sec.examples(lm(), texts, EXITS)
    wanted = []
    for exit in range(2):
        for text in texts:
            found = [logits(sub_model(lm(), n).model.config, lm().params, text[:-1]).argmax(-1) for n in (1, 2, 3)]
            right = np.stack(found) == np.asarray(text[1:])
            wanted += np.where(right[exit], sec.EXIT, np.where(right[exit + 1:].any(0), sec.CONTINUE,
                                                               sec.STOP)).tolist()
    assert np.asarray(actions).ravel().tolist() == wanted and len(set(wanted)) == 3
    own = sec.fit_controller(lm(), texts, EXITS, steps=150, rate=3e-2)
    raw = np.einsum("end,eda->ena", hidden, own.kernel) + np.asarray(own.bias)[:, None]
    chance = np.exp(raw) / np.exp(raw).sum(-1, keepdims=True)
    loss = -np.log(np.take_along_axis(chance, np.asarray(actions)[..., None], -1)).mean()
    share = np.bincount(wanted, minlength=3) / len(wanted)
    assert loss < 0.7 * -(share * np.log(share)).sum()


@pytest.mark.wide
def test_parts_of_the_examples_teach_what_all_at_once_do():
    texts = [[1, 2, 3, 4, 5, 6, 7], [9, 8], [5, 5, 2, 11, 3], [7, 3, 1], [2, 4]]
    whole, parts = (sec.examples(lm(), texts, EXITS, size) for size in (8, 2))
    np.testing.assert_allclose(parts[0], whole[0], atol=1e-5)
    np.testing.assert_array_equal(parts[1], whole[1])
    assert whole[0].shape == (2, 14, 16) and whole[1].shape == (2, 14)
    one, several = (sec.fit_controller(lm(), texts, EXITS, 20, size=size, tokens=tokens)
                    for size, tokens in ((8, 99), (2, 4)))
    np.testing.assert_allclose(several.kernel, one.kernel, atol=1e-4)
    np.testing.assert_allclose(several.bias, one.bias, atol=1e-4)


@pytest.mark.parametrize(("message", "make"), [
    (r"exits: got \(2, 3\), takes rising numbers of layers from 1 to 2",
     lambda: sec.with_controller(lm(), always(0, 0), (2, 3))),
    (r"exits: got \(1,\), the controller has 2", lambda: sec.with_controller(lm(), always(0, 0), (1,))),
    (r"exits: got \(3,\), takes rising numbers", lambda: sec.with_exits(lm(), (3,), sec.ConfidenceExit(0.5))),
    ("tau: got 1.5", lambda: sec.ConfidenceExit(1.5)),
    ("texts: got 1, the shortest of 1", lambda: sec.fit_controller(lm(), [[3]], EXITS)),
    ("size, tokens: got 0 and 65536, take 1 or more", lambda: sec.fit_controller(lm(), [[3, 4]], EXITS, size=0)),
])
def test_wrong_input_is_named(message, make):
    with pytest.raises(ValueError, match=f"^{message}"):
        make()
