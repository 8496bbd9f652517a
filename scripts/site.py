"""Pages of the documentation site that are made from the code: one for each registry entry, and those of the API.

`mkdocs build` calls `on_config` and `on_files`; see mkdocs.yml. A page is made of the registry entry, the docstring of
the module that is named after the paper, the docstrings of the parts that a method is made of, and the rows of the
tables of figures in docs/.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import itertools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from site_examples import example, search_example

DOCS = Path(__file__).parents[1] / "docs"

FAMILIES = {
    "ar-sampling": "Autoregressive decoding", "speculative-linear": "Speculation: chains of drafts",
    "speculative-tree": "Speculation: trees of drafts", "speculative-self": "Speculation: drafts by the model itself",
    "speculative-theory": "Speculation: rules and schedules", "parallel-jacobi": "Jacobi and lookahead decoding",
    "blockwise-parallel": "Blockwise parallel decoding", "masked-diffusion": "Masked diffusion",
    "diffusion-cache": "Caches of masked diffusion", "search": "Beams and search",
    "batching-scheduling": "Batches and schedules"}

GUARANTEES = {
    "seed-exact": "with one seed the tokens are those of plain decoding, greedy or sampled",
    "distribution-exact": "the text has the distribution of plain decoding; with one seed it is another draw",
    "approximate": "the text may differ from plain decoding's: that is the method's trade"}

GUIDES = {"masked-diffusion": "choose/diffusion.md", "diffusion-cache": "choose/diffusion.md",
          "search": "choose/beam_search.md", "ar-sampling": "usage/sampling.md", "evict": "choose/caches_evict.md",
          "bounded": "choose/caches_evict.md", "quantize": "choose/caches_quantize.md",
          "sparse": "choose/caches_sparse.md", "prefill": "choose/caches_prefill.md",
          "prefix": "choose/caches_prefix.md", "context": "usage/meshes.md"}
"""Guides of families; of the others choose/drafts.md."""

FIGURES = ("results/speculation.md", "choose/diffusion.md", "choose/beam_search.md", "choose/search.md",
           "results/conformance.md")
"""Files whose tables have figures of algorithms and searches."""

CACHE_FIGURES = ("results/caches.md", "choose/caches.md", "choose/caches_sparse.md", "choose/caches_prefill.md")

API = {
    "decodax": ("decodax", "What most programs need."),
    "policies": ("decodax.sampling", "The chain of transforms that makes the distribution, and rules to sample."),
    "drafts": ("decodax.algorithms.speculative.drafts", "Where drafts come from."),
    "shapes": ("decodax.algorithms.speculative.trees", "How drafts are laid out as trees."),
    "diffusion": ("decodax.algorithms.diffusion", "Samplers of masked diffusion."),
    "caches": ("decodax.caches", "What the cache keeps."),
    "constraints": ("decodax.constraints", "Texts that match."),
    "search": ("decodax.algorithms.beams", "Beams and related searches."),
    "steps": ("decodax.search", "Search over steps, on forks of one state."),
    "select": ("decodax.select", "One of several samples."),
    "contrastive": ("decodax.algorithms.contrastive", "Layers or models contrasted with one another."),
    "jobs": ("decodax.jobs", "Many prompts."),
    "models": ("decodax.models", "Networks."),
    "formats": ("decodax.models.formats", "Weights in fewer bits."),
    "adapters": ("decodax.models.adapters", "LoRA."),
    "core": ("decodax.core.types", "The contracts of the round."),
    "plan": ("decodax.bench.plan", "Planning a job."),
    "harness": ("decodax.bench.harness", "lm-evaluation-harness."),
}
"""Pages of the API: the module, and a line."""


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages to those of docs/."""
    from mkdocs.structure.files import File

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_config(config: Any) -> Any:
    """Puts the made pages where the navigation of mkdocs.yml names their folder, as in "systems/"."""
    from decodax.common.registry import ALGORITHMS, CACHES

    families = dict.fromkeys(e.family for e in ALGORITHMS.values())
    made: dict[str, list[Any]] = {
        "systems/": ["systems/index.md", *(
            {FAMILIES.get(family, family): [{name: f"systems/{name}.md"} for name, e in ALGORITHMS.items()
                                            if e.family == family]} for family in families)],
        "caches/": ["caches/index.md", *({name: f"caches/{name}.md"} for name in CACHES)],
        **{f"{kind}/": [f"{kind}/index.md", *({name: f"{kind}/{name}.md"} for name in table)]
           for kind, (_, table, _) in {**search_pages(), **_others()}.items()},
        "api/": ["api/index.md", *({module: f"api/{name}.md"} for name, (module, _) in API.items())]}
    filled = lambda where: ([{title: filled(below) for title, below in entry.items()} for entry in where]
                            if isinstance(where, list) else made.get(where, where))
    config.nav = filled(config.nav)
    return config


