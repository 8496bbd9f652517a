"""Hyper-connections: the published rule by plain loops, what a layer makes of it, and what several streams refuse."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import decodax as dx
from decodax.models import Transformer, llama
from decodax.models.blocks.layer import DecoderLayer
from decodax.models.config import DecoderConfig
from decodax.models.residual.hyper_connections import HyperConnection, HyperEnds, sinkhorn
from decodax.models.residual.options import HyperConnections

N, D, EPS = 3, 8, 1e-6
SMALL = dataclasses.replace(llama(vocab=11, width=D, layers=2, heads=2, mlp=12),
                            streams=HyperConnections(N, iterations=5, norm_eps=1e-5))


def drawn(make: Any) -> Any:
    """A module with random weights."""
    graph, state = nnx.split(make)
    leaves, tree = jax.tree.flatten(state)
    return nnx.merge(graph, jax.tree.unflatten(tree, [
        jax.random.normal(jax.random.key(i), leaf.shape) * 0.3 for i, leaf in enumerate(leaves)]))


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def by_hand(part: HyperConnection, streams: np.ndarray, iterations: int | None, most: float = 2.0
            ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Input of the half, shares of its output and mixture of the streams of one node, `[n, D]`, in float64."""
    fn, base, scale = (np.asarray(x[...], np.float64) for x in (part.fn, part.base, part.scale))
    flat = streams.reshape(-1)
    found = fn @ (flat / np.sqrt((flat ** 2).mean() + 1e-5))
    pre = sigmoid(found[:N] * scale[0] + base[:N]) + EPS
    post = most * sigmoid(found[N:2 * N] * scale[1] + base[N:2 * N])
    if iterations is None:
        return pre @ streams, post + EPS, np.eye(N)
    mix = np.exp((found[2 * N:] * scale[2] + base[2 * N:]).reshape(N, N))
    mix = mix / mix.sum(1, keepdims=True) + EPS
    mix /= mix.sum(0) + EPS
    for _ in range(iterations - 1):
        mix /= mix.sum(1, keepdims=True) + EPS
        mix /= mix.sum(0) + EPS
    return pre @ streams, post, mix


@pytest.mark.parametrize(("iterations", "most"), [(1, 2.0), (5, 2.0), (None, 1.3)])
def test_shares_are_those_of_the_rule(iterations: int | None, most: float) -> None:
    c = dataclasses.replace(SMALL, streams=HyperConnections(N, iterations, norm_eps=1e-5, magnitude=most))
    part = drawn(HyperConnection(c, nnx.Rngs(0)))
    assert len(part.base[...]) == (2 * N if iterations is None else 2 * N + N * N)
    streams, out = (np.random.default_rng(i).normal(size=shape) for i, shape in enumerate([(2, 4, N, D), (2, 4, D)]))
    active, after = part(jnp.asarray(streams, jnp.float32))
    written = after(jnp.asarray(out, jnp.float32))
    for at in np.ndindex(2, 4):
        want, post, mix = by_hand(part, streams[at], iterations, most)
        np.testing.assert_allclose(active[at], want, atol=1e-5)
        np.testing.assert_allclose(written[at], post[:, None] * out[at] + mix.T @ streams[at], atol=1e-5)


def test_many_steps_make_rows_and_columns_sum_to_one() -> None:
    made = np.asarray(sinkhorn(jax.random.normal(jax.random.key(0), (5, 4, 4)) * 3, 50, EPS))
    np.testing.assert_allclose(made.sum(-1), 1, atol=1e-4)
    np.testing.assert_allclose(made.sum(-2), 1, atol=1e-4)
    assert (made > 0).all()


def test_ends_split_into_equal_streams_and_join_with_shares() -> None:
    ends = drawn(HyperEnds(SMALL, nnx.Rngs(0)))
    x = jax.random.normal(jax.random.key(9), (2, 3, D))
    np.testing.assert_array_equal(ends.split(x), np.repeat(np.asarray(x)[:, :, None], N, 2))
    streams = np.random.default_rng(0).normal(size=(1, 1, N, D))
    flat = streams.reshape(-1)
    found = np.asarray(ends.fn[...], np.float64) @ (flat / np.sqrt((flat ** 2).mean() + 1e-5))
    shares = sigmoid(found * float(ends.scale[...][0]) + np.asarray(ends.base[...])) + EPS
    np.testing.assert_allclose(ends.join(jnp.asarray(streams, jnp.float32))[0, 0], shares @ streams[0, 0], atol=1e-5)


def test_a_layer_reads_and_writes_the_streams_before_each_half() -> None:
    layer = drawn(DecoderLayer(SMALL, SMALL.layers[0], nnx.Rngs(0)))
    streams = jax.random.normal(jax.random.key(5), (1, 2, N, D))
    attend = lambda index, q, k, v, **options: (q, "entry")
    rope = SMALL.layers[0].rope
    tables = {rope: rope.table(jnp.arange(2)[None]), "inputs": None}
    got, entry = layer(0, streams, tables, attend)
    active, after = layer.attn_hc(streams)
    active, onward = layer.mlp_hc(after(layer.attn(0, layer.attn_in(active), tables, attend)[0]))
    np.testing.assert_allclose(got, onward(layer.mlp(layer.mlp_in(active))), atol=1e-6)
    assert entry == "entry"


@pytest.mark.wide
def test_drafts_give_the_tokens_of_plain_decoding_and_of_a_full_forward() -> None:
    model = Transformer(SMALL)
    params = jax.tree.map(lambda x: x * 12, model.init_params(jax.random.key(1)))
    lm = dx.LM(model=model, params=params, vocab_size=11)
    prompts, options = [[5, 6, 7, 5, 6], [9]], dict(max_new_tokens=8, eos_token_id=[])
    plain = dx.generate(lm, prompts, **options).tokens
    drafted = dx.generate(lm, prompts, algorithm="prompt-lookup:length=3", **options).tokens
    assert plain.tolist() == drafted.tolist()
    text = jnp.array([prompts[0] + plain[0].tolist()])
    assert model.forward(params, text)[0, 4:-1].argmax(-1).tolist() == plain[0].tolist()


@pytest.mark.parametrize("change", [{"block": "sandwich"}, {"layer_scale": True}, {"residual_scale": 0.5}])
def test_other_residual_streams_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="streams: hyper-connections take pre blocks"):
        dataclasses.replace(SMALL, **change)


def test_bad_numbers_and_methods_that_leave_out_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="count: got 0"):
        HyperConnections(0)
    with pytest.raises(ValueError, match="iterations: got 0"):
        HyperConnections(2, 0)
    model: DecoderConfig = SMALL
    with pytest.raises(ValueError, match="several residual streams"):
        Transformer(model).pieces({})
