import importlib
import re
import tomllib
import types
from pathlib import Path

import pytest

import decodax
from decodax.common.registry import SHELVES

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_every_package_is_in_the_distribution() -> None:
    found = set()
    for folder, name in (("decodax", "decodax"), ("models", "decodax.models"),
                         ("pallas_kernels", "decodax.pallas_kernels")):
        for file in (ROOT / folder).rglob("__init__.py"):
            found.add(".".join([name, *file.parent.relative_to(ROOT / folder).parts]))
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == found


def test_the_version_is_the_same_everywhere() -> None:
    assert decodax.__version__ == PROJECT["project"]["version"]


def test_shipped_weights_stay_below_64_megabytes() -> None:
    zoo = ROOT / "models" / "zoo"
    assert sum(f.stat().st_size for f in zoo.rglob("*") if f.is_file()) < 64e6


def test_every_public_name_exists_and_is_listed() -> None:
    assert sorted(decodax.__all__) == sorted(set(decodax.__all__))
    for name in decodax.__all__:
        found = getattr(decodax, name)
        if isinstance(found, types.ModuleType):
            assert found.__name__.startswith("decodax.") and found.__name__.endswith(f".{name}")
        else:
            assert found.__name__ == name and getattr(importlib.import_module(found.__module__), name) is found
        assert name in dir(decodax)


NAMESPACES = sorted(name for name in decodax.__all__ if isinstance(getattr(decodax, name), types.ModuleType))


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_a_namespace_lists_its_public_names_alone(namespace: str) -> None:
    found = getattr(decodax, namespace)
    entries = SHELVES[namespace].identifiers() if namespace in SHELVES else []
    assert dir(found) == sorted({*found.__all__, *entries})


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_every_name_that_a_namespace_lists_is_an_attribute(namespace: str) -> None:
    found = getattr(decodax, namespace)
    assert not [name for name in dir(found) if not hasattr(found, name)]


@pytest.mark.parametrize("shelf", ["algorithms", "caches", "search", "select", "constraints"])
def test_every_name_is_a_function_of_its_namespace(shelf: str) -> None:
    """`dx.select.mbr` is the rule, and not a module that happens to have its name."""
    namespace = getattr(decodax, shelf)
    assert all(callable(getattr(namespace, name)) for name in SHELVES[shelf].identifiers())


def test_the_metadata_say_what_is_supported() -> None:
    project = PROJECT["project"]
    versions = {c.rpartition(" ")[2] for c in project["classifiers"] if re.fullmatch(r"Programming .* 3\.\d+", c)}
    assert project["requires-python"] == ">=3.11,<3.14" and versions == {"3.11", "3.12", "3.13"}
    assert "Typing :: Typed" in project["classifiers"] and (ROOT / "decodax" / "py.typed").exists()
    assert PROJECT["tool"]["setuptools"]["package-data"] == {
        "decodax": ["py.typed"], "decodax.models": ["zoo/*/*", "formats/native/*.cc", "formats/native/*.h"]}
    assert all((ROOT / name).exists() for name in (project["readme"], *project["license-files"]))


def test_the_changelog_has_this_version_or_what_comes_next() -> None:
    titles = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert titles[0] in ("Unreleased", decodax.__version__)
