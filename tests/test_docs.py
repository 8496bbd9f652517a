"""The examples of the guides run as they stand."""

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import decodax as dx
from decodax.common.registry import ALGORITHMS
from decodax.engine.request import Request
from tests.matrix import often

DOCS = Path(__file__).parents[1] / "docs"
GUIDE = DOCS / "low_level.md"
OWN = ("low_level.md", "meshes.md", "scoring.md")
"""Those with a test of their own."""


def blocks(file: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)```", file.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.wide(but=("planning.md",))
@pytest.mark.parametrize("name", often(["training.md", "planning.md"], sorted(
    file.name for file in DOCS.glob("*.md") if blocks(file) and file.name not in OWN)))
def test_examples_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": __name__}
    for i, block in enumerate(blocks(DOCS / name)):
        exec(compile(block, f"{name}, block {i + 1}", "exec", dont_inherit=True), names)


README = DOCS.parent / "README.md"


def run_readme(tmp_path, monkeypatch):
    """README's blocks one after the other, as they stand; what they have named."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dx, "cache_programs", lambda: None)       # it holds for the whole process
    names = {"__name__": __name__}
    for i, block in enumerate(blocks(README)):
        exec(compile(block, f"README.md, block {i + 1}", "exec", dont_inherit=True), names)
    return names


@pytest.mark.wide       # 45 s, most of it compiling
def test_the_readme_runs(tmp_path, monkeypatch, capsys):
    names = run_readme(tmp_path, monkeypatch)
    assert names["out"].lengths.max() > 1 and len(capsys.readouterr().out) > 200


def test_the_readme_names_what_there_is(tmp_path, monkeypatch):
    """All that `generate` and `stream` are asked for there is read, with the models that are shipped."""
    asked = []

    def read(lm, prompts, **options):
        asked.append(Request.read(lm, prompts, **options))
        stats = SimpleNamespace(tokens_per_forward=1.0)
        return SimpleNamespace(text=asked[-1].prompts, status=[], stats=stats)

    monkeypatch.setattr(dx, "generate", read)
    monkeypatch.setattr(dx, "stream", lambda *given, **options: iter(read(*given, **options).status))
    run_readme(tmp_path, monkeypatch)
    found = [request.algorithm.name for request in asked]
    assert len(blocks(README)) == 2 and len(found) == 6 and found[-1] == "MaskedDiffusion"
    assert "dx.cache_programs()" in blocks(README)[0]


def test_a_batch_is_independent_of_its_order(tiny_model):
    """By the line that README, the guide to sampling and the docstring of `generate` give."""
    lm, line = dx.load(tiny_model), "request_ids=[dx.jobs.address(p) for p in prompts]"
    assert all(line in text for text in (README.read_text(), (DOCS / "sampling.md").read_text(),
                                         dx.generate.__doc__))
    prompts, options = ["def a", "import", "class"], dict(temperature=1.0, max_new_tokens=12, seed=3)
    draw = lambda prompts, **more: dx.generate(lm, prompts, **options, **more).text
    address = lambda prompts: [dx.jobs.address(p) for p in prompts]
    plain, turned = draw(prompts, request_ids=address(prompts)), prompts[::-1]
    assert draw(turned, request_ids=address(turned)) == plain[::-1]
    assert draw(prompts[1:2], request_ids=address(prompts[1:2])) == plain[1:2]
    assert draw(turned) != draw(prompts)[::-1]      # by place


@pytest.mark.matrix
def test_the_guide_to_the_low_level_runs():
    names = {"__name__": __name__}
    for block in re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL):
        exec(compile(block, str(GUIDE), "exec", dont_inherit=True), names)
    del ALGORITHMS["careful"]
    assert np.asarray(names["s"].stats.rounds).tolist() == [3, 3]
    assert names["out"].status[0].name in ("DEAD_END", "LENGTH", "EOS")
    stopped, free = names["judged"]
    plain = dx.generate(names["lm"], "def fib(n):", max_new_tokens=16)
    assert stopped.status[0].name == "DEAD_END" and stopped.lengths[0] < 16     # by a random judge, after a while
    assert free.text == plain.text


def test_the_page_of_speculative_systems_has_each_under_one_name():
    """A row in every table, or a word in front of them that it has none; none of another name for the same object."""
    page = (DOCS / "speculation_results.md").read_text()
    front, *tables = page.split("| system |")
    rows = [set(re.findall(r"^\| ([\w+.-]+) \|", table, re.MULTILINE)) - {"plain"} for table in tables]
    own = {name for name,
           e in ALGORITHMS.items() if "diffusion" not in e.needs and e.family != "search" and not e.alias_of
           and name != "autoregressive"}
    left_out = set(re.findall(r"`([\w+.-]+)`", front[front.index("Not measured here:"):front.index("`compare all`")]))
    assert len(tables) == 3 and rows[0] == rows[1] == rows[2]
    assert not rows[0] & left_out and rows[0] | left_out == own
    others = {(e.name, e.alias_of) for e in ALGORITHMS.values() if e.alias_of and "diffusion" not in e.needs}
    assert all(re.search(rf"`{name}`[\w ]+`{of}`|`{name}` for `{of}`", front.replace("\n", " ")) for name, of in others)


def test_a_role_without_weights_is_named():
    with pytest.raises(ValueError, match="no weights for 'judge'; there are some for target, guide"):
        dx.Params(target=1, others={"guide": 2}).role("judge")
