"""Measures quality: right answers against what a method saves.

    python scripts/evaluate.py systems "llada:steps=[16,8,4,2,1]" --task copy shuffle sudoku --plot curves.png
    python scripts/evaluate.py caches                                   # all cache policies that need no training
    python scripts/evaluate.py caches snapkv "knorm:skip_layers=()" --length 2048 --plot caches.png
    python scripts/evaluate.py drafts                                   # drafts on smaller caches
    python scripts/evaluate.py search --plot docs/choose/search.png            # samples, votes and searches
    python scripts/evaluate.py schemas JSON-Schema-Test-Suite/tests/draft2020-12

`schemas` reads a clone of https://github.com/json-schema-org/JSON-Schema-Test-Suite. `evaluate.py NAME --help` lists
the options.
"""

from __future__ import annotations

import importlib
import shlex
import sys
from pathlib import Path
from typing import Any

import commands
from commands import Command

FILES: dict[str, Any] = {"plot": dict(type=Path, metavar="FILE"), "json": dict(type=Path, metavar="FILE")}
given = lambda nargs, kind=str, **more: dict(positional=True, nargs=nargs, type=kind, **more)

EVALUATIONS = {
    "systems": Command("accuracy against parallelism of decoding systems, on problems with checkable answers",
                       systems=given("+"), model="tasks-diffusion", draft=str, task=("all",), problems=100, batch=50,
                       seed=0, repeats=3, temperature=0.0, markdown=False, **FILES),
    "caches": Command("accuracy of cache policies against the bytes that they keep, on long texts",
                      policies=given("*"), model="recall", removed=(0.25, 0.5, 0.8),
                      mode=dict(default=("aware", "agnostic"), nargs="+", choices=("aware", "agnostic")),
                      task=dict(nargs="+", choices=("recall", "needle", "values", "track", "copy", "prose"),
                                help="tasks; \"prose\" is for models of English (default: all that `recall` has "
                                     "learned)"),
                      problems=20, length=1024, seeds=(0, 1, 2), figures=(Path,), markdown=False, **FILES),
    "drafts": Command("acceptance of drafts that a model makes on a smaller cache of its own", model="recall",
                      problems=20, length=1024, seed=0),
    "search": Command("right answers of samples, votes and searches against tokens", model="sums", methods=(str,),
                      rows=(1, 2, 4, 8, 16, 32), problems=200, numbers=6, temperature=0.8, errors=0.1, seed=0, **FILES),
    "schemas": Command("the agreement of `json_schema` with JSON Schema's own test suite",
                       directory=given(None, Path, help="tests of a draft, such as tests/draft2020-12"), optional=False,
                       typed=False),
}
MEANING = {
    "systems": "NAME[:OPTION=VALUE,...] of `decodax list`; a list of values is a grid", "model": "name or path",
    "draft": "name or path of the smaller model, for systems that need one", "task": "tasks",
    "problems": "problems of each task", "batch": "problems at a time", "seed": "seed of problems and samples",
    "repeats": "timed runs, of which the median is shown", "temperature": "of the samples; 0 is greedy",
    "markdown": "print Markdown, with the command", "plot": "draw the figures, as PNG, SVG or PDF",
    "json": "write every figure", "removed": "shares of the text that are removed",
    "policies": "NAME[:OPTION=VALUE,...] of `decodax list caches` (default: all that are not exact)",
    "mode": "whether a policy sees the question", "length": "words of the texts", "seeds": "seeds of the texts",
    "figures": "print and draw what --json wrote before, instead of measuring", "methods": "methods (default: all)",
    "rows": "rows of a problem", "numbers": "count of numbers of a sum",
    "errors": "share of texts that the verifier is wrong about", "optional": "also read the directories below it",
    "typed": "give schemas with keywords of one type that type"}
"""Help of the options."""


def main(argv: list[str] | None = None) -> int:
    """Runs a command line and returns the exit status."""
    words = sys.argv[1:] if argv is None else argv
    args = commands.parser(__doc__, EVALUATIONS, MEANING, "Measures").parse_args(words)
    args.line = shlex.join(["python", "scripts/evaluate.py", *words])
    return commands.run("evaluate.py", args, lambda args: importlib.import_module(
        f"evaluations.{'caches' if args.command == 'drafts' else args.command}").main(args))


if __name__ == "__main__":
    raise SystemExit(main())
