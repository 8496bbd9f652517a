"""SentenceKV: queries that read whole sentences."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.cache import KVLayer
from decodax.caches.sparse.sentence_kv import SentenceKVCache, SentenceKVConfig
from decodax.core.capabilities import ReadPrompt
from decodax.core.window import causal


def given() -> tuple[Any, ...]:
    """Queries, keys and values `f32[1, 70, 2, 8]` and tokens `i32[1, 70]`, and the cache that has settled on 44."""
    r = np.random.RandomState(0)
    x = r.standard_normal((70, 16)).astype(np.float32).round(3)
    parts = tuple(jnp.asarray(x @ (r.standard_normal((16, 16)).astype(np.float32).round(3) / 2).T).reshape(1, 70, 2, 8)
                  for _ in range(3))
    ids = r.randint(0, 16, 70)
    ids[44:][np.isin(ids[44:], (3, 7))] = 1
    ids[[49, 50, 61, 65]] = 3, 3, 3, 7
    tokens = jnp.asarray(ids, jnp.int32)[None]
    kind = SentenceKVConfig((3, 7), budget=18, factor=1.5, sinks=2, recent=6, window_size=4, kernel_size=1)
    cache: Any = kind([KVLayer(2, 8, queries=2)], 1, 96, jnp.float32).prefill_cache()
    window = causal(tokens[:, :44], jnp.array([0])).replace(is_prefill=True)
    _, entry = cache.attend(0, *(part[:, :44] for part in parts), window, scale=8 ** -0.5)
    cache = cache.commit([entry], jnp.arange(44)[None]).finish_prefill(ReadPrompt(None, None, tokens))
    assert isinstance(cache, SentenceKVCache) and cache.base.count[0].tolist() == [[27, 27]]
    return parts, tokens, cache


def attended(cache: Any, parts: Any, tokens: Any, start: int, stop: int) -> tuple[Any, Any]:
    """What the tokens from `start` to `stop` find, `f32[n, 16]`, and their entry."""
    window = causal(tokens[:, start:stop], jnp.array([start]))
    out, entry = cache.attend(0, *(part[:, start:stop] for part in parts), window, scale=8 ** -0.5)
    return out[0].reshape(stop - start, 16), entry


@pytest.mark.wide
@pytest.mark.parametrize("width", [1, 6])
def test_sentences_are_read_as_the_authors_read_them(width: int) -> None:
    """Numbers of zzbright1998/SentenceKV, commit d6bb131: its plain attention (`LlamaAttention`), 26 tokens one by one
    behind 44, of which 27 stay, without pooling (it makes ties), with `>=` in place of `>` where it compares a token
    with the number of first ones. Here one by one, or in windows of 6."""
    wanted = np.asarray(json.loads((Path(__file__).parents[1] / "expected" / "sentences.json").read_text()))
    (parts, tokens, cache), found = given(), []
    for start in range(44, 70, width):
        stop = min(start + width, 70)
        out, entry = attended(cache, parts, tokens, start, stop)
        cache = cache.commit([entry], jnp.arange(start, stop)[None])
        found.append(out)
    np.testing.assert_allclose(np.concatenate(found), wanted, atol=2e-5)


@pytest.mark.wide
def test_nodes_of_earlier_levels_tell_where_a_sentence_began() -> None:
    """The ends at 49 and 50 among them; level by level as in one window."""
    parts, tokens, cache = given()
    cache = cache.commit([attended(cache, parts, tokens, 44, 48)[1]], jnp.arange(44, 48)[None])
    wanted, entry = attended(cache, parts, tokens, 48, 52)
    buffer, found = cache.tree_buffer([entry], 4), []
    for start in range(48, 52, 2):
        sees = jnp.broadcast_to(jnp.arange(4) < start - 48, (1, 2, 4))
        out, entry = attended(buffer.seen_by(sees), parts, tokens, start, start + 2)
        buffer = buffer.append([entry], jnp.array([[start, start + 1]]), jnp.int32(start - 48))
        found.append(out)
    np.testing.assert_allclose(np.concatenate(found), wanted, atol=1e-5)


def test_ends_of_sentences_are_those_of_the_tokenizer() -> None:
    lm = dx.load("pycode")
    assert lm.tokenizer is not None
    ends = SentenceKVConfig().of_model(lm).marks
    assert {lm.tokenizer.decode([i]) for i in ends} >= {".", "!", "?"}
