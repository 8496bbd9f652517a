"""The registry: everything that is chosen by name, on one shelf for each kind of thing.

A function or a dataclass becomes an entry by the decorator `Shelf.register`. Its parameters, or fields, are the options
of the entry, their annotations say what each takes (`decodax.common.options`), and its docstring is what `help` and
`decodax list` show. The modules of a shelf are imported when the shelf is first read, so that a name can be looked up
before anything else was imported.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from typing import Any, Literal, TypeVar, get_args

from decodax.common.options import Option, built, options_of

Guarantee = Literal["seed-exact", "distribution-exact", "exact", "approximate"]
"""What holds of the output. "seed-exact": with one seed the tokens are those of plain decoding. "distribution-exact":
the texts have the distribution of plain decoding. "exact", of a cache: the model computes what it does with a dense
one. "approximate": the output may differ."""

Needs = Literal["nothing", "a model", "a draft model", "a model and a draft model", "samples",
                "a draft model and samples", "a diffusion model", "a diffusion model and a draft model"]
"""What an entry is made of beside its options: nothing, the target itself, a smaller model with its tokenizer, both,
the target and samples of the texts to come (an option says how), those and a draft model, or a target that fills masks,
alone or with an autoregressive model."""

Made = TypeVar("Made", bound=Callable[..., Any])

BESIDE = ("lm", "draft")
"""Parameters of an entry that are no options: the target, and the draft model."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One name of a shelf.

    Attributes:
        shelf: kind of thing, the name of its shelf. name: what it is chosen by. make: function or class that makes it.
        title: title of the paper. authors: authors and year. summary: one sentence.
        family: group in which listings show it. guarantee: of the output, with the default options; what is made may
            say another one. needs: what `make` takes beside options.
        alias_of: name of the entry that this is another name for, or None. An alias makes what that entry makes; its
            summary says what its own paper adds.
        module: name of the module that registered it.
    """

    shelf: str
    name: str
    make: Callable[..., Any]
    title: str
    authors: str
    summary: str
    family: str = ""
    guarantee: Guarantee = "approximate"
    needs: Needs = "nothing"
    alias_of: str | None = None
    module: str = ""

    @property
    def paper(self) -> str:
        """Title, authors and year."""
        return f"{self.title} ({self.authors})" if self.authors and self.title else self.title or self.authors

    @property
    def takes_model(self) -> bool:
        """Whether it is made for a target model."""
        return self.needs not in ("nothing", "a draft model")

    @property
    def takes_draft(self) -> bool:
        """Whether it needs a draft model."""
        return "draft model" in self.needs

    @property
    def may_draft(self) -> bool:
        """Whether it may be given a draft model."""
        return "draft" in inspect.signature(self.make).parameters

    @functools.cached_property
    def options(self) -> dict[str, Option]:
        """Options by name."""
        return {name: option for name, option in options_of(self.make).items() if name not in BESIDE}

    @property
    def owner(self) -> str:
        """Who registered it, for messages."""
        return f"an alias in {self.module}" if self.alias_of else f"{self.module}.{self.make.__qualname__}"

    @property
    def identifier(self) -> str:
        """Name as an attribute of a module.

        >>> Entry("caches", "freedave++", print, "", "", "").identifier
        'freedave_plus_plus'
        """
        name = self.name.replace("+", "_plus").replace("-", "_").replace(".", "_")
        return f"_{name}" if name[0].isdigit() else name


@dataclasses.dataclass(frozen=True)
class Configured:
    """An entry with options, for a model that is not known yet: what a function of a shelf returns for entries that
    look at the target, and what `generate` makes of a name.

    Attributes:
        entry: which. options: by name. draft: draft model, or None.
    """

    entry: Entry
    options: Mapping[str, Any]
    draft: Any = None

    def build(self, lm: Any = None, draft: Any = None, **beside: Any) -> Any:
        """Makes it for a model.

        Args:
            lm, draft: target and draft model from `decodax.load`.
            beside: values of options that were left open and that the caller knows, such as the batch size.

        Raises:
            ValueError: a model that is missing, or an option out of its range.
        """
        draft = self.draft if draft is None else draft
        found, given = self.entry, {**{k: v for k, v in beside.items() if k in self.entry.options}, **self.options}
        needed = {"lm": lm} if found.takes_model else {}
        needed |= {"draft": draft} if found.takes_draft else {}
        if missing := [f"{how}=decodax.load(...)" for how, model in needed.items() if model is None]:
            raise ValueError(f"{found.name!r} needs {found.needs}; give {' and '.join(missing)}")
        takes = inspect.signature(found.make).parameters
        return built(found.make, given, **{k: v for k, v in (("lm", lm), ("draft", draft)) if k in takes})


class Shelf(MutableMapping[str, Entry]):
    """All entries of one kind, by name.

    Args:
        kind: name of the shelf, which is also that of the module that shows it, as in `decodax.caches`.
        slot: argument of `decodax.generate` that takes its names, which begins the messages of errors.
        modules: modules that fill the shelf, in the order of the listing.
    """

    def __init__(self, kind: str, slot: str, *modules: str):
        self.kind, self.slot, self.modules = kind, slot, modules
        self._entries: dict[str, Entry] = {}
        self._waiting: dict[str, tuple[str, Entry]] = {}
        self._read = False

    def _filled(self) -> dict[str, Entry]:
        if not self._read:
            self._read = True
            for module in self.modules:
                importlib.import_module(module)
            # the library's own entries stand first, in the order of their modules, whatever was imported before
            place = lambda e: next((i for i, m in enumerate(self.modules) if f"{e.module}.".startswith(f"{m}.")),
                                   len(self.modules))
            self._entries = {e.name: e for e in sorted(self._entries.values(), key=place)}
        return self._entries

    def __getitem__(self, name: str) -> Entry:
        return self._filled()[name]

    def __setitem__(self, name: str, entry: Entry) -> None:
        self._filled()[name] = entry

    def __delitem__(self, name: str) -> None:
        del self._filled()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._filled())

    def __len__(self) -> int:
        return len(self._filled())

    def register(self, name: str, title: str = "", authors: str = "", summary: str = "", *, family: str = "user",
                 guarantee: Guarantee = "approximate", needs: Needs = "nothing") -> Callable[[Made], Made]:
        """Registers the function or class below it.

        Args:
            name: without ":", after which the command line writes options. title, authors, family, guarantee, needs: as
                in `Entry`. summary: one sentence; default the first of the docstring.

        Raises:
            ValueError: a name that is taken, or a `needs` or `guarantee` of an unknown kind.

        >>> from decodax.common.registry import ALGORITHMS
        >>> @ALGORITHMS.register("two-at-a-time", summary="An example.", guarantee="seed-exact")
        ... def two_at_a_time(length: int = 2):
        ...     from decodax.algorithms.speculative import Speculative, drafts
        ...     return Speculative(drafts.PromptLookup(length))
        >>> ALGORITHMS.make("two-at-a-time").emits
        3
        >>> del ALGORITHMS["two-at-a-time"]
        """
        for argument, given, known in (("needs", needs, Needs), ("guarantee", guarantee, Guarantee)):
            if given not in get_args(known):
                raise ValueError(f"register {name!r}: {argument}: got {given!r}, takes one of "
                                 f"{', '.join(map(repr, get_args(known)))}")

        def add(make: Made) -> Made:
            text = summary or (inspect.getdoc(make) or "").partition("\n\n")[0].replace("\n", " ")
            self._put(Entry(self.kind, name, make, title, authors, text, family, guarantee, needs,
                            module=make.__module__))
            return make

        return add

    def alias(self, name: str, of: str, title: str, authors: str, summary: str, *, family: str) -> None:
        """Registers another paper's name for the entry `of`, which may be registered later.

        Raises:
            ValueError: a name that is taken.
        """
        module = sys._getframe(1).f_globals.get("__name__", "__main__")     # the caller's, as namedtuple finds it
        entry = Entry(self.kind, name, print, title, authors, summary, family, alias_of=of, module=module)
        if of in self._entries:
            self._put(self._resolved(entry, self._entries[of]))
        else:
            self._check_free(entry)
            self._waiting[name] = (of, entry)

    def _put(self, new: Entry) -> None:
        self._check_free(new)
        self._entries[new.name] = new
        for name, (of, entry) in list(self._waiting.items()):
            if of == new.name:
                del self._waiting[name]
                self._put(self._resolved(entry, new))

    @staticmethod
    def _resolved(alias: Entry, of: Entry) -> Entry:
        return dataclasses.replace(alias, make=of.make, guarantee=of.guarantee, needs=of.needs,
                                   alias_of=of.alias_of or of.name)

    def _check_free(self, new: Entry) -> None:
        if not new.name or ":" in new.name:
            raise ValueError(f"register: got the name {new.name!r} by {new.owner}, takes a name without ':'")
        held = self._entries.get(new.name) or self._waiting.get(new.name, (None, None))[1]
        if held is not None:
            raise ValueError(f"register: the name {new.name!r} of {new.owner} is taken by {held.owner}; takes another "
                             f"name, or that entry has to go first: del decodax.common.registry.{self.kind.upper()}"
                             f"[{new.name!r}]")

    def names(self, family: str | None = None) -> list[str]:
        """Returns the names of the shelf, or those of a family."""
        return [name for name, entry in self.items() if family in (None, entry.family)]

    def find(self, name: str) -> Entry:
        """Returns the entry of a name.

        Raises:
            ValueError: an unknown name (near ones are listed), or an alias of one.
        """
        if name in self:
            return self[name]
        if name in self._waiting:
            of, entry = self._waiting[name]
            raise ValueError(f"{self.slot}: {name!r}, {entry.owner}, is another name for {of!r}, which is not "
                             "registered")
        raise ValueError(f"{self.slot}: unknown name {name!r}; {near(name, self)}")

    def configure(self, name: str, draft: Any = None, /, **options: Any) -> Configured:
        """Returns an entry with options, for a model that is given later (`Configured.build`).

        Raises:
            ValueError: an unknown name, an option that the entry does not take, or one that is missing.
        """
        entry = self.find(name)
        if unknown := sorted(options.keys() - entry.options.keys()):
            known = ", ".join(f"{k}={v.default!r}" if v.optional else k for k, v in entry.options.items())
            raise ValueError(f"{self.slot}: {name!r} takes no option {unknown[0]!r}; takes {known or 'none'}")
        if missing := [key for key, option in entry.options.items() if not option.optional and key not in options]:
            raise ValueError(f"{self.slot}: {name!r} needs {missing[0]}=")
        return Configured(entry, options, draft)

    def make(self, name: str, lm: Any = None, draft: Any = None, **options: Any) -> Any:
        """Makes what stands under a name.

        Args:
            name: one of `names()`.
            lm, draft: target and draft model from `decodax.load`, for entries that need them (`Entry.needs`).
            options: of the entry; see `find(name).options`.

        Raises:
            ValueError: an unknown name, a model that is missing, or an option that is unknown, missing or out of its
                range.
        """
        return self.configure(name, draft, **options).build(lm)

    def parse(self, text: str) -> tuple[str, dict[str, Any]]:
        """Returns the name and the options of `NAME[:OPTION=VALUE,...]`.

        Raises:
            ValueError: an unknown name, an option that the entry does not take, or a value that is no number, text, or
                tuple of them.

        >>> from decodax.common.registry import ALGORITHMS
        >>> ALGORITHMS.parse("prompt-lookup:length=5,max_ngram=2")
        ('prompt-lookup', {'length': 5, 'max_ngram': 2})
        """
        name = text.partition(":")[0]
        return name, parse_options(text, self.find(name).options)

    def read(self, text: str, draft: Any = None) -> Configured:
        """Returns the entry and options of `NAME[:OPTION=VALUE,...]`. Raises as `parse` and `configure`."""
        name, options = self.parse(text)
        return self.configure(name, draft, **options)

    def attribute(self, identifier: str) -> Callable[..., Any]:
        """Returns the function that makes an entry, for `decodax.<shelf>.<identifier>`.

        Raises:
            AttributeError: there is no such entry.
        """
        for entry in self.values():
            if entry.identifier == identifier:
                return self._function(entry)
        raise AttributeError(f"decodax.{self.kind} has no {identifier!r}; {near(identifier, self.identifiers())}")

    def identifiers(self) -> list[str]:
        """Returns the names of the shelf as attributes of a module."""
        return [entry.identifier for entry in self.values()]

    def _function(self, entry: Entry) -> Callable[..., Any]:
        if inspect.isclass(entry.make):
            return entry.make
        def make(*args: Any, **options: Any) -> Any:
            given = signature.bind(*args, **options).arguments
            draft = given.pop("draft", None)
            found = self.configure(entry.name, draft, **given)
            return found if entry.takes_model else found.build()

        parameters = [p.replace(kind=p.KEYWORD_ONLY if p.name == "draft" else p.kind)
                      for p in inspect.signature(entry.make).parameters.values() if p.name != "lm"]
        parameters.sort(key=lambda p: p.kind)
        signature = inspect.signature(entry.make).replace(parameters=parameters)
        make.__name__, make.__qualname__, make.__module__ = entry.identifier, entry.identifier, entry.module
        make.__doc__ = described(entry)
        make.__signature__ = signature      # type: ignore[attr-defined]
        return make


def described(entry: Entry) -> str:
    """Returns what there is to know of an entry: what it does, its options with their ranges, paper, guarantee, what it
    needs, and how it is called."""
    text = inspect.getdoc(entry.make) if not entry.alias_of else None
    parts = [text or entry.summary]
    if entry.options:
        parts.append("Options:\n" + "\n".join(f"    {name}: {option}" for name, option in entry.options.items()))
    facts = [("Paper", entry.paper), ("Another name for", entry.alias_of), ("Guarantee", entry.guarantee),
             ("Needs", entry.needs if entry.needs != "nothing" else "")]
    parts.append("\n".join(f"{word}: {value}" for word, value in facts if value))
    return "\n\n".join(parts)


def near(name: str, known: Collection[str]) -> str:
    """Returns what to say to a name that is not `known`: the near ones, or all."""
    name = str(name)
    close = difflib.get_close_matches(name, known, n=4, cutoff=0.5)
    close += [n for n in known if name.lower() in n and n not in close]
    return f"near ones: {', '.join(close)}" if close else f"takes one of {', '.join(known)}"


def parse_options(text: str, known: Collection[str]) -> dict[str, Any]:
    """Returns the options of `NAME[:OPTION=VALUE,...]`. A text that is a word or words with hyphens needs no quotes.

    >>> parse_options("magicdec:budget=512,keep=sink-window", ("budget", "keep"))
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


