"""The examples of README and of the guides run as they stand, each page in one namespace, in order.

A block that cannot run has a comment `<!-- not run: REASON -->` in the line above it. The other pages of
`docs/extending` have tests of their own.
"""

import ast
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import decodax as dx
from decodax.common.registry import ALGORITHMS, FORMATS, SELECTS, SHELVES
from decodax.core.algorithm import name_of
from decodax.engine.request import Request
from scripts import real_models
from tests.extending.pages import DOCS, blocks_of, run_file

ROOT = DOCS.parent
README = ROOT / "README.md"
PAGES = {path.relative_to(ROOT).as_posix(): path for path in
         (README, *sorted(DOCS.rglob("*.md"))) if any(blocks_of(path))
         and (path.parent.name != "extending" or path.name in ("algorithm.md", "round.md"))}

QUICK = ("docs/usage/planning.md", "docs/usage/scoring.md")
USAGE = ("README.md", "docs/coming_from.md", "docs/index.md", *(f"docs/choose/{name}.md" for name in (
    "best_of_n", "caches", "constraints", "search", "search_steps")), *(f"docs/usage/{name}.md" for name in (
        "generate", "jobs", "meshes", "sampling", "training")), "docs/extending/algorithm.md",
         "docs/extending/round.md", *QUICK)


def low_level(names: dict[str, Any], printed: str) -> None:
    rows, given = names["rows"], dict(max_new_tokens=[32, 8], temperature=0.8, top_p=0.95)
    whole = dx.generate(names["lm"], names["ids"], algorithm="prompt-lookup:length=4", **given)
    assert [rows.tokens[b, : rows.lengths[b]].tolist() for b in (0, 1)] == [
        given + whole.row(b).tolist() for b, given in enumerate(names["ids"])]
    assert np.asarray(rows.state.stats.rounds).tolist() == whole.stats.rounds.tolist()


def method(names: dict[str, Any], printed: str) -> None:
    assert names["out"].status[0].name in ("DEAD_END", "LENGTH", "EOS")
    stopped, free = names["judged"]
    plain = dx.generate(names["lm"], "def fib(n):", max_new_tokens=16)
    assert stopped.status[0].name == "DEAD_END" and stopped.lengths[0] < 16     # by a random judge, after a while
    assert free.text == plain.text


def scoring(names: dict[str, Any], printed: str) -> None:
    assert names["s"].count.tolist() == [len(names["lm"].tokenizer.encode(names["text"])) - 1]
    assert "range(10): range(10):" in printed


