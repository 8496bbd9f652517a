"""Entries of the registry: the things that are chosen by name, with paper, options and guarantee, and their
configuration before the model is known."""

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
"""The guarantee of the output. "seed-exact": with the same seed, the tokens are those of plain decoding.
"distribution-exact": the texts have the distribution of plain decoding. "exact": with a cache, the model computes the
same as with a dense cache; with a constraint, every text belongs to its language. "approximate": the output may differ.
"""

Needs = Literal["nothing", "a model", "a draft model", "a model and a draft model", "samples",
                "a draft model and samples", "a diffusion model", "a diffusion model and a draft model",
                "a trained drafter", "a trained drafter and samples", "a tuned draft model"]
"""The models and data from which an entry is made, beside its options: nothing, the target model, a draft model with
its tokenizer, both, the target and sample texts (given by an option), those and a draft model, a masked diffusion
model as the target, alone or with an autoregressive model, the target with a drafter that was trained for it (shipped
for some models, else given as `draft`), both that and sample texts, or a draft model that was tuned for the method
(none is shipped)."""

BESIDE = ("lm", "draft")
"""Parameters of an entry that are not options: the target model and the draft model."""


EXAMPLES = {"algorithm": "", "cache": "", "constraint": "", "search": ", temperature=0.8",
            "select": ", num_samples=4, temperature=0.8"}
