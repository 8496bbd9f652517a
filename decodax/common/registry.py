"""The table of decoding methods by name: what an entry is, how makers register, how a name becomes an algorithm.

There is one table. The library's own makers, those of masked diffusion and those of a user's package all fill it with
the decorator `entry`, at any time. `decodax.algorithms.entries` imports the library's own.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import re
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, get_args

from decodax.common.options import built

Guarantee = Literal["seed-exact", "distribution-exact", "approximate"]
"""What holds of a method's output: see `Algorithm.guarantee`."""

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


@dataclasses.dataclass(frozen=True)
class System:
    """A decoding method of the table, most often a published one.

    Attributes:
        name: what it is chosen by. title: the paper's. authors: and year. family: as in the field's surveys.
        guarantee: of the output, with the default options; others may change it, as another verifier does, and the
            algorithm that is made states its own (`Algorithm.guarantee`). needs: what `make` must be given.
        make: builds the algorithm from `lm`, `draft` and the options that its signature names.
        summary: one line.
        alias_of: the name of the entry that this is another name for, or None. An alias builds what that entry builds;
            its summary says what its own paper adds.
        module: the name of the module that registered it.
    """

    name: str
    title: str
    authors: str
    family: str
    guarantee: Guarantee
    needs: Needs
    make: Callable[..., Any]
    summary: str
    alias_of: str | None = None
    module: str = ""

    @property
    def drafts(self) -> bool:
        """Whether it needs a draft model."""
        return self.needs in (DRAFT, BOTH, SAMPLED, DIFFUSION)

    @property
    def options(self) -> dict[str, Any]:
        """What can be set, with defaults."""
        given = inspect.signature(self.make).parameters.values()
        return {p.name: p.default for p in given if p.name not in ("lm", "draft")}

    @property
    def owner(self) -> str:
        """Who registered it, for messages."""
        return f"an alias in {self.module}" if self.alias_of else f"{self.module}.{self.make.__qualname__}"


@dataclasses.dataclass(frozen=True)
class _Alias:
    """Another name for an entry that is not registered yet."""

    name: str
    of: str
    module: str
    shown: Mapping[str, Any]

    @property
    def owner(self) -> str:
        return f"an alias in {self.module}"


SYSTEMS: dict[str, System] = {}
"""All of them, by name."""

_WAITING: dict[str, _Alias] = {}
"""Aliases whose entry is still to come, by their own names."""


