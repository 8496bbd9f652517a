"""Entries of the registry: what has a name, with its paper, options and guarantee, and what a user makes of it before
the model is known.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import keyword
import re
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, Literal

from decodax.common.arguments import shown
from decodax.common.options import Option, built, options_of
from decodax.common.strings import listed, unknown_option

Guarantee = Literal["seed-exact", "distribution-exact", "exact", "approximate"]
"""What holds of the output. "seed-exact": with one seed the tokens are those of plain decoding. "distribution-exact":
the texts have the distribution of plain decoding. "exact", of a cache: the model computes what it does with a dense
one; of a constraint: every text belongs to its language. "approximate": the output may differ."""

Needs = Literal["nothing", "a model", "a draft model", "a model and a draft model", "samples",
                "a draft model and samples", "a diffusion model", "a diffusion model and a draft model"]
"""What an entry is made of beside its options: nothing, the target itself, a smaller model with its tokenizer, both,
the target and samples of the texts to come (an option says how), those and a draft model, or a target that fills masks,
alone or with an autoregressive model."""

BESIDE = ("lm", "draft")
"""Parameters of an entry that are no options: the target, and the draft model."""


EXAMPLES = {"algorithm": "", "cache": "", "constraint": "", "search": ", temperature=0.8",
            "select": ", num_samples=4, temperature=0.8"}
"""Slots whose entries have an example, and what the call says beside them."""


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
        module: name of the module that registered it. slot: argument of `decodax.generate` that takes the entry, which
            begins the messages of errors. model: shipped model of its example; default one that `needs` asks for.
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
    slot: str = ""
    model: str = ""

    @property
    def paper(self) -> str:
        """Title, authors and year."""
        return f"{self.title} ({self.authors})" if self.authors and self.title else self.title or self.authors

    @property
    def takes_model(self) -> bool:
        """True if it is made for a target model."""
        return self.needs not in ("nothing", "a draft model")

    @property
    def takes_draft(self) -> bool:
        """True if it needs a draft model."""
        return "draft model" in self.needs

    @property
    def may_draft(self) -> bool:
        """True if it may be given a draft model."""
        return "draft" in inspect.signature(self.make).parameters

    @functools.cached_property
    def options(self) -> dict[str, Option]:
        """Options by name."""
        return {name: option for name, option in options_of(self.make).items() if name not in BESIDE}

    @property
    def owner(self) -> str:
        """Function, class or module that registered it, for messages."""
        return f"an alias in {self.module}" if self.alias_of else f"{self.module}.{self.make.__qualname__}"

    @property
    def identifier(self) -> str:
        """Name as an attribute of a module.

        >>> [Entry("caches", name, print, "", "", "").identifier for name in ("freedave++", "del")]
        ['freedave_plus_plus', 'del_']
        """
        name = self.name.replace("+", "_plus").replace("-", "_").replace(".", "_")
        return f"_{name}" if name[0].isdigit() else f"{name}_" if keyword.iskeyword(name) else name

    @property
    def description(self) -> str:
        """Everything that is known of it: what it does, its options with their ranges, the paper, the guarantee, what
        it needs, and a call."""
        text = (inspect.getdoc(self.make) or "") if not self.alias_of else ""
        parts = [text or self.summary]
        if self.options:
            more = {name: "" if re.search(rf"\b{name}\b", text) else _inherited(self.make, name)
                    for name in self.options}
            lines = [textwrap.fill(f"{name}: {option}{more[name]}", 100, initial_indent=" " * 4,
                                   subsequent_indent=" " * 8, break_long_words=False, break_on_hyphens=False)
                     for name, option in self.options.items()]
            parts.append("\n".join(["Options:", *lines]))
        facts = [("Paper", self.paper), ("Another name for", self.alias_of), ("Guarantee", self.guarantee),
                 ("Needs", self.needs if self.needs != "nothing" else ""), ("Example", self.example)]
        parts.append("\n".join(f"{word}: {value}" for word, value in facts if value))
        return "\n\n".join(parts)

    @property
    def example(self) -> str:
        """A call with it; "..." where an option has to be given. Empty of what no slot takes."""
        needed = [f"{name}=..." for name, option in self.options.items() if not option.optional]
        if self.slot == "weights":
            return f'dx.load("pycode", weights="{self.name}")'
        if self.slot not in EXAMPLES:
            return ""
        beside = EXAMPLES[self.slot] + (', draft="pycode-draft"' if self.takes_draft else "")
        model = self.model or ("pycode-diffusion" if "diffusion" in self.needs else "pycode")
        made = f"dx.{self.shelf}.{self.identifier}({', '.join(needed)})"
        prompt = "1207=" if model == "numerals" else "def area(r):"
        return f'dx.generate("{model}", "{prompt}", {self.slot}={made}{beside})'

    def configured(self, options: Mapping[str, Any], draft: Any = None) -> Configured:
        """Returns the entry with options, for a model that is given later (`Configured.build`).

        Raises:
            ValueError: an option that the entry does not take, or one that is missing.
        """
        if unknown := sorted(options.keys() - self.options.keys()):
            raise ValueError(unknown_option(self.name, unknown[0], self.options, self.slot))
        if missing := [key for key, option in self.options.items() if not option.optional and key not in options]:
            raise ValueError(f"{self.slot}: {self.name!r} needs {missing[0]}=")
        return Configured(self, options, draft)

    def function(self) -> Callable[..., Any]:
        """Returns the function that makes what the entry names, of its options.

        It returns a `Configured` where the entry is made for a model, or misses its draft model: the call of `generate`
        says which. A wrong option is a TypeError in the words of `configured`.
        """
        needs_model = self.takes_model

        def make(*args: Any, **options: Any) -> Any:
            if unknown := sorted(options.keys() - signature.parameters.keys()):
                raise TypeError(unknown_option(self.name, unknown[0], self.options, self.slot))
            try:
                given = signature.bind_partial(*args, **options).arguments
            except TypeError as error:
                raise TypeError(f"{self.slot}: {self.name!r}: {error}; takes {listed(self.options)}") from None
            lm, draft = given.pop("lm", None), given.pop("draft", None)
            found = self.configured(given, draft)
            # without a draft model that it could take, the call completes it
            later = needs_model or (self.takes_draft and draft is None)
            return found if later else found.build(lm)

        own = inspect.signature(self.make).parameters.values()
        beside = [p.replace(kind=p.KEYWORD_ONLY, default=None) for p in own
                  if p.name == "draft" or (p.name == "lm" and not needs_model)]
        parameters = [*(p for p in own if p.name not in BESIDE), *beside]
        parameters.sort(key=lambda p: p.kind)
        signature = inspect.Signature(parameters)
        make.__name__, make.__qualname__, make.__module__ = self.identifier, self.identifier, self.module
        make.__doc__ = self.description
        make.__signature__ = signature      # type: ignore[attr-defined]
        return make


@dataclasses.dataclass(frozen=True, repr=False)
class Configured:
    """An entry with options, for a model that is not known yet: what a function of a shelf returns for entries that
    look at the target, and what `generate` makes of a name.

    Attributes:
        entry: which. options: by name. draft: draft model, or None.
    """

    entry: Entry
    options: Mapping[str, Any]
    draft: Any = None

    def __repr__(self) -> str:
        """The call that makes it."""
        given = {**self.options, **({} if self.draft is None else {"draft": self.draft})}
        said = ", ".join(f"{name}={shown(value)}" for name, value in given.items())
        return f"dx.{self.entry.shelf}.{self.entry.identifier}({said})"

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


def _inherited(make: Callable[..., Any], name: str) -> str:
    """What a base class says of an option that the docstring of `make` leaves out."""
    for base in getattr(make, "__mro__", ())[1:]:
        if name in inspect.get_annotations(base):
            text = re.sub(r"\s+", " ", inspect.getdoc(base) or "")
            told = re.search(rf"\b{name}(?:, \w+)*(?: and \w+)?: (.+?)(?=[.;] \w+(?:, \w+)*(?: and \w+)?: |\Z)", text)
            return "" if told is None else f". {told[1][:1].upper()}{told[1][1:].rstrip('.')}."
    return ""
