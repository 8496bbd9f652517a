"""Prompts whose groups leave a part of their tokens."""

from __future__ import annotations

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
from tests.caches.small import DEEP, PROMPTS

CONFIG = DEEP.model.config


def by_hand(tokens: list[int], group: int, keep: float, recent: int) -> np.ndarray:
    """Logits `f64[T, V]` of a prompt and what follows it: each layer sees of full groups what it keeps."""
    w = jax.tree.map(lambda x: np.asarray(x, np.float64), DEEP.params)
    T, d, half = len(tokens), CONFIG.head_dim, CONFIG.head_dim // 2
    norm = lambda x, scale: x / np.sqrt((x ** 2).mean(-1, keepdims=True) + CONFIG.norm.eps) * scale
    at = np.arange(T)
    angle = at[:, None, None] * 10_000.0 ** (-np.arange(half) / half)

    def turn(x: np.ndarray) -> np.ndarray:
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)

    x = w["embed"][tokens]
    for i in range(len(CONFIG.layers)):
        own = w["layers"][str(i)]
        y = norm(x, own["attn_in"]["scale"])
        q, k, v = ((y @ own["attn"][name]["kernel"]).reshape(T, -1, d) for name in "qkv")
        q, k = turn(q), turn(k)
        kept = np.ones(T, bool)
        for start in range(0, T - recent - group + 1, group):
            norms = (k[start:start + group] ** 2).sum((1, 2))
            kept[start:start + group] = np.argsort(np.argsort(norms)) < int(group * keep)
        same = at[:, None] // group == at // group
        seen = (at[:, None] >= at) & (same | kept)
        r = CONFIG.heads // CONFIG.kv_heads
        scores = np.einsum("qhd,khd->hqk", q, np.repeat(k, r, 1)) / np.sqrt(d)
        weights = np.exp(np.where(seen, scores, -np.inf) - np.where(seen, scores, -np.inf).max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        x = x + np.einsum("hqk,khd->qhd", weights, np.repeat(v, r, 1)).reshape(T, -1) @ own["attn"]["o"]["kernel"]
        y = norm(x, own["mlp_in"]["scale"])
        gate, up = (y @ own["mlp"][name]["kernel"] for name in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ own["mlp"]["down"]["kernel"]
    return norm(x, w["norm"]["scale"]) @ w["lm_head"]["kernel"]


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
        logits = by_hand(prompt + out.row(i).tolist(), 6, 0.5, 3 + 4)[len(prompt) - 1:-1]
        wanted = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        assert out.logprobs is not None
        np.testing.assert_allclose(out.logprobs.raw[i], wanted[np.arange(4), out.row(i)], atol=1e-4)


@pytest.mark.wide
def test_a_long_prompt_takes_the_memory_of_its_share() -> None:
    long = dataclasses.replace(DEEP, model=Transformer(dataclasses.replace(CONFIG, context=1024)))

    def size(cache: Any) -> int:
        job = Job.begin(Request.read(long, [PROMPTS[0] * 24], max_new_tokens=8, cache=cache))
        return sum(x.nbytes for x in jax.tree.leaves(job.state.cache))

    assert size(dx.caches.make("quick-prefill", group_size=64, keep=0.125, recent=8)) < 0.45 * size(None)
