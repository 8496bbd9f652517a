"""The examples in docstrings run, module by module under the names that users import."""

import doctest
import importlib
import pkgutil

import pytest

import decodax
import decodax.models
import decodax.pallas_kernels

MODULES = sorted({module.name for package in (decodax, decodax.models, decodax.pallas_kernels)
                  for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")
                  if not module.name.endswith("__main__")})


@pytest.mark.parametrize("name", MODULES)
def test_examples_hold(name: str) -> None:
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    assert doctest.testmod(importlib.import_module(name), optionflags=flags).failed == 0
