"""A user's transform stands where its stage says, and is exact there: tail-free sampling, written as a user would."""

import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import decodax as dx
from decodax.common.struct import struct
from decodax.core.types import DEAD_END
from decodax.sampling import Context, Custom, Transform, build
from tests.algorithms.diffusion import toy
from tests.laws.cases import LEFT_TO_RIGHT, decode, prompts, texts
from tests.matrix import often
from tests.sampling.draws import VOCAB, chi_square, draw, frequencies
from tests.sampling.lifted import BATCH, TREE, log_probs, out_of, start, window_and_logits
from tests.sampling.oracle import row_keys

ROWS = 6


@struct
class TailFree(Transform):
    """Tail-free sampling (Phoenix and Egan 2019): the tail begins where the sorted probabilities stop to bend.

    Attributes:
        z: `f32[B]`, the share of the curvature up to which ranks are kept.
    """

    stage: ClassVar[Any] = "probabilities"
    z: Array

    def logits(self, state: Any, ctx: Context, logits: Array) -> Array:
        order = jnp.argsort(-logits)
        bend = jnp.abs(jnp.diff(jax.nn.softmax(logits)[order], n=2))
        inside = jnp.cumsum(bend / bend.sum()) <= self.z
        kept = jnp.concatenate([jnp.array([True]), inside, jnp.array([False])])
        return jnp.where(jnp.zeros_like(kept).at[order].set(kept), logits, -jnp.inf)


def cut_the_least(ctx: Context, logits: Array) -> Array:
    """Removes what is less likely than 0.1."""
    return jnp.where(jax.nn.softmax(logits) < 0.1, -jnp.inf, logits)


def nothing(ctx: Context, logits: Array) -> Array:
    return jnp.full_like(logits, -jnp.inf)


def oracle(logits: np.ndarray, temperature: float, z: float) -> np.ndarray:
    """Probabilities `f64[V]` by tail-free sampling, as the paper has it."""
    p = np.exp(np.float64(logits) / temperature)
    p /= p.sum()
    ranked = np.sort(p)[::-1]
    second = np.abs(np.diff(np.diff(ranked)))
    share = np.cumsum(second / second.sum())
    assert np.abs(share - z).min() > 1e-5           # rounding does not decide the test
    count = 1
    while count <= len(share) and share[count - 1] <= z:
        count += 1
    p[p < ranked[count - 1]] = 0
    return p / p.sum()


def test_each_stage_has_its_place() -> None:
    own = [Custom(nothing, stage=stage) for stage in ("last", "probabilities", "logits", "probabilities")]
    chain = build(1, temperature=0.7, top_k=3, xtc_probability=0.5, mirostat_tau=3.0, repetition_penalty=1.2,
                  transforms=own, vocab_size=VOCAB, watermarking_config={}).transforms
    told = [t.stage if isinstance(t, Custom) else type(t).__name__ for t in chain]
    assert told == ["Repetition", "logits", "GreenList", "Temperature", "TopK", "probabilities", "probabilities", "XTC",
                    "Mirostat2", "GreenList", "last"]


def test_tail_free_sampling_is_the_papers_at_every_node_after_the_temperature() -> None:
    temperature, z = [0.6, 1.7], [0.93, 0.8]
    policy = build(BATCH, temperature=temperature, transforms=[TailFree(jnp.array(z))])
    window, logits = window_and_logits(TREE, seed=4)
    ours = np.exp(np.asarray(log_probs(policy, start(policy), window, logits)))
    for row in range(BATCH):
        for node in range(len(TREE)):
            wanted = oracle(logits[row, node], temperature[row], z[row])
            np.testing.assert_allclose(ours[row, node], wanted, rtol=1e-4)
    kept = (ours > 0).sum(-1)
    assert kept.min() < 4 < kept.max() < logits.shape[-1]
    hotter = [(oracle(x, 1.0, z[i]) > 0).sum() for i, rows in enumerate(logits) for x in rows]
    assert kept.ravel().tolist() != hotter          # in front of the temperature it would keep others


