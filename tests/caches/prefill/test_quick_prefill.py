"""Prompts whose groups leave a part of their tokens."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.caches.prefill.quick_prefill import smallest
from decodax.engine.batch import Job
from decodax.engine.request import Request
from decodax.models import Transformer
from tests.by_hand import logits
from tests.caches.small import DEEP, PROMPTS

CONFIG = DEEP.model.config


def by_hand(tokens: list[int], group: int, keep: float, recent: int) -> np.ndarray:
    """Logits `f64[T, V]` of a prompt and what follows it: each layer sees of full groups what it keeps."""
    T, at = len(tokens), np.arange(len(tokens))

    def sees(layer: int, keys: np.ndarray) -> np.ndarray:
        kept = np.ones(T, bool)
        for start in range(0, T - recent - group + 1, group):
            norms = (keys[start:start + group] ** 2).sum((1, 2))
            kept[start:start + group] = np.argsort(np.argsort(norms)) < int(group * keep)
        return (at[:, None] >= at) & ((at[:, None] // group == at // group) | kept)

    return logits(CONFIG, DEEP.params, tokens, sees=sees)


def test_the_authors_choose_the_same_tokens() -> None:
    expected = Path(__file__).parents[1] / "expected" / "retrieval.json"
    wanted = json.loads(expected.read_text())["quick-prefill"]["chosen"]
    r = np.random.RandomState(3)
    for number, chosen in zip((3, 8, 13), wanted, strict=True):
        keys = jnp.asarray(r.standard_normal((1, 2, 16, 8)).astype(np.float32)).swapaxes(1, 2)
        assert np.flatnonzero(smallest(keys, number)[0]).tolist() == chosen


@pytest.mark.wide
def test_a_prompt_is_read_as_by_hand() -> None:
    """Prompts of 41 and 26 tokens in groups of 6, and one of 5 that is none; the 3 latest tokens stay, the newest one
    among them."""
    kind = dx.caches.make("quick-prefill", group_size=6, keep=0.5, recent=3)
    out = dx.generate(DEEP, PROMPTS, cache=kind, max_new_tokens=4, logprobs=0, eos_token_id=[])
    for i, prompt in enumerate(PROMPTS):
        found = by_hand(prompt + out.row(i).tolist(), 6, 0.5, 3 + 4)[len(prompt) - 1:-1]
        wanted = found - np.log(np.exp(found).sum(-1, keepdims=True))
        assert out.logprobs is not None
        np.testing.assert_allclose(out.logprobs.raw[i], wanted[np.arange(4), out.row(i)], atol=1e-4)


@pytest.mark.wide
def test_a_long_prompt_takes_the_memory_of_its_share() -> None:
    long = dataclasses.replace(DEEP, model=Transformer(dataclasses.replace(CONFIG, context=1024)))

    def size(cache: Any) -> int:
        job = Job.begin(Request.read(long, [PROMPTS[0] * 24], max_new_tokens=8, cache=cache))
        return sum(x.nbytes for x in jax.tree.leaves(job.state.cache))

    assert size(dx.caches.make("quick-prefill", group_size=64, keep=0.125, recent=8)) < 0.45 * size(None)
