"""Runs the pages of `docs/extending` as they stand."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"


def run_page(name: str) -> dict[str, Any]:
    """Executes all ```python blocks of `docs/extending/<name>.md` in one namespace, and returns the namespace."""
    return run_file(DOCS / "extending" / f"{name}.md")


def run_file(path: Path) -> dict[str, Any]:
    """Executes all ```python blocks of a Markdown file in one namespace, and returns the namespace.

    The namespace is that of a module, since a dataclass looks up the one that it is defined in. Lines of an error are
    lines of the page.
    """
    text = path.read_text()
    module = ModuleType(f"{path.parent.name}_{path.stem}")
    sys.modules[module.__name__] = module
    names = vars(module)
    blocks = list(re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
    assert blocks, f"{path} has no python block"
    for block in blocks:
        above = text[:block.start(1)].count("\n")
        exec(compile("\n" * above + block[1], str(path), "exec", dont_inherit=True), names)
    return names