ALGORITHMS = Shelf("algorithms", "algorithm", "decodax.algorithms.autoregressive",
                   "decodax.algorithms.speculative.drafts.text", "decodax.algorithms.speculative.drafts.jacobi",
                   "decodax.algorithms.speculative.drafts.model", "decodax.algorithms.speculative.trees",
                   "decodax.algorithms.speculative.verify", "decodax.algorithms.speculative.drafts.self",
                   "decodax.algorithms.speculative", "decodax.algorithms.diffusion", "decodax.algorithms.beams",
                   "decodax.algorithms.contrastive", "decodax.algorithms.parallel")
"""Decoding methods, for `algorithm=`."""

CACHES = Shelf("caches", "cache", "decodax.caches")
"""What the cache keeps, for `cache=`."""

SEARCHES = Shelf("search", "search", "decodax.search")
"""Searches over texts that grow step by step, for `search=`."""

SELECTS = Shelf("select", "select", "decodax.select")
"""Rules that choose one of several samples, for `select=`."""

CONSTRAINTS = Shelf("constraints", "constraint", "decodax.constraints")
"""Languages that a text is held to, for `constraint=`."""

FORMATS = Shelf("formats", "weights", "decodax.models.formats")
"""Formats of weights, for `weights=`."""

FUNCTIONS = Shelf("functions", "function", "decodax.search", "decodax.select", "decodax.algorithms.contrastive",
                  "decodax.algorithms.beams.ctc", "decodax.algorithms.speculative.split", "decodax.front",
                  "decodax.contrib", "decodax.sharding")
"""Published methods that are called as functions."""

SHELVES = {shelf.kind: shelf for shelf in (ALGORITHMS, CACHES, SEARCHES, SELECTS, CONSTRAINTS, FORMATS, FUNCTIONS)}
"""All shelves, by name."""
