"""Modules import only from the floors below them, and nowhere in a circle."""

from __future__ import annotations

import ast
import graphlib
from pathlib import Path

ROOT = Path(__file__).parents[1]

FLOORS = (
    "struct", "progress", "axes", "pallas_kernels", "cache", "core", "memory", "policy", "options", "registry",
    "autoregressive", "constraints", "readout", "speculative", "search", "diffusion", "models", "kvcache",
    "sharding", "io", "systems", "result", "arc", "programs", "methods", "request", "reading", "job", "jobs", "api",
    "scoring", "choice", "steps", "canvas", "watermarks", "functions", "bench", "harness", "plan", "cli", "__main__",
)
"""Lowest first."""


def modules() -> dict[str, Path]:
    """The files of the package by module name, as an installation has them."""
    found = {}
    for folder, package in (("decodax", "decodax"), ("models", "decodax.models"),
                            ("pallas_kernels", "decodax.pallas_kernels")):
        for file in (ROOT / folder).rglob("*.py"):
            parts = file.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join((package, *(p for p in parts if p != "__init__")))] = file
    return found


def imports() -> dict[str, set[str]]:
    """What each module imports of the package, wherever the import stands. The package itself, whose names are lazy, is
    left out."""
    files = modules()
    graph: dict[str, set[str]] = {}
    for name, file in files.items():
        found = set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                found |= {f"{node.module}.{alias.name}" if f"{node.module}.{alias.name}" in files else node.module
                          for alias in node.names}
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
        graph[name] = (found & files.keys()) - {name, "decodax"}
    del graph["decodax"]
    return graph


def floor(module: str) -> int:
    return FLOORS.index(module.split(".")[1])


def test_a_module_imports_only_from_its_floor_and_those_below():
    wrong = [f"{name} imports {other}" for name, others in imports().items() for other in others
             if floor(other) > floor(name)]
    assert not wrong, "\n".join(wrong)


def test_no_module_imports_itself_by_way_of_others():
    graphlib.TopologicalSorter(imports()).prepare()         # raises CycleError, which names the modules


def test_the_core_knows_no_method():
    low = ("struct", "axes", "pallas_kernels", "cache", "core")
    assert all(other.split(".")[1] in low for name, others in imports().items() if name.startswith("decodax.core")
               for other in others)
