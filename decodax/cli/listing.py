"""The command `decodax list`: lists everything that can be chosen by name. Imports JAX only when it runs."""

from __future__ import annotations

import argparse
import difflib
import json
import shutil
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from decodax.cli.common import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from decodax.common.registry import Entry

KINDS = {"algorithms": "algorithm=", "caches": "cache=", "searches": "search=", "selects": "select=",
         "functions": "called as decodax.NAME(...)", "constraints": "constraint=", "formats": "weights=",
         "models": "dx.load"}
"""The listings, and for each the arguments or functions that take its names."""

SLOTS = {"algorithm": "algorithms", "cache": "caches", "search": "searches", "select": "selects",
         "constraint": "constraints", "function": "functions", "format": "formats", "weights": "formats",
         "model": "models"}
"""Listings by the slots that take their names, and by single words."""

EXAMPLES = """\
examples:
  decodax list                        the names of every listing, by family
  decodax list caches                 the cache policies, each with a description
  decodax list algorithms --family speculative-tree
  decodax list snapkv                 one entry, with its options
"""


def add(commands: Any, parents: list[argparse.ArgumentParser], run: Callable[[argparse.Namespace], None],
        epilog: str) -> None:
    """Adds the command to the subparsers `commands`; `run` is the function that runs it, `epilog` text for the help."""
    p = commands.add_parser("list", parents=parents, help="methods, caches, searches, models: all that has a name",
                            description="Lists what is chosen by name. With a listing it describes the entries, with "
                            "the name of an entry it shows what this does, its options and its paper.",
                            epilog=EXAMPLES + "\n" + epilog, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.set_defaults(command=run)
    p.add_argument("what", nargs="?", metavar="LISTING_OR_NAME", help=f"{', '.join(KINDS)}, or the name of an entry")
    p.add_argument("--family", metavar="NAME", help="entries of one family, such as speculative-tree")


def run(args: argparse.Namespace) -> None:
    """Prints the names of all listings, one listing with descriptions, or one entry with its options."""
    args.what = SLOTS.get(args.what, args.what)
    tables = entries()
    found = [entry for table in tables.values() for entry in table if entry.name == args.what]
    if found and args.what not in KINDS:
        _show(found[0], args.json)
        return
    if args.what is not None and args.what not in KINDS:
        known = [*KINDS, *(entry.name for table in tables.values() for entry in table)]
        near = difflib.get_close_matches(args.what, known, n=4, cutoff=0.5)
        raise UsageError(f"list: got {args.what!r}, takes {', '.join(KINDS)} or the name of an entry"
                         + (f"; near ones: {', '.join(near)}" if near else ""))
    tables = {kind: table for kind, table in tables.items() if args.what in (None, kind)}
    if args.family is not None:
        families = sorted({entry.family for table in tables.values() for entry in table if entry.family})
        if args.family not in families:
            raise UsageError(f"--family: got {args.family!r}, takes one of {', '.join(families)}")
        tables = {kind: [entry for entry in table if entry.family == args.family]
                  for kind, table in tables.items()}
    if args.json:
        print(json.dumps([{"listing": kind, **as_json(entry)} for kind, table in tables.items() for entry in table],
                         indent=2))
        return
    names_alone = args.what is None and args.family is None
    for kind, table in tables.items():
        if table:
            (_print_names if names_alone else _print)(f"{kind} ({KINDS[kind]})", table)
    if names_alone:
        _console().print("`decodax list algorithms` describes the entries of a listing, `decodax list NAME` shows one "
                         "entry with its options and its paper.")


def entries() -> dict[str, list[Entry]]:
    """Returns the entries of each listing by its name ("algorithms", "caches", ...): by family, the most used of each
    first."""
    from decodax.common.order import ordered
    from decodax.common.registry import ALGORITHMS, CACHES, CONSTRAINTS, FORMATS, FUNCTIONS, SEARCHES, SELECTS
    from decodax.io.cards import listed_models

    shelves = {"algorithms": ALGORITHMS, "caches": CACHES, "searches": SEARCHES, "selects": SELECTS,
               "functions": FUNCTIONS, "constraints": CONSTRAINTS, "formats": FORMATS}
    return {**{kind: ordered(shelf.values()) for kind, shelf in shelves.items()}, "models": ordered(listed_models())}


def as_json(entry: Entry) -> dict[str, Any]:
    """Returns the description of an entry as a dictionary for JSON: its names, paper, summary and options."""
    fields = ("name", "title", "authors", "family", "guarantee", "needs", "summary", "alias_of")
    return {**{field: getattr(entry, field) for field in fields},
            "options": {name: str(option) for name, option in entry.options.items()}}


def _show(entry: Entry, as_object: bool) -> None:
    if as_object:
        print(json.dumps(as_json(entry), indent=2))
        return
    print(f"{entry.name} ({entry.shelf})\n\n{entry.description}")


def _console() -> Console:
    """Returns a console as wide as the terminal, or as COLUMNS says where the output is a pipe."""
    from rich.console import Console

    return Console(highlight=False, width=max(shutil.get_terminal_size((100, 24)).columns, 60))


def _by_family(table: list[Entry]) -> dict[str, list[Entry]]:
    """Returns the entries by the names of their families, which are left empty if there is only one."""
    families = list(dict.fromkeys(entry.family for entry in table))
    return {family if len(families) > 1 else "": [entry for entry in table if entry.family == family]
            for family in families}


def _print_names(title: str, table: list[Entry]) -> None:
    from rich.table import Table

    shown = Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="bold", show_header=False)
    families = _by_family(table)
    if "" not in families:
        shown.add_column(no_wrap=True, min_width=20)
    shown.add_column(ratio=1)
    for family, rows in families.items():
        shown.add_row(*[family] * (family != ""), "  ".join(entry.name for entry in rows))
    _console().print(shown)
    print()


def _print(title: str, table: list[Entry]) -> None:
    from rich.table import Table

    shown = Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="bold")
    shown.add_column("name", no_wrap=True)
    shown.add_column("what it does", ratio=1)
    if any(entry.guarantee for entry in table):
        shown.add_column("guarantee", no_wrap=True)
    for family, rows in _by_family(table).items():
        if family:
            shown.add_row(f"[bold]{family}[/bold]")
        for entry in rows:
            needs = "" if entry.needs == "nothing" else f" (needs {entry.needs})"
            other = f"another name for {entry.alias_of}: " if entry.alias_of else ""
            line = f"{other}{entry.summary}{needs}".replace("[", "\\[")
            shown.add_row(entry.name, line, *([entry.guarantee] if entry.guarantee else []))
    _console().print(shown)
    print()