def pages() -> dict[str, str]:
    """Every made page by its path below docs/."""
    from decodax.common.registry import ALGORITHMS, CACHES

    found = {"systems/index.md": systems_index(ALGORITHMS.values()), "caches/index.md": caches_index(CACHES.values()),
             "api/index.md": "# API\n\n| module | |\n|---|---|\n" + "".join(
                 f"| [`{module}`]({name}.md) | {line} |\n" for name, (module, line) in API.items())}
    found |= {f"systems/{name}.md": system_page(entry) for name, entry in ALGORITHMS.items()}
    found |= {f"caches/{name}.md": cache_page(entry) for name, entry in CACHES.items()}
    for kind, (slot, table, guide) in search_pages().items():
        found[f"{kind}/index.md"] = searches_index(slot, table.values(), guide)
        found |= {f"{kind}/{name}.md": search_page(slot, entry, guide) for name, entry in table.items()}
    for kind, (slot, table, guide) in _others().items():
        found[f"{kind}/index.md"] = others_index(kind, slot, table.values(), guide)
        found |= {f"{kind}/{name}.md": other_page(slot, entry, guide) for name, entry in table.items()}
    return found | {f"api/{name}.md": api_page(module, line) for name, (module, line) in API.items()}


def search_pages() -> dict[str, tuple[str, dict[str, Any], str]]:
    """By folder: the slot of `generate` that takes the names, their table, and the guide."""
    from decodax.common.registry import SEARCHES, SELECTS

    return {"searches": ("search", SEARCHES, "choose/search_steps.md"),
            "rules": ("select", SELECTS, "choose/best_of_n.md")}


def _others() -> dict[str, tuple[str, Any, str]]:
    """The same for constraints and formats of weights."""
    from decodax.common.registry import CONSTRAINTS, FORMATS

    return {"constraints": ("constraint", CONSTRAINTS, "choose/constraints.md"),
            "formats": ("weights", FORMATS, "choose/weights.md")}


def systems_index(entries: Iterable[Any]) -> str:
    """All systems, by family."""
    lines = ["# Systems", "", "Published decoding methods by name; `decodax list algorithms` prints the same table. "
             "*Guarantee* says what holds of the text with the default "
             "options (`dx.algorithms.make(...).traits.guarantee` is that of what was made): "
             + "; ".join(f"**{name}**: {text}" for name, text in GUARANTEES.items()) + ".", ""]
    entries = list(entries)
    for family in dict.fromkeys(e.family for e in entries):
        lines += [f"## {FAMILIES.get(family, family)}", "", "| name | paper | guarantee | needs |", "|---|---|---|---|"]
        for e in entries:
            if e.family == family:
                lines.append(f"| [`{e.name}`]({e.name}.md) | {_paper(e)} | {e.guarantee} | {e.needs} |")
        lines.append("")
    return "\n".join(lines)


def system_page(e: Any) -> str:
    """One system: paper, rule, guarantee, options, an example, figures."""
    guide = GUIDES.get(e.family, "choose/drafts.md")
    lines = [f"# {e.name}", "", f"*{e.title}*" + (f", {e.authors}" if e.authors else ""), ""]
    if e.alias_of:
        lines += [f"Another name for [`{e.alias_of}`]({e.alias_of}.md): the papers come to the same algorithm.", ""]
    lines += [f"{e.summary[:1].upper()}{e.summary[1:]}.", "",
              f"**Guarantee:** {e.guarantee} with the default options: {GUARANTEES[e.guarantee]}.", "",
              f"**Needs:** {e.needs}. **Family:** {FAMILIES.get(e.family, e.family)}; see {_link(guide)}.", "",
              "## Example", "", "```python", example(e), "```", ""]
    lines += options(e) + sections(method(e.make) + parts(e.make))
    return "\n".join(lines + figures(e.alias_of or e.name, FIGURES))


def caches_index(entries: Iterable[Any]) -> str:
    lines = ["# Caches by name", "", "For `cache=`; [the guide](../choose/caches.md) says which to choose.", "",
             "| name | paper | keeps | effect |", "|---|---|---|---|"]
    return "\n".join(lines + [f"| [`{e.name}`]({e.name}.md) | {_cell(e.title)} ({_cell(e.authors)}) | "
                              f"{_cell(e.summary)} | {e.guarantee} |" for e in entries]) + "\n"


