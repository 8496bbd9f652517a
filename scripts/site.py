"""Pages of the documentation site that are made from the code: one a system, cache policy, search and rule, and the
API's.

`mkdocs build` calls `on_config` and `on_files`; see mkdocs.yml. What stands on a page comes from the registry, from the
docstrings of the parts that a system is made of, and from the tables of figures in docs/.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import itertools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

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

GUIDES = {"masked-diffusion": "diffusion.md", "diffusion-cache": "diffusion.md", "search": "search.md"}
"""By family; of the others speculation.md."""

FIGURES = ("speculation_results.md", "diffusion.md", "search.md", "conformance.md")

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
           for kind, (_, table, _) in _searches().items()},
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
    for kind, (slot, table, guide) in _searches().items():
        found[f"{kind}/index.md"] = searches_index(slot, table.values(), guide)
        found |= {f"{kind}/{name}.md": search_page(slot, entry, guide) for name, entry in table.items()}
    return found | {f"api/{name}.md": api_page(module, line) for name, (module, line) in API.items()}


def _searches() -> dict[str, tuple[str, dict[str, Any], str]]:
    """By folder: the slot of `generate` that takes the names, their table, and the guide."""
    from decodax.common.registry import SEARCHES, SELECTS

    return {"searches": ("search", SEARCHES, "search_steps.md"), "rules": ("select", SELECTS, "select.md")}


def systems_index(entries: Iterable[Any]) -> str:
    """All systems, by family."""
    lines = ["# Systems", "", "Published decoding methods by name; `decodax list algorithms` prints the same table. "
             "*Guarantee* says what holds of the text with the default "
             "options (`dx.algorithms.make(...).guarantee` is that of what was made): "
             + "; ".join(f"**{name}**: {text}" for name, text in GUARANTEES.items()) + ".", ""]
    entries = list(entries)
    for family in dict.fromkeys(e.family for e in entries):
        lines += [f"## {FAMILIES.get(family, family)}", "", "| name | paper | guarantee | needs |", "|---|---|---|---|"]
        for e in entries:
            if e.family == family:
                paper = _cell(f"{e.title} ({e.authors})" if e.authors else e.title)
                lines.append(f"| [`{e.name}`]({e.name}.md) | {paper} | {e.guarantee} | {e.needs} |")
        lines.append("")
    return "\n".join(lines)


def system_page(e: Any) -> str:
    """One system: paper, rule, guarantee, options, an example, figures."""
    guide = GUIDES.get(e.family, "speculation.md")
    lines = [f"# {e.name}", "", f"*{e.title}*" + (f", {e.authors}" if e.authors else ""), ""]
    if e.alias_of:
        lines += [f"Another name for [`{e.alias_of}`]({e.alias_of}.md): the papers come to the same algorithm.", ""]
    lines += [f"{e.summary[:1].upper()}{e.summary[1:]}.", "",
              f"**Guarantee:** {e.guarantee} with the default options: {GUARANTEES[e.guarantee]}.", "",
              f"**Needs:** {e.needs}. **Family:** {FAMILIES.get(e.family, e.family)}; see the guide "
              f"[{guide[:-3]}](../{guide}).", "",
              "## Example", "", "```python", example(e), "```", ""]
    if e.options:
        lines += ["## Options", "", "| option | default |", "|---|---|"]
        lines += [f"| `{name}` | `{_cell(str(value))}` |" for name, value in e.options.items()] + [""]
    for name, text in parts(e.make):
        lines += [f"## {name}", "", docstring(text), ""]
    return "\n".join(lines + figures(e.alias_of or e.name, FIGURES))


GIVEN = {
    "awrs": "check=lambda tokens: 0 not in tokens", "dynamic-beam-allocation": 'phrases=["return"]',
    "grid-beam-search": 'phrases=["return"]', "knn-ssd": "domains=[samples[:1], samples[1:]]",
    "seal": 'corpus=[lm.tokenizer.encode("def fib(n):\\n    return n")]'}
"""What examples give beside models, for systems that cannot do without."""

TRAINED = {"apd": ("pycode-full", "--block 0"), "sbd": ("pycode-sbd", "--attention causal-prefix --block 16")}
"""Systems for models that are not shipped: the directory in runs/, and how `pycode` becomes one."""


def example(e: Any) -> str:
    """A call that runs on the shipped models, or on one that the first line trains."""
    fills = "diffusion" in e.needs
    model, prompt = ("pycode-diffusion", '"def area(r):"') if fills else ("pycode", '"def fib(n):"')
    lines = ["import decodax as dx", ""]
    if e.name in TRAINED:
        name, how = TRAINED[e.name]
        model = f"runs/{name}/model"
        lines.append(f"# python scripts/train.py diffusion --preset pycode-diffusion {how} --output runs/{name}")
    elif e.name == "cascade":
        model, prompt = "numerals", '"1207="'
    lines.append(f'lm = dx.load("{model}")')
    given = ["lm"] if e.needs not in ("nothing", "a draft model") else []
    if e.takes_draft:
        lines.append('draft = dx.load("pycode-draft")')
        given.append("draft=draft")
    if "samples" in e.needs:
        lines.append('samples = [lm.tokenizer.encode(text) for text in ("def area(r):", "import os", "class Node:")]')
    own = GIVEN.get(e.name, "samples=samples" if "samples" in e.needs else "")
    given += [own] if own else []
    name = f'"{e.name}"' if not given else f'dx.algorithms.make("{e.name}", {", ".join(given)})'
    return "\n".join([*lines, f"out = dx.generate(lm, {prompt}, max_new_tokens=32, algorithm={name})",
                      "print(out.text[0], out.stats.tokens_per_forward)"])


def caches_index(entries: Iterable[Any]) -> str:
    lines = ["# Caches by name", "", "Policies for `cache=`; [the guide](../caches.md) says which to choose.", "",
             "| name | paper | keeps | effect |", "|---|---|---|---|"]
    return "\n".join(lines + [f"| [`{e.name}`]({e.name}.md) | {_cell(e.title)} ({_cell(e.authors)}) | "
                              f"{_cell(e.summary)} | {e.guarantee} |" for e in entries]) + "\n"


def cache_page(e: Any) -> str:
    """One cache policy."""
    effect = {"exact": "a model with this cache computes what it does with a dense one",
              "approximate": "what is left out is missed"}[e.guarantee]
    lines = [f"# {e.name}", "", f"*{e.title}*" + (f", {e.authors}" if e.authors else ""), "",
             e.summary if e.summary.endswith(".") else f"Keeps {e.summary}.", "",
             f"**Effect:** {e.guarantee}: {effect}.", "", "## Example", "", "```python", "import decodax as dx", "",
             'lm = dx.load("pycode")',
             f'out = dx.generate(lm, "def fib(n):", max_new_tokens=32, cache="{e.name}")', "print(out.text[0])", "```",
             ""]
    if e.options:
        lines += ["## Options", "", "| option | default |", "|---|---|"]
        lines += [f"| `{name}` | `{_cell(str(value))}` |" for name, value in e.options.items()] + [""]
    for name, text in parts(e.make):
        lines += [f"## {name}", "", docstring(text), ""]
    return "\n".join(lines + figures(e.name, ("caches_results.md", "conformance.md")))


STANDINS = {
    "reward": ("between 0 and 1", "lambda prompt, texts: [1 / (1 + len(text)) for text in texts]"),
    "potential": ("a log weight", "lambda prompt, texts: [-0.1 * len(text) for text in texts]"),
    "quality": ("an estimate of quality", "lambda prompt, texts: [1 / (1 + len(text)) for text in texts]"),
    "compare": ("above 0 where a is better", "lambda prompt, a, b: len(b) - len(a)"),
    "act": ("what the call in the text gives", 'lambda prompt, text: " # found\\n"'),
    "redundant": ("a small verifier", "lambda prompt, thoughts: len(thoughts) > 2"),
    "fork": ("a token that the model was tuned to write", "4094"), "child": ("", "4095"),
    "retrieve": ("what is found for the question that ends the text", 'lambda prompt, text: "# found: os.path\\n"'),
    "evidence": ("texts in another language", "dx.select.Sampled(lm, num_samples=4, sampling=SAMPLING)"),
    "references": ("samples of the reference policy", "dx.select.Sampled(lm, num_samples=4, sampling=SAMPLING)"),
    "guidance": ("", '"\\n# so\\n"'), "rule": ("", "dx.select.mbr()")}
"""What examples put for options without a default."""


def searches_index(slot: str, entries: Iterable[Any], guide: str) -> str:
    """All searches over steps, or all rules that choose one of several samples."""
    what = {"search": "Searches over steps by name", "select": "Rules that choose one of several samples, by name"}
    listing = {"search": "searches", "select": "selects"}[slot]
    lines = [f"# {what[slot]}", "", f"For `dx.generate(..., {slot}=)`; see [the guide](../{guide}). "
             f"`decodax list {listing}` prints the same table.", "", "| name | paper | rule |", "|---|---|---|"]
    paper = lambda e: _cell(f"{e.title} ({e.authors})" if e.authors else e.title)
    rows = [f"| [`{e.name}`]({e.name}.md) | {paper(e)} | {_cell(e.summary)} |" for e in entries]
    if slot == "search":
        from decodax.common.registry import FUNCTIONS
        rows += ["", "## Methods that are functions", "", "| call | paper | |", "|---|---|---|"]
        rows += [f"| `decodax.{e.name}` | {paper(e)} | {_cell(e.summary)} |" for e in FUNCTIONS.values()]
    return "\n".join([*lines, *rows, ""])


def search_page(slot: str, e: Any, guide: str) -> str:
    """One search over steps, or rule."""
    lines = [f"# {e.name}", "", *([f"*{e.title}*" + (f", {e.authors}" if e.authors else ""), ""] if e.title else []),
             f"{e.summary[:1].upper()}{e.summary[1:]}. See the guide [{guide[:-3]}](../{guide}).", "",
             "## Example", "", "```python", search_example(slot, e), "```", ""]
    if e.options:
        lines += ["## Options", "", "| option | default |", "|---|---|"]
        lines += [f"| `{name}` | {_cell(str(value))} |" for name, value in e.options.items()] + [""]
    lines += ["## Rule", "", docstring(inspect.getdoc(e.make) or ""), ""]
    return "\n".join(lines + figures(e.name, (*FIGURES, guide)))


def search_example(slot: str, e: Any) -> str:
    """A call that runs on a shipped model."""
    from decodax.search import CanvasExplorer

    fills = slot == "search" and issubclass(e.make, CanvasExplorer)
    needed = [name for name, option in e.options.items() if not option.optional]
    given = [(name, *STANDINS.get(name, ("", ""))) for name in needed]
    values = [value for _, _, value in given]
    lines = ["import decodax as dx", "", f'lm = dx.load("{"pycode-diffusion" if fills else "pycode"}")']
    if "SAMPLING" in "".join(values):
        lines.append("SAMPLING = dict(temperature=1.0, max_new_tokens=16)")
    for name, said, value in given:
        lines += [*([f"# yours: {said}"] if said else []), *([f"{name} = {value}"] if value else [])]
    options = [f"{name}={name}" for name in needed]
    options += ["n=2", "simulations=4", "every=4"] if fills else \
        ['until="\\n"', "step_tokens=12"] if slot == "search" else []
    lines.append(f"{slot} = dx.{slot}.{e.identifier}({', '.join(options)})")
    how = ("num_samples=4, temperature=0.8, max_new_tokens=16" if slot == "select" else
           'algorithm="llada:block_length=8", temperature=0.8, max_new_tokens=16' if fills else
           "temperature=0.8, max_new_tokens=24")
    return "\n".join([*lines, f'out = dx.generate(lm, "def area(", {slot}={slot}, {how})', "print(out.text[0])"])


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
    linked = lambda text: re.sub(r"\]\((?!http)([^)]*)\)", r"](../\1)", text)
    for file in files:
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
                out += [f"From [{file}](../{file}){': ' + text if text else ''}", "", *header, linked(line), ""]
    return ["## Figures", "", *out] if out else []


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
