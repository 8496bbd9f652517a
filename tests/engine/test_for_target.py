"""A method that runs the target's network takes it from the call: the user names the model once."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

import decodax as dx
from decodax.algorithms.contrastive import dola
from decodax.algorithms.speculative import NOTHING, Adaptive, Automatic
from decodax.algorithms.speculative.adaptive.fit_trees import Counted
from decodax.algorithms.speculative.drafts import DraftExit, Fallback, Merged, PromptLookup, Staged, TargetRooted
from decodax.algorithms.speculative.drafts.self.knn_ssd import Anchors
from decodax.algorithms.speculative.heads.source import HeadWeights, TrainedHead
from decodax.algorithms.speculative.trees import Chain
from decodax.core import drivers
from decodax.core.composed import parts_of
from decodax.core.resized import Resized
from decodax.core.target import RunsTarget, for_target
from decodax.models.drafters.stack import MedusaHead
from decodax.sampling.guidance import Guided
from tests.caches.small import DEEP, PROMPTS
from tests.small_models import net

OTHER = net(4, 3)
SKIP = dx.drafts.LayerSkip(1)
SNAP = dx.drafts.OwnCache(dx.caches.make("snapkv", budget=14, window_size=4))
ANCHORS = Anchors(vectors=jnp.ones((1, 16)), keep=jnp.ones((1, 2, 2), bool).at[0, 1].set(False))
THREE = (NOTHING, dx.Speculative(SKIP, shape=Chain(2)), dx.Speculative(dx.drafts.CLaSp(), shape=Chain(2)))

METHODS: dict[str, Any] = {
    "layer skip": dx.Speculative(SKIP), "half of the layers": dx.Speculative(dx.drafts.LayerSkip()),
    "clasp": dx.Speculative(dx.drafts.CLaSp()), "dynamic exit": dx.Speculative(dx.drafts.DynamicExit()),
    "anchors": dx.Speculative(dx.drafts.KNNSkip(ANCHORS)), "own cache": dx.Speculative(SNAP),
    "draft exit": dx.Speculative(DraftExit(SKIP)), "staged": dx.Speculative(Staged(SNAP, PromptLookup(2), 3)),
    "rooted": dx.Speculative(TargetRooted(SKIP)), "fallback": dx.Speculative(Fallback(PromptLookup(3), SKIP)),
    "merged": dx.Speculative(Merged((SKIP, dx.drafts.DynamicExit()))),
    "counted": Counted(dx.Speculative(SKIP, shape=Chain(2))),
    "adaptive": Adaptive(THREE, Automatic((9.0, 1.0, 2.0)))}


@functools.cache
def plain(which: str) -> list[list[int]]:
    out = dx.generate({"deep": DEEP, "other": OTHER}[which], PROMPTS, max_new_tokens=12)
    return [row.tolist() for row in out.tokens]


def targets(whole: Any) -> list[Any]:
    """Returns the networks of all parts that run the target's."""
    return [*([whole.target] if isinstance(whole, RunsTarget) else []),
            *(x for part in parts_of(whole) for x in targets(part))]


@pytest.mark.parametrize("name", METHODS)
def test_every_part_of_a_method_gets_the_target(name: str) -> None:
    before, after = targets(METHODS[name]), targets(for_target(METHODS[name], DEEP))
    assert len(before) == len(after) > 0
    assert set(before) == {None} and set(after) == {DEEP.model}


@pytest.mark.wide(but=("layer skip", "own cache"))
@pytest.mark.parametrize("name", METHODS)
def test_drafts_of_the_target_itself_take_it_from_the_call(name: str) -> None:
    found = dx.generate(DEEP, PROMPTS, max_new_tokens=12, algorithm=METHODS[name])
    assert found.tokens.tolist() == plain("deep")
    assert found.stats.accepted.sum() > 0


@pytest.mark.wide
def test_one_object_decodes_on_two_targets_in_turn() -> None:
    for name in ("half of the layers", "clasp", "merged"):
        for which, lm in (("deep", DEEP), ("other", OTHER), ("deep", DEEP)):
            assert dx.generate(lm, PROMPTS, max_new_tokens=12, algorithm=METHODS[name]).tokens.tolist() == plain(which)


def test_a_bound_method_has_the_target() -> None:
    assert targets(dx.bind(DEEP, METHODS["merged"], capacity=64).algorithm) == [DEEP.model] * 2
    kind = dx.caches.make("kivi", group_size=4, residual_length=8)
    bound = dx.bind(DEEP, METHODS["layer skip"], cache=kind, capacity=64)
    assert targets(bound.algorithm) == [DEEP.model.with_cache(kind)]


def test_what_has_a_target_keeps_it() -> None:
    bound = for_target(METHODS["merged"], OTHER)
    for other in (DEEP, Resized(DEEP.model, None, None)):       # the second has no layers to run
        assert targets(for_target(bound, other)) == [OTHER.model] * 2


def test_drafts_run_below_guidance_and_readouts() -> None:
    assert targets(for_target(METHODS["merged"], Guided(DEEP.model))) == [DEEP.model] * 2
    read_out = dola(OTHER, "low")
    assert targets(for_target(METHODS["merged"], read_out)) == [OTHER.model] * 2
    assert targets(for_target(METHODS["own cache"], read_out)) == [read_out.model]
    head: Any = TrainedHead(MedusaHead((), 16, width=16), HeadWeights({}))
    assert targets(head.for_target(Guided(DEEP.model))) == [DEEP.model]


@pytest.mark.wide
def test_drafts_below_a_readout_give_the_tokens_of_the_readout() -> None:
    lm = dola(OTHER, "low")
    found = dx.generate(lm, PROMPTS, max_new_tokens=12, algorithm=METHODS["layer skip"])
    assert found.tokens.tolist() == dx.generate(lm, PROMPTS, max_new_tokens=12).tokens.tolist()


FAULTS: list[tuple[str, Callable[[], Any]]] = [
    (r"^LayerSkip: the target is not known yet; call for_target\(model\) first", lambda: SKIP.keep),
    (r"^OwnCache: the target is not known yet; call for_target\(model\) first", lambda: SNAP.model),
    ("^layer: got 9, takes 1 to 2$", lambda: dx.generate(DEEP, PROMPTS,
                                                         algorithm=dx.Speculative(dx.drafts.LayerSkip(9)))),
    ("^layer: got 9, takes 1 to 2$", lambda: dx.bind(DEEP, "layerskip:layer=9")),
    (r"^skip: got \(7,\), takes layers from 0 to 1$", lambda: dx.bind(DEEP, dx.Speculative(Fallback(
        PromptLookup(3), dx.drafts.LayerSkip(skip=(7,)))))),
    ("^skips: got 2, takes 1 to 1$", lambda: dx.bind(DEEP, "clasp:skips=2"))]


@pytest.mark.parametrize(("message", "call"), FAULTS)
def test_what_does_not_fit_the_target_is_refused_before_anything_is_compiled(message: str, call: Any) -> None:
    before = drivers.compiled()
    with pytest.raises(ValueError, match=message):
        call()
    assert drivers.compiled() == before


@pytest.mark.parametrize("make", [dx.drafts.LayerSkip, dx.drafts.CLaSp, dx.drafts.DynamicExit, dx.drafts.KNNSkip,
                                  dx.drafts.OwnCache])
def test_a_model_is_refused_by_name(make: Any) -> None:
    first = next(field.name for field in dataclasses.fields(make) if not field.kw_only)
    for given in (DEEP, DEEP.model):
        with pytest.raises(TypeError, match=f"^{first}: got .*; {make.__name__} takes no model"):
            make(given)