def cache_page(e: Any) -> str:
    """One cache policy."""
    effect = {"exact": "a model with this cache computes what it does with a dense one",
              "approximate": "what is left out is missed"}[e.guarantee]
    lines = [f"# {e.name}", "", f"*{e.title}*" + (f", {e.authors}" if e.authors else ""), "",
             e.summary if e.summary.endswith(".") else f"Keeps {e.summary}.", "",
             f"**Effect:** {e.guarantee}: {effect}. See {_link(GUIDES.get(e.family, 'choose/caches.md'))}.", "",
             "## Example", "", "```python", "import decodax as dx", "",
             'lm = dx.load("pycode")',
             f'out = dx.generate(lm, "def fib(n):", max_new_tokens=32, cache="{e.name}")', "print(out.text[0])", "```",
             ""]
    lines += options(e) + sections(method(e.make) + parts(e.make))
    return "\n".join(lines + figures(e.name, CACHE_FIGURES))


def searches_index(slot: str, entries: Iterable[Any], guide: str) -> str:
    """All searches over steps, or all rules that choose one of several samples."""
    what = {"search": "Searches over steps by name", "select": "Rules that choose one of several samples, by name"}
    listing = {"search": "searches", "select": "selects"}[slot]
    lines = [f"# {what[slot]}", "", f"For `dx.generate(..., {slot}=)`; see [the guide](../{guide}). "
             f"`decodax list {listing}` prints the same table.", "", "| name | paper | rule |", "|---|---|---|"]
    rows = [_row(e) for e in entries]
    if slot == "search":
        from decodax.common.registry import FUNCTIONS
        rows += ["", "## Methods that are functions", "", "| call | paper | |", "|---|---|---|"]
        rows += [f"| `decodax.{e.name}` | {_paper(e)} | {_cell(e.summary)} |" for e in FUNCTIONS.values()]
    return "\n".join([*lines, *rows, ""])


def search_page(slot: str, e: Any, guide: str) -> str:
    """One search over steps, or rule."""
    lines = [f"# {e.name}", "", *([f"*{e.title}*" + (f", {e.authors}" if e.authors else ""), ""] if e.title else []),
             f"{e.summary[:1].upper()}{e.summary[1:].rstrip('.')}. See {_link(guide)}.", "",
             "## Example", "", "```python", search_example(slot, e), "```", ""]
    lines += options(e) + sections([*method(e.make), ("Rule", inspect.getdoc(e.make) or "")])
    return "\n".join(lines + figures(e.name, (*FIGURES, guide)))


def others_index(kind: str, slot: str, entries: Iterable[Any], guide: str) -> str:
    """All constraints, or all formats of weights."""
    lines = [f"# {kind.capitalize()} by name", "", f"For `{slot}=`; {_link(guide)} says which to choose.", "",
             "| name | paper | |", "|---|---|---|"]
    return "\n".join([*lines, *map(_row, entries), ""])


def other_page(slot: str, e: Any, guide: str) -> str:
    """One constraint, or one format of weights."""
    lines = [f"# {e.name}", "", *([f"*{e.title}*" + (f", {e.authors}" if e.authors else ""), ""] if e.title else []),
             f"{e.summary[:1].upper()}{e.summary[1:].rstrip('.')}. For `{slot}=`; see {_link(guide)}.", ""]
    lines += options(e) + sections([*method(e.make), ("Rule", inspect.getdoc(e.make) or "")])
    return "\n".join(lines)


def _paper(e: Any) -> str:
    return _cell(f"{e.title} ({e.authors})" if e.authors else e.title)


def _row(e: Any) -> str:
    return f"| [`{e.name}`]({e.name}.md) | {_paper(e)} | {_cell(e.summary)} |"


def _link(guide: str) -> str:
    title = (DOCS / guide).read_text().partition("\n")[0].removeprefix("# ")
    return f"[{title}](../{guide})"


def _value(value: Any) -> str:
    return value.__name__ if inspect.isfunction(value) else repr(value)


def api_page(module: str, line: str) -> str:
    """What a module exports: signatures and docstrings."""
    found = importlib.import_module(module)
    names = getattr(found, "__all__", None) or [
        n for n, x in vars(found).items() if not n.startswith("_") and getattr(x, "__module__", "") == module]
    lines = [f"# {module}", "", line, ""]
    for name in sorted(names, key=str.lower):
        value = getattr(found, name)
        if inspect.isclass(value):
            lines += _class(name, value)
        elif callable(value) and inspect.getdoc(value):
            lines += [f"## {name}", "", *_signature(name, value), docstring(inspect.getdoc(value) or ""), ""]
    return "\n".join(lines)


