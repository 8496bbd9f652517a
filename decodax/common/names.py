"""The names that `dir` lists for a public module."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def directory(names: Iterable[str], more: Callable[[], Iterable[str]] = tuple) -> Callable[[], list[str]]:
    """Returns a `__dir__` for a module. It lists the public names alone, without submodules, imports and dunders.

    Args:
        names: `__all__` of the module.
        more: returns further names, such as those of the entries of a shelf. It is called when `dir` is.

    >>> directory(["run", "Model"], lambda: ["beam"])()
    ['Model', 'beam', 'run']
    """
    return lambda: sorted({*names, *more()})
