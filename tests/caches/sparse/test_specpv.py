"""Caches of which rounds read a part, whose entries are computed anew from everything now and then."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import decodax as dx
from decodax.cache.entry import KVEntry
from decodax.caches.sparse.specpv import SpecPVCache, SpecPVConfig
from decodax.core.capabilities import ReadPrompt, finish_prefill, needs_refresh, prefill_cache
from decodax.core.window import causal
from decodax.engine.methods import with_cache
from tests.caches.small import DEEP, LOOKUP, PROMPTS, SMALL, TREE

FEW = SpecPVConfig(budget=8, sinks=1, window=1, block_size=4, buffer=5)


def test_blocks_are_those_of_the_authors() -> None:
    """And what is read: these, the first block, and all from the last whole block before the window on."""
    wanted = json.loads((Path(__file__).parents[1] / "expected" / "retrieval.json").read_text())["specpv"]["chosen"]
    r = np.random.RandomState(0)
    keys, q = (r.standard_normal(n).round(3).astype(np.float32) for n in ((61, 2, 8), (4, 8)))
    cache = SpecPVConfig(20, 1, 2, 4, 8)([(2, 8)], 2, 80, jnp.float32)
    assert isinstance(cache, SpecPVCache)
    at, two = jnp.arange(61), jnp.asarray([keys, keys])
    cache = cache.commit([KVEntry(two, two)], jnp.where(at < jnp.array([[61], [17]]), at, -1))
    cache = cache.choose_blocks([jnp.asarray([q, q])], jnp.array([True, True]))
    chosen = [[sorted(x.tolist()) for x in row] for row in cache.chosen[0]]
    assert chosen == [wanted, [[-1, -1, -1, -1, 0]] * 2]
    read = cache.always(0)
    far = [4 + 4 * block + i for block in wanted[1] for i in range(4)]
    assert set(read[0, 1].tolist()) == {-1, *range(4), *far, *range(52, 61)}
    assert set(read[1, 0].tolist()) == {-1, *range(17)}


def fed(kind: Any, texts: np.ndarray, start: np.ndarray, count: int) -> list[tuple[Any, np.ndarray]]:
    """The caches before each token is read, of texts `i32[B, N]` behind prompts of `start` tokens, and logits."""
    model, params = DEEP.model if kind is None else DEEP.model.with_cache(kind), DEEP.params
    cache, tokens = prefill_cache(model.init_cache(len(texts), 128, params=params)), jnp.asarray(texts)
    window = causal(tokens, jnp.zeros(len(texts), jnp.int32), jnp.arange(texts.shape[1]) < start[:, None])
    out = model.apply(params, window.replace(is_prefill=True), cache)
    told = ReadPrompt(model, params, tokens)
    cache = finish_prefill(cache.commit(out.entries, jnp.where(window.live, window.positions, -1)), told)
    steps = []

    @jax.jit
    def read(cache: Any) -> tuple[Any, Array]:
        window = causal(jnp.take_along_axis(tokens, cache.length[:, None], 1), cache.length)
        out = model.apply(params, window, cache)
        return cache.commit(out.entries, window.positions), out.logits()[:, 0]

    for _ in range(count):
        if (stale := needs_refresh(cache)) is not None and stale.any():
            cache = jax.jit(lambda cache, rows: cache.refresh(told, rows))(cache, stale)
        before, (cache, logits) = cache, read(cache)
        steps.append((before, np.asarray(logits)))
    return steps


@pytest.mark.wide
def test_entries_from_a_part_are_computed_anew_from_everything() -> None:
    """In rows of different lengths, one of which is read whole; and the token behind them reads everything."""
    texts = np.random.default_rng(3).integers(0, 16, (3, 60)).astype(np.int32)
    start = np.array([41, 26, 5])
    part, whole = fed(FEW, texts, start, 13), fed(None, texts, start, 13)
    apart = lambda step, b, end: np.abs(np.asarray(part[step][0].kv[1][b, :, :end] - whole[step][0].kv[1][b, :, :end])
                                        ).max()
    for step, ((cache, logits), (_, dense)) in enumerate(zip(part, whole, strict=True)):
        anew = step % 6 == 0
        for b, n in enumerate(start):
            assert cache.since[b] == n + step - step % 6
            assert (apart(step, b, n + step) < 1e-5) == (anew or step % 6 == 1 or b == 2)
            assert (np.abs(logits[b] - dense[b]).max() < 1e-4) == (anew or b == 2)


@pytest.mark.wide
def test_only_rows_that_are_due_are_computed_anew() -> None:
    texts = np.random.default_rng(3).integers(0, 16, (2, 60)).astype(np.int32)
    cache = fed(FEW, texts, np.array([41, 41]), 6)[-1][0]
    cache = cache.replace(length=cache.length + 1, due=cache.due + jnp.array([0, 1]))
    assert cache.needs_refresh().tolist() == [True, False] and cache.max_commit().tolist() == [1, 1]
    new = cache.refresh(ReadPrompt(DEEP.model, DEEP.params, jnp.asarray(texts)), cache.needs_refresh())
    assert new.since.tolist() == [47, 41] and new.due.tolist() == [53, 48]
    for old, now in zip(cache.kv, new.kv, strict=True):
        np.testing.assert_array_equal(old[1], now[1])
        np.testing.assert_array_equal(old[0, :, :42], now[0, :, :42])
    assert not np.allclose(cache.kv[1][0, :, 42:47], new.kv[1][0, :, 42:47], atol=1e-3)


@pytest.mark.wide
def test_forwards_that_compute_entries_anew_are_counted() -> None:
    """Before the first token and behind each 5."""
    out = dx.generate(SMALL, PROMPTS[:2], cache=FEW, max_new_tokens=20)
    assert out.stats.rounds.tolist() == [20 + 4] * 2 and out.stats.forwards == 24


@pytest.mark.wide
@pytest.mark.parametrize("algorithm", [LOOKUP, TREE], ids=["chain", "tree"])
def test_drafts_change_nothing_after_a_context(algorithm: Any) -> None:
    """Whose questions are read as what follows a prompt is."""
    options: dict[str, Any] = dict(context=PROMPTS[0], cache=FEW, max_new_tokens=20, temperature=[0.0, 0.9], seed=3)
    asked = [PROMPTS[1][:7], PROMPTS[2]]
    plain, drafted = (dx.generate(SMALL, asked, algorithm=alg, **options) for alg in (None, algorithm))
    assert plain.tokens.tolist() == drafted.tokens.tolist() and drafted.stats.accepted.sum() > 0
    alone = dx.generate(SMALL, asked[:1], **{**options, "temperature": 0.0})
    assert alone.tokens[0].tolist() == plain.tokens[0].tolist()


SNAP = dx.caches.make("snapkv", budget=14, window_size=4)


@pytest.mark.wide
@pytest.mark.parametrize(("answers", "drafts"), [(FEW, SNAP), (None, FEW)], ids=["answers", "drafts"])
def test_a_model_drafts_for_itself_on_another_cache_or_on_this_one(answers: Any, drafts: Any) -> None:
    """And gives the tokens of plain decoding on the cache that answers."""
    lm = SMALL if answers is None else with_cache(SMALL, answers)
    own = dx.Speculative(dx.drafts.OwnCache(drafts))
    plain, drafted = (dx.generate(lm, PROMPTS, algorithm=alg, max_new_tokens=20) for alg in (None, own))
    assert plain.tokens.tolist() == drafted.tokens.tolist() and drafted.stats.accepted.sum() > 0
