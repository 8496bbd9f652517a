"""ShadowKV: chunks that are read by keys of low rank."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from decodax.cache import KVLayer
from decodax.cache.entry import KVEntry
from decodax.caches.sparse.shadowkv import ShadowKVCache, ShadowKVConfig
from decodax.core.capabilities import ReadPrompt
from decodax.core.window import causal
from decodax.models.rope import Rope, rotate

EXPECTED = Path(__file__).parents[1] / "expected" / "retrieval.json"


@pytest.mark.wide
def test_a_query_reads_the_chunks_of_shadowkv_by_keys_of_low_rank() -> None:
    """Attention of the authors' code to outliers, the end of the prompt, and keys that it makes anew."""
    wanted, r = json.loads(EXPECTED.read_text())["shadowkv"], np.random.RandomState(0)
    keys = r.standard_normal((131, 2, 16)).astype(np.float32).round(3)
    keys = (keys + 2 * np.sin(np.arange(131) / 9)[:, None, None]).astype(np.float32)
    values, q = (r.standard_normal(n).astype(np.float32).round(3) for n in ((131, 2, 16), (4, 16)))
    rope = Rope(16)
    cos, sin = rope.table(jnp.arange(131)[None], None)
    rotated = rotate(jnp.asarray(keys)[None], cos, sin, rope.interleaved)
    kind = ShadowKVConfig(24, 8, 10, 2, 4, _new=4)
    shape = KVLayer(2, 16, queries=4, rope=rope)
    cache = kind([shape], 2, 160, jnp.float32).prefill_cache()
    two = lambda x: jnp.concatenate([jnp.asarray(x).reshape(1, *x.shape[-3:])] * 2)
    # the other row is a shorter text
    at = jnp.arange(131)
    cache = cache.commit([KVEntry(two(rotated), two(values))], jnp.where(at < jnp.array([[131], [50]]), at,
                                                                  -1)).finish_prefill(
        ReadPrompt(None, None, jnp.zeros((2, 0), jnp.int32)))
    assert isinstance(cache, ShadowKVCache) and cache.shadows[0] is not None
    far = [np.flatnonzero(x).tolist() for x in np.asarray(cache.shadows[0].far[0])]
    assert far == wanted["far"] and cache.room(jnp.ones(2, bool)).tolist() == [59 - 51, 59 - 50]
    asks = two(2 * q[None])
    own = -100 * asks.reshape(2, 1, 2, 2, 16).sum(3)        # its own key is as good as not there
    out, _ = cache.attend(0, asks, own, own, causal(jnp.zeros((2, 1), jnp.int32), cache.length), scale=128 ** -0.5)
    np.testing.assert_allclose(out[0, 0], wanted["out"], atol=2e-4)
