"""SpeCache: what a guess looks at is what the next round reads in full."""

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.bench.plan import PRESETS, abstract, plan
from decodax.cache.entry import KVEntry
from decodax.caches.quantize.kivi import OneBitCodec
from decodax.caches.sparse.specache import Chooser, SpeCacheConfig
from decodax.core import host_memory
from decodax.core.capabilities import ReadPrompt
from decodax.core.window import causal
from tests.caches.small import PROMPTS, SMALL

FEW: dict[str, Any] = dict(top=4, group_size=4, residual_length=8)


def run(algorithm: Any = None, rows: tuple[int, ...] = (0, 1, 2), **more: Any) -> Any:
    return dx.generate(SMALL, [PROMPTS[i] for i in rows], request_ids=rows, algorithm=algorithm, seed=5, logprobs=0,
                       max_new_tokens=20, temperature=[[0.0, 0.9, 0.0][i] for i in rows], **more)


@pytest.mark.wide
def test_fetched_entries_are_those_of_the_whole_cache() -> None:
    """If all of it is fetched, results are those of a dense cache; with a part, they are others."""
    dense, everything = run(), run(dx.algorithms.make("specache", SMALL, **{**FEW, "top": 200}))
    assert dense.tokens.tolist() == everything.tokens.tolist()
    np.testing.assert_allclose(dense.logprobs.raw, everything.logprobs.raw, atol=1e-5)
    # one round more than tokens: that of the first guess
    assert everything.stats.rounds.tolist() == [21] * 3 and everything.lengths.tolist() == [20] * 3
    few = run(dx.algorithms.make("specache", SMALL, **FEW))
    assert np.abs(dense.logprobs.raw[:, 0] - few.logprobs.raw[:, 0]).max() > 1e-3


