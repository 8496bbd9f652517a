"""Sources whose caches are kept differently draft beside each other as they do alone: some attend to the target's
cache, some to a smaller one beside it or to a view of it, and some have a cache of their own."""

import functools
import itertools
from typing import Any

import pytest

import decodax as dx
from decodax.algorithms.speculative import Adaptive, Automatic
from decodax.algorithms.speculative.drafts import DraftModel, Merged, OwnCache
from decodax.algorithms.speculative.heads import drafting_source
from decodax.algorithms.speculative.trees import Chain
from decodax.caches import make
from decodax.caches.quantize.quantized import QuantizedConfig
from decodax.caches.quantize.quantspec import QuantSpecCodec
from tests.caches.small import DEEP, PROMPTS
from tests.drafters.fresh import fresh
from tests.matrix import often

CODES = QuantizedConfig(QuantSpecCodec(8), 8, "quantspec")
SOURCES: dict[str, Any] = {
    "layers": lambda: dx.drafts.LayerSkip(1), "searched layers": dx.drafts.CLaSp, "an exit": dx.drafts.DynamicExit,
    "few tokens": lambda: OwnCache(make("snapkv", budget=14, window_size=4)),
    "a ring": lambda: OwnCache(make("streaming-llm", start_size=2, recent_size=8)),
    "choices": lambda: OwnCache(make("h2o", budget=14, every=5)),
    "fewer bits": lambda: OwnCache(CODES, alone=True),
    "a model": lambda: DraftModel(DEEP),
    **{name: functools.partial(lambda name: drafting_source(DEEP, fresh(name, DEEP)), name)
       for name in ("eagle-3", "longspec", "mixture-of-attentions", "pass", "dflash")}}
ALONE = {"few tokens", "a ring", "choices", "fewer bits"}
"""Sources with which the target gets another cache."""
# CLaSp needs a cache that forgets the end of a text, and mixture-of-attentions a dense one: quantspec's is neither
PAIRS = [pair for pair in itertools.combinations(SOURCES, 2) if ALONE.intersection(pair)
         and pair not in (("searched layers", "fewer bits"), ("fewer bits", "mixture-of-attentions"))]
ALIKE = [pair for pair in PAIRS if "fewer bits" not in pair]
"""Pairs that both give the tokens of plain decoding. Adaptive methods refuse arms with different guarantees."""
SHOWN = [("layers", "few tokens"), ("searched layers", "a ring"), ("layers", "fewer bits"), ("few tokens", "eagle-3"),
         ("few tokens", "mixture-of-attentions")]
NEVER, ALWAYS = 1e6, 1.0


@functools.cache
def source(name: str) -> Any:
    return SOURCES[name]()


@functools.cache
def run(algorithm: Any, cache: Any = None) -> Any:
    return dx.generate(DEEP, PROMPTS, algorithm=algorithm, cache=cache, seed=5, temperature=[0.0, 0.9, 0.0],
                       max_new_tokens=12)


@pytest.mark.wide
@pytest.mark.parametrize(("one", "other"), often(SHOWN, PAIRS))
def test_merged_drafts_on_two_caches_give_the_tokens_of_plain_decoding(one: str, other: str) -> None:
    pair = (one, other)
    plain = run(None, CODES if "fewer bits" in pair else None)
    for both in (pair, pair[::-1]):
        merged = run(dx.Speculative(Merged(tuple(map(source, both)), Chain(2))))
        assert merged.tokens.tolist() == plain.tokens.tolist()
        assert merged.stats.accepted.sum() > 0


@pytest.mark.wide
@pytest.mark.parametrize(("one", "other"), often(SHOWN[:2], ALIKE))
def test_drafts_beside_another_cache_are_accepted_as_often_as_alone(one: str, other: str) -> None:
    pair = (one, other)
    arms = tuple(dx.Speculative(source(name), shape=Chain(2)) for name in pair)
    for alone, costs in zip(arms, ((ALWAYS, NEVER), (NEVER, ALWAYS)), strict=True):
        beside, wanted = run(Adaptive(arms, Automatic(costs))), run(alone)
        assert beside.tokens.tolist() == wanted.tokens.tolist()
        for count in ("rounds", "accepted"):
            assert getattr(beside.stats, count).tolist() == getattr(wanted.stats, count).tolist()
