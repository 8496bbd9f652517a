"""A class that is made of other drafts, methods or models loses nothing of them. The tests find all such classes."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable
from typing import Any, ClassVar, Self

import jax
import numpy as np
import pytest

import decodax
from decodax.algorithms.beams.algorithm import BeamSearch
from decodax.algorithms.beams.lexical import DynamicBeams, GridBeams, _Lexical
from decodax.algorithms.beams.seal import CorpusBeams
from decodax.algorithms.diffusion.round import Round
from decodax.algorithms.diffusion.samplers.assd import Pass
from decodax.algorithms.parallel.cascade import _Order
from decodax.algorithms.speculative import NOTHING, Adaptive, Automatic, Speculative
from decodax.algorithms.speculative.adaptive.arms import _Arm
from decodax.algorithms.speculative.adaptive.fit_trees import Counted
from decodax.algorithms.speculative.adaptive.predictor import Watched
from decodax.algorithms.speculative.adaptive.stoppers import AcceptanceHead, DraftLength
from decodax.algorithms.speculative.drafter import Drafter
from decodax.algorithms.speculative.drafts import (
    DraftExit,
    Fallback,
    Forced,
    Merged,
    SpecBranch,
    Staged,
    TargetRooted,
)
from decodax.algorithms.speculative.drafts.model.tli import Intersection
from decodax.algorithms.speculative.drafts.text.ngram import NGramModel
from decodax.algorithms.speculative.grown import Grown, Trimmed
from decodax.algorithms.speculative.halves import _Ahead, _There
from decodax.algorithms.speculative.heads.block_draft_refinement import BlockLattice, Rescored
from decodax.algorithms.speculative.heads.mumo import UnitCandidates
from decodax.algorithms.speculative.reflective import Reflective
from decodax.algorithms.speculative.source import Draft, Source
from decodax.algorithms.speculative.trees import Fixed
from decodax.algorithms.speculative.verify import Verifier
from decodax.cache.wrapper import Combined, Wrapper
from decodax.core.algorithm import (
    Algorithm,
    Concludes,
    Grouped,
    GuidesItself,
    LearnsFromPrompt,
    Paced,
    Varies,
    prefill_observer,
)
from decodax.core.around import Around, AroundModel
from decodax.core.cache import Cache, CacheConfig, Feature
from decodax.core.capabilities import DraftBase, HoldsViews, PromptPhase, Refreshes, Truncates
from decodax.core.composed import Composed, parts_of
from decodax.core.target import RunsTarget, for_target
from decodax.core.types import Model
from decodax.engine.piggyback import Mixed, Piggyback

for module in pkgutil.walk_packages(decodax.__path__, "decodax."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)


def kinds(cls: type) -> list[type]:
    """The classes of the library that derive from it."""
    found = [x for sub in cls.__subclasses__() for x in (sub, *kinds(sub))]
    return [x for x in dict.fromkeys(found) if x.__module__.startswith("decodax.")]


def below(cls: type) -> list[type]:
    """Those of them that can be made."""
    return [x for x in kinds(cls) if not inspect.isabstract(x)]


def holding(cls: type, *bases: type) -> dict[str, str]:
    """The fields of a dataclass whose annotation names one of the kinds, or what derives from them."""
    names = {x.__name__ for base in bases for x in (base, *kinds(base))}
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    return {f.name: str(f.type) for f in fields if names & set(re.findall(r"\w+", str(f.type)))}


def public(cls: type) -> set[str]:
    return {name for name in vars(cls) if not name.startswith("_")}


@dataclasses.dataclass(frozen=True)
class Told(RunsTarget, Drafter):
    """What is asked of it shows in what it is then."""

    number: int = 1
    exact: bool = False     # type: ignore[assignment]
    weighed: bool = True
    budget: int = 0
    size: int = 0
    network: int = 0
    length: ClassVar[int] = 2
    cache_needs: ClassVar[frozenset[Feature]] = frozenset(("truncation",))

    @property
    def weights(self) -> Any:
        return np.float32(self.number) if self.weighed else None

    @property
    def prefill_observer(self) -> Self:
        return self

    def bare(self) -> Self:
        return dataclasses.replace(self, weighed=False)

    def with_length(self, budget: int) -> Self:
        return dataclasses.replace(self, budget=budget)

    def for_vocabulary(self, size: int) -> Self:
        return dataclasses.replace(self, size=size)

    def for_target(self, model: Any) -> Self:
        return dataclasses.replace(self, network=model)

    def wrap_model(self, model: Any) -> Any:
        return (*model, self.number)


class ToldDraft(Told, Draft):
    propose: Any = None


class ToldSource(Told, Source):
    start: Any = None
    extend: Any = None


ToldDraft.__abstractmethods__ = ToldSource.__abstractmethods__ = frozenset()        # type: ignore[attr-defined]
DRAFT, ONE, TWO = ToldDraft(1), ToldSource(1), ToldSource(2)
LINKED = (NOTHING, Speculative(ONE), Speculative(TWO, shape=Fixed.balanced(2, 2)))

MADE: dict[type, Callable[[], Any]] = {
    Grown: lambda: Grown(ONE), Trimmed: lambda: Trimmed(DRAFT, 1),
    SpecBranch: lambda: SpecBranch(ONE), TargetRooted: lambda: TargetRooted(ONE), DraftExit: lambda: DraftExit(ONE),
    UnitCandidates: lambda: UnitCandidates(ONE), Rescored: lambda: Rescored(ONE, TWO),  # type: ignore[arg-type]
    BlockLattice: lambda: BlockLattice(ONE, NGramModel(5, 3), 2),
    Watched: lambda: Watched(ONE, 2, 3), AcceptanceHead: lambda: AcceptanceHead(ONE, {}),
    DraftLength: lambda: DraftLength(ONE, {}),
    _Ahead: lambda: _Ahead(SpecBranch(ONE)),
    Fallback: lambda: Fallback(DRAFT, TWO), Merged: lambda: Merged((ONE, TWO)), Forced: lambda: Forced(base=DRAFT),
    Staged: lambda: Staged(ONE, TWO), Intersection: lambda: Intersection(ONE),      # type: ignore[arg-type]
    Speculative: lambda: Speculative(ONE), Reflective: lambda: Reflective(ONE, probe=(1,)),
    BeamSearch: lambda: BeamSearch(2, draft=ONE),
    Adaptive: lambda: Adaptive(LINKED, Automatic((1.0,) * 3)),
    _Arm: lambda: _Arm(MADE[Adaptive](), 1), Counted: lambda: Counted(Speculative(ONE)),
    Piggyback: lambda: Piggyback(Speculative(ONE), 64, 16, 1), Mixed: lambda: Mixed(Speculative(ONE), 64, 16, 1)}
WITHOUT = {Round, _Order, Pass}
"""Those around methods that take no draft."""
REFUSING = {cls: functools.partial(cls, 2, draft=ONE, **given) for cls, given in (
    (CorpusBeams, {}), *((cls, {"phrases": [[1]]}) for cls in (_Lexical, DynamicBeams, GridBeams)))}
"""Those that inherit a field for drafts and refuse one."""
OWN = {(Intersection, "weights"), (Intersection, "for_vocabulary"), (Intersection, "cache_needs")}
"""What one answers itself: Intersection's draft model has a vocabulary, weights and a cache of its own."""

