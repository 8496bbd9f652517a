"""Caches that know what a token is: examples and lists of subtasks."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.caches import Evicting, make
from decodax.caches.evict.text.marks import marked, read_marks
from decodax.caches.evict.text.shotkv import kept_examples
from decodax.caches.evict.text.tim import TIMCache, holes
from decodax.engine.batch import Job
from decodax.engine.request import Request
from tests.caches.small import DEEP, OPTIONS, PROMPTS, same


def begun(name: str, prompts: list[list[int]], new: int = 4, **more: Any) -> Job:
    return Job.begin(Request.read(DEEP, prompts, cache=make(name, **{**OPTIONS[name], **more}), max_new_tokens=new))


@pytest.mark.wide
def test_whole_examples_stay() -> None:
    """And the one in which the latest tokens are, in the same way in all layers; while decoding the prompt stays."""
    job = begun("shotkv", PROMPTS, new=12)
    cache = job.state.cache
    assert isinstance(cache, Evicting)
    for b, prompt in enumerate(PROMPTS):
        text = np.asarray([prompt[:-1]])
        cuts = np.asarray(marked(jnp.asarray(text), read_marks(OPTIONS["shotkv"]["separator"], "separator"))[0]) > 0
        example = np.cumsum(cuts) - cuts
        held = [set(np.asarray(at)[b, 0][np.asarray(at)[b, 0] >= 0].tolist()) for at in cache.positions]
        assert held[0] == held[1] and len(held[0]) <= 14
        if len(text[0]) <= 14:
            assert held[0] == set(range(len(text[0])))
        assert max(held[0]) == len(text[0]) - 1
        if (example == example[-1]).sum() <= 14:
            assert all((example[list(held[0])] == i).sum() in (0, (example == i).sum()) for i in range(example[-1] + 1))
    before = [set(np.asarray(cache.positions[0])[b, 0].tolist()) - {-1} for b in range(3)]
    job.advance(None)
    now = [set(np.asarray(job.state.cache.positions[0])[b, 0].tolist()) - {-1} for b in range(3)]
    assert all(a <= b and len(b - a) <= 6 + 4 for a, b in zip(before, now, strict=True))


def test_examples_are_taken_by_their_means_as_long_as_they_fit() -> None:
    worth = jnp.array([1.0, 1, 9, 9, 9, 2, 2, 0, 0, 0])
    example = jnp.array([0, 0, 1, 1, 1, 2, 2, 3, 3, 0])
    valid, late = jnp.arange(10) < 9, jnp.arange(10) == 8
    stays = lambda n: kept_examples(worth, example, valid, late, jnp.int32(n), jnp.int32(9)).astype(int).tolist()
    assert stays(9) == [1] * 9 + [0]
    assert stays(6) == [0, 0, 1, 1, 1, 0, 0, 1, 1, 0]
    assert stays(4) == [0, 0, 0, 0, 0, 1, 1, 1, 1, 0]       # the best does not fit, the next one does
    assert stays(1) == [0, 0, 0, 0, 0, 0, 0, 0, 1, 0]


@pytest.mark.wide
def test_finished_lists_are_found_in_one_another() -> None:
    text = [1, 8, 2, 8, 3, 9, 4, 9, 5, 8, 6, 9, 7, 8, 0]
    gone = lambda length, depth: holes(jnp.array([text]), jnp.array([length]), ((8,),), ((9,),), depth)[0]
    assert np.flatnonzero(gone(15, 0)).tolist() == [2, 3, 4, 5, 6, 10]
    assert np.flatnonzero(gone(15, 1)).tolist() == [2, 3, 4, 5, 6]
    assert np.flatnonzero(gone(15, 2)).tolist() == np.flatnonzero(gone(6, 0)).tolist() == [4]
    assert not gone(15, 3).any() and not gone(5, 0).any()
    longer = holes(jnp.array([[1, 2, 5, 6, 3, 4, 0]]), jnp.array([7]), ((1, 2),), ((3, 4),), 0)[0]
    assert np.flatnonzero(longer).tolist() == [2, 3]


@pytest.mark.wide
def test_after_a_hole_the_model_continues_the_text_without_it() -> None:
    """Of two layers, in rows with and without holes, behind a prompt and while decoding."""
    prompts = [[1, 2, 8, 4, 5, 6, 9, 7, 1, 2, 8, 3, 3, 9, 4], [1, 8, 2, 3, 4], [8, 5, 5, 9, 2, 2]]
    shorter = [[1, 2, 8, 9, 7, 1, 2, 8, 9, 4], [1, 8, 2, 3, 4], [8, 9, 2, 2]]
    own = make("tim", open=8, close=9, depth=0, every=100)
    out, wanted = (dx.generate(DEEP, ids, cache=kind, max_new_tokens=6, logprobs=0)
                   for ids, kind in ((prompts, own), (shorter, None)))
    assert same(out, wanted)
    job = Job.begin(Request.read(DEEP, prompts, cache=make("tim", open=8, close=9, depth=1, every=3), max_new_tokens=9))
    job.advance(None)
    cache, n = job.state.cache, np.asarray(job.state.cache.length)
    assert isinstance(cache, TIMCache)
    tokens = np.asarray(job.state.tokens)
    for b in range(3):
        kept = [t for t, gone in zip(tokens[b, :n[b]], np.asarray(cache.dropped)[b], strict=False) if not gone]
        whole = Job.begin(Request.read(DEEP, [[*map(int, kept), 0]], max_new_tokens=1)).state.cache
        for one, other in zip(cache.kv, whole.kv, strict=True):
            np.testing.assert_allclose(one[b, :, :len(kept)], other[0, :, :len(kept)], atol=2e-4)
    assert cache.removed[0] == 3