def test_tokens_are_drawn_with_the_papers_frequencies() -> None:
    logits = np.random.default_rng(0).normal(size=VOCAB) * 1.5
    p = oracle(logits, 1.3, 0.9)
    assert 3 < (p > 0).sum() < VOCAB
    counts = frequencies(logits, temperature=1.3, transforms=[TailFree(jnp.array([0.9]))])
    assert chi_square(counts, p) < 45       # 12 degrees of freedom at most: once in 100,000 seeds


@functools.cache
def decoded(algorithm: str, policy: str) -> Any:
    z, base = jnp.array([0.9, 0.7] * (ROWS // 2)), dict(temperature=[0.0, 1.2, 0.8] * (ROWS // 3))
    policies: dict[str, dict[str, Any]] = {
        "none": dict(repetition_penalty=1.2),
        "tail-free": dict(repetition_penalty=1.2, transforms=[TailFree(z)]),
        "function": dict(top_k=9, transforms=[Custom(cut_the_least, needs="nothing", stage="probabilities")]),
        "beside a state": dict(mirostat_tau=2.0, transforms=[TailFree(z), Custom(cut_the_least, stage="last")])}
    alg = dx.Autoregressive() if algorithm == "plain" else LEFT_TO_RIGHT[algorithm]
    return decode(alg, "toy", prompts(ROWS), base | policies[policy], new=24, top_logprobs=0)


@pytest.mark.wide
@pytest.mark.parametrize("policy", often(["beside a state"], ["tail-free", "function", "beside a state"]))
def test_speculation_equals_plain_sampling(policy: str) -> None:
    plain, drafted = decoded("plain", policy), decoded("lookup", policy)
    assert texts(drafted) == texts(plain) != texts(decoded("plain", "none"))
    assert np.asarray(drafted.stats.accepted).sum() > 0
    cold = np.arange(ROWS) % 3 == 0
    for row, (a, b) in enumerate(zip(plain.record.processed, drafted.record.processed, strict=True)):
        at = slice(int(plain.prompt_length[row]), int(plain.length[row]))
        np.testing.assert_allclose(a[at], b[at], atol=1e-4)
        assert np.isfinite(a[at]).all()
        assert (np.asarray(a[at]) == 0).all() == cold[row]      # a greedy row is certain of each token


@pytest.mark.wide
def test_after_the_temperature_a_greedy_row_keeps_its_token() -> None:
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(2, VOCAB)), jnp.float32)
    for stage in ("probabilities", "last"):
        for more in ({}, dict(mirostat_tau=3.0)):       # without a state and with one
            forbids = Custom(nothing, needs="nothing", stage=stage)
            policy = build(2, temperature=[0.0, 1.0], transforms=[forbids], **more)
            assert draw(policy, logits, row_keys(2)).tolist() == [int(logits[0].argmax()), DEAD_END]
            window, raw = window_and_logits(TREE, seed=2)
            s = start(policy)
            ours = np.asarray(jax.jit(lambda x, p=policy, s=s, w=window: p.over(s, w, out_of(x)).log_probs())(raw))
            assert (ours[0].argmax(-1) == raw[0].argmax(-1)).all() and (ours[0].max(-1) == 0).all()
            assert (ours[1] == -np.inf).all()
    forbids = Custom(nothing, needs="nothing")          # in front of it, a transform holds for greedy rows too
    assert draw(build(2, transforms=[forbids]), logits, row_keys(2)).tolist() == [DEAD_END] * 2


@pytest.mark.wide
def test_a_canvas_is_filled_under_it() -> None:
    tokens = lambda **options: dx.generate(toy.lm(), toy.PROMPTS, max_new_tokens=8, seed=3, **options).tokens
    free, greedy = tokens(temperature=1.0), tokens()
    one = TailFree(jnp.zeros(len(toy.PROMPTS)))         # which leaves the likeliest token
    assert np.array_equal(tokens(temperature=1.0, transforms=[one]), greedy) and not np.array_equal(free, greedy)


def test_an_unknown_stage_or_need_is_refused() -> None:
    for options, told in ((dict(stage="first"), "stage='first', takes one of 'logits', 'probabilities', 'last'"),
                          (dict(needs="all"), "needs='all', takes one of 'nothing', 'bag', 'sequence'")):
        with pytest.raises(ValueError, match=f"transforms: Custom has {told}"):
            build(1, transforms=[Custom(nothing, **options)])  # type: ignore[arg-type]
