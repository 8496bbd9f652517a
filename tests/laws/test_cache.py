"""Laws of caches: committed entries are what attention sees, dropped ones leave no trace, rows can be gathered."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decodax.algorithms.plain import Autoregressive
from decodax.cache import Slotted, dense, empty_slots
from decodax.common.struct import struct
from decodax.core import drivers
from decodax.core.window import causal
from decodax.pallas_kernels.window_attention import merge, window_attention, window_attention_lse
from tests.laws.cases import ALGORITHMS, POLICIES, decode, prompts, start, texts
from tests.matrix import often


@struct
class Backwards(Slotted):
    """A cache whose slots are positions counted from the end."""

    def place(self, layer, entry, positions):
        return jnp.where(positions < self.size, self.size - 1 - positions, -1)[:, None]


WIDTHS = [(2, 4), (1, 8)]
WIDE = [(2, 4, 6), (1, 8, 3)]
KINDS = {
    "dense": lambda batch, capacity: dense(WIDTHS, batch, capacity, jnp.float32),
    "dense of other values": lambda batch, capacity: dense(WIDE, batch, capacity, jnp.float32),
    "slotted": lambda batch, capacity: Backwards(
        **empty_slots(WIDTHS, batch, capacity, jnp.float32, slots=capacity)),
    "slotted of other values": lambda batch, capacity: Backwards(
        **empty_slots(WIDE, batch, capacity, jnp.float32, slots=capacity)),
}


OFTEN = ["dense of other values", "slotted of other values"]


def entries(key, batch, width, kind="dense"):
    """Keys and values for a cache of a kind."""
    cache, draw = KINDS[kind](1, 8), iter(jax.random.split(jax.random.key(key), 4))
    one = lambda held: jax.random.normal(next(draw), (batch, width, held.shape[1], held.shape[3]))
    return tuple((one(k), one(v)) for k, v in ((cache.keys(i), cache.values(i)) for i in range(len(cache.kv))))


def look(cache, layer=0):
    """What a fixed query sees of the cache."""
    batch = cache.length.shape[0]
    q = jax.random.normal(jax.random.key(9), (batch, 1, 4, 4))
    zeros = lambda held: jnp.zeros((batch, 1, 2, held.shape[3]))
    window = causal(jnp.zeros((batch, 1), jnp.int32), cache.length)
    return cache.attend(layer, q, zeros(cache.keys(layer)), zeros(cache.values(layer)), window, scale=0.5)[0]


@pytest.mark.wide(but=("dense of other values",))
@pytest.mark.parametrize("kind", often(OFTEN, KINDS))
def test_chunks_of_any_size_commit_the_same(kind):
    kv = entries(0, 3, 6, kind)
    part = lambda a, b: jax.tree.map(lambda x: x[:, a:b], kv)
    slots = jnp.broadcast_to(jnp.arange(6), (3, 6))
    whole = KINDS[kind](3, 8).commit(kv, slots)
    pieces = KINDS[kind](3, 8)
    for a, b in ((0, 1), (1, 4), (4, 6)):
        pieces = pieces.commit(part(a, b), slots[:, a:b])
    assert np.array_equal(look(whole), look(pieces))


@pytest.mark.wide(but=("4-dense of other values",))
@pytest.mark.parametrize("kind", often(OFTEN, KINDS))
@pytest.mark.parametrize("width", [1, 4])
def test_dropped_entries_leave_no_trace(kind, width):
    full = KINDS[kind](2, 8).commit(entries(0, 2, 3, kind), jnp.broadcast_to(jnp.arange(3), (2, 3)))
    same = full.commit(entries(1, 2, width, kind), jnp.full((2, width), -1))
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(full), jax.tree.leaves(same), strict=True))
    beyond = full.commit(entries(1, 2, width, kind), jnp.full((2, width), 8)) if width > 1 else full
    assert np.array_equal(look(full), look(beyond.replace(length=full.length)))


@pytest.mark.wide(but=("dense of other values",))
@pytest.mark.parametrize("kind", often(OFTEN, KINDS))
def test_rows_accept_different_lengths(kind):
    kv = entries(0, 2, 4, kind)
    slots = jnp.array([[0, 1, -1, -1], [0, 1, 2, 3]])
    ragged = KINDS[kind](2, 8).commit(kv, slots)
    assert ragged.length.tolist() == [2, 4]
    for row, count in enumerate((2, 4)):
        alone = KINDS[kind](1, 8).commit(jax.tree.map(lambda x, r=row, n=count: x[r:r + 1, :n], kv),
                                         jnp.arange(count)[None])
        assert np.allclose(look(ragged.select(jnp.array([row]))), look(alone), atol=1e-6)


@pytest.mark.wide(but=("dense of other values",))
@pytest.mark.parametrize("kind", often(OFTEN, KINDS))
def test_select_gathers_rows(kind):
    full = KINDS[kind](3, 8).commit(entries(0, 3, 4, kind), jnp.array([[0, 1, 2, 3], [0, 1, -1, -1], [0, -1, -1, -1]]))
    rows = jnp.array([2, 0, 0, 1])
    picked = full.select(rows)
    assert picked.length.tolist() == [1, 4, 4, 2]
    for layer in (0, 1):
        assert np.array_equal(picked.kv[layer], full.kv[layer][rows])


@pytest.mark.wide(but=("llada",))
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
    out = window_attention(q, k, v, jnp.asarray(mask), jnp.asarray(positions), np.concatenate([ck, cv], -1),
                           jnp.asarray(length), scale=0.4, sliding=sliding, softcap=softcap)
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


@pytest.mark.wide(but=("dense of other values",))
@pytest.mark.parametrize("kind", often(OFTEN, KINDS))
def test_committed_entries_are_attended_to(kind):
    """Against a softmax over the entries themselves."""
    kv = entries(0, 2, 5, kind)
    cache = KINDS[kind](2, 8).commit(kv, jnp.broadcast_to(jnp.arange(5), (2, 5)))
    q = np.asarray(jax.random.normal(jax.random.key(9), (2, 1, 4, 4)))
    k, v = (np.concatenate([x, np.zeros((2, 1, *x.shape[2:]))], 1) for x in kv[0])
    for b in range(2):
        for h in range(4):
            weight = np.exp(k[b, :, h // 2] @ q[b, 0, h] * 0.5)
            assert np.allclose(look(cache)[b, 0, h], weight @ v[b, :, h // 2] / weight.sum(), atol=1e-6)


def test_attention_to_parts_merges_into_attention_to_all():
    """Sinks and the rest, where some queries see nothing of one part."""
    draw = np.random.default_rng(1)
    B, W, H, G, d, S = 2, 3, 4, 2, 8, 16
    q, k, v = (jnp.asarray(draw.normal(size=(B, W, h, d)), jnp.float32) for h in (H, G, G))
    ck, cv = (jnp.asarray(draw.normal(size=(B, G, S, d)), jnp.float32) for _ in range(2))
    cache, length = jnp.concatenate([ck, cv], -1), jnp.array([9, 0])
    positions = length[:, None] + jnp.arange(W)
    held = jnp.where(jnp.arange(S) < length[:, None], jnp.arange(S), -1)[:, None]
    mask = jnp.tril(jnp.ones((1, W, W), bool))

    def part(mine):
        return window_attention_lse(q, k, v, mask & mine(positions)[:, None], positions, cache, scale=0.4,
                                    slot_positions=jnp.where(mine(held), held, -1))

    whole, lse = window_attention_lse(q, k, v, mask, positions, cache, length, scale=0.4)
    out, total = merge(part(lambda at: at < 2), part(lambda at: at >= 2))
    assert np.allclose(out, whole, atol=1e-6) and np.allclose(total, lse, atol=1e-6)
    # the weight of a key is exp(score - lse): those of all keys in sight add up to one
    scores = 0.4 * jnp.einsum("bwgrd,bkgd->bwgrk", q.reshape(B, W, G, H // G, d),
                              jnp.concatenate([ck.swapaxes(1, 2), k], 1))
    sees = jnp.concatenate([jnp.broadcast_to((jnp.arange(S) < length[:, None])[:, None], (B, W, S)),
                            jnp.broadcast_to(mask, (B, W, W))], 2)[:, :, None, None]
    weights = jnp.where(sees, jnp.exp(scores - lse.reshape(B, W, G, H // G)[..., None]), 0)
    assert np.allclose(weights.sum(-1), 1, atol=1e-5)


def test_one_token_of_prompt_needs_no_prefill():
    assert len(texts(decode(Autoregressive(), "llama", [[3]], {}))[0]) == 12
