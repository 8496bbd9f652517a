"""Pages of the documentation site that are made from the code: one for each registry entry, and those of the API.

`mkdocs build` calls the functions that begin with `on_`; see mkdocs.yml. A page has the facts of an entry, the
docstrings of what makes it and of its module, and the rows of the tables of figures in docs/. mkdocstrings renders the
docstrings.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import griffe

sys.path.insert(0, str(Path(__file__).parent))     # also where the site is built by another program

from conformance_report import FAMILIES

DOCS = Path(__file__).parents[1] / "docs"

GUARANTEES = {
    "seed-exact": "with one seed the tokens are those of plain decoding, greedy or sampled",
    "distribution-exact": "the text has the distribution of plain decoding; with one seed it is another draw",
    "exact": "a model with this cache computes what it does with a dense one; a text belongs to the language",
    "approximate": "the text may differ from plain decoding's: that is the method's trade"}

GUIDES = {"masked-diffusion": "choose/diffusion.md", "diffusion-cache": "choose/diffusion.md",
          "search": "choose/beam_search.md", "ar-sampling": "usage/sampling.md", "evict": "choose/caches_evict.md",
          "bounded": "choose/caches_evict.md", "quantize": "choose/caches_quantize.md",
          "sparse": "choose/caches_sparse.md", "prefill": "choose/caches_prefill.md",
          "prefix": "choose/caches_prefix.md", "context": "usage/meshes.md"}
"""Guides of families that are not the guide of their folder."""

FIGURES = ("results/speculation.md", "choose/diffusion.md", "choose/beam_search.md", "choose/search.md",
           "choose/search_steps.md", "choose/best_of_n.md", "results/conformance.md", "results/caches.md",
           "choose/caches.md", "choose/caches_sparse.md", "choose/caches_prefill.md")
"""Files whose tables have figures of entries."""


class Folder(NamedTuple):
    """The pages of a shelf: its name in the registry, the title of the list, and the guide."""

    shelf: str
    title: str
    guide: str


FOLDERS = {
    "systems": Folder("algorithms", "Systems", "choose/drafts.md"),
    "caches": Folder("caches", "Caches by name", "choose/caches.md"),
    "searches": Folder("search", "Searches over steps by name", "choose/search_steps.md"),
    "rules": Folder("select", "Rules that choose one of several samples, by name", "choose/best_of_n.md"),
    "constraints": Folder("constraints", "Constraints by name", "choose/constraints.md"),
    "formats": Folder("formats", "Formats by name", "choose/weights.md"),
}

API = ("decodax", *(f"decodax.{name}" for name in """algorithms.beams algorithms.contrastive algorithms.diffusion
algorithms.speculative.drafts algorithms.speculative.trees bench.harness bench.plan caches constraints core.types jobs
models models.adapters models.formats sampling search select""".split()))
"""Modules of the API."""


class Doctests(griffe.Extension):
    """Shows the doctests of docstrings as code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"(?m)^>>> (?:.+\n?)+", lambda found: f"```pycon\n{found[0].rstrip()}\n```\n",
                                         obj.docstring.value)