def entry(name: str, title: str = "", authors: str = "", family: str = "user", summary: str = "",
          needs: Needs = "nothing", guarantee: Guarantee = "seed-exact"
          ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers the function below it as the maker of a decoding method.

    From then on `decodax.system(name)` and `algorithm="name"` find it, and it is listed in
    `decodax.algorithms.entries.SYSTEMS`.

    Args:
        name: without ":", behind which the command line writes options. title, authors, family, summary, needs,
            guarantee: as in `System`.

    Raises:
        ValueError: a name that is taken, or a `needs` or `guarantee` of an unknown kind.

    >>> @entry("two-at-a-time", summary="an example")
    ... def two_at_a_time(length: int = 2):
    ...     from decodax.algorithms.speculative import Speculative, drafts
    ...     return Speculative(drafts.PromptLookup(length))
    >>> system("two-at-a-time").emits
    3
    >>> del SYSTEMS["two-at-a-time"]
    """
    for argument, given, known in (("needs", needs, Needs), ("guarantee", guarantee, Guarantee)):
        if given not in get_args(known):
            raise ValueError(f"entry {name!r}: {argument}: got {given!r}, takes one of "
                             f"{', '.join(map(repr, get_args(known)))}")

    def add(make: Callable[..., Any]) -> Callable[..., Any]:
        _put(System(name, title, authors, family, guarantee, needs, make, summary, module=make.__module__))
        return make

    return add


def alias(name: str, of: str, title: str, authors: str, family: str, summary: str) -> None:
    """Registers another paper's name for the entry `of`, which may be registered later.

    Raises:
        ValueError: a name that is taken.
    """
    module = sys._getframe(1).f_globals.get("__name__", "__main__")     # the caller's, as collections.namedtuple does
    waiting = _Alias(name, of, module, dict(title=title, authors=authors, family=family, summary=summary))
    if of in SYSTEMS:
        _put(_resolved(waiting, SYSTEMS[of]))
    else:
        _free(waiting)
        _WAITING[name] = waiting


def _put(new: System) -> None:
    """Adds an entry, and the aliases that waited for it."""
    _free(new)
    SYSTEMS[new.name] = new
    for waiting in [a for a in _WAITING.values() if a.of == new.name]:
        del _WAITING[waiting.name]
        _put(_resolved(waiting, new))


def _resolved(alias: _Alias, of: System) -> System:
    return dataclasses.replace(of, name=alias.name, alias_of=of.alias_of or of.name, module=alias.module,
                               **alias.shown)


def _free(new: System | _Alias) -> None:
    """Raises ValueError unless the name can be taken."""
    if not new.name or ":" in new.name:
        raise ValueError(f"entry: got the name {new.name!r} by {new.owner}, takes a name without ':'")
    held = SYSTEMS.get(new.name) or _WAITING.get(new.name)
    if held is not None:
        raise ValueError(f"entry: the name {new.name!r} of {new.owner} is taken by {held.owner}; takes another name, "
                         f"or that entry has to go first: del decodax.algorithms.entries.SYSTEMS[{new.name!r}]")


def find(name: str) -> System:
    """The entry of this name.

    Raises:
        ValueError: an unknown name (near ones are listed), or an alias of one.
    """
    if name in SYSTEMS:
        return SYSTEMS[name]
    if name in _WAITING:
        missing = _WAITING[name]
        raise ValueError(f"system: {name!r}, {missing.owner}, is another name for {missing.of!r}, which is not "
                         "registered")
    raise ValueError(f"system: unknown name {name!r}; {near(name, SYSTEMS)}")


@dataclasses.dataclass(frozen=True)
class Named:
    """A published method that is a class with its options as fields: a search over steps, or a rule of choice.

    Attributes:
        name: what it is chosen by. title: the paper's. authors: and year. summary: one line. make: the class.
    """

    name: str
    title: str
    authors: str
    summary: str
    make: type[Any]

    @property
    def options(self) -> dict[str, Any]:
        """What can be set, with defaults; `...` where there is none."""
        fields = dataclasses.fields(self.make)
        return {f.name: ... if f.default is dataclasses.MISSING else f.default for f in fields}


def made(what: str, table: Mapping[str, Named], name: str, options: Mapping[str, Any]) -> Any:
    """What stands in a table under a name, with these options; `what` begins the messages of errors.

    Raises:
        ValueError: an unknown name (near ones are listed), an option that it does not take, one that is missing, or one
            out of its range.
    """
    if name not in table:
        raise ValueError(f"{what}: unknown name {name!r}; {near(name, table)}")
    entry = table[name]
    if unknown := sorted(options.keys() - entry.options.keys()):
        raise ValueError(f"{what}: {name!r} takes no option {unknown[0]!r}; takes {', '.join(entry.options)}")
    if missing := [key for key, value in entry.options.items() if value is ... and key not in options]:
        raise ValueError(f"{what}: {name!r} needs {missing[0]}=")
    return built(entry.make, options)


def near(name: str, known: Collection[str]) -> str:
    """What to say to a name that is not `known`: the near ones, or all."""
    name = str(name)
    close = difflib.get_close_matches(name, known, n=4, cutoff=0.5)
    close += [n for n in known if name.lower() in n and n not in close]
    return f"near ones: {', '.join(close)}" if close else f"takes one of {', '.join(known)}"


def system(name: str, lm: Any = None, draft: Any = None, **options: Any) -> Any:
    """The algorithm that stands in the table under a name.

    Args:
        name: one of `decodax.algorithms.entries.SYSTEMS`.
        lm: what `load` gave, for systems that look at the target: its layers, or what its rounds cost.
        draft: a smaller model from `load`, for systems that draft with one.
        options: the system's own; `SYSTEMS[name].options` lists them with their defaults.

    Raises:
        ValueError: an unknown name (near ones are listed), a model that is missing, or an option it does not take.
    """
    found = find(name)
    needed = {"lm": lm} if found.needs not in ("nothing", DRAFT) else {}
    needed |= {"draft": draft} if found.drafts else {}
    if missing := [f"{how}=decodax.load(...)" for how, given in needed.items() if given is None]:
        raise ValueError(f"system: {name!r} needs {found.needs}; give {' and '.join(missing)}")
    if unknown := sorted(options.keys() - found.options.keys()):
        raise ValueError(f"system: {name!r} takes no option {unknown[0]!r}; takes "
                         f"{', '.join(f'{k}={v!r}' for k, v in found.options.items()) or 'none'}")
    given = {"lm": lm, "draft": draft}
    takes = inspect.signature(found.make).parameters
    return built(found.make, options, **{k: v for k, v in given.items() if k in takes})


def parse(text: str) -> tuple[str, dict[str, Any]]:
    """The name and the options of `NAME[:OPTION=VALUE,...]`, as the command line writes a system.

    Raises:
        ValueError: an unknown name (near ones are listed), an option that the system does not take, or a value that is
            no number, text, or tuple of them.

    >>> from decodax.algorithms.entries import parse
    >>> parse("prompt-lookup:length=5,max_ngram=2")
    ('prompt-lookup', {'length': 5, 'max_ngram': 2})
    """
    name = text.partition(":")[0]
    return name, options(text, find(name).options)


def options(text: str, known: Collection[str]) -> dict[str, Any]:
    """The options of `NAME[:OPTION=VALUE,...]`. A text that is a word or words with hyphens goes without quotes.

    >>> options("magicdec:budget=512,keep=sink-window", ("budget", "keep"))
    {'budget': 512, 'keep': 'sink-window'}

    Raises:
        ValueError: an option that is not among those `known`, or a value that is no number, text, or tuple of them.
    """
    # a size such as 64MB is no word of Python
    source = re.sub(r"(?<==)\s*(\d+(?:\.\d+)?[A-Za-z]+)(?=\s*(?:,|$))", r"'\1'", text.partition(":")[2])
    source = f"dict({source})"

    def value(node: ast.expr) -> Any:
        said = ast.get_source_segment(source, node) or ""
        bare = isinstance(node, ast.Name | ast.BinOp) and re.fullmatch(r"[A-Za-z_]\w*(-[A-Za-z_]\w*)*", said)
        return said if bare else ast.literal_eval(node)

    try:
        call: Any = ast.parse(source, mode="eval").body
        given = {keyword.arg: value(keyword.value) for keyword in call.keywords}
        if call.args or None in given:
            raise ValueError("a value without a name")
    except (SyntaxError, ValueError, AttributeError, RecursionError, MemoryError) as error:
        raise ValueError(f"{text}: takes NAME:OPTION=VALUE,... with numbers or tuples of them") from error
    if unknown := sorted(given.keys() - set(known)):
        raise ValueError(f"{text}: takes no option {unknown[0]}; takes {', '.join(known) or 'none'}")
    return given
