"""The methods that `decodax compare` runs, by its arguments, with the draft model or trained drafter of each."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from decodax.bench.compare import Contender
    from decodax.io.load import LM


def parted(drafts: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits the arguments of `--draft` into those that are models and those that are trained drafters, and returns
    these two lists.

    Raises:
        ValueError: several are models.
    """
    from decodax.io.drafters import holds_drafter

    models = [path for path in drafts if not holds_drafter(path)]
    if len(models) > 1:
        raise ValueError(f"draft: got the models {' and '.join(models)}, takes one, and any number of trained drafters")
    return models, [path for path in drafts if holds_drafter(path)]


def systems_of(names: Sequence[str], model: str, drafters: Mapping[str, Any] = {}
               ) -> dict[str, tuple[str, dict[str, Any]]]:
    """Returns the method and its options for each `NAME[:OPTION=VALUE,...]`. "all" is every method that is measured
    against plain decoding, under one of its names; of those with a trained drafter, those in `drafters` and those that
    have a shipped one for the model with the name `model`, and none of those with a tuned draft model."""
    from decodax.common.registry import ALGORITHMS
    from decodax.io.drafters import shipped_drafter

    every = [name for name, entry in ALGORITHMS.items()
             if name != "autoregressive" and not entry.alias_of and "samples" not in entry.needs
             and entry.family != "search" and "diffusion" not in entry.needs
             and entry.needs != "a tuned draft model"
             and (not entry.takes_drafter or any(system in drafters or shipped_drafter(system, model)
                                                 for system in {name, *entry.systems}))]
    return {given: ALGORITHMS.parse(given) for name in names for given in (every if name == "all" else [name])}


def contender_of(name: str, options: dict[str, Any], lm: LM, draft: LM | None,
                 drafters: Mapping[str, Any] = {}) -> Contender:
    """Returns the algorithm that `decodax compare` runs for a method. If the method has an option for the batch size,
    returns a function of the batch size that makes it.

    Args:
        name: the method.
        options: its options.
        lm: the model.
        draft: the draft model.
        drafters: trained drafters by the methods that they were trained for.
    """
    from decodax.common.registry import ALGORITHMS

    entry = ALGORITHMS[name]
    build = functools.partial(ALGORITHMS.make, name, lm, draft_among(name, draft, drafters), **options)
    return (lambda batch: build(batch=batch)) if "batch" in entry.options.keys() - options.keys() else build()


def draft_among(name: str, draft: Any, drafters: Mapping[str, Any]) -> Any:
    """Returns the draft model or the trained drafter with which a method drafts, or None. A method that takes either
    drafts with the first of `drafters`, which are trained ones by their methods, else with the model `draft`."""
    from decodax.common.registry import ALGORITHMS

    entry = ALGORITHMS[name]
    if entry.takes_drafter:
        return next((drafters[system] for system in entry.systems if system in drafters), None)
    if entry.takes_draft:
        return draft
    return next(iter(drafters.values()), draft) if entry.may_draft else None


def drafts_named(chosen: Mapping[str, tuple[str, Any]], draft: Any, drafters: Mapping[str, Any], model: str = ""
                 ) -> str | None:
    """Returns the names of the draft models and trained drafters of a comparison, each with the methods that draft with
    it if there are several; None without any. `chosen` has the method of each contender, and `model` is the name of
    the model, whose shipped drafters are used where no other is given."""
    from decodax.common.registry import ALGORITHMS
    from decodax.io.drafters import shipped_drafter

    whose: dict[str, list[str]] = {}
    for given, (name, _) in chosen.items():
        if (own := draft_among(name, draft, drafters)) is not None:
            whose.setdefault(own.name, []).append(given)
        elif path := next(filter(None, (shipped_drafter(system, model) for system in ALGORITHMS[name].systems
                                        if ALGORITHMS[name].takes_drafter)), None):
            whose.setdefault(path.name, []).append(given)
    if len(whose) < 2:
        return next(iter(whose), None)
    return ", ".join(f"{own} for {' and '.join(givens)}" for own, givens in whose.items())
