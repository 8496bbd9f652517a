"""docs/results/conformance.md says of every registry entry how it compares, and what it says follows from the cases."""

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

import pytest

from decodax.common.registry import ALGORITHMS

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def report() -> ModuleType:
    script = HERE.parents[1] / "scripts" / "conformance_report.py"
    spec = importlib.util.spec_from_file_location("conformance_report", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_cases_say(report: ModuleType) -> None:
    text = report.PAGE.read_text()
    assert text == report.page(), "run python scripts/conformance_report.py"
    assert all(f"\n| `{name}` | " in text for name in ALGORITHMS)


@pytest.mark.parametrize(("remark", "message"), [
    ('[no-such-system]\nresult = "equal"\n', "no-such-system: no registry entry of this name"),
    ('[stand]\nresult = "fine"\n', "stand: result: got 'fine'"),
    ('[stand]\nresult = "equal"\ncomment = "x"\n', "stand: unknown comment"),
    ("", "has no cases and no result"),
])
def test_a_wrong_or_missing_line_is_named(report: ModuleType, remark: str, message: str, tmp_path: Path) -> None:
    for folder in ("cases", "drafts"):
        shutil.copytree(HERE / folder, tmp_path / folder)
    (tmp_path / "remarks.toml").write_text(remark)
    with pytest.raises(ValueError, match=message):
        report.page(tmp_path)