def low(x: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """Numbers in few bits, written out; a group is the whole axis."""
    least, most = x.min(axis, keepdims=True), x.max(axis, keepdims=True)
    if bits == 1:       # the middles of both halves
        return np.where(x > (least + most) / 2, (least + 3 * most) / 4, (3 * least + most) / 4)
    step = (most - least) / 3
    return least + step * np.round((x - least) / step)


@pytest.mark.wide
@pytest.mark.parametrize("bits", [1, 2])
def test_a_round_is_that_of_the_paper(bits: int) -> None:
    """Algorithms 2 and 3 for one layer, written out head by head: attention to few bits with what was fetched in full,
    and what the guess has fetched for the next round."""
    group, lengths, G, d = 8, (29, 13), 2, 8
    draws = np.random.default_rng(bits)
    kv: Any = draws.standard_normal((2, 2, 64, G, d)).astype(np.float32)
    kind = SpeCacheConfig(bits, 3, group, group)
    cache: Any = kind([(G, d)], 2, 64, jnp.float32).prefill_cache()
    at = np.arange(40)
    cache = cache.commit([KVEntry(*(jnp.asarray(x[:, :40]) for x in kv))],
                         jnp.asarray(np.where(at < np.array(lengths)[:, None], at, -1), jnp.int32))
    cache = cache.finish_prefill(ReadPrompt(None, None, jnp.zeros((2, 0), jnp.int32)))
    assert all(host_memory.on_host(x) for x in cache.pages) and not any(map(host_memory.on_host, cache.fetched))
    chosen: list[list[list[int]]] = [[[] for _ in range(G)] for _ in lengths]
    length = np.array(lengths)
    for step in range(4):       # the first one chooses alone, and the third one fills a group of the longer row
        ready, Q = step > 0, 2 * G
        q = 2 * draws.standard_normal((2, 2, Q, d)).astype(np.float32)
        new = np.stack([[kv[j][b, length[b]:length[b] + 2] for b in range(2)] for j in range(2)])
        window = causal(jnp.zeros((2, 2), jnp.int32), jnp.asarray(length, jnp.int32),
                        jnp.broadcast_to(jnp.array([True, ready]), (2, 2)))
        window = window.replace(hints=(Chooser(jnp.full(2, int(ready), jnp.int32)),))
        out, entry = cache.attend(0, jnp.asarray(q), *map(jnp.asarray, new), window, scale=0.5)
        cache = cache.commit([entry], jnp.asarray(np.stack([length if ready else [-1, -1], [-1, -1]], 1), jnp.int32))
        for b, g in np.ndindex(2, G):
            n = length[b]
            keys, values = kv[0][b, :n, g].copy(), kv[1][b, :n, g].copy()
            for start in range(0, n // group * group, group):
                part = slice(start, start + group)
                keys[part], values[part] = low(keys[part], bits, 0), low(values[part], bits, 1)
            full = chosen[b][g]
            keys[full], values[full] = kv[0][b, full, g], kv[1][b, full, g]
            keys, values = (np.concatenate([x, new[j, b, :, g]]) for j, x in enumerate((keys, values)))
            worth = []
            for node in range(1 + ready):
                for h in range(g * Q // G, (g + 1) * Q // G):
                    weights = np.asarray(jax.nn.softmax(0.5 * keys[:n + node + 1] @ q[b, node, h]))
                    np.testing.assert_allclose(out[b, node, h], weights @ values[:n + node + 1], atol=1e-5)
                    if node == ready:
                        worth.append(weights[:n + node])
            chosen[b][g] = np.argsort(-np.mean(worth, 0))[:3].tolist()
            assert cache.chosen[0][b, g].tolist() == chosen[b][g]
            held = np.stack([kv[j][b, chosen[b][g], g] for j in range(2)], 1)
            np.testing.assert_array_equal(cache.fetched[0][b, g], held)
        length = length + ready
    assert cache.length.tolist() == length.tolist() == [32, 16]


def test_codes_and_caches_that_do_not_fit_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"^residual_length: got 30, takes a multiple of the group size of 4"):
        dx.algorithms.make("specache", SMALL, group_size=4, residual_length=30)
    with pytest.raises(ValueError, match=r"^key_bits, value_bits, group_size: got 2, 1 and 32, takes 1, 1"):
        OneBitCodec(2)
    with pytest.raises(ValueError, match=r"^cache: .* a cache of its own"):
        run(dx.algorithms.make("specache", SMALL, **FEW), cache="quest")
    with pytest.raises(ValueError, match=r"^cache: specache got keys of 8 numbers and values of 4"):
        SpeCacheConfig(group_size=4, residual_length=8)([(2, 8, 4)], 1, 16, jnp.float32)
    cache: Any = SpeCacheConfig(group_size=8, residual_length=8)([(2, 8)], 1, 16, jnp.float32)
    with pytest.raises(ValueError, match=r"^cache: specache is read by its own method"):
        cache.attend(0, *(jnp.ones((1, 1, 2, 8)),) * 3, causal(jnp.zeros((1, 1), jnp.int32), cache.length), scale=1.0)


@pytest.mark.wide
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="takes libtpu (the extra tpu-aot)")
def test_a_tpu_fetches_tokens_by_asynchronous_slices() -> None:
    lm = abstract({**PRESETS["llama-3-8b"], "num_hidden_layers": 2, "vocab_size": 4096})
    p = plan(lm, "v5e:2x4", mesh=[(2, 4)], batch=4, capacity=8192, compile=True,
             algorithm=dx.algorithms.make("specache", lm))[0]
    assert p.compiled is not None and p.padded == pytest.approx(1, abs=0.02)
    entry = 2 * 2 * 128 * 2         # of a device's rows and heads: bytes of a position in all layers
    assert p.counts.host == 2 * 2 * 8192 * entry
    assert p.counts.cache < 0.25 * p.counts.host
    assert p.compiled.text.count(" dynamic-slice-start(") == 2 * 8 and "HostExecute" not in p.compiled.text