def readme(names: dict[str, Any], printed: str) -> None:
    shown = re.findall(r"^```text\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    assert len(shown) == 1 and printed.strip("\n").startswith(shown[0].strip("\n"))


CHECKS: dict[str, Callable[[dict[str, Any], str], None]] = {
    "README.md": readme, "docs/extending/round.md": low_level, "docs/extending/algorithm.md": method,
    "docs/usage/scoring.md": scoring}
"""What else holds of a page: from its names, and what it printed."""


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """An empty folder for what pages write, and a registry that forgets what they enter."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dx, "cache_programs", lambda: None)       # it holds for the whole process
    known = set(ALGORITHMS)
    yield
    for name in set(ALGORITHMS) - known:
        del ALGORITHMS[name]


@pytest.mark.real
@pytest.mark.wide
def test_the_example_with_a_published_model_runs(elsewhere, tmp_path, capsys):
    path = real_models.folder() / real_models.MODELS["smollm2"].file
    if not path.is_file():
        pytest.skip(f"{path} is missing: python scripts/real_models.py smollm2")
    (tmp_path / path.name).symlink_to(path)
    block, = re.findall(r"^<!-- not run: takes SmolLM2 -->\n```python\n(.*?)^```$", README.read_text(), re.S | re.M)
    exec(block, {"dx": dx})
    assert capsys.readouterr().out.strip() == block.rpartition("# ")[2].strip()


@pytest.mark.wide(but=QUICK)
@pytest.mark.parametrize("name", PAGES)
def test_the_examples_of_a_page_run(name, elsewhere, capsys):
    names = run_file(PAGES[name])
    if name in CHECKS:
        CHECKS[name](names, capsys.readouterr().out)


def test_the_usage_pages_have_examples():
    assert {*USAGE} <= {*PAGES} and not {*QUICK} & {*USAGE[:-len(QUICK)]}


def test_the_readme_names_what_there_is(elsewhere, monkeypatch):
    """All that `generate` and `stream` are asked for there is read, with the models that are shipped."""
    asked = []

    def read(lm, prompts, select=None, **options):
        assert select is None or SELECTS.read(select)
        asked.append(Request.read(lm, prompts, **options))
        stats = SimpleNamespace(tokens_per_forward=1.0)
        return SimpleNamespace(text=asked[-1].prompts, status=[], stats=stats)

    monkeypatch.setattr(dx, "generate", read)
    monkeypatch.setattr(dx, "stream", lambda *given, **options: iter(read(*given, **options).status))
    run_file(README)
    found = [name_of(request.algorithm) for request in asked]
    assert len(found) > 6 and found[-1] == "MaskedDiffusion"


def test_a_batch_is_independent_of_its_order(tiny_model):
    """By the line that README, the guide to `generate` and its docstring give."""
    lm, line = dx.load(tiny_model), "request_ids=[dx.jobs.address(p) for p in prompts]"
    assert all(line in text for text in (README.read_text(), (DOCS / "usage" / "generate.md").read_text(),
                                         dx.generate.__doc__))
    prompts, options = ["def a", "import", "class"], dict(temperature=1.0, max_new_tokens=12, seed=3)
    draw = lambda prompts, **more: dx.generate(lm, prompts, **options, **more).text
    address = lambda prompts: [dx.jobs.address(p) for p in prompts]
    plain, turned = draw(prompts, request_ids=address(prompts)), prompts[::-1]
    assert draw(turned, request_ids=address(turned)) == plain[::-1]
    assert draw(prompts[1:2], request_ids=address(prompts[1:2])) == plain[1:2]
    assert draw(turned) != draw(prompts)[::-1]      # by place


def test_the_page_of_speculative_systems_has_each_under_one_name():
    """A row in the table, or a word in front of it that it has none; none of another name for the same object."""
    page = (DOCS / "results" / "speculation.md").read_text()
    front, table = page.split("| system |")
    rows = set(re.findall(r"^\| ([\w+.-]+) \|", table, re.MULTILINE)) - {"plain"}
    own = {name for name,
           e in ALGORITHMS.items() if "diffusion" not in e.needs and e.family != "search" and not e.alias_of
           and name != "autoregressive"}
    left_out = set(re.findall(r"`([\w+.-]+)`", front[front.index("Not measured here:"):front.index("`compare all`")]))
    assert not rows & left_out and rows | left_out == own
    others = {(e.name, e.alias_of) for e in ALGORITHMS.values() if e.alias_of and "diffusion" not in e.needs}
    assert all(re.search(rf"`{name}`[\w ]+`{of}`|`{name}` for `{of}`", front.replace("\n", " ")) for name, of in others)


MADE = ("systems", "caches", "searches", "rules", "constraints", "formats", "api")
"""Pages that `scripts/site.py` makes."""


def anchors(text: str) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title.lower())).strip("-") for title in titles}


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "docs"])
def test_links_between_pages_lead_somewhere(name):
    pages = sorted((ROOT / name).rglob("*.md")) if name == "docs" else [ROOT / name]
    lost = []
    for page in pages:
        for link in re.findall(r"\]\((?!https?:|#)([^)\s]+)\)", page.read_text()):
            path, _, anchor = link.partition("#")
            target = page.parent / path
            if not (target.exists() or path.removeprefix("../").partition("/")[0] in MADE):
                lost.append(f"{page.name}: {link}")
            elif anchor and target.suffix == ".md" and target.exists() and anchor not in anchors(target.read_text()):
                lost.append(f"{page.name}: {link}")
    assert not lost


VALUE = r"""(?:\((?:[^()]|\([^()]*\))*\)|\[[^\[\]]*\]|[^\s"'`|,;()\[\]\\]+)"""
CONFIGURED = re.compile(rf"""(?<![\w./-])([a-z][\w+-]*):([a-z]\w*={VALUE}(?:,\s*[a-z]\w*={VALUE})*)""")


def test_options_in_the_documentation_are_options_of_the_entries():
    """Every `NAME:OPTION=VALUE` parses by a shelf of the registry that has an entry of this name."""
    pages = [README]
    for folder in ("decodax", "docs", "models", "scripts"):
        pages += [page for page in (ROOT / folder).rglob("*") if page.suffix in (".ipynb", ".md", ".py", ".sh")]
    found = {(page.name, name, options.rstrip(".:")) for page in pages
             for name, options in CONFIGURED.findall(page.read_text())}
    wrong, count = [], 0
    for page, name, options in sorted(found):
        refusals = []
        shelves = [shelf for shelf in SHELVES.values() if name in shelf]
        for shelf in shelves:
            try:
                shelf.parse(f"{name}:{options}")
            except ValueError as error:
                refusals.append(f"{page}: {name}:{options}: {error}")
        if shelves and len(refusals) == len(shelves):
            wrong += refusals
        count += bool(shelves)
    assert not wrong
    assert count > 50


def test_the_page_on_weights_names_every_format():
    text = (DOCS / "choose" / "weights.md").read_text()
    assert not [name for name in FORMATS.names() if f'`"{name}"`' not in text]


def test_files_that_pages_name_exist():
    """Paths in backticks, in every page of the repository and in the remarks about published code."""
    named = re.compile(r"`[^`\n]*?\b((?:decodax|docs|models|scripts|tests)/[\w./-]+\.(?:json|md|py))\b")
    pages = [page for folder in ("decodax", "docs", "models", "pallas_kernels", "scripts", "tests")
             for page in (ROOT / folder).rglob("*.md")]
    pages += [*ROOT.glob("*.md"), ROOT / "tests" / "conformance" / "remarks.toml"]
    assert not [f"{page.name}: {path}" for page in pages for path in named.findall(page.read_text())
                if not (ROOT / path).exists()]


def code_of(page: Path) -> list[str]:
    """Python of a page: its blocks, also those that are not run, and its code in backticks."""
    text = page.read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return blocks + re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE))


def resolved(call: ast.Call) -> Any:
    """The function of `decodax` that is called, or None for other calls."""
    path = ast.unparse(call.func).split(".")
    for shelf in ("", "algorithms", "caches", "constraints"):
        found: Any = getattr(dx, shelf) if shelf else dx
        for part in path[1:] if path[0] in ("dx", "decodax") else path if shelf else ():
            found = getattr(found, part, None)
        if found is not dx and found is not None and (not shelf or path[0] != "dx"):
            return found if callable(found) else None
    return None


def test_keywords_of_calls_in_the_documentation_are_parameters():
    wrong, count = [], 0
    for page in (README, *sorted(DOCS.rglob("*.md"))):
        for code in code_of(page):
            try:
                tree = ast.parse(code.strip())
            except SyntaxError:
                continue
            for call in ast.walk(tree):
                if not isinstance(call, ast.Call) or (function := resolved(call)) is None:
                    continue
                known = inspect.signature(function).parameters
                if any(p.kind is p.VAR_KEYWORD for p in known.values()):
                    continue
                wrong += [f"{page.name}: {ast.unparse(call)}: {k.arg}" for k in call.keywords
                          if k.arg and k.arg not in known]
                count += 1
    assert not wrong and count > 100
