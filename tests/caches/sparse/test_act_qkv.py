"""Caches of which a probe query chooses what a window and a token read."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decodax.cache import KVLayer
from decodax.caches.sparse.act_qkv import ActQKVCache, ActQKVConfig, ProbingWindow
from decodax.caches.sparse.activations import Activations, density, divided
from decodax.core.window import causal

WANTED = json.loads((Path(__file__).parents[1] / "expected" / "actqkv.json").read_text())
T, MORE = 90, 6
KIND = ActQKVConfig(4 + 16 + 3 * 4, sinks=4, recent=16, block_size=4, window_size=8, representatives=2, least=1, room=1)


def given() -> tuple[np.ndarray, ...]:
    """Keys, values and queries of `T + MORE` tokens, without positions."""
    r = np.random.RandomState(0)
    draw = lambda heads: r.standard_normal((T + MORE, heads, 8)).astype(np.float32).round(3)
    return draw(2), draw(2), draw(4) * np.float32(1.5)


def filled(lengths: tuple[int, ...]) -> tuple[ActQKVCache, np.ndarray]:
    """A cache with prompts of these lengths, read by windows, and the outputs of all their tokens."""
    keys, values, q = given()
    cache: Any = KIND([KVLayer(2, 8, queries=4)], len(lengths), 112, jnp.float32)
    before: Any = (Activations(mean=jnp.zeros((len(lengths), 32)), variance=jnp.zeros((len(lengths), 32))),)
    out = np.zeros((len(lengths), 96, 4, 8), np.float32)

    @jax.jit
    def visit(count: Any, cache: Any, before: Any, parts: Any) -> Any:
        slots = jnp.broadcast_to(8 * count + jnp.arange(8, dtype=jnp.int32), (len(lengths), 8))
        live = slots < jnp.array(lengths)[:, None]
        reading = ProbingWindow(cache, count, before)
        window = causal(jnp.zeros(slots.shape, jnp.int32), slots[:, 0], live)
        out, entry = reading.attend(0, *parts, window, scale=8 ** -0.5)
        return out, cache.commit([entry], jnp.where(live, slots, -1)), tuple(reading.after)

    for i in range(-(-max(lengths) // 8)):
        parts = [jnp.asarray(x)[None, 8 * i:8 * i + 8].repeat(len(lengths), 0) for x in (q, keys, values)]
        own, cache, before = visit(jnp.int32(i), cache, before, parts)
        out[:, 8 * i:8 * i + 8] = own
    return cache, out


@pytest.mark.wide
def test_windows_and_tokens_read_what_the_authors_read() -> None:
    """Outputs of all tokens of a prompt and of some behind it, in a batch with a shorter one."""
    keys, values, q = given()
    cache, out = filled((T, 37))
    at = [out[0, :T].sum((1, 2))]
    np.testing.assert_allclose(out[1, :37].sum((1, 2)), WANTED["sums"][:37], atol=2e-3)
    attend = jax.jit(lambda cache, *parts: cache.attend(0, *parts, causal(jnp.zeros((2, 1), jnp.int32), cache.length),
                                                        scale=8 ** -0.5))
    for i in range(T, T + MORE):
        parts = [jnp.asarray(x)[None, i:i + 1].repeat(2, 0) for x in (q, keys, values)]
        new, entry = attend(cache, *parts)
        cache = cache.commit([entry], jnp.array([[i], [-1]]))
        at.append(new[0].sum((1, 2)))
    np.testing.assert_allclose(np.concatenate(at), WANTED["sums"], atol=2e-3)
    # else a cache that reads everything would pass
    assert all(len(blocks) == 3 for blocks in WANTED["chosen"][-MORE:])


def test_layers_divide_blocks_as_the_authors_do() -> None:
    means = jnp.array(WANTED["means"]).mean(1)
    for (total, least, most), wanted in zip(((40, 2, 20), (40, 10, 20), (60, 1, 16)), WANTED["cuts"], strict=True):
        assert divided(means, total, jnp.int32(least), jnp.int32(most)).tolist() == wanted


def test_a_token_reads_by_densities_of_tokens_at_least_room_before_it() -> None:
    """The latest so many of those, and as many blocks in all layers before there are enough."""
    kind = ActQKVConfig(2 + 16 + 4 * 2, sinks=2, recent=16, block_size=2, window_size=8, samples=2, least=1, room=5)
    cache: Any = kind([KVLayer(2, 8, queries=4)] * 2, 1, 112, jnp.float32)
    densities = jnp.array([[0.1, 0.9, 0.9, 0.2, 0.2, 0.7, 0.7], [0.1, 0.1, 0.1, 0.8, 0.8, 0.3, 0.3]])
    sampled = jnp.array([-1, 40, 48, 50, 51, 52, 53])
    cut = lambda layer, at, there: int(cache.block_limit(layer, densities, sampled, jnp.int32(there), jnp.int32(at)))
    assert [cut(layer, 56, 20) for layer in (0, 1)] == [2, 6]            # by 50 and 51: 0.2 and 0.8, of 8 blocks
    assert [cut(layer, 54, 20) for layer in (0, 1)] == [7, 1]            # by 40 and 48
    assert [cut(layer, 55, 20) for layer in (0, 1)] == [4, 4]            # by 48 and 50: 0.55 and 0.45
    assert [cut(layer, 54, 5) for layer in (0, 1)] == [5, 3]
    assert [cut(layer, 50, 20) for layer in (0, 1)] == [4, 4] and cut(0, 50, 3) == 3       # there is one alone


def test_the_density_is_an_entropy() -> None:
    flat = jnp.array([0.3] * 4 + [9.0] * 2)
    np.testing.assert_allclose(density(flat, jnp.int32(4)), 1, atol=1e-5)
    shares = np.array(jax.nn.softmax(jnp.array([0.1, 0.9, -0.4])))
    np.testing.assert_allclose(density(jnp.array([0.1, 0.9, -0.4, 5.0]), jnp.int32(3)),
                               -(shares * np.log(shares)).sum() / np.log(3), atol=1e-5)
    assert density(flat, jnp.int32(1)) == -1


def test_activation_bias_is_that_of_all_windows_so_far() -> None:
    """The running variance is that of all queries together, where windows are equally long."""
    x = np.random.default_rng(0).standard_normal((2, 3, 8, 5)).astype(np.float32)
    live = jnp.ones((2, 8), bool)
    state = Activations(mean=jnp.zeros((2, 5)), variance=jnp.zeros((2, 5)))
    for i in range(3):
        state = state.after(jnp.asarray(x[:, i]), live, jnp.int32(i))
    together = x.reshape(2, 24, 5)
    np.testing.assert_allclose(state.mean, together.mean(1), atol=1e-5)
    np.testing.assert_allclose(state.variance, together.var(1, ddof=1), rtol=1e-4)
    bias = state.bias(jnp.asarray(x[:, 2]), live.at[1, 5:].set(False))
    np.testing.assert_allclose(bias.sum(1), 1, atol=1e-5)
    spread = together[0].var(0, ddof=1)
    off = np.square(x[0, 2] - together[0].mean(0)) / (spread + spread.mean() / 100)
    np.testing.assert_allclose(bias[0], off.mean(1) / off.mean(1).sum(), rtol=1e-3)
    assert (bias[1, 5:] == 0).all()
