"""Prompts of which segments read a part."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.algorithms.speculative import Speculative
from decodax.algorithms.speculative.drafts import OwnCache
from decodax.cache import KVLayer, dense
from decodax.cache.entry import KVEntry
from decodax.caches.prefill.critiprefill import CriticalReader, CritiPrefillConfig
from decodax.core.window import causal
from tests.caches.small import DEEP, PROMPTS


def test_segments_read_what_the_authors_read() -> None:
    """In three layers of a text of 45 tokens, of which the third and the fourth go by what the one before said, too."""
    wanted = json.loads((Path(__file__).parents[1] / "expected" / "retrieval.json").read_text())["critiprefill"]
    r, T, shapes = np.random.RandomState(0), 45, (KVLayer(2, 8, queries=4),) * 4
    given = [[r.standard_normal((T, n, 8)).astype(np.float32).round(3) for n in (4, 2, 2)] for _ in range(3)]
    kind = CritiPrefillConfig(8, segment_size=8, block_size=4, threshold_len=16)

    @jax.jit
    def read(start: Any, base: Any, parts: Any) -> Any:
        reading = CriticalReader(base, kind, (start >= 16) & (start + 8 < jnp.array([T])), shapes)
        window = causal(jnp.zeros((1, 8), jnp.int32), start[None], jnp.ones((1, 8), bool))
        return [reading.attend(layer + 1, *(x[None] for x in own), window, scale=8 ** -0.5)[0]
                for layer, own in enumerate(parts)]

    base, out = dense(shapes, 1, 48, jnp.float32), np.zeros((3, 48))
    for start in range(0, T, 8):
        parts = [[jnp.pad(jnp.asarray(x[start:start + 8]), ((0, 8 - len(x[start:start + 8])), (0, 0), (0, 0)))
                  for x in own] for own in given]
        for layer, own in enumerate(read(jnp.int32(start), base, parts)):
            out[layer, start:start + 8] = own[0].reshape(8, -1).sum(-1)
        entries = [KVEntry(k[None], v[None]) for _, k, v in (parts[0], *parts)]
        base = base.commit(entries, start + jnp.arange(8)[None])
    np.testing.assert_allclose(out[:, :T], wanted["sums"], atol=2e-3)


def test_it_is_combined_with_no_other_cache() -> None:
    kind = dx.caches.make("critiprefill", budget=4, segment_size=4, block_size=2, threshold_len=8)
    with pytest.raises(ValueError, match=r"^cache: critiprefill reads a prompt when it is in, and this model reads it"):
        dx.generate(DEEP, PROMPTS, algorithm=Speculative(OwnCache(kind)), max_new_tokens=8)
