"""Helpers that the commands share. Imports no JAX."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence


class UsageError(Exception):
    """The arguments do not fit together, or one is out of its range."""


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> None:
    """Prints a table; if the output is a file or a pipe, each row is one line."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=1000)
    shown = Table(box=None, pad_edge=False)
    for i, column in enumerate(columns):
        shown.add_column(column, justify="right" if i in right else "left", no_wrap=i == 0)
    for row in rows:
        shown.add_row(*row)
    console.print(shown)


def mesh_shape(text: str) -> tuple[int, int]:
    """The numbers of a mesh: replicas, and devices of each.

    Raises:
        UsageError: it says something else.
    """
    data, _, model = text.partition("x")
    if not (data.isdecimal() and model.isdecimal() and int(data) and int(model)):
        raise UsageError(f"--mesh: takes DATAxMODEL, as 2x4; got {text!r}")
    return int(data), int(model)


def keep_programs() -> str:
    """Keeps compiled programs between calls if possible. Returns the directory, or why it is not possible."""
    from decodax.programs import cache_programs

    try:
        return cache_programs()
    except OSError as error:
        return f"nowhere: {error}"


@contextlib.contextmanager
def naming_the_argument() -> Iterator[None]:
    """Turns errors about values into usage errors: their text names the argument."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise UsageError(error) from error
