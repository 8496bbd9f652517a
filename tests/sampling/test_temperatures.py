"""Temperatures of any size: from below the least float32 to the largest, over logits of any size."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decodax.algorithms.beams import BeamSearch
from decodax.algorithms.plain import Autoregressive
from decodax.algorithms.speculative import Speculative
from decodax.algorithms.speculative.verify import (
    BlockVerification,
    KSeq,
    MultiRound,
    Rejection,
    SeedExact,
    TypicalAcceptance,
)
from decodax.core.window import causal
from decodax.pallas_kernels import vocabulary
from decodax.sampling import Temperature, build
from tests.laws.cases import ALGORITHMS, Sampled, decode, prompts, texts
from tests.matrix import often

V = 300
SIZES = [1e-50, 1e-45, 1e-38, 1e-30, 1e-20, 1e-10, 1e-6, 1e-3, 0.5, 1.0, 30.0, 1e10, 1e38, 3e38]
COLD = [1e-50, 1e-45, 1e-38, 1e-30, 1e-20, 1e-7]

CHAINS: dict[str, dict[str, Any]] = {
    "alone": {}, "nucleus": dict(top_k=50, top_p=0.9, min_p=0.05), "min-p": dict(min_p=0.1), "top-p": dict(top_p=0.9),
    "typical": dict(typical_p=0.9), "cutoffs": dict(epsilon_cutoff=1e-3, eta_cutoff=1e-3),
    "kept": dict(top_p=0.5, min_p=0.2, min_tokens_to_keep=3), "top-h": dict(top_h=0.4), "sigma": dict(top_n_sigma=1.0),
    "xtc": dict(xtc_probability=0.5), "dynamic": dict(dynatemp_range=0.5), "mirostat": dict(mirostat_tau=3.0),
    "bregman": dict(bregman_lambda=0.1), "penalised": dict(repetition_penalty=1.3, presence_penalty=0.5),
    "marked": dict(watermarking_config=dict(bias=2.0), vocab_size=V)}
SURE = ("alone", "nucleus", "min-p", "top-p", "cutoffs", "kept", "top-h", "sigma", "mirostat", "bregman")
"""Those under which the likeliest token stays the likeliest."""


@jax.jit
def drawn(policy: Any, state: Any, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A token of each row, and log-probabilities."""
    window = causal(state["tokens"][:, -1:], state["length"] - 1, jnp.ones((len(logits), 1), bool))
    dist = policy.over_logits(SimpleNamespace(**state), window, logits[:, None])
    return dist.draw()[:, 0], dist.log_probs()[:, 0]


def begun(policy: Any, rows: int, seed: int = 0) -> dict[str, Any]:
    tokens = jnp.asarray(np.random.default_rng(seed).integers(0, V, (rows, 6)), jnp.int32)
    length, key = jnp.full(rows, 6, jnp.int32), jax.vmap(jax.random.key)(jnp.arange(rows))
    return dict(tokens=tokens, length=length, prompt_length=length, key=key,
                policy=policy.init(tokens, length, length, key))


@pytest.mark.wide(but=("nucleus", "dynamic", "alone"))
@pytest.mark.parametrize("chain", CHAINS)
def test_every_temperature_gives_a_draw_of_a_distribution(chain: str) -> None:
    policy = jax.device_put(build(len(SIZES), temperature=SIZES, **CHAINS[chain]))
    state, rng = begun(policy, len(SIZES)), np.random.default_rng(1)
    for size in (1e-30, 1.0, 100.0, 1e10, 1e30):
        logits = (rng.normal(size=(len(SIZES), V)) * size).astype(np.float32)
        logits[:, ::7] = -np.inf
        token, log_p = map(np.asarray, drawn(policy, state, logits))
        rows = np.arange(len(SIZES))
        assert token.min() >= 0 and (logits[rows, token] > -np.inf).all()
        assert (log_p[rows, token] > -np.inf).all() and (log_p[:, ::7] == -np.inf).all()
        np.testing.assert_allclose(np.exp(log_p).sum(1), 1, atol=1e-4)
        if chain in SURE:
            cold = np.array(SIZES) <= 1e-6 * size
            assert (token == logits.argmax(1))[cold].all()


