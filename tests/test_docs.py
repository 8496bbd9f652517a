"""The examples of the guides run as they stand."""

import re
from pathlib import Path

import numpy as np
import pytest

import decodax as dx
from decodax.systems import SYSTEMS
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


@pytest.mark.matrix
def test_the_guide_to_the_low_level_runs():
    names = {"__name__": __name__}
    for block in re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL):
        exec(compile(block, str(GUIDE), "exec", dont_inherit=True), names)
    del SYSTEMS["careful"]
    assert np.asarray(names["s"].stats.rounds).tolist() == [3, 3]
    assert names["out"].status[0].name in ("DEAD_END", "LENGTH", "EOS")
    stopped, free = names["judged"]
    plain = dx.generate(names["lm"], "def fib(n):", max_new_tokens=16)
    assert stopped.status[0].name == "DEAD_END" and stopped.lengths[0] < 16     # by a random judge, after a while
    assert free.text == plain.text


def test_a_role_without_weights_is_named():
    with pytest.raises(ValueError, match="no weights for 'judge'; there are some for target, guide"):
        dx.Params(target=1, others={"guide": 2}).role("judge")
