"""Each published method is in some listing: of systems, cache policies, searches, rules, or functions."""

import importlib
import inspect
import re

import pytest

from decodax.common.registry import FUNCTIONS, Entry

PARTS = {
    "search.covered": "what `heal` draws from", "search.k_means": "of phi-decoding",
    "search.to_apar": "data for `apar`", "select.calibrated": "of infalign-ctrl",
    "select.equilibrium": "of equilibrium-ranking", "select.chrf": "a utility of `mbr`",
    "select.insert": "for `resolve_edits`", "fit_tree": "of `stand`"}
"""Functions whose docstrings name a paper, but are parts of methods that stand in a listing."""

MODULES = ("decodax", "decodax.search", "decodax.select", "decodax.algorithms.contrastive")


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_a_function_that_is_listed_exists_and_names_its_paper(name: str) -> None:
    entry: Entry = FUNCTIONS[name]
    module = inspect.getmodule(entry.make)
    assert callable(entry.make) and module is not None and entry.make.__doc__
    first, year = re.split(r",| and | et al| (?=\d)", entry.authors)[0], entry.authors[-4:]
    assert re.search(rf"{first}\b[^)]{{0,80}}{year}", inspect.getsource(module)), entry.authors


def test_every_public_function_that_names_a_paper_is_listed() -> None:
    found = set()
    for module in MODULES:
        for name in importlib.import_module(module).__all__:
            value = getattr(importlib.import_module(module), name)
            cites = re.search(r"\b[A-Z]\w+(?: et al\.| and [A-Z]\w+)?,? (?:19|20)\d\d\b", inspect.getdoc(value) or "")
            if inspect.isfunction(value) and cites:
                found.add(f"{module}.{name}".removeprefix("decodax."))
    assert found - set(FUNCTIONS) <= set(PARTS)
    assert len(found & set(FUNCTIONS)) > 10


def test_functions_are_on_the_pages_that_the_site_makes() -> None:
    from scripts import site

    page = site.pages()["searches/index.md"]
    assert all(f"`decodax.{name}`" in page and e.title in page for name, e in FUNCTIONS.items())
