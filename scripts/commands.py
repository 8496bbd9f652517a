"""Command lines of the programs in scripts/, from a table of subcommands. Imports no JAX, so that `--help` is fast.

A subcommand has options by their default values, which say what an option takes: a number or a text takes one of its
type, a tuple several of the type of its first entry, and False is a flag. A type in place of a value stands for None. A
dictionary has keywords of `add_argument`; with `positional=True` the option is an argument without dashes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


class Command:
    """A subcommand: a line that says what it is for, and its options."""

    def __init__(self, text: str, /, **options: Any):
        self.text, self.options = text, options


def add_option(parser: argparse.ArgumentParser, name: str, default: Any, help: str) -> None:
    """Adds an option to a parser, which shows its default value unless `help` does."""
    given = dict(default) if isinstance(default, dict) else {"default": default}
    value = given.get("default")
    if value is False:
        given["action"] = "store_true"
    elif "action" not in given and "type" not in given and value not in (None, ()):
        first = value[0] if isinstance(value, tuple) else value
        given["type"] = first if isinstance(first, type) else type(first)
        if isinstance(value, tuple):
            given.setdefault("nargs", "*")
        if isinstance(first, type):
            given["default"] = None
    help, shown = given.pop("help", help), given.get("default")
    if shown is not None and shown is not False and shown not in ((), "") and "default:" not in help:
        help += f" (default: {' '.join(map(str, shown)) if isinstance(shown, tuple) else shown})"
    flag = name if given.pop("positional", False) else f"--{name.replace('_', '-')}"
    parser.add_argument(flag, help=help.replace("%", "%%"), **given)


def parser(description: str | None, commands: Mapping[str, Command], meaning: Mapping[str, str],
           verb: str) -> argparse.ArgumentParser:
    """Returns the parser of a program from its docstring, the subcommands and the help of options by name, and the
    verb before the text of a subcommand, such as "Measures"."""
    p = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    below = p.add_subparsers(dest="command", required=True, metavar="NAME")
    for name, command in commands.items():
        one = below.add_parser(name, help=command.text, description=f"{verb} {command.text}.")
        for option, default in command.options.items():
            add_option(one, option, default, meaning.get(option, ""))
    return p


def field_options(fields: Any) -> dict[str, Any]:
    """Returns the options of the fields of a dataclass, whose annotations say what they take and whose metadata have
    `help` and further keywords of `add_argument`."""
    kinds = {"int": int, "float": float, "str": str, "Path": Path}
    out = {}
    for field in fields:
        kind = kinds.get(str(field.type).removesuffix(" | None"))
        out[field.name] = {"default": field.default, "help": field.metadata["help"], **({"type": kind} if kind else {}),
                           **field.metadata["parse"]}
    return out


def run(program: str, args: argparse.Namespace, call: Callable[[argparse.Namespace], Any]) -> int:
    """Calls a program with its arguments and returns the exit status; wrong input is one line on standard error."""
    try:
        return call(args) or 0
    except (ValueError, FileNotFoundError, FloatingPointError, ModuleNotFoundError) as error:
        print(f"{program} {args.command}: {error}", file=sys.stderr)
        return 2