def _class(name: str, value: type) -> list[str]:
    """A class with its own public methods and properties."""
    lines = [f"## {name}", "", *_signature(name, value), docstring(inspect.cleandoc(value.__doc__ or ""))
             if _written(value) else "", ""]
    for own, what in vars(value).items():
        what = what.__func__ if isinstance(what, (classmethod, staticmethod)) else what
        text = inspect.getdoc(what)
        if own.startswith("_") or not text or not (inspect.isfunction(what) or isinstance(what, property)):
            continue
        head = [] if isinstance(what, property) else _signature(own, what)
        lines += [f"### {name}.{own}", "", *head, docstring(text), ""]
    return lines


def _signature(name: str, value: Any) -> list[str]:
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return []
    shown = [re.sub(r"<factory>|<object object at 0x\w+>", "...", str(p)) for n, p in signature.parameters.items()
             if n != "self"]
    back = "" if signature.return_annotation in (signature.empty, None) or inspect.isclass(value) else \
        f" -> {signature.return_annotation!r}"
    one = f"{name}({', '.join(shown)}){back}"
    if len(one) > 90:
        shown = [("*, " if p.kind is p.KEYWORD_ONLY and before.kind is not p.KEYWORD_ONLY else "") + text
                 for text, p, before in zip(shown, [p for n, p in signature.parameters.items() if n != "self"],
                                            [next(iter(signature.parameters.values())), *signature.parameters.values()],
                                            strict=False)]
        one = f"{name}(\n    " + ",\n    ".join(shown) + f",\n){back}"
    return ["```python", re.sub(r"(: |-> )'([^'\n]*)'", r"\1\2", one), "```", ""]


def options(e: Any) -> list[str]:
    """The table of an entry's options."""
    rows = [f"| `{name}` | `{_cell(str(value))}` |" for name, value in e.options.items()]
    return ["## Options", "", "| option | default |", "|---|---|", *rows, ""] if rows else []


def sections(found: Iterable[tuple[str, str]]) -> list[str]:
    """Docstrings under their titles."""
    return [line for name, text in found for line in (f"## {name}", "", docstring(text), "")]


def method(make: Any) -> list[tuple[str, str]]:
    """The docstring of the module that an entry is made in, if it has the module for itself and its kin."""
    from decodax.common.registry import SHELVES

    module = inspect.getmodule(inspect.unwrap(make))
    if module is None or not module.__name__.startswith("decodax."):
        return []
    kin = sum(entry.module == module.__name__ for shelf in SHELVES.values() for entry in shelf.values())
    return [("Method", inspect.cleandoc(module.__doc__))] if module.__doc__ and kin <= 3 else []


def parts(make: Any) -> list[tuple[str, str]]:
    """The parts that a maker builds, with their docstrings: classes of this library whose names stand in its source."""
    if inspect.isclass(make):       # its docstring says everything
        return [("Rule", inspect.getdoc(make) or "")]
    source, names = inspect.getsource(make), {**vars(inspect.getmodule(make)), **inspect.getclosurevars(make).nonlocals}
    own, found = inspect.getdoc(make), {}
    for path in re.findall(r"\b((?:\w+\.)*\w+)\(", source):
        value: Any = names.get(path.partition(".")[0])
        for step in path.split(".")[1:]:
            value = getattr(value, step, None)
        if inspect.isclass(value) and value.__module__.startswith("decodax.") and _written(value):
            found[value.__name__] = inspect.cleandoc(value.__doc__ or "")
    last = ("Speculative", "MaskedDiffusion")       # what most systems are made of
    return ([("Rule", own)] if own else []) + sorted(found.items(), key=lambda part: part[0] in last)


def _written(value: type) -> bool:
    """Whether a class has a docstring of its own: dataclasses make one up."""
    return bool(value.__doc__) and not (dataclasses.is_dataclass(value) and
                                        (value.__doc__ or "").startswith(f"{value.__name__}("))


def docstring(text: str) -> str:
    """Markdown of a docstring in Google's style."""
    out: list[str] = []
    section = False
    for line in text.splitlines():
        if re.fullmatch(r"(Attributes|Args|Raises|Returns):", line):
            out += ["", f"**{line}**", ""]
            section = True
        elif section and re.match(r" {4}\S", line):
            out.append("- " + re.sub(r"^(\w+(?:, \w+)*):", r"`\1`:", line.strip()))
        elif line.startswith((">>>", "...")):
            out.append("    " + line)
        else:
            section = section and (not line or line.startswith(" "))
            out.append(("  " + line.strip()) if section and line.strip() else line)
    return "\n".join(out)


def figures(name: str, files: Iterable[str]) -> list[str]:
    """The rows of a name in the tables of figures, under the headings of the tables."""
    out: list[str] = []
    for file in files:
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
                out += [f"From {_link(file)}{': ' + text if text else ''}", "", *header, linked(line), ""]
    return ["## Figures", "", *out] if out else []


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