def test_ordinary_temperatures_divide() -> None:
    temperature = np.float32([0.05, 0.3, 0.7, 1.0, 1.5, 10.0])
    logits = (np.random.default_rng(2).normal(size=(6, V)) * 20).astype(np.float32)
    found = jax.vmap(lambda t, x: Temperature(t).logits(None, None, x))(temperature, logits)
    np.testing.assert_allclose(found, logits / temperature[:, None], rtol=1e-6)


@pytest.mark.wide(but=("1e-30", "1e-09"))
@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-9])
def test_equal_largest_logits_are_drawn_equally_often(temperature: float) -> None:
    """Of 2,000 draws among two; a right program fails once in two million times."""
    logits = np.random.default_rng(3).normal(size=V).astype(np.float32)
    logits[[17, 250]] = 5.0
    policy = jax.device_put(build(2000, temperature=temperature, top_p=0.95))
    token = np.asarray(drawn(policy, begun(policy, 2000), np.broadcast_to(logits, (2000, V)))[0])
    assert set(token.tolist()) == {17, 250}
    assert abs((token == 17).sum() - 1000) < 5 * 500 ** 0.5


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_broken_logits_stay_visible(broken: float) -> None:
    policy = jax.device_put(build(len(SIZES), temperature=SIZES))
    logits = np.random.default_rng(4).normal(size=(len(SIZES), V)).astype(np.float32)
    logits[:, 40] = broken
    assert (np.asarray(drawn(policy, begun(policy, len(SIZES)), logits)[0]) == -1).all()


@pytest.mark.wide
@pytest.mark.parametrize("size", [1.0, 1e30])
def test_the_kernel_draws_what_the_transforms_draw(size: float) -> None:
    temperature = jnp.asarray([t for t in SIZES if t > 1e-45], jnp.float32)
    B = len(temperature)
    logits = (np.random.default_rng(5).normal(size=(B, 1, V)) * size).astype(np.float32)
    logits[:, :, ::7] = -np.inf
    address = jnp.asarray(np.random.default_rng(6).integers(0, 2 ** 32, (B, 1, 2)), jnp.uint32)
    more = dict(p=jnp.full(B, 0.9), min_p=jnp.full(B, 0.01))
    one, other = (vocabulary.draw(jnp.asarray(logits), address, temperature, **more, implementation=name)
                  for name in ("xla", "mosaic_tpu"))
    assert one[0].tolist() == other[0].tolist()
    assert np.isfinite(one[1]).all() and np.isfinite(other[1]).all()


VERIFIERS = [Rejection(), BlockVerification(), SeedExact(), KSeq(), MultiRound(), TypicalAcceptance()]


@pytest.mark.wide
@pytest.mark.parametrize("verify", often(VERIFIERS[:2], VERIFIERS), ids=lambda v: type(v).__name__)
def test_drafts_near_zero_are_verified_as_greedy_ones(verify: Any) -> None:
    plain = texts(decode(Autoregressive(), "llama", prompts(6), {}, eos=[1]))
    made = decode(Speculative(Sampled(), verify), "llama", prompts(6), dict(temperature=COLD, top_p=0.9), eos=[1])
    assert texts(made) == plain


@pytest.mark.parametrize("name", often(["llada"], ["autoregressive", "lookup", "llada", "llada-quota"]))
def test_other_algorithms_near_zero_are_greedy(name: str) -> None:
    run = lambda **policy: texts(decode(ALGORITHMS[name], "llama", prompts(6), policy, eos=[1]))
    assert run(temperature=COLD) == run()


@pytest.mark.wide
def test_beams_near_zero_are_those_of_the_search_without_draws() -> None:
    ids = [row for row in prompts(6) for _ in range(2)]
    run = lambda **policy: decode(BeamSearch(2), "llama", ids, policy, eos=[1], draft=BeamSearch(2).weights)
    cold = run(temperature=[t for t in COLD for _ in range(2)])
    assert texts(cold) == texts(run())
    assert np.isfinite(np.asarray(cold.algo.finished.score)).all()


def test_temperatures_are_numbers_from_zero() -> None:
    assert (build(2, temperature=[1e-50, 0.0], do_sample=[True, False]).greedy == np.array([False, True])).all()
    for wrong in (-1e-30, float("inf"), float("nan"), 1e39):
        with pytest.raises(ValueError, match="temperature: got"):
            build(1, temperature=wrong)
