"""Drafts of the target itself on another view of its cache."""

import dataclasses
import functools
from typing import Any

import jax
import pytest

import decodax as dx
from decodax.algorithms.speculative import NOTHING, Automatic, automatic
from decodax.algorithms.speculative.adaptive.fit_trees import Counted
from decodax.algorithms.speculative.drafts import Fallback, Merged, OwnCache, PromptLookup
from decodax.algorithms.speculative.trees import Chain, Fixed
from decodax.caches import make
from decodax.caches.quantize.quantized import QuantizedConfig
from decodax.caches.quantize.quantspec import QuantSpecCodec
from decodax.core import drivers
from decodax.core.capabilities import draft_view
from decodax.models import Diffusion
from tests.caches.small import DEEP, PROMPTS
from tests.matrix import often

QUANTSPEC = QuantizedConfig(QuantSpecCodec(8), 8, "quantspec")
SNAP = make("snapkv", budget=14, window_size=4)


@functools.cache
def run(algorithm: Any = None, cache: Any = None, rows: tuple[int, ...] = (0, 1, 2)) -> Any:
    return dx.generate(DEEP, [PROMPTS[i] for i in rows], algorithm=algorithm, cache=cache, request_ids=rows, seed=5,
                       temperature=[[0.0, 0.9, 0.0][i] for i in rows], max_new_tokens=20)


CASES: dict[str, tuple[Any, Any, Any]] = {      # the method, the cache that is asked for, the cache of plain decoding
    "snapkv": (dx.Speculative(OwnCache(SNAP)), None, None),
    "a tree": (dx.Speculative(OwnCache(SNAP), shape=Fixed.balanced(2, 2, 1)), None, None),
    "choices while decoding": (dx.Speculative(OwnCache(make("h2o", budget=14, every=5))), None, None),
    "a ring": (dx.Speculative(OwnCache(make("streaming-llm", start_size=2, recent_size=8))), None, None),
    "beside codes": (dx.Speculative(OwnCache(SNAP)), make("kivi", group_size=4, residual_length=8),
                     make("kivi", group_size=4, residual_length=8)),
    "quantspec": (dx.algorithms.make("quantspec", DEEP, group=8, weights=None), None, QUANTSPEC),
    "triforce": (dx.algorithms.make("triforce", DEEP, draft=DEEP, budget=20, chunk=4, length=4, sinks=2, recent=10),
                 None, None),
    "triforce, two guesses": (dx.algorithms.make("triforce", DEEP, draft=DEEP, budget=20, chunk=4, length=5, guesses=2,
                                                 sinks=2,
                                        recent=10), None, None),
    "other weights": (dx.algorithms.make("quantspec", DEEP, group=8, weights="int8"), None, QUANTSPEC),
}


@pytest.mark.wide
@pytest.mark.parametrize("case", often(["a tree", "triforce"], CASES))
def test_drafts_on_another_cache_give_the_tokens_of_plain_decoding(case: str) -> None:
    method, asked, held = CASES[case]
    drafted = run(method, asked)
    assert drafted.tokens.tolist() == run(cache=held).tokens.tolist()
    assert drafted.stats.accepted.sum() > 10


@pytest.mark.wide
@pytest.mark.parametrize(("case", "negative"), often([("snapkv", True)], [
    (case, negative) for case in ("snapkv", "a ring", "triforce", "quantspec") for negative in (True, False)]))
def test_drafts_under_guidance_give_the_tokens_of_plain_decoding_under_it(case: str, negative: bool) -> None:
    method, asked, held = CASES[case]
    options: dict[str, Any] = dict(seed=5, temperature=[0.0, 0.9, 0.0], max_new_tokens=12, guidance_scale=1.7,
                                   negative_prompts=[p[::-1] for p in PROMPTS] if negative else None)
    drafted = dx.generate(DEEP, PROMPTS, algorithm=method, cache=asked, **options)
    assert drafted.tokens.tolist() == dx.generate(DEEP, PROMPTS, cache=held, **options).tokens.tolist()
    assert drafted.stats.accepted.sum() > 0


@pytest.mark.full
def test_the_inner_draft_model_does_not_change_the_outer_drafts() -> None:
    method = CASES["triforce"][0]
    alone = dx.Speculative(OwnCache(method.draft.draft.kind), shape=Chain(4))
    for count in ("rounds", "drafted", "accepted"):
        assert getattr(run(method).stats, count).tolist() == getattr(run(alone).stats, count).tolist()


@pytest.mark.full
def test_drafts_do_not_depend_on_batch_mates() -> None:
    method = CASES["choices while decoding"][0]
    alone, together = run(method, rows=(1,)), run(method)
    assert alone.stats.accepted.tolist() == together.stats.accepted[1:2].tolist()