"""Slots whose entries have an example, and what the call says beside them."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One named entry of a shelf (a kind of things in the registry).

    Attributes:
        shelf: name of the shelf.
        name: the name by which it is chosen.
        make: function or class that makes it.
        title: title of the paper.
        authors: authors and year.
        summary: one sentence.
        family: group in which listings show it.
        guarantee: guarantee of the output with the default options; the object that is made may state another one.
            Empty for a model.
        needs: models that `make` takes beside options.
        alias_of: the entry of which this is another name, or None. An alias makes the same thing; its summary says what
            its own paper adds.
        module: name of the module that registered it.
        slot: argument of `decodax.generate` that takes the entry; the messages of errors begin with it.
        model: shipped model for its example; empty: the one that `needs` asks for.
        drafters: methods whose trained drafters `make` takes, the likeliest first; empty: its own.
    """

    shelf: str
    name: str
    make: Callable[..., Any]
    title: str
    authors: str
    summary: str
    family: str = ""
    guarantee: Guarantee | Literal[""] = "approximate"
    needs: Needs = "nothing"
    alias_of: str | None = None
    module: str = ""
    slot: str = ""
    model: str = ""
    drafters: tuple[str, ...] = ()

    @property
    def paper(self) -> str:
        """Title, authors and year of the paper."""
        return f"{self.title} ({self.authors})" if self.authors and self.title else self.title or self.authors

    @property
    def takes_model(self) -> bool:
        """True if `make` needs the target model."""
        return self.needs not in ("nothing", "a draft model", "a tuned draft model")

    @property
    def takes_draft(self) -> bool:
        """True if `make` needs a draft model."""
        return "draft model" in self.needs

    @property
    def takes_drafter(self) -> bool:
        """True if `make` needs a drafter that was trained for the target."""
        return "trained drafter" in self.needs

    @property
    def systems(self) -> tuple[str, ...]:
        """The methods whose trained drafters `make` takes, the likeliest first."""
        return self.drafters or (self.alias_of or self.name,)

    @property
    def may_draft(self) -> bool:
        """True if `make` has an argument for a draft model."""
        return "draft" in inspect.signature(self.make).parameters

    @functools.cached_property
    def options(self) -> dict[str, Option]:
        """The options by name."""
        return {name: option for name, option in options_of(self.make).items() if name not in BESIDE}

    @property
    def owner(self) -> str:
        """Full name of the function or class that registered it, or of the module for an alias; for messages."""
        return f"an alias in {self.module}" if self.alias_of else f"{self.module}.{self.make.__qualname__}"

    @property
    def identifier(self) -> str:
        """The name as an attribute of a module.

        >>> [Entry("caches", name, print, "", "", "").identifier for name in ("freedave++", "del")]
        ['freedave_plus_plus', 'del_']
        """
        name = self.name.replace("+", "_plus").replace("-", "_").replace(".", "_")
        return f"_{name}" if name[0].isdigit() else f"{name}_" if keyword.iskeyword(name) else name

    @property
    def description(self) -> str:
        """The full description: what it does, its options with their ranges, the paper, the guarantee, the models that
        it needs, and an example."""
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
        """A call with the entry, as text, with "..." for options that have to be given. Empty if no slot takes the
        entry. A drafter that was trained for the model is the one that `scripts/train.py drafter` writes."""
        fitted = ("samples", "domains") if "samples" in self.needs else ()      # options that another one may replace
        needed = [f"{name}=..." for name, option in self.options.items() if not option.optional or name in fitted]
        if self.slot == "weights":
            return f'dx.load("pycode", weights="{self.name}")'
        if self.slot not in EXAMPLES:
            return ""
        draft = "pycode-draft"
        if self.takes_drafter:
            draft = f"runs/pycode-{self.systems[0]}/model"
        beside = EXAMPLES[self.slot] + (f', draft="{draft}"' if self.takes_draft or self.takes_drafter else "")
        model = self.model or ("pycode-diffusion" if "diffusion" in self.needs else "pycode")
        made = f"dx.{self.shelf}.{self.identifier}({', '.join(needed)})"
        prompt = "1207=" if model == "numerals" else "def area(r):"
        return f'dx.generate("{model}", "{prompt}", {self.slot}={made}{beside})'

    def configured(self, options: Mapping[str, Any], draft: Any = None) -> Configured:
        """Returns the entry with options, for a model that is given later (`Configured.build`).

        Args:
            options: options by name.
            draft: the draft model, if it is known.

        Raises:
            ValueError: an option that the entry does not take, or one that is missing.
        """
        if unknown := sorted(options.keys() - self.options.keys()):
            raise ValueError(unknown_option(self.name, unknown[0], self.options, self.slot))
        if missing := [key for key, option in self.options.items() if not option.optional and key not in options]:
            raise ValueError(f"{self.slot}: {self.name!r} needs {missing[0]}=")
        return Configured(self, options, draft)

    def function(self) -> Callable[..., Any]:
        """Returns the function that a user calls to make the entry with its options.

        If the entry needs a model, or a draft model that is not given, the function returns a `Configured`, which
        `generate` builds for its model. Wrong options raise a TypeError with the text of `configured`.
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
        parameters = [*(p.replace(default=NamedDefault(p.default)) if inspect.isfunction(p.default) else p
                        for p in own if p.name not in BESIDE), *beside]
        parameters.sort(key=lambda p: p.kind)
        signature = inspect.Signature(parameters)
        make.__name__, make.__qualname__, make.__module__ = self.identifier, self.identifier, self.module
        make.__doc__ = self.description
        make.__signature__ = signature      # type: ignore[attr-defined]
        return make


@dataclasses.dataclass(frozen=True, repr=False)
class NamedDefault:
    """A function that is the default of an option. Its representation is its name, so that `help` shows no address.

    Attributes:
        function: the function.
    """

    function: Callable[..., Any]

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.function(*args, **options)

    def __repr__(self) -> str:
        return self.function.__name__


@dataclasses.dataclass(frozen=True, repr=False)
class Configured:
    """An entry with options, for a model that is not known yet. The functions of a shelf return it for entries that
    need the target model, and `generate` makes it from a string.

    Attributes:
        entry: the entry.
        options: the options by name.
        draft: the draft model, or None.
    """

    entry: Entry
    options: Mapping[str, Any]
    draft: Any = None

    def __repr__(self) -> str:
        """Returns the call that makes it."""
        given = {**self.options, **({} if self.draft is None else {"draft": self.draft})}
        said = ", ".join(f"{name}={shown(value)}" for name, value in given.items())
        return f"dx.{self.entry.shelf}.{self.entry.identifier}({said})"

    def build(self, lm: Any = None, draft: Any = None, **beside: Any) -> Any:
        """Makes the object, such as an algorithm or a cache configuration, for a model.

        Args:
            lm: target model from `decodax.load`; None only if the entry does not need one.
            draft: draft model from `decodax.load`; None: `self.draft`.
            beside: values that the caller knows, such as the batch size, for options that were not given. Those that
                the entry does not take are ignored.

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
    """Returns the description of an option in the docstring of a base class, if the docstring of `make` does not
    mention it."""
    for base in getattr(make, "__mro__", ())[1:]:
        if name in inspect.get_annotations(base):
            text = re.sub(r"\s+", " ", inspect.getdoc(base) or "")
            told = re.search(rf"\b{name}(?:, \w+)*(?: and \w+)?: (.+?)(?=[.;] \w+(?:, \w+)*(?: and \w+)?: |\Z)", text)
            return "" if told is None else f". {told[1][:1].upper()}{told[1][1:].rstrip('.')}."
    return ""
