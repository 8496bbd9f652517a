"""Helpers of several commands. Imports no JAX."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

DRAFT = "pycode-draft"
"""The draft model that commands take by default."""

MODEL = "a shipped model (see decodax info), a Hugging Face directory or a GGUF file"
"""Description of an argument that names a model, for the help of all commands."""


class UsageError(Exception):
    """Arguments of the command line that do not fit together, or one that is out of its range."""


class Parser(argparse.ArgumentParser):
    """An argument parser that suggests similar flags and commands for unknown ones. It reports an unknown flag before a
    missing argument, which may be the consequence of a misspelt flag. Subcommands get parsers of the same class."""

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
        """Ends the program with an error if the command is unknown."""
        assert self._subparsers is not None
        commands = [str(command) for group in self._subparsers._group_actions for command in group.choices or ()]
        if name not in commands:
            close = difflib.get_close_matches(name, commands, n=3)
            self.error(f"{name}: unknown command; " + (f"did you mean {' or '.join(close)}?" if close else
                                                       f"takes {', '.join(commands)}"))


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> None:
    """Prints a table to standard output; if that is a file or a pipe, each row is one line.

    Args:
        columns: titles of the columns.
        rows: the cells of each row.
        right: indices of the columns that are aligned to the right.
    """
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


def mesh_shape(text: str) -> tuple[int, ...]:
    """Parses the shape of a mesh, such as "2x4": number of replicas, number of devices of each, and after a second "x"
    number of parts of the experts.

    Raises:
        UsageError: the text has another form.
    """
    sizes = text.split("x")
    if len(sizes) not in (2, 3) or not all(size.isdecimal() and int(size) for size in sizes):
        raise UsageError(f"--mesh: takes DATAxMODEL, as 2x4, or DATAxMODELxEXPERT; got {text!r}")
    return tuple(map(int, sizes))


def keep_programs() -> str:
    """Enables the cache of compiled programs on disk. Returns its directory, or a text that says why that is not
    possible."""
    from decodax.engine.compilation import cache_programs

    try:
        return cache_programs()
    except OSError as error:
        return f"nowhere: {error}"


@contextlib.contextmanager
def naming_the_argument() -> Iterator[None]:
    """Turns a ValueError or TypeError within the context into a UsageError; its text already names the argument."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise UsageError(error) from error


def weight_format(text: str | None) -> Any:
    """Returns the weight format of `--weights NAME[:OPTION=VALUE,...]`; None without one.

    Raises:
        UsageError: an unknown format or option, or a format that needs calibration data.
    """
    from decodax.models.formats import without_data

    with naming_the_argument():
        return without_data(text)