OWN, RING = OwnCache(SNAP), OwnCache(make("streaming-llm", start_size=2, recent_size=8))
BOTH = tuple(dx.Speculative(draft, shape=Chain(3)) for draft in (OWN, RING))
NEVER, ALWAYS = 1e6, 1.0
WRAPPED: dict[str, tuple[Any, Any]] = {     # the method, and the arm whose drafts it verifies
    "adaptive": (dx.algorithms.speculative.Adaptive((NOTHING, BOTH[0]), Automatic((NEVER, ALWAYS))), BOTH[0]),
    "adaptive, two caches": (dx.algorithms.speculative.Adaptive(BOTH, Automatic((ALWAYS, NEVER))), BOTH[0]),
    "adaptive, the other cache": (dx.algorithms.speculative.Adaptive(BOTH, Automatic((NEVER, ALWAYS))), BOTH[1]),
    "fallback": (dx.Speculative(Fallback(PromptLookup(3), OWN, at_least=99, shape=Chain(3))), BOTH[0]),
    "merged": (dx.Speculative(Merged((OWN, OWN), Chain(3))), BOTH[0]),
    "counted": (Counted(dx.Speculative(OWN, shape=Chain(3))), BOTH[0]),
}


@pytest.mark.wide
@pytest.mark.parametrize("case", WRAPPED)
def test_drafts_in_a_wrapper_are_accepted_as_often_as_alone(case: str) -> None:
    """They read their own small cache there, too, and not the whole one, whose drafts would all hold."""
    wrapped, alone = (run(method) for method in WRAPPED[case])
    assert wrapped.tokens.tolist() == alone.tokens.tolist()
    for count in ("rounds", "accepted"):
        assert getattr(wrapped.stats, count).tolist() == getattr(alone.stats, count).tolist()
    assert (alone.stats.accepted < alone.stats.drafted).any()


@pytest.mark.wide
def test_there_are_several_small_caches_beside_the_whole_one() -> None:
    model = dx.algorithms.speculative.Adaptive(BOTH, Automatic((ALWAYS, NEVER))).wrap_model(DEEP.model)
    cache = model.init_cache(2, 64)
    assert all(cache.draft_view(draft.kind).capacity == 64 for draft in (OWN, RING))
    assert type(cache.draft_view(OWN.kind)) is not type(cache.draft_view(RING.kind))
    again = dx.algorithms.speculative.Adaptive((*BOTH, dx.Speculative(OWN, shape=Chain(2))),
                                               Automatic((1.0,) * 3)).wrap_model(DEEP.model)
    assert again == model       # a kind that two arms read stands there once


def test_a_whole_cache_is_not_handed_out_as_a_view() -> None:
    coded = DEEP.model.with_cache(make("kivi", group_size=4, residual_length=8))
    whole, codes = DEEP.model.init_cache(2, 64), coded.init_cache(2, 64)
    with pytest.raises(ValueError, match=r"^cache: drafts read a cache of the kind .*, and none is beside Dense"):
        draft_view(whole, SNAP)
    for cache in (whole, codes):
        with pytest.raises(ValueError, match=r"^cache: (Dense|QuantizedCache) has no smaller view of itself"):
            draft_view(cache)


@pytest.mark.wide
def test_automatic_measures_the_rounds_that_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the cache with all views, with the drafts that look on: the programs are those of its arms."""
    seen = []
    begin = drivers.begin
    monkeypatch.setattr(drivers, "begin", lambda alg, *rest, **more: seen.append(alg) or begin(alg, *rest, **more))
    method = automatic(DEEP, OWN, (2,), batch=2, length=40, repeats=1)
    found = [dataclasses.replace(alg, adaptive=dataclasses.replace(alg.adaptive, controller=method.controller))
             for alg in seen]
    assert found == [*method.with_length(3 * 8 * 2).bare().variants]      # 3 tokens a round, twice 8 rounds


def test_the_draft_view_reads_the_higher_bits() -> None:
    """So that the drafts of the 8 bits' own model are nearly all accepted, and those of 4 bits not all of them."""
    model = DEEP.model.with_cache(QUANTSPEC)
    cache = model.init_cache(2, 64)
    assert cache.draft_view().kind.codec == QuantSpecCodec(8, lower=False) != cache.kind.codec
    assert jax.tree.leaves(cache.draft_view())[0] is jax.tree.leaves(cache)[0]


def test_bad_arguments_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"^cache: got .*but the method brings a cache of its own; takes none"):
        run(CASES["quantspec"][0], SNAP)
    with pytest.raises(ValueError, match=r"^keep: got 'h2o', takes one of snapkv, sink-window"):
        dx.algorithms.make("magicdec", DEEP, keep="h2o")
    with pytest.raises(ValueError, match=r"^model: got type"):
        OwnCache(SNAP).for_target(Diffusion)
