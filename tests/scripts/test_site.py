"""The documentation site is built strictly, and its examples and the notebook run."""

import dataclasses
import functools
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import site_examples
import train

import decodax as dx
from decodax.common.registry import ALGORITHMS, CACHES, CONSTRAINTS, FORMATS, SELECTS
from decodax.common.registry import SEARCHES as SEARCHES_BY_NAME
from decodax.models import Diffusion
from recipes.options import from_arguments
from scripts import site
from tests.matrix import often

ROOT = Path(__file__).parents[2]


@pytest.mark.wide
def test_the_site_builds_without_a_warning(tmp_path):
    """Each page is in the navigation, and no link leads nowhere."""
    done = subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path)], cwd=ROOT,
                          env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}, capture_output=True,
                          text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(list((tmp_path / "systems").iterdir())) == len(ALGORITHMS) + 1
    page = (tmp_path / "systems" / "prompt-lookup" / "index.html").read_text()
    for said in ("Saxena 2023", "seed-exact", "max_ngram", "Drafts", "prompt-lookup-decoding", "token-recycling"):
        assert said in page, said
    assert "Rolling" not in page and "sudoku" in (tmp_path / "notebook" / "index.html").read_text()


def test_pages_say_what_the_registry_does():
    for name, entry in ALGORITHMS.items():
        page = site.system_page(entry)
        assert page.startswith(f"# {name}\n") and entry.title in page and f"**Guarantee:** {entry.guarantee}" in page
        assert all(f"`{option}`" in page for option in entry.options)
        # the rule of each stands on its page, by the parts that it is made of or its maker
        assert entry.alias_of or site.parts(entry.make), name


def test_a_page_has_the_method_of_its_paper_and_the_measured_figures():
    page = site.cache_page(CACHES["louiskv"])
    assert "## Method" in page and "LouisKV: a layer chooses anew" in page and "choose/caches_sparse.md" in page
    assert "| louiskv:skip=(0,1) |" in page


def test_every_entry_of_every_shelf_has_a_page():
    made = site.pages()
    shelves = {"systems": ALGORITHMS, "caches": CACHES, "searches": SEARCHES_BY_NAME, "rules": SELECTS,
               "constraints": CONSTRAINTS, "formats": FORMATS}
    for folder, shelf in shelves.items():
        assert all(made[f"{folder}/{name}.md"].startswith(f"# {name}\n") for name in shelf), folder


SEARCHES = [(front, entry) for front, table, _ in site.search_pages().values() for entry in table.values()]


@pytest.mark.wide
@pytest.mark.parametrize(("front", "entry"), often(SEARCHES[:1], SEARCHES), ids=lambda x: getattr(x, "name", x))
def test_examples_of_searches_run(front, entry, capsys):
    page = site.search_page(front, entry, "choose/search_steps.md")
    assert page.startswith(f"# {entry.name}\n") and all(f"`{option}`" in page for option in entry.options)
    exec(compile(site_examples.search_example(front, entry), entry.name, "exec", dont_inherit=True), {})
    assert capsys.readouterr().out


MEASURED = {"automatic", "disco", "knn-ssd", "self-speculative", "specdec++"}
"""Systems whose making runs the model: `--all` runs their examples."""


def test_every_example_makes_its_system(monkeypatch):
    """As far as `generate`; models that are trained first stand in with other weights."""
    load, made = functools.cache(dx.load), []

    def found(name):
        if not name.startswith("runs/"):
            return load(name)
        full = Diffusion(4096) if name == "runs/pycode-full/model" else \
            Diffusion(4096, attention="causal-prefix", block=16)
        return dataclasses.replace(load("pycode-diffusion"), diffusion=full)

    def generate(lm, prompt, max_new_tokens, algorithm):
        made.append(dx.algorithms.make(algorithm, lm) if isinstance(algorithm, str) else algorithm)
        raise StopIteration

    monkeypatch.setattr(dx, "load", found)
    monkeypatch.setattr(dx, "generate", generate)
    names = [name for name in ALGORITHMS if name not in MEASURED]
    for name in names:
        with pytest.raises(StopIteration):
            exec(compile(site_examples.example(ALGORITHMS[name]), name, "exec", dont_inherit=True), {})
    assert len(made) == len(names)


@pytest.mark.parametrize("name", list(site_examples.TRAINED))
def test_the_command_that_an_example_names_is_the_trainers(name):
    line = next(line for line in site_examples.example(ALGORITHMS[name]).splitlines() if line.startswith("# python"))
    options = from_arguments(train.parser().parse_args(line.split()[3:]))
    assert options.output.as_posix() == f"runs/{site_examples.TRAINED[name][0]}"
    assert (options.attention, options.block) == {"apd": (None, None), "sbd": ("causal-prefix", 16)}[name]
    said = inspect.getdoc(ALGORITHMS[name].make) or ""
    assert line.removeprefix("# ") in " ".join(said.replace("\\\n", " ").split())


SOME = ["autoregressive", "prompt-lookup", "llada"]


@pytest.mark.wide(but=("autoregressive",))
@pytest.mark.parametrize("name", often(SOME, [n for n in ALGORITHMS if n not in site_examples.TRAINED]))
def test_examples_run(name, capsys):
    exec(compile(site_examples.example(ALGORITHMS[name]), name, "exec", dont_inherit=True), {})
    assert re.search(r"\d+\.\d+\n$", capsys.readouterr().out)


@pytest.mark.wide
def test_the_notebook_runs(tmp_path):
    import nbformat
    from nbclient import NotebookClient

    book = nbformat.read(ROOT / "docs" / "notebook.ipynb", as_version=4)
    shown = [cell["outputs"] for cell in book.cells if cell.cell_type == "code"]
    os.environ["PYTHONPATH"] = str(ROOT)
    NotebookClient(book, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    for before, cell in zip(shown, (c for c in book.cells if c.cell_type == "code"), strict=True):
        assert bool(before) == bool([o for o in cell.outputs if o.get("name") != "stderr"]), cell.source
