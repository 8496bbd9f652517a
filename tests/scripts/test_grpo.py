"""A policy gradient on `sums`: a model sampled from while it is trained."""

import gc
import json

import jax
import numpy as np
import pytest
from rich.console import Console

import decodax as dx
from decodax.train.grpo import align
from recipes import grpo
from recipes.grpo import Trainer
from recipes.options import GrpoOptions as Options

SMALL = Options(problems=4, group=4, numbers=3, updates=2, held_out=4, rate=1e-4)


@pytest.mark.wide
@pytest.mark.parametrize("lora", [None, 2])
def test_ratios_are_one_and_later_steps_compile_nothing(lora):
    trainer = Trainer(Options(**{**vars(SMALL), "lora": lora}))
    before = jax.tree.map(np.asarray, trainer.trained)
    first = trainer.step(0)
    trainer.step(1)     # an adapter's matrices are arrays of the optimizer's from here on
    with jax.no_tracing(True):
        second = trainer.step(2)
    # float32 logits of about 20 are 2e-6 apart at best; the bar is on what has just been sampled
    assert first.off < 2e-5 and second.off < 2e-5
    assert any((np.asarray(a) != b).any() for a, b in zip(jax.tree.leaves(trainer.trained), jax.tree.leaves(before),
                                                          strict=True))
    assert first.tokens > 4 * 4 * 3


@pytest.mark.wide
def test_calibrated_rewards_draw_from_the_first_model_and_compile_nothing_later():
    trainer = Trainer(Options(**{**vars(SMALL), "transform": 5.0, "kl": 0.05}))
    trainer.step(0)
    trainer.step(1)
    with jax.no_tracing(True):
        assert np.isfinite(trainer.step(2).off)


def test_rewards_are_aligned_by_quantiles_of_the_first_model():
    rewards, first = np.array([[0.2, 0.9], [1.0, 0.0]]), np.array([[0.0, 0.2, 0.5, 1.0], [0.1, 0.1, 0.2, 0.3]])
    c = np.array([[0.5, 0.75], [1.0, 0.0]])
    np.testing.assert_allclose(align(rewards, first, 0.0), c)
    for t in (5.0, -5.0):       # the order and the ratios of differences are those of exp(t c)
        made, wanted = align(rewards, first, t), np.exp(t * c) * np.sign(t)
        np.testing.assert_allclose(np.diff(made.ravel()) / np.ptp(made), np.diff(wanted.ravel()) / np.ptp(wanted))


@pytest.mark.full
def test_rewards_rise_on_problems_seen_again(monkeypatch):
    """The gradient's sign: the same four sums eight times over."""
    monkeypatch.setattr(grpo.random, "Random", lambda seed: random_of("the same"))
    trainer = Trainer(Options(problems=4, group=16, numbers=4, updates=4, rate=1e-4))
    rewards = [trainer.step(i).reward for i in range(10)]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.05, rewards


random_of = grpo.random.Random


@pytest.mark.wide
def test_an_exported_model_decodes_the_same(tmp_path):
    for lora in (None, 2):
        trainer = grpo.train(Options(**{**vars(SMALL), "steps": 1, "lora": lora, "export": tmp_path / str(lora)}),
                                   Console(quiet=True))
        asked = ["34+51-07=\n"]
        want = dx.generate(trainer.now, asked, max_new_tokens=27).text
        lm = dx.load("sums", adapter=tmp_path / "2") if lora else dx.load(tmp_path / "None")
        assert dx.generate(lm, asked, max_new_tokens=27).text == want
    assert json.loads((tmp_path / "2" / "adapter_config.json").read_text())["r"] == 2


@pytest.mark.wide
@pytest.mark.mesh
def test_on_a_mesh():
    trainer = Trainer(Options(**{**vars(SMALL), "problems": 8, "mesh": "2x2"}))
    first = trainer.step(0)
    alone = Trainer(Options(**{**vars(SMALL), "problems": 8}))
    other = alone.step(0)
    assert first.off < 2e-5 and first.reward == other.reward     # the same draws
    for a, b in zip(jax.tree.leaves(trainer.trained), jax.tree.leaves(alone.trained), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4)              # Adam's first step is the gradient's sign times rate


@pytest.mark.wide
def test_memory_is_flat_over_calls():
    calls(30)


@pytest.mark.full
def test_memory_is_flat_over_a_thousand_calls():
    calls(1000)


def calls(count: int) -> None:
    """Generates with other weights each time: no trace, and as many arrays and bytes as before."""
    lm = dx.load("sums")
    params = lm.params
    more = jax.jit(lambda p: jax.tree.map(lambda x: x * np.float32(1.0001), p))
    take = lambda params: dx.generate(lm.with_params(params), ["34+51=\n"], max_new_tokens=8, num_samples=2,
                                      temperature=1.0, seed=1, logprobs=0)
    for _ in range(2):
        params = more(params)
        take(params)
    gc.collect()
    arrays, held = len(jax.live_arrays()), sum(x.nbytes for x in jax.live_arrays())
    with jax.no_tracing(True):
        for _ in range(count):
            params = more(params)
            take(params)
    gc.collect()
    assert len(jax.live_arrays()) <= arrays and sum(x.nbytes for x in jax.live_arrays()) <= held
