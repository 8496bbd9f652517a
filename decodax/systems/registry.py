"""What an entry of the table is, how makers register, and how a name becomes an algorithm."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
from collections.abc import Callable
from typing import Any, Literal

from decodax.core.types import Algorithm
from decodax.speculative import Rejection, SeedExact, shapes
from decodax.speculative.verify import Guarantee

Needs = Literal["nothing", "a model", "a draft model", "a model and a draft model", "samples",
                "a draft model and samples", "a diffusion model", "a diffusion model and a draft model"]
"""What a maker must be given: nothing, the target itself (`lm`), a smaller model with its tokenizer (`draft`), both,
with a tokenizer each, the target and samples of the texts to come (its options say how), those and a draft model, or a
target that fills masks (`lm`), alone or with an autoregressive one (`draft`)."""

DRAFT: Needs = "a draft model"
TARGET: Needs = "a model"
BOTH: Needs = "a model and a draft model"
SAMPLED: Needs = "a draft model and samples"
FILLING: Needs = "a diffusion model"
DIFFUSION: Needs = "a diffusion model and a draft model"
LINEAR, TREE, SELF, THEORY = "speculative-linear", "speculative-tree", "speculative-self", "speculative-theory"
EXACT, REJECTION, CHAIN = SeedExact(), Rejection(), shapes.Chain(4)
JACOBI, BATCH, BLOCKWISE = "parallel-jacobi", "batching-scheduling", "blockwise-parallel"


@dataclasses.dataclass(frozen=True)
class System:
    """A published system.

    Attributes:
        name: what it is chosen by. title: the paper's. authors: and year. family: as in the field's surveys.
        guarantee: of the output, as the verifier states it. needs: what `make` must be given.
        make: builds the algorithm from `lm`, `draft` and the options that its signature names.
        summary: one line.
        alias_of: the name of the entry that this is another name for, or None. An alias builds what that entry builds;
            its summary says what its own paper adds.
    """

    name: str
    title: str
    authors: str
    family: str
    guarantee: Guarantee
    needs: Needs
    make: Callable[..., Algorithm]
    summary: str
    alias_of: str | None = None

    @property
    def drafts(self) -> bool:
        """Whether it needs a draft model."""
        return self.needs in (DRAFT, BOTH, SAMPLED, DIFFUSION)

    @property
    def options(self) -> dict[str, Any]:
        """What can be set, with defaults."""
        given = inspect.signature(self.make).parameters.values()
        return {p.name: p.default for p in given if p.name not in ("lm", "draft")}


SYSTEMS: dict[str, System] = {}
"""All of them, by name."""


def system(name: str, lm: Any = None, draft: Any = None, **options: Any) -> Algorithm:
    """The algorithm of a published system.

    Args:
        name: one of `SYSTEMS`.
        lm: what `load` gave, for systems that look at the target: its layers, or what its rounds cost.
        draft: a smaller model from `load`, for systems that draft with one.
        options: the system's own; `SYSTEMS[name].options` lists them with their defaults.

    Raises:
        ValueError: an unknown name (near ones are listed), a model that is missing, or an option it does not take.
    """
    found = SYSTEMS.get(name)
    if found is None:
        near = difflib.get_close_matches(name, SYSTEMS, n=4, cutoff=0.5)
        near += [n for n in SYSTEMS if name.lower() in n and n not in near]
        raise ValueError(f"system: unknown name {name!r}; " + (f"near ones: {', '.join(near)}" if near else
                                                               f"takes one of {', '.join(SYSTEMS)}"))
    needed = {"lm": lm} if found.needs not in ("nothing", DRAFT) else {}
    needed |= {"draft": draft} if found.drafts else {}
    if missing := [f"{how}=decodax.load(...)" for how, given in needed.items() if given is None]:
        raise ValueError(f"system: {name!r} needs {found.needs}; give {' and '.join(missing)}")
    if unknown := sorted(options.keys() - found.options.keys()):
        raise ValueError(f"system: {name!r} takes no option {unknown[0]!r}; takes "
                         f"{', '.join(f'{k}={v!r}' for k, v in found.options.items()) or 'none'}")
    given = {"lm": lm, "draft": draft}
    takes = inspect.signature(found.make).parameters
    return found.make(**{k: v for k, v in given.items() if k in takes}, **options)


def parse(text: str) -> tuple[str, dict[str, Any]]:
    """The name and the options of `NAME[:OPTION=VALUE,...]`, as the command line writes a system.

    Raises:
        ValueError: an unknown name (near ones are listed), an option that the system does not take, or a value that is
            no number, text, or tuple of them.

    >>> parse("prompt-lookup:length=5,max_ngram=2")
    ('prompt-lookup', {'length': 5, 'max_ngram': 2})
    """
    name, _, given = text.partition(":")
    if name not in SYSTEMS:
        system(name)                                    # raises, and lists near ones
    try:
        call: Any = ast.parse(f"dict({given})", mode="eval").body
        options = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        if call.args or None in options:
            raise ValueError("a value without a name")
    except (SyntaxError, ValueError, AttributeError, RecursionError, MemoryError) as error:
        raise ValueError(f"{text}: takes NAME:OPTION=VALUE,... with numbers or tuples of them") from error
    if unknown := sorted(options.keys() - SYSTEMS[name].options.keys()):
        raise ValueError(f"{text}: takes no option {unknown[0]}; takes "
                         f"{', '.join(SYSTEMS[name].options) or 'none'}")
    return name, options


def entry(name: str, title: str, authors: str, family: str, summary: str, needs: Needs = "nothing",
          guarantee: Guarantee = "seed-exact") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers the maker below it; the fields of `System`."""
    def add(make: Callable[..., Any]) -> Callable[..., Any]:
        assert name not in SYSTEMS
        SYSTEMS[name] = System(name, title, authors, family, guarantee, needs, make, summary)
        return make

    return add


def alias(name: str, of: str, title: str, authors: str, family: str, summary: str) -> None:
    """Registers another paper's name for what stands under `of`."""
    assert name not in SYSTEMS and SYSTEMS[of].alias_of is None
    SYSTEMS[name] = dataclasses.replace(SYSTEMS[of], name=name, title=title, authors=authors, family=family,
                                        summary=summary, alias_of=of)