def on_startup(**_: Any) -> None:
    """Links the library for mkdocstrings as it is installed, with models/ and pallas_kernels/ in the package."""
    root = DOCS.parent
    tree = root / ".cache" / "site" / "decodax"
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    for path in (*(root / "decodax").iterdir(), root / "models", root / "pallas_kernels"):
        (tree / path.name).symlink_to(path)


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages to those of docs/."""
    from mkdocs.structure.files import File

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_config(config: Any) -> Any:
    """Puts the made pages where the navigation of mkdocs.yml names their folder, as in "systems/"."""
    made: dict[str, list[Any]] = {"api/": ["api/index.md", *({module: f"api/{module}.md"} for module in API)]}
    for name, folder in FOLDERS.items():
        made[f"{name}/"] = [f"{name}/index.md", *({e.name: f"{name}/{e.name}.md"} for e in entries(folder))]
    made["systems/"][1:] = [{title: [{e.name: f"systems/{e.name}.md"} for e in each]}
                            for title, each in by_family(entries(FOLDERS["systems"])).items()]
    filled = lambda where: ([{title: filled(below) for title, below in entry.items()} for entry in where]
                            if isinstance(where, list) else made.get(where, where))
    config.nav = filled(config.nav)
    return config


def pages() -> dict[str, str]:
    """Returns every made page by its path below docs/."""
    first = lambda module: cell((importlib.import_module(module).__doc__ or "").partition("\n\n")[0].replace("\n", " "))
    found = {"api/index.md": "# API\n\n" + table(("module", ""), [
        (f"[`{module}`]({module}.md)", first(module)) for module in API])}
    for module in API:
        found[f"api/{module}.md"] = f"# {module}\n\n::: {module}\n    options: {exported(module)}\n"
    for name, folder in FOLDERS.items():
        found[f"{name}/index.md"] = index(folder)
        found |= {f"{name}/{e.name}.md": page(folder, e) for e in entries(folder)}
    return found


def entries(folder: Folder) -> list[Any]:
    """Returns the entries of a folder."""
    from decodax.common.registry import SHELVES

    return list(SHELVES[folder.shelf].values())


def by_family(found: Iterable[Any]) -> dict[str, list[Any]]:
    """Returns algorithms by the title of their family."""
    out: dict[str, list[Any]] = {}
    for e in found:
        out.setdefault(FAMILIES.get(e.family, e.family), []).append(e)
    return out


def index(folder: Folder) -> str:
    """Returns the list of a folder, of algorithms by family, of searches with the methods that are functions."""
    from decodax.common.registry import FUNCTIONS, SHELVES

    slot = SHELVES[folder.shelf].slot
    lines = [f"# {folder.title}",
             f"For `{slot}=`, as `decodax list` prints them; {link(folder.guide)} says which to choose."]
    row = lambda e: (f"[`{e.name}`]({e.name}.md)", cell(e.paper), cell(e.summary), e.guarantee, e.needs)
    columns = ("name", "paper", "what it does", "guarantee", "needs")
    if folder.shelf != "algorithms":
        lines.append(table(columns, map(row, entries(folder))))
    else:
        lines.append("The guarantee is that with the default options (`dx.algorithms.make(...).traits.guarantee` is "
                     "that of what was made): " + "; ".join(f"**{k}**: {v}" for k, v in GUARANTEES.items()) + ".")
        lines += [f"## {title}\n\n{table(columns, map(row, each))}"
                  for title, each in by_family(entries(folder)).items()]
    if folder.shelf == "search":
        lines.append("## Methods that are functions\n\n" + table(("call", "paper", ""), [
            (f"`decodax.{e.name}`", cell(e.paper), cell(e.summary)) for e in FUNCTIONS.values()]))
    return "\n\n".join(lines) + "\n"


def page(folder: Folder, e: Any) -> str:
    """Returns the page of an entry: paper, summary, guarantee, example, options, docstrings and figures."""
    said = e.summary if e.summary.endswith(".") else f"{e.summary}."
    lines = [f"# {e.name}", *([f"*{e.title}*" + (f", {e.authors}" if e.authors else "")] if e.title else []),
             f"{said[:1].upper()}{said[1:]} See {link(GUIDES.get(e.family, folder.guide))}."]
    if e.alias_of:
        lines.append(f"Another name for [`{e.alias_of}`]({e.alias_of}.md): the papers come to the same algorithm.")
    lines.append(f"**Guarantee:** {e.guarantee}: {GUARANTEES[e.guarantee]}. **Needs:** {e.needs}.")
    if e.example:
        lines.append(f"```python\n{e.example}\n```")
    if e.options:
        lines.append("## Options\n\n" + table(("option", "takes"), [
            (f"`{name}`", cell(str(option))) for name, option in e.options.items()]))
    make = getattr(e.make, "func", e.make)
    lines.append(f"## Rule\n\n::: {make.__module__}.{make.__qualname__}")
    if has_own_module(make.__module__):
        lines.append(f"## Method\n\n::: {make.__module__}\n    options: {{members: []}}")
    return "\n\n".join([*lines, *figures(e.alias_of or e.name)]) + "\n"


def has_own_module(module: str) -> bool:
    """Returns True if a module has a docstring and makes at most three entries."""
    from decodax.common.registry import SHELVES

    kin = sum(other.module == module for shelf in SHELVES.values() for other in shelf.values())
    return kin <= 3 and bool(importlib.import_module(module).__doc__)


def exported(module: str) -> str:
    """Returns the option of mkdocstrings that shows what a module exports."""
    names = getattr(importlib.import_module(module), "__all__", None)
    return f"{{members: [{', '.join(names)}]}}" if names else "{}"


def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Returns a table in Markdown."""
    from decodax.bench.figures import markdown_table

    return markdown_table(list(columns), [list(row) for row in rows])


def cell(text: str) -> str:
    """Returns a text as a cell of a table."""
    return text.replace("|", "\\|").replace("<", "&lt;")


def link(guide: str) -> str:
    """Returns a link from a made page to a page of docs/, by its title."""
    return f"[{(DOCS / guide).read_text().partition(chr(10))[0].removeprefix('# ')}](../{guide})"


def figures(name: str) -> list[str]:
    """Returns the rows of a name in the tables of figures, under the headings of the tables."""
    out: list[str] = []
    for file in FIGURES:
        folder = file.rpartition("/")[0]
        linked = functools.partial(re.sub, r"\]\((?!http|#)([^)]*)\)", rf"](../{folder}/\1)")
        header: list[str] = []
        said: list[str] = []            # the paragraph in front of the table
        for before, line in itertools.pairwise(["", *(DOCS / file).read_text().splitlines()]):
            if not line.startswith("|"):
                said = [line] if not before.strip() and line.strip() else [*said, line] if line.strip() else said
                header = []
            elif len(header) < 2:
                header.append(line)
            elif line.split("|")[1].strip().strip("`").split(":")[0] == name and "| paper |" not in header[0]:
                text = "" if said[:1] and said[0].startswith(("#", "    ", "!", "```")) else linked(" ".join(said))
                out += [f"From {link(file)}{': ' + text if text else ''}", "\n".join([*header, linked(line)])]
    return ["## Figures", *out] if out else []