HOLDERS = [cls for base in (Drafter, Algorithm) for cls in below(base) if holding(cls, Drafter, Algorithm)]


def told(whole: Any) -> list[Told]:
    """The innermost drafts that it is made of."""
    return [x for part in parts_of(whole) for x in ([part] if isinstance(part, Told) else told(part))]


def markers(weights: Any) -> set[float]:
    return {float(x) for x in jax.tree.leaves(weights)} & {1.0, 2.0}


def test_a_field_that_may_hold_a_draft_says_so() -> None:
    """Else the walk below would not find it. These of type Any hold networks, weights and kinds of caches."""
    open_ones = {(cls.__name__, f.name) for base in (Drafter, Algorithm) for cls in below(base)
                 if dataclasses.is_dataclass(cls) for f in dataclasses.fields(cls) if str(f.type) == "Any"}
    assert {name for _, name in open_ones} <= {"model", "weights", "parameters", "projection", "packed", "kind", "warm"}


def test_the_wrappers_are_found() -> None:
    assert {Adaptive, _Arm, Counted, Fallback, Merged, Staged, Forced, Piggyback, Round} <= set(HOLDERS)


@pytest.mark.parametrize("cls", HOLDERS)
def test_a_wrapper_of_drafts_forwards_what_is_asked_of_it(cls: type) -> None:
    if cls in WITHOUT:
        assert issubclass(cls, Around)
        return
    if cls in REFUSING:
        with pytest.raises(ValueError, match=r"draft: got .*takes none"):
            REFUSING[cls]()
        return
    whole = MADE[cls]()
    inner = told(whole)
    assert inner, "takes fields that hold its drafts"
    numbers = {float(x.number) for x in inner}
    if (cls, "weights") not in OWN:
        assert markers(whole.weights) >= numbers
        assert not any(x.weighed for x in told(whole.bare())) and len(told(whole.bare())) == len(inner)
    assert {x.budget for x in told(whole.with_length(8))} == {8}
    assert {x.network for x in told(for_target(whole, 7))} == {7}
    assert set(whole.wrap_model(())) == {int(x) for x in numbers}
    needs = whole.traits.needs if isinstance(whole, Algorithm) else whole.cache_needs
    assert (cls, "cache_needs") in OWN or needs >= {"truncation"}
    if isinstance(whole, Drafter):
        assert whole.prefill_observer is not None
        assert not whole.exact
        if (cls, "for_vocabulary") not in OWN:
            assert {x.size for x in told(whole.for_vocabulary(5))} == {5}
    else:
        assert prefill_observer(whole) is not None
        assert whole.traits.guarantee == "approximate"


