"""A window, and a state that takes in what has left it through kernels."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.cache import KVLayer
from decodax.caches import LessKernels, make
from decodax.caches.bounded.less import LayerKernels, LessCache, LessConfig
from decodax.core.window import causal
from decodax.train import fit_less
from decodax.train.less import Lesson, first_kernels, lessons_of, squared_error, synthesized
from tests.caches.small import KERNELS, MODEL, PARAMS, PROMPTS, SMALL, same

WANTED = json.loads((Path(__file__).parents[1] / "expected" / "retrieval.json").read_text())["less"]
N, SINKS, RECENT = 45, 2, 12
SOME = (20, 1, 1, 3, 20)


def given() -> tuple[np.ndarray, np.ndarray, np.ndarray, LayerKernels, np.ndarray]:
    """Queries, keys and values of 45 tokens in 2 heads, kernels, and an output projection."""
    r = np.random.RandomState(0)
    q, k, v = (r.standard_normal((N, 2, 8)).astype(np.float32).round(3) for _ in range(3))
    sizes = dict(query_in=(2, 8, 5), query_out=(2, 5, 3), key_in=(2, 8, 5), key_out=(2, 5, 3), scale=(2, 3),
                 mix=(2, 3, 3), mix_scale=(2, 3))
    drawn = {name: r.standard_normal(size) / (3 if name.endswith("_in") else 1) for name, size in sizes.items()}
    kernels = LayerKernels(**{name: jnp.asarray(x.astype(np.float32).round(3)) for name, x in drawn.items()})
    return q, k, v, kernels, r.standard_normal((2, 8, 6)).astype(np.float32).round(3)


@jax.jit
def step(cache: LessCache, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, LessCache]:
    window = causal(jnp.zeros(q.shape[:2], jnp.int32), cache.length)
    out, entry = cache.attend(0, q, k, v, window, scale=8 ** -0.5)
    return out, cache.commit([entry], window.positions)


@functools.cache
def read(widths: tuple[int, ...]) -> tuple[np.ndarray, LessCache]:
    """Attention of all tokens that come in windows of so many, and the cache behind them."""
    q, k, v, kernels, _ = given()
    cache = LessConfig(LessKernels.of([kernels]), SINKS, RECENT)([KVLayer(2, 8, queries=2)], 1, 64, jnp.float32)
    assert isinstance(cache, LessCache)
    found, start = [], 0
    for width in widths:
        out, cache = step(cache, *(jnp.asarray(x[None, start:start + width]) for x in (q, k, v)))
        found.append(np.asarray(out[0]))
        start += width
    return np.concatenate(found), cache


@pytest.mark.wide
@pytest.mark.parametrize("widths", [SOME, *(pytest.param(widths, marks=pytest.mark.wide) for widths in (
    (N,), (7,) * 6 + (3,), (1,) * N))])
def test_attention_with_state_is_that_of_the_authors(widths: tuple[int, ...]) -> None:
    """In windows of any width: their code for whole texts, and their code that decodes a token at a time."""
    out, cache = read(widths)
    np.testing.assert_allclose(out.sum(-1), WANTED["sums"], atol=1e-4)
    np.testing.assert_allclose(out.sum(-1), WANTED["steps"], atol=1e-4)
    assert sorted(cache.positions[0][0, 0].tolist()) == [*range(SINKS), *range(N - RECENT, N)]


def test_a_state_has_taken_in_what_has_left_the_window() -> None:
    _, k, v, kernels, _ = given()
    psi = np.asarray(kernels.psi(jnp.asarray(k)))[SINKS:N - RECENT]
    state = read(SOME)[1].states[0][0]
    np.testing.assert_allclose(state[..., :-1], np.einsum("ngr,nge->gre", psi, v[SINKS:N - RECENT]), atol=1e-4)
    np.testing.assert_allclose(state[..., -1], psi.sum(0), atol=1e-4)


@pytest.mark.wide
def test_training_has_the_attention_and_the_loss_of_the_authors() -> None:
    q, k, v, kernels, outputs = given()
    scores = np.where(np.tri(N, dtype=bool), np.einsum("qhd,khd->hqk", q, k) * 8 ** -0.5, -np.inf)
    at = np.arange(N)
    kept = np.where((at < SINKS) | (at >= at[:, None] - RECENT), scores, -np.inf)
    part = lambda scores: np.einsum("hqk,khd->qhd", jax.nn.softmax(jnp.asarray(scores)), v)
    own = Lesson(*(jnp.asarray(x) for x in (q, k, v, part(scores), part(kept),
                                            jax.nn.logsumexp(jnp.asarray(kept), axis=-1).T)))
    np.testing.assert_allclose(synthesized(kernels, own, SINKS, RECENT).sum(-1), WANTED["sums"], atol=1e-4)
    loss = squared_error(kernels, jax.tree.map(lambda x: x[None], own), jnp.array([N]), jnp.asarray(outputs), SINKS,
                         RECENT)
    np.testing.assert_allclose(loss, WANTED["loss"], rtol=1e-4)


@pytest.mark.wide
def test_without_kernels_it_is_the_window_alone() -> None:
    """`sink-window` of one layer, whose keys do not depend on what it reads."""
    none = LessKernels.of([KERNELS.layer(0).replace(scale=jnp.zeros((2, 3)))])
    options = dict(max_new_tokens=20, logprobs=0, temperature=0)
    assert same(dx.generate(SMALL, PROMPTS, cache=make("less", kernels=none, start_size=3, recent_size=8), **options),
                dx.generate(SMALL, PROMPTS, cache=make("sink-window", budget=11, n_sink=3, every=1), **options))


@pytest.mark.wide
def test_kernels_learn_what_the_window_does_not_see(tmp_path: Path) -> None:
    """On texts that they have not seen; they are written and read as arrays."""
    r = np.random.default_rng(0)
    texts = [r.integers(0, 16, n).tolist() for n in r.integers(40, 64, 20)]
    made = fit_less(SMALL, texts, start_size=2, recent_size=9, rank=3, hidden=16, epochs=12, rate=1e-2, dropout=0.0)
    made.save(tmp_path / "less.npz")
    assert LessKernels.load(tmp_path / "less.npz") == made == make("less", kernels=str(tmp_path / "less.npz")).kernels
    new = np.array([r.integers(0, 16, 64) for _ in range(8)], np.int32)
    lengths, outputs = np.full(8, 64, np.int32), MODEL.outputs(PARAMS, 0)
    lessons = lessons_of(MODEL, 2, 9, PARAMS, new, lengths, 0)
    error = lambda kernels: float(squared_error(kernels, lessons, jnp.asarray(lengths), outputs, 2, 9))
    before = error(first_kernels(2, 4, 4, 3, 16, jax.random.key(0)))
    assert error(made.layer(0)) < 0.8 * before
