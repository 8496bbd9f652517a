"""The documentation site is built strictly, and its examples and the notebook run."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

import decodax as dx
from decodax.common.registry import ALGORITHMS, CACHES
from scripts import real_models, site
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
    assert "LouisKV: a layer chooses the tokens" in (tmp_path / "caches" / "louiskv" / "index.html").read_text()
    assert "Rolling" not in page and "sudoku" in (tmp_path / "notebook" / "index.html").read_text()


def test_every_entry_of_every_shelf_has_a_page_that_says_what_the_registry_does():
    made = site.pages()
    for name, folder in site.FOLDERS.items():
        for entry in site.entries(folder):
            page = made[f"{name}/{entry.name}.md"]
            assert page.startswith(f"# {entry.name}\n") and entry.title in page, entry.name
            assert f"**Guarantee:** {entry.guarantee}" in page and entry.example in page, entry.name
            assert all(f"| `{option}` |" in page for option in entry.options), entry.name


def test_a_page_has_the_method_of_its_paper_and_the_measured_figures():
    page = site.page(site.FOLDERS["caches"], CACHES["louiskv"])
    assert "## Method\n\n::: decodax.caches.sparse.louiskv\n" in page and "choose/caches_sparse.md" in page
    assert "::: decodax.caches.sparse.louiskv.LouisKVConfig" in page and "| louiskv:skip=(0,1) |" in page


TRAINED = ("apd", "assd", "pard", "pard-2", "specdec",
           *(name for name, e in ALGORITHMS.items() if e.takes_drafter))
"""Systems for models that are trained first, as their docstrings say."""

SLOW = ("automatic", "disco", "knn-ssd", "self-speculative", "specdec++")
"""Systems whose making runs the model."""


def test_every_example_makes_its_system(monkeypatch):
    """As far as `generate`, for what has no option that must be given."""
    load, made = functools.cache(dx.load), []

    def generate(model, prompt, algorithm, draft=None):
        made.append(ALGORITHMS.object(algorithm, load(model), draft and load(draft)))

    monkeypatch.setattr(dx, "generate", generate)
    names = [name for name, e in ALGORITHMS.items()
             if name not in (*SLOW, *TRAINED) and e.example and "=..." not in e.example]
    for name in names:
        exec(ALGORITHMS[name].example, {"dx": dx})
    assert len(made) == len(names) > 90 and all(hasattr(one, "decide") for one in made)


SOME = ["autoregressive", "prompt-lookup", "llada"]


@pytest.mark.wide(but=("autoregressive",))
@pytest.mark.parametrize("name", often(SOME, [n for n, e in ALGORITHMS.items()
                                              if n not in TRAINED and "=..." not in e.example]))
def test_examples_run(name):
    assert eval(ALGORITHMS[name].example.removesuffix(")") + ", max_new_tokens=32)", {"dx": dx}).text[0]


@pytest.mark.wide
def test_the_notebook_runs(tmp_path):
    import nbformat
    from nbclient import NotebookClient

    book = nbformat.read(ROOT / "docs" / "notebook.ipynb", as_version=4)
    shown = [cell["outputs"] for cell in book.cells if cell.cell_type == "code"]
    os.environ["PYTHONPATH"] = str(ROOT)
    here = real_models.folder() / real_models.MODELS["smollm2"].file
    if here.is_file():      # which the notebook would download
        (tmp_path / here.name).symlink_to(here)
    NotebookClient(book, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    for before, cell in zip(shown, (c for c in book.cells if c.cell_type == "code"), strict=True):
        assert bool(before) == bool([o for o in cell.outputs if o.get("name") != "stderr"]), cell.source