def test_a_method_around_another_one_is_a_wrapper() -> None:
    around = [cls for cls in below(Algorithm) if holding(cls, Algorithm)]
    assert {cls for cls in around if not issubclass(cls, Around)} == {Adaptive}


@dataclasses.dataclass(frozen=True)
class BesideDraft(Around):
    """Around a method, with a draft of its own in another field."""

    method: Algorithm
    draft: Drafter

    @property
    def inner(self) -> Algorithm:
        return self.method


def test_a_wrapper_with_a_draft_of_its_own_keeps_it() -> None:
    whole = BesideDraft(MADE[Adaptive](), DRAFT)
    variants: Any = whole.variants
    assert [x.inner for x in variants] == list(whole.inner.variants)
    assert {x.draft for x in variants} == {DRAFT}
    beams = BesideDraft(BeamSearch(4), DRAFT).answering(2)
    assert beams == BesideDraft(BeamSearch(4).answering(2), DRAFT)


def test_wrappers_answer_for_all_of_the_contract() -> None:
    """A member that is added to a contract is added to its wrapper, or this fails."""
    can = set().union(*map(public, (LearnsFromPrompt, Varies, Grouped, Concludes, Paced, GuidesItself)))
    assert public(Algorithm) | can | public(Composed) <= public(Around) | public(Composed)
    assert public(Algorithm) & public(Composed) == set()
    assert public(Model) <= public(AroundModel)
    assert public(Verifier) - {"length"} <= public(_There) | {"drawn"}


def test_a_cache_of_caches_answers_for_all_of_the_contract() -> None:
    can = public(PromptPhase) | public(Refreshes) | public(Truncates) | public(DraftBase) | public(HoldsViews)
    assert (public(Cache) | can) - {"commit", "draft_view"} <= public(Combined)      # what is not one for all members
    assert {"commit", "draft_view"} <= public(Wrapper)


def test_kinds_of_caches_around_others_forward_what_they_are_asked() -> None:
    """A config that defines `wrap_model` is exempt: it gives the model its inner config instead of itself."""
    around = [cls for cls in below(CacheConfig) if holding(cls, CacheConfig) and "wrap_model" not in public(cls)]
    assert {cls.__name__ for cls in around} >= {"QuantizedPruningConfig", "Propagation"}
    for cls in around:
        assert {"with_length", "of_model", "beyond"} <= public(cls), cls


def test_models_around_others_are_wrappers() -> None:
    around = [cls for cls in below(Model) if set(holding(cls, Model)) & {"base", "inner", "model"}]
    rest = {cls.__name__ for cls in around if not issubclass(cls, AroundModel)}
    # Phd answers for its copies
    assert rest <= {"Phd"}, rest
