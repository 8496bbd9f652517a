"""Runs the pages and the longer examples of `docs/extending` as they stand."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"


def run_page(name: str) -> dict[str, Any]:
    """Executes `docs/extending/examples/<name>.py`, and returns its namespace."""
    return run_file(DOCS / "extending" / "examples" / f"{name}.py")


def blocks_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the ```python blocks of a Markdown file, each with the number of lines above it, but for those whose line
    above says `<!-- not run: REASON -->`. A Python file is one block.

    Raises:
        ValueError: such a comment that is not above a block.
    """
    text = path.read_text()
    if path.suffix == ".py":
        yield 0, text
        return
    blocks = list(re.finditer(r"^(<!-- not run: \S[^\n]* -->\n)?```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
    if sum(block[1] is not None for block in blocks) != text.count("<!-- not run"):
        raise ValueError(f"{path}: a comment 'not run' is not in the line above a block")
    yield from ((text[:block.start(2)].count("\n"), block[2]) for block in blocks if block[1] is None)


def run_file(path: Path) -> dict[str, Any]:
    """Executes the blocks of a file in one namespace, and returns the namespace.

    The namespace is that of a module, since a dataclass looks up the one that it is defined in. Lines of an error are
    lines of the page.
    """
    module = ModuleType(f"{path.parent.name}_{path.stem}")
    sys.modules[module.__name__] = module
    names = vars(module)
    blocks = list(blocks_of(path))
    assert blocks, f"{path} has no python block"
    for above, source in blocks:
        exec(compile("\n" * above + source, str(path), "exec", dont_inherit=True), names)
    return names
