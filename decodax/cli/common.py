"""Helpers that the commands share. Imports no JAX."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import sys
from collections.abc import Iterator, Sequence
from typing import Any


class UsageError(Exception):
    """The arguments do not fit together, or one is out of its range."""


class Parser(argparse.ArgumentParser):
    """A parser that says which flag or command may have been meant, before it misses what a misspelt one was to give.
    Commands get parsers of its kind."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:       # type: ignore[override]
        given, known = sys.argv[1:] if args is None else list(args), list(self._option_string_actions)
        for arg in given:
            if self._subparsers is not None and not arg.startswith("-"):
                self._known_command(arg)
                break       # what follows is the command's own
            if arg == "--":
                break       # what follows are values
            name = arg.partition("=")[0]
            if name.startswith("--") and " " not in arg and not any(flag.startswith(name) for flag in known):
                close = difflib.get_close_matches(name, [flag for flag in known if flag.startswith("--")], n=3)
                self.error(f"{name}: unknown flag" + (f"; did you mean {' or '.join(close)}?" if close else
                                                      f"; {self.prog} --help lists those that there are"))
        return super().parse_known_args(args, namespace)

    def _known_command(self, name: str) -> None:
        """Ends with an error if there is no such command."""
        assert self._subparsers is not None
        commands = [str(command) for group in self._subparsers._group_actions for command in group.choices or ()]
        if name not in commands:
            close = difflib.get_close_matches(name, commands, n=3)
            self.error(f"{name}: unknown command; " + (f"did you mean {' or '.join(close)}?" if close else
                                                       f"takes {', '.join(commands)}"))


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
    from decodax.engine.compilation import cache_programs

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
