"""Selections by tables and pools."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from decodax import caches
from decodax.cache import KVLayer
from decodax.caches import HeldLayer
from decodax.caches.evict.heads.headkv import head_sizes
from decodax.caches.evict.scope import DecodePool
from decodax.caches.evict.scores import Gathered
from decodax.caches.evict.snapkv import WindowAttention
from decodax.engine.batch import Job
from decodax.engine.request import Request
from decodax.io.load import LM
from decodax.train import Probe, fit_heads, fit_layers
from decodax.train.probe import num_dropped
from tests.caches.evict.lookahead import MODEL
from tests.caches.evict.pressed import TEXTS, weights
from tests.caches.small import DEEP

WANTED = json.loads((Path(__file__).parents[1] / "expected" / "scope.json").read_text())


@pytest.mark.wide
@pytest.mark.parametrize("scheme", ["slide", "adaptive"])
def test_a_pool_keeps_what_scope_keeps(scheme: str) -> None:
    """Step by step on random keys and queries, of two heads, with a prompt of 6 tokens."""
    random = np.random.RandomState(7)
    keys, queries = random.standard_normal((2, 2, 60, 8)).astype(np.float32)
    rule = DecodePool(WindowAttention(1, 1), 5 if scheme == "slide" else 40, 3,
                      "at once" if scheme == "slide" else "by steps", 4)
    kept = [list(range(6))] * 2
    for step, at in enumerate(range(6, 50)):
        kept = [[*own, at] for own in kept]
        held = [np.pad(np.array(own), (0, 64 - len(own)), constant_values=-1) for own in kept]
        taken = np.stack([key[own] for key, own in zip(keys, held, strict=True)])
        layer = HeldLayer(keys=jnp.asarray(taken), values=jnp.asarray(taken), positions=jnp.asarray(np.stack(held)),
                          count=jnp.array([len(own) for own in kept]), length=jnp.array(at + 1),
                          prompt_length=jnp.array(6), since=jnp.array(at), gathered=Gathered(), outputs=None, layer=0,
                          depth=1, shape=KVLayer(2, 8), queries=jnp.asarray(queries[None, :, at]) / 8 ** 0.5)
        stays = np.asarray(rule.choose(layer, jnp.array(6)))
        kept = [[int(p) for p in own[mask]] for own, mask in zip(held, stays, strict=True)]
        if str(step) in WANTED["kept"][scheme]:
            assert kept == WANTED["kept"][scheme][str(step)]


def test_heads_share_by_their_importance() -> None:
    """As HeadKV's code: a third of 30 is every head's, and 20 a head are shared."""
    assert head_sizes(((0.1, 0.4), (0.5, 0.0)), 32, 2, 1.5, 1.0) == ((20, 44), (52, 12))
    with pytest.raises(ValueError, match=r"^heads: got none, takes the importance of each head"):
        caches.make("headkv")


def test_layers_keep_the_same_part_of_the_attention() -> None:
    """As PrefixKV's search says, on attention that is spread more from layer to layer."""
    for case in json.loads((Path(__file__).parents[1] / "expected" / "prefixkv.json").read_text())["cases"]:
        (layers, length), random = case["shape"], np.random.RandomState(case["seed"])
        paid = (random.gamma(0.3 + 0.4 * np.arange(layers)[:, None], size=(layers, length)) + 1e-3).round(4)
        assert num_dropped(paid, case["share"], case["sinks"]).tolist() == case["dropped"]


@pytest.mark.wide
def test_shares_of_layers_are_measured_on_texts() -> None:
    tokens = np.random.default_rng(0).integers(0, 16, 60).tolist()
    shares = fit_layers(DEEP, [tokens, tokens[:40]], 0.4)
    assert len(shares) == 2 and abs(np.mean(shares) - 0.4) < 0.03
    job = Job.begin(Request.read(DEEP, [tokens], cache=caches.make("prefixkv", layers=shares), max_new_tokens=4))
    assert [int(count[0, 0]) for count in job.state.cache.count] == [59 - round(59 * (1 - share)) for share in shares]
    for expected, wrong in (
            (r"^texts: got none", lambda: fit_layers(DEEP, [])),
            (r"^texts: got one of 6 tokens, takes more than 6", lambda: fit_layers(DEEP, [tokens[:6]])),
            (r"^share: got 1, takes a number between 0 and 1", lambda: fit_layers(DEEP, [tokens], 1)),
            (r"^layers: got none, takes the share of each layer", lambda: caches.make("prefixkv"))):
        with pytest.raises(ValueError, match=expected):
            wrong()


@pytest.mark.wide
@pytest.mark.parametrize("case", range(2))
def test_the_tokens_of_prefixkv_are_kept(case: int) -> None:
    wanted = json.loads((Path(__file__).parents[1] / "expected" / "prefixkv.json").read_text())["kept"][case]
    lm = LM(model=MODEL, params=weights(MODEL), vocab_size=320)
    for text, layers in zip(TEXTS, wanted["kept"], strict=True):
        shares = fit_layers(lm, [text], 1 - wanted["removed"])
        cache: Any = Job.begin(Request.read(lm, [[*text, 0]], cache=caches.make("prefixkv", layers=shares),
                                            max_new_tokens=1)).state.cache
        for layer, bits in enumerate(layers):
            kept = np.unpackbits(np.frombuffer(bytes.fromhex(bits), np.uint8))[:len(text)]
            for found in np.asarray(cache.positions[layer][0]):
                np.testing.assert_array_equal(found[found >= 0], np.flatnonzero(kept))


def test_importance_is_the_attention_to_the_answer() -> None:
    tokens = np.random.default_rng(0).integers(0, 16, 40).tolist()
    heads = fit_heads(DEEP, [Probe(tokens, 10, 14), Probe(tokens[:30], 2, 9)])
    assert np.shape(heads) == (2, 2) and abs(np.sum(heads) - 1) < 1e-9
    np.testing.assert_allclose(fit_heads(DEEP, [Probe(tokens, 0, 40)]), 0.25, rtol=1e-5)    # all attention
    with pytest.raises(ValueError, match=r"^probes: got an answer from 9 to 5 in 40 tokens"):
        fit_heads(DEEP, [Probe(tokens, 9, 5)])
