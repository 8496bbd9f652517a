"""PLPHP against its rule written out in NumPy: which image tokens of a prompt stay."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.caches import make
from decodax.caches.evict.scores import Gathered, HeldLayer
from decodax.caches.evict.text.plphp import ImageAttention, ImageShares
from decodax.engine.batch import Job
from decodax.engine.request import Request
from tests.caches.small import DEEP, PROMPTS

GIVEN: dict[str, Any] = dict(image=(3, 9), rate=0.5, change=0.25, attentive=0.6, indifferent=0.3)


@pytest.mark.parametrize(("level", "share"), [(0.7, 0.75), (0.45, 0.5), (0.2, 0.25)])
def test_a_layer_keeps_what_it_looks_at(level: float, share: float) -> None:
    """Weights of the newest token that give image tokens so much of it together, in the mean over heads."""
    r, n, image = np.random.default_rng(2), 24, np.zeros(30, bool)
    image[[1, 2, 3, 4, 6, 9, 10, 11, 12, 15, 20, 21]] = True
    weights = r.uniform(0.1, 1, (4, n))
    for part, total in ((image[:n], level), (~image[:n], 1 - level)):
        own = weights * part
        weights = np.where(part, own / own.sum(1, keepdims=True) * total, weights)
    # keys of as many numbers as tokens: any weights can be had
    keys = np.zeros((2, 30, 30), np.float32)
    keys[:, :n, :n] = np.eye(n)
    queries = np.zeros((1, 4, 30), np.float32)
    queries[0, :, :n] = np.log(weights)
    held = HeldLayer(keys=jnp.asarray(keys), values=jnp.asarray(keys), count=jnp.full(2, n), length=jnp.int32(n),
                     positions=jnp.where(jnp.arange(30) < n, jnp.arange(30), -1)[None].repeat(2, 0),
                     prompt_length=jnp.int32(n), since=jnp.int32(n), queries=jnp.asarray(queries), outputs=None,
                     layer=0, gathered=Gathered(slots=jnp.asarray(image)[None].repeat(2, 0)), depth=2,
                     shape=dx.cache.KVLayer(2, 30))
    rule = ImageShares(ImageAttention((3, 9)), 0.5, 0.25, 0.6, 0.3)
    for count, room in ((1000, 12), (17, 5)):       # 12 tokens are text
        stays = np.asarray(rule.choose(held, jnp.int32(count)))
        for g in range(2):
            own = np.where(image[:n], weights[2 * g:2 * g + 2].mean(0), -1)
            first = np.argsort(-own)[:min(int(share * 12), room)]
            assert set(np.flatnonzero(stays[g])) == {*first, *np.flatnonzero(~image[:n])}
    assert np.flatnonzero(rule.choose(held, jnp.int32(3))[0]).tolist() == [19, 22, 23]      # not even for the text


@pytest.mark.wide
def test_text_stays_and_memory_is_that_of_the_budget() -> None:
    def held(**more: Any) -> Any:
        return Job.begin(Request.read(DEEP, PROMPTS, cache=make("plphp", **GIVEN, **more),
                                      max_new_tokens=3)).state.cache

    everything, some = held(), held(budget=24)
    for row, prompt in enumerate(PROMPTS):
        text = [i for i, token in enumerate(prompt[:-1]) if not 3 <= token <= 9]
        for layer in range(2):
            for g in range(2):
                positions = np.asarray(everything.positions[layer])[row, g]
                assert set(text) <= set(positions[positions >= 0].tolist())
                image = np.sum(positions >= 0) - len(text)
                assert image in [int(share * (len(prompt) - 1 - len(text))) for share in (0.25, 0.5, 0.75)]
    assert some.kv[0].shape[2] == 24 + 4 < everything.kv[0].shape[2]


@pytest.mark.wide
def test_without_an_image_nothing_goes() -> None:
    text = [[token if not 3 <= token <= 9 else 1 for token in prompt] for prompt in PROMPTS]
    out = dx.generate(DEEP, text, cache=make("plphp", **GIVEN), max_new_tokens=6, logprobs=0)
    plain = dx.generate(DEEP, text, max_new_tokens=6, logprobs=0)
    assert out.logprobs is not None and plain.logprobs is not None
    assert out.tokens.tolist() == plain.tokens.tolist()
    np.testing.assert_allclose(out.logprobs.raw, plain.logprobs.raw, atol=1e-5)
