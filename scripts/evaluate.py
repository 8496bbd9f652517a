"""Measures quality: right answers, or nats a token, against what a method saves.

    python scripts/evaluate.py systems "llada:steps=[16,8,4,2,1]" --task copy shuffle sudoku --plot curves.png
    python scripts/evaluate.py caches                                   # all cache policies that need no training
    python scripts/evaluate.py caches snapkv knorm:skip=() --length 2048 --plot caches.png
    python scripts/evaluate.py drafts                                   # drafts on smaller caches
    python scripts/evaluate.py search --plot docs/choose/search.png            # samples, votes and searches
    python scripts/evaluate.py kv-prediction --steps 0 4000 --together 4000
    python scripts/evaluate.py less
    python scripts/evaluate.py predictors
    python scripts/evaluate.py echo-att
    python scripts/evaluate.py arc
    python scripts/evaluate.py reading
    python scripts/evaluate.py schemas JSON-Schema-Test-Suite/tests/draft2020-12

`kv-prediction` to `arc` train something first and need the extra `train`. `schemas` reads a clone of
https://github.com/json-schema-org/JSON-Schema-Test-Suite. `evaluate.py NAME --help` lists the options.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

EVALUATIONS = {
    "systems": "accuracy against parallelism of decoding systems, on problems with checkable answers",
    "caches": "accuracy of cache policies against the bytes that they keep, on long texts",
    "drafts": "acceptance of drafts that a model makes on a smaller cache of its own",
    "search": "right answers of samples, votes and searches against tokens",
    "kv-prediction": "loss and time to the first token of KV Prediction",
    "less": "loss of `less` on held-out text",
    "predictors": "share of attention that trained predictors find",
    "echo-att": "loss of layers that share attention",
    "arc": "loss of a context as the vectors of an ARC-Encoder",
    "reading": "loss of caches that read a part of the text",
    "schemas": "`json_schema` on JSON Schema's own test suite",
}
SPEC = "NAME[:OPTION=VALUE,...]"


def parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = p.add_subparsers(dest="command", required=True, metavar="NAME")

    def command(name: str, model: str = "") -> Callable[..., Any]:
        text = EVALUATIONS[name]
        made = commands.add_parser(name, help=text, description=f"Measures the {text}." if text[0] != "`" else
                                   f"Measures {text}.")

        def option(flag: str, default: Any = None, help: str = "", **more: Any) -> None:
            if isinstance(default, (int, float)) and not isinstance(default, bool):
                more = {"type": type(default)} | more
            said = "" if default is None or default is False else \
                f" (default: {' '.join(map(str, default)) if isinstance(default, (list, tuple)) else default})"
            made.add_argument(flag, help=help + said, **more, **({"default": default} if flag[0] == "-" else {}))

        if model:
            option("--model", model, "name or directory")
        return option

    def files(one: Callable[..., Any]) -> None:
        one("--plot", None, "draw the figures, as PNG, SVG or PDF", type=Path, metavar="FILE")
        one("--json", None, "write every figure", type=Path, metavar="FILE")

    one = command("systems", "tasks-diffusion")
    one("systems", None, "systems; a list of values is a grid", nargs="+", metavar=SPEC)
    one("--draft", None, "name or directory of the smaller model, for systems that need one")
    one("--task", ["all"], "tasks", nargs="+")
    one("--problems", 100, "problems of each task")
    one("--batch", 50, "problems at a time")
    one("--seed", 0, "seed of problems and samples")
    one("--repeats", 3, "timed runs, of which the median is shown")
    one("--temperature", 0.0, "0 is greedy")
    one("--markdown", False, "print Markdown, with the command", action="store_true")
    files(one)

    one = command("caches", "recall")
    one("policies", None, "of `decodax list caches` (default: all that are not exact)", nargs="*", metavar=SPEC)
    one("--removed", [0.25, 0.5, 0.8], "shares of the text that are removed", nargs="+", type=float)
    one("--mode", ["aware", "agnostic"], "whether a policy sees the question", nargs="+", choices=["aware", "agnostic"])
    one("--task", None, "tasks (default: all that `recall` has learned)", nargs="+",
        choices=["recall", "needle", "values", "track", "copy"])
    one("--problems", 20, "problems of each task and seed")
    one("--length", 1024, "words of the texts")
    one("--seeds", [0, 1, 2], "seeds of the texts", nargs="+", type=int)
    one("--figures", None, "print and draw what --json wrote before, instead of measuring", nargs="+", type=Path)
    one("--markdown", False, "print Markdown, with the command", action="store_true")
    files(one)

    one = command("drafts", "recall")
    one("--problems", 20, "problems of each task")
    one("--length", 1024, "words of the texts")
    one("--seed", 0, "seed of the texts")

    one = command("search", "sums")
    one("--methods", None, "methods (default: all)", nargs="+")
    one("--rows", [1, 2, 4, 8, 16, 32], "rows of a problem", nargs="+", type=int)
    one("--problems", 200, "held-out sums")
    one("--numbers", 6, "count of numbers of a sum")
    one("--temperature", 0.8, "of the samples")
    one("--errors", 0.1, "share of texts that the verifier is wrong about")
    one("--seed", 0, "seed of problems and samples")
    files(one)

    one = command("kv-prediction")
    one("--fit", 128, "texts to fit on")
    one("--steps", [0, 300], "training steps of each kind of maps", nargs="+", type=int)
    one("--together", [300], "training steps of the auxiliary model with its maps", nargs="*", type=int)
    one("--rate", 2e-3, "learning rate")
    one("--texts", 64, "held-out texts")
    one("--prompt", 384, "tokens of their prompts")
    one("--after", 128, "tokens after the prompts")
    one("--timed", 512, "tokens of the timed prompt")
    one("--repeats", 31, "timings")

    def numbers(name: str, model: str = "", **defaults: Any) -> Callable[..., Any]:
        one = command(name, model)
        for option, default in defaults.items():
            one(f"--{option.replace('_', '-')}", default, MEANING.get(option, option))
        return one

    one = numbers("less", "pycode", size=512, sinks=4, recent=64, far=128, each=2, rank=8, hidden=128, epochs=12,
                  rate=5e-3, dropout=0.0)
    one("--save", None, "file for the kernels")
    numbers("predictors", size=1024, texts=48, budget=128, near=16, steps=300, butler_steps=600, problems=4)
    numbers("echo-att", size=256, each=8, steps=200, more=100, batch=4, rate=3e-4)
    one = numbers("arc", "pycode", size=128, pool=4, hidden=512, layers=4, steps=600, batch=8, texts=96, seed=0,
                  rate=1e-3, bridge_rate=2e-3, continuation=0.8)
    one("--save", None, "directory for the encoder")
    numbers("reading", "pycode", size=512, prompt=384, each=1, tested=4, count=256, loops=20, taken=8, recent=32,
            sinks=4, distance=128)

    one = command("schemas")
    one("directory", None, "tests of a draft, such as tests/draft2020-12", type=Path)
    one("--optional", False, "also read the directories below it", action="store_true")
    one("--typed", False, "give schemas with keywords of one type that type", action="store_true")
    return p


MEANING = {
    "size": "tokens of a text", "sinks": "first tokens that are kept", "recent": "latest tokens that are kept",
    "far": "first token that is scored", "each": "texts of each training module", "rank": "rank of the state",
    "hidden": "width of the hidden layer", "epochs": "passes over the texts", "rate": "learning rate",
    "dropout": "dropout of the kernels", "texts": "number of texts", "steps": "training steps",
    "butler_steps": "training steps of `token-butler`", "problems": "problems of each task",
    "budget": "tokens that are read", "near": "first and latest tokens that are always read",
    "more": "further steps of distillation", "batch": "texts of a step", "pool": "tokens for each vector",
    "layers": "layers of the encoder", "seed": "seed of the order of texts",
    "bridge_rate": "learning rate of the bridge",
    "continuation": "share of texts that are continued instead of repeated", "prompt": "tokens of the prompt",
    "tested": "texts of each scored module", "count": "centroids of a codebook", "loops": "iterations of k-means",
    "taken": "tokens that are read for each head", "distance": "distance at which keys are rotated"}
"""Help of the numeric options."""


def main(argv: list[str] | None = None) -> int:
    """Runs a command line and returns the exit status."""
    words = sys.argv[1:] if argv is None else argv
    args = parser().parse_args(words)
    args.line = shlex.join(["python", "scripts/evaluate.py", *words])
    try:
        return importlib.import_module(f"evaluations.{args.command.replace('-', '_')}").main(args) or 0
    except (ValueError, FileNotFoundError) as error:
        print(f"evaluate.py {args.command}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
