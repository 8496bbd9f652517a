"""Prompts whose far tokens are hashed and sampled."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decodax.cache import KVLayer, dense
from decodax.caches.prefill.hyper_attention import Halves, HyperAttentionConfig, sampled_attention

WANTED = json.loads((Path(__file__).parents[1] / "expected" / "hyper.json").read_text())
H, N, D, BLOCK, SAMPLES, LEAST, PROJECTIONS = 4, 64, 8, 4, 3, 8, 3


@dataclasses.dataclass(frozen=True)
class Given(HyperAttentionConfig):
    """With the projections and columns that the authors' code was run with."""

    def projected(self, keys: Any, width: int) -> Any:
        return jnp.asarray(given()[3])[None]

    def sampled(self, keys: Any, halves: Any, starts: Any, heads: int) -> Any:
        columns = given()[4]
        return jnp.asarray(np.stack([columns[half][:, start // (2 * half)] for half, start in zip(
            halves, starts, strict=True)]))[None]


def given() -> tuple[Any, ...]:
    r = np.random.RandomState(0)
    q, k, v = (r.standard_normal((N, H, D)).astype(np.float32).round(3) for _ in range(3))
    projections = r.standard_normal((D, PROJECTIONS)).astype(np.float32).round(3)
    columns = {s: r.randint(0, s, (H, N // (2 * s) if s < N else 1, SAMPLES)) for s in (8, 16, 32, 64)}
    return q, k, v, projections, columns


def read(q: Any, k: Any, v: Any, length: Any, kind: HyperAttentionConfig) -> np.ndarray:
    """Attention of prompts `f[B, N, H, d]`."""
    shapes = (KVLayer(k.shape[2], D, queries=H),)
    base = dense(shapes, len(q), q.shape[1], jnp.float32)

    @jax.jit
    def run(q: Any, k: Any, v: Any, length: Any) -> Any:
        return Halves(base, kind, length, q.shape[1], shapes).attend(0, q, k, v, None, scale=D ** -0.5)[0]

    return np.asarray(run(*map(jnp.asarray, (q, k, v, length))))


def plain(q: Any, k: Any, v: Any) -> np.ndarray:
    scores = jnp.einsum("whd,khd->hwk", q, k.repeat(q.shape[1] // k.shape[1], 1)) * D ** -0.5
    weights = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones(scores.shape[1:], bool)), scores, -1e30))
    return np.asarray(jnp.einsum("hwk,khd->whd", weights, v.repeat(q.shape[1] // v.shape[1], 1)))


@pytest.mark.wide
def test_attention_is_that_of_the_authors() -> None:
    """Of a text that is halved three times, and of all queries to all keys."""
    q, k, v, projections, columns = given()
    q, k, v = map(jnp.asarray, (q, k, v))
    out = read(q[None], k[None], v[None], [N], Given(BLOCK, SAMPLES, LEAST, PROJECTIONS))[0].reshape(N, -1)
    np.testing.assert_allclose(out.sum(-1), WANTED["causal"]["sums"], atol=1e-4)
    np.testing.assert_allclose((out ** 2).sum(-1), WANTED["causal"]["squares"], atol=1e-4)
    whole = [sampled_attention(q[:, h][None], k[:, h], v[:, h], jnp.int32(N), jnp.asarray(columns[N][h]), projections,
                               block=BLOCK, scale=D ** -0.5) for h in range(H)]
    np.testing.assert_allclose(sum(out.sum((0, 2)) for out, _ in whole), WANTED["whole"]["sums"], atol=1e-4)
    np.testing.assert_allclose(sum(lse[0] for _, lse in whole), WANTED["whole"]["lse"], atol=1e-4)


@pytest.mark.wide
def test_the_mean_over_columns_is_attention() -> None:
    """Sums of weights are estimated without bias, so means over many draws come near them."""
    q, k, v = (jnp.asarray(x[:32, 0]) for x in given()[:3])
    projections = jnp.asarray(given()[3])

    @jax.jit
    @jax.vmap
    def one(key: Any) -> Any:
        columns = jax.random.randint(key, (1, 8), 0, 32)
        out, lse = sampled_attention(q[None], k, v, jnp.int32(32), columns, projections, block=4, scale=D ** -0.5)
        return jnp.exp(lse[0]), out[0] * jnp.exp(lse[0])[:, None]

    total, values = (np.asarray(x) for x in one(jax.random.split(jax.random.key(0), 4000)))
    weights = np.exp(q @ k.T * D ** -0.5)
    # 320 means, each within 5 of its standard errors: false alarms of 2e-4
    for found, wanted in ((total, weights.sum(-1)), (values, weights @ v)):
        error = found.std(0) / len(found) ** 0.5
        assert (np.abs(found.mean(0) - wanted) < 5 * error + 1e-4).all()


@pytest.mark.wide
@pytest.mark.parametrize("length", [0, 7, 8, 15, 16, 29, 40, 63])
def test_a_row_is_read_as_it_is_alone(length: int) -> None:
    """Whatever stands behind it; with fewer than two pieces exactly."""
    q, k, v, *_ = given()
    kind, n = HyperAttentionConfig(BLOCK, SAMPLES, LEAST, PROJECTIONS), max(-(-length // 8) * 8, 8)
    k, v = k[:, :2], v[:, :2]
    alone = read(*(x[None, :n] for x in (q, k, v)), [length], kind)[0, :length]
    r, there = np.random.default_rng(1), np.arange(N)[:, None, None] < length
    rows = [np.stack([r.standard_normal(x.shape).astype(np.float32), np.where(there, x, 3)]) for x in (q, k, v)]
    np.testing.assert_allclose(read(*rows, [N, length], kind)[1, :length], alone, atol=1e-5)
    exact = plain(q, k, v)[:length]
    np.testing.assert_allclose(alone[:LEAST], exact[:LEAST], atol=1e-5)
    assert np.allclose(alone, exact, atol=1e-3) == (length < 2 * LEAST)


@pytest.mark.wide
def test_all_of_a_text_may_be_read_exactly() -> None:
    q, k, v, *_ = given()
    for sizes in (dict(), dict(block_size=32, min_seq_len=32), dict(min_seq_len=8, skip=1)):
        kind = HyperAttentionConfig(**{"block_size": 4, "sample_size": 3, "min_seq_len": 64, **sizes})
        np.testing.assert_allclose(read(q[None], k[None], v[None], [N], kind)[0], plain(q, k, v), atol=1e-5)
