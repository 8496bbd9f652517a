"""Laws of caches: committed entries are what attention sees, dropped ones leave no trace, rows can be gathered."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decodax.autoregressive import Autoregressive
from decodax.cache import causal, dense
from decodax.core import drivers
from decodax.pallas_kernels.window_attention import window_attention
from tests.laws.cases import ALGORITHMS, POLICIES, decode, prompts, start, texts
from tests.matrix import often

KINDS = {"dense": lambda batch, capacity: dense([(2, 4), (1, 8)], batch, capacity, jnp.float32)}


def entries(key, batch, width):
    k = jax.random.split(jax.random.key(key), 4)
    shapes = [(batch, width, 2, 4)] * 2 + [(batch, width, 1, 8)] * 2
    a, b, c, d = (jax.random.normal(key, shape) for key, shape in zip(k, shapes, strict=True))
    return ((a, b), (c, d))


def look(cache, layer=0):
    """What a fixed query sees of the cache."""
    batch = cache.length.shape[0]
    q = jax.random.normal(jax.random.key(9), (batch, 1, 4, 4))
    zero = jnp.zeros((batch, 1, 2, 4))
    window = causal(jnp.zeros((batch, 1), jnp.int32), cache.length)
    return cache.attend(layer, q, zero, zero, window, scale=0.5)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_of_any_size_commit_the_same(kind):
    kv = entries(0, 3, 6)
    part = lambda a, b: jax.tree.map(lambda x: x[:, a:b], kv)
    slots = jnp.broadcast_to(jnp.arange(6), (3, 6))
    whole = KINDS[kind](3, 8).commit(kv, slots)
    pieces = KINDS[kind](3, 8)
    for a, b in ((0, 1), (1, 4), (4, 6)):
        pieces = pieces.commit(part(a, b), slots[:, a:b])
    assert np.array_equal(look(whole), look(pieces))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1, 4])
def test_dropped_entries_leave_no_trace(kind, width):
    full = KINDS[kind](2, 8).commit(entries(0, 2, 3), jnp.broadcast_to(jnp.arange(3), (2, 3)))
    same = full.commit(entries(1, 2, width), jnp.full((2, width), -1))
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(full), jax.tree.leaves(same), strict=True))
    beyond = full.commit(entries(1, 2, width), jnp.full((2, width), 8)) if width > 1 else full
    assert np.array_equal(look(full), look(beyond.replace(length=full.length)))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_accept_different_lengths(kind):
    kv = entries(0, 2, 4)
    slots = jnp.array([[0, 1, -1, -1], [0, 1, 2, 3]])
    ragged = KINDS[kind](2, 8).commit(kv, slots)
    assert ragged.length.tolist() == [2, 4]
    for row, count in enumerate((2, 4)):
        alone = KINDS[kind](1, 8).commit(jax.tree.map(lambda x, r=row, n=count: x[r:r + 1, :n], kv),
                                         jnp.arange(count)[None])
        assert np.allclose(look(ragged.select(jnp.array([row]))), look(alone), atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_select_gathers_rows(kind):
    full = KINDS[kind](3, 8).commit(entries(0, 3, 4), jnp.array([[0, 1, 2, 3], [0, 1, -1, -1], [0, -1, -1, -1]]))
    rows = jnp.array([2, 0, 0, 1])
    picked = full.select(rows)
    assert picked.length.tolist() == [1, 4, 4, 2]
    for layer in (0, 1):
        assert np.array_equal(picked.keys[layer], full.keys[layer][rows])
        assert np.array_equal(picked.values[layer], full.values[layer][rows])


@pytest.mark.parametrize("algorithm", often(["lookup", "llada"], ALGORITHMS))
def test_a_selected_state_decodes_as_the_rows_it_came_from(algorithm):
    alg, ids, policy = ALGORITHMS[algorithm], prompts(3), POLICIES["sampled"]
    plain = texts(decode(alg, "llama", ids, policy))
    network, params, chain, s = start(alg, "llama", ids, policy)
    s = drivers.advance(alg, network, params, chain, s, jnp.int32(2))
    rows = jnp.array([2, 0, 2])
    s = drivers.advance(alg, network, params, chain.select(rows), s.select(rows), jnp.int32(100))
    assert texts(s) == [plain[2], plain[0], plain[2]]


@pytest.mark.parametrize("sliding", [None, 3, 300])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_window_attention_equals_attention_to_everything(sliding, softcap):
    """The merge of cache blocks and window against one float64 softmax over all keys in sight."""
    draw = np.random.default_rng(0)
    B, W, H, G, d, S = 2, 3, 4, 2, 8, 512
    length = np.array([300, 7])
    q, k, v = (draw.normal(size=(B, W, h, d)).astype(np.float32) for h in (H, G, G))
    ck, cv = (draw.normal(size=(B, G, S, d)).astype(np.float32) for _ in range(2))
    positions = length[:, None] + np.arange(W)
    mask = np.tril(np.ones((1, W, W), bool))
    out = window_attention(q, k, v, jnp.asarray(mask), jnp.asarray(positions), ck, cv, jnp.asarray(length),
                           scale=0.4, sliding=sliding, softcap=softcap)
    for b in range(B):
        n = length[b]
        for w in range(W):
            for h in range(H):
                g = h // (H // G)
                keys = np.concatenate([ck[b, g, :n], k[b, :w + 1, g]]).astype(np.float64)
                values = np.concatenate([cv[b, g, :n], v[b, :w + 1, g]]).astype(np.float64)
                score = keys @ q[b, w, h] * 0.4
                score = score if softcap is None else softcap * np.tanh(score / softcap)
                if sliding is not None:
                    keep = n + w - np.arange(n + w + 1) < sliding
                    score, values = score[keep], values[keep]
                weight = np.exp(score - score.max())
                assert np.allclose(out[b, w, h], weight @ values / weight.sum(), atol=2e-6)


def test_one_token_of_prompt_needs_no_prefill():
    assert len(texts(decode(Autoregressive(), "llama", [[3]], {}))[0]) == 12
