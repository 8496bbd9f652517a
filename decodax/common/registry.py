"""The registry: everything that is chosen by name, on one shelf for each kind of thing.

A function or a dataclass becomes an entry by the decorator `Shelf.register`. Its parameters, or fields, are the options
of the entry; their annotations say which values they take (`decodax.common.options`); its docstring is what `help` and
`decodax list` show. The modules of a shelf are imported when the shelf is used for the first time, so that a name can
be looked up before any other import.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, TypeVar, get_args

from decodax.common.entries import Configured, Entry, Guarantee, Needs
from decodax.common.order import ordered
from decodax.common.strings import near, parse_options

__all__ = ["ALGORITHMS", "CACHES", "CONSTRAINTS", "FORMATS", "FUNCTIONS", "SEARCHES", "SELECTS", "SHELVES",
           "Configured", "Entry", "Guarantee", "Needs", "Shelf"]

Made = TypeVar("Made", bound=Callable[..., Any])


class Shelf(MutableMapping[str, Entry]):
    """All entries of one kind, by name.

    Args:
        kind: name of the shelf and of its module, such as "caches" for `decodax.caches`.
        slot: argument of `decodax.generate` that takes the entries; the messages of errors begin with it.
        modules: names of the modules that register the entries, in the order of the listing.
    """

    def __init__(self, kind: str, slot: str, *modules: str):
        self.kind, self.slot, self.modules = kind, slot, modules
        self._entries: dict[str, Entry] = {}
        self._waiting: dict[str, tuple[str, Entry]] = {}
        self._functions: dict[Entry, Callable[..., Any]] = {}
        self._read = False

    def _filled(self) -> dict[str, Entry]:
        if not self._read:
            self._read = True
            for module in self.modules:
                importlib.import_module(module)
            # the library's own entries come first, in the order of their modules, whatever was imported before
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
                 guarantee: Guarantee = "approximate", needs: Needs = "nothing", model: str = "",
                 drafters: tuple[str, ...] = ()) -> Callable[[Made], Made]:
        """Returns a decorator that registers a function or class.

        Args:
            name: the name; without ":", after which strings have options.
            title: title of the paper.
            authors: authors and year.
            summary: one sentence; empty: the first sentence of the docstring.
            family: group in which listings show it.
            guarantee: guarantee of the output with the default options.
            needs: models that the function takes beside options.
            model: shipped model for its example.
            drafters: methods whose trained drafters the function takes, the likeliest first; empty: its own.

        Raises:
            ValueError: a name that is taken, or a `needs` or `guarantee` of an unknown kind.

        >>> from decodax.common.registry import ALGORITHMS
        >>> @ALGORITHMS.register("two-at-a-time", summary="An example.", guarantee="seed-exact")
        ... def two_at_a_time(length: int = 2):
        ...     from decodax.algorithms.speculative import Speculative, drafts
        ...     return Speculative(drafts.PromptLookup(length))
        >>> ALGORITHMS.make("two-at-a-time").traits.emits
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
                            module=make.__module__, slot=self.slot, model=model, drafters=drafters))
            return make

        return add

    def alias(self, name: str, of: str, title: str, authors: str, summary: str, *, family: str) -> None:
        """Registers another name for the entry `of`, which may be registered later. The other arguments describe the
        paper of this name, as in `register`.

        Raises:
            ValueError: a name that is taken.
        """
        module = sys._getframe(1).f_globals.get("__name__", "__main__")     # the caller's, as namedtuple finds it
        entry = Entry(self.kind, name, print, title, authors, summary, family, alias_of=of, module=module,
                      slot=self.slot)
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
        return dataclasses.replace(alias, make=of.make, guarantee=of.guarantee, needs=of.needs, drafters=of.drafters,
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
        """Returns the names of all entries, or of the entries of a family: by family, the most used of each first."""
        return [entry.name for entry in ordered(self.values()) if family in (None, entry.family)]

    def find(self, name: str) -> Entry:
        """Returns the entry with a name.

        Raises:
            ValueError: an unknown name (the message lists similar ones), or an alias of an unknown name.
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
        return self.find(name).configured(options, draft)

    def make(self, name: str, lm: Any = None, draft: Any = None, **options: Any) -> Any:
        """Makes the object of an entry.

        Args:
            name: name of the entry.
            lm: target model from `decodax.load`, if the entry needs it (`Entry.needs`).
            draft: draft model from `decodax.load`, if the entry needs it.
            options: options of the entry; see `find(name).options`.

        Raises:
            ValueError: an unknown name, a model that is missing, or an option that is unknown, missing or out of its
                range.
        """
        return self.configure(name, draft, **options).build(lm)

    def parse(self, text: str) -> tuple[str, dict[str, Any]]:
        """Returns the name and the options of `NAME[:OPTION=VALUE,...]`.

        Raises:
            ValueError: an unknown name, an option that the entry does not take, or a value without its option's name
                (see `decodax.common.strings`).

        >>> from decodax.common.registry import ALGORITHMS
        >>> ALGORITHMS.parse("prompt-lookup:length=5,max_ngram=2")
        ('prompt-lookup', {'length': 5, 'max_ngram': 2})
        """
        name = text.partition(":")[0]
        return name, parse_options(text, self.find(name).options, self.slot)

    def read(self, text: str, draft: Any = None) -> Configured:
        """Returns the entry of `NAME[:OPTION=VALUE,...]` with its options.

        Args:
            text: the string.
            draft: the draft model, if it is known.

        Raises:
            ValueError: as in `parse` and `configure`.
        """
        name, options = self.parse(text)
        return self.configure(name, draft, **options)

    def object(self, given: Any, lm: Any = None, draft: Any = None) -> Any:
        """Returns the object for a slot, from the argument of a user.

        Args:
            given: a string, a `Configured`, which is built for the models, or an object, which is returned unchanged.
            lm: the target model.
            draft: the draft model.

        Raises:
            ValueError: as in `read` and `Configured.build`.
            TypeError: an entry of another shelf.
        """
        given = self.read(given, draft) if isinstance(given, str) else given
        if not isinstance(given, Configured):
            return given
        if given.entry.shelf != self.kind:
            raise TypeError(f"{self.slot}: got {given!r}, takes a function of decodax.{self.kind}")
        return given.build(lm, draft)

    def attribute(self, identifier: str) -> Callable[..., Any]:
        """Returns the function that makes an entry, for `decodax.<shelf>.<identifier>`.

        Raises:
            AttributeError: there is no such entry.
        """
        for entry in self.values():
            if entry.identifier == identifier:
                if entry not in self._functions:
                    self._functions[entry] = entry.function()
                return self._functions[entry]
        raise AttributeError(f"decodax.{self.kind} has no {identifier!r}; {near(identifier, self.identifiers())}")

    def identifiers(self) -> list[str]:
        """Returns the names of all entries as attributes of the shelf's module (`Entry.identifier`), in the order of
        the shelf, such as "prompt_lookup" for "prompt-lookup" and "del_" for "del"."""
        return [entry.identifier for entry in self.values()]


ALGORITHMS = Shelf("algorithms", "algorithm", "decodax.algorithms.plain",
                   "decodax.algorithms.speculative.drafts.text", "decodax.algorithms.speculative.drafts.jacobi",
                   "decodax.algorithms.speculative.drafts.model", "decodax.algorithms.speculative.trees",
                   "decodax.algorithms.speculative.verify", "decodax.algorithms.speculative.drafts.self",
                   "decodax.algorithms.speculative.heads",
                   "decodax.algorithms.speculative", "decodax.algorithms.diffusion", "decodax.algorithms.beams",
                   "decodax.algorithms.contrastive", "decodax.algorithms.parallel")
"""Decoding methods, for `algorithm=`."""

CACHES = Shelf("caches", "cache", "decodax.caches")
"""Cache policies, for `cache=`."""

SEARCHES = Shelf("search", "search", "decodax.search")
"""Searches over texts that grow step by step, for `search=`."""

SELECTS = Shelf("select", "select", "decodax.select")
"""Rules that choose one of several samples, for `select=`."""

CONSTRAINTS = Shelf("constraints", "constraint", "decodax.constraints")
"""Languages to which a text is constrained, for `constraint=`."""

FORMATS = Shelf("formats", "weights", "decodax.models.formats")
"""Formats of weights, for `weights=`."""

FUNCTIONS = Shelf("functions", "function", "decodax.search", "decodax.select", "decodax.algorithms.contrastive",
                  "decodax.algorithms.beams.ctc", "decodax.algorithms.speculative.split", "decodax.front",
                  "decodax.contrib", "decodax.sharding")
"""Published methods that are called as functions."""

SHELVES = {shelf.kind: shelf for shelf in (ALGORITHMS, CACHES, SEARCHES, SELECTS, CONSTRAINTS, FORMATS, FUNCTIONS)}
"""All shelves, by name."""
