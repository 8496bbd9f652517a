"""Measures speed and memory on this machine, side by side in one process.

    python scripts/benchmark.py rounds                        # the README's figures, ten minutes on two idle cores
    python scripts/benchmark.py rounds --only batch capacity --repeats 3
    python scripts/benchmark.py weights --formats int8        # needs `pip install xllamacpp gguf` for llama.cpp
    python scripts/benchmark.py caches --policies snapkv:budget=1024 h2o:budget=1024 --layers 4
    python scripts/benchmark.py caches --shared 1024 --batch 32 --policies hydragen
    python scripts/benchmark.py beams
    python scripts/benchmark.py constraints
    python scripts/benchmark.py jobs --requests 2000 --batch-size 64 --algorithm prompt-lookup
    python scripts/benchmark.py kernels --form int8 pages --batch 64 --capacity 8192 --live 8192
    python scripts/benchmark.py tpu --shape 8b 1b --mesh 1x8 2x4 --policy greedy top-p

`rounds`, `weights` and `beams` need the test extra (torch, transformers); `tpu` needs the extra `tpu-aot` and no TPU.
`benchmark.py NAME --help` lists the options.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

BENCHMARKS = {
    "rounds": "the decoding round against transformers and against itself",
    "weights": "formats of weights against float32 arrays and llama.cpp, on a CPU",
    "caches": "memory and time of cache policies against dense caches",
    "beams": "a step of beam search against samples and transformers",
    "constraints": "making automata, and a constrained round",
    "jobs": "continuous batches against static ones",
    "kernels": "forms of window attention and draws, on the devices that JAX finds",
    "tpu": "cost of a round as XLA compiles it for TPU slices; options with several values are combined",
}
PARTS = ("batch", "capacity", "window", "overhead", "lookup", "draft", "automatic", "retraces", "cold")
FORMS = ("dense", "int8", "pages", "prefix", "weights", "draw")
CACHES = ("snapkv:budget=512", "knorm:budget=512,skip_layers=()", "h2o:budget=512", "adakv:budget=512")
SPEC = "NAME[:OPTION=VALUE,...]"


def parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = p.add_subparsers(dest="command", required=True, metavar="NAME")

    def command(name: str) -> Callable[..., Any]:
        text = BENCHMARKS[name]
        made = commands.add_parser(name, help=text, description=f"Measures {text}.")

        def option(flag: str, default: Any = None, help: str = "", **more: Any) -> None:
            if isinstance(default, int) and not isinstance(default, bool):
                more = {"type": int} | more
            shown = "" if default is None or isinstance(default, (bool, tuple, list)) else f" (default: {default})"
            made.add_argument(flag, default=default, help=help + shown, **more)

        return option

    one = command("rounds")
    one("--only", PARTS, f"comparisons to run, of {', '.join(PARTS)} (default: all)", nargs="+", choices=PARTS,
        metavar="PART")
    one("--repeats", 5, "times that each side runs")
    one("--new", 128, "new tokens")
    one("--json", None, "file for the figures and all times", type=Path)

    one = command("weights")
    one("--formats", None, "formats of `decodax.models.formats` (default: those that need no data)", nargs="+",
        metavar="FORMAT")
    one("--repeats", 5, "times that each side runs")
    one("--new", 128, "new tokens")
    one("--threads", None, "threads of llama.cpp (default: all)", type=int)

    one = command("caches")
    one("--policies", CACHES, f"cache policies (default: {' '.join(CACHES)})", nargs="+", metavar=SPEC)
    one("--batch", 8, "prompts")
    one("--prompt", 4096, "tokens of the longest prompt")
    one("--held", 512, "tokens of the prompts of the dense cache that times are compared with")
    one("--shared", None, "tokens that all prompts begin with", type=int)
    one("--new", 128, "new tokens")
    one("--layers", 12, "layers of the model")
    one("--repeats", 12, "timings of 8 rounds")

    one = command("beams")
    one("--beams", 4, "beams of each of 8 prompts")
    one("--new", 64, "tokens of a text")
    one("--repeats", 7, "times that each side runs")

    one = command("constraints")
    one("--size", 150_000, "size of the vocabulary")
    one("--batch", 8, "rows of the rounds")
    one("--repeats", 7, "times that each side runs")

    one = command("jobs")
    one("--model", "pycode", "name or directory")
    one("--requests", 500, "number of requests")
    one("--batch-size", 16, "prompts at once")
    one("--longest", 512, "tokens of a row at most")
    one("--header", 0, "tokens that all prompts begin with")
    one("--new", None, "new tokens of each request (default: log-normal)", type=int)
    one("--token-budget", None, "also read prompts in the rounds of others, with this budget", type=int)
    one("--algorithm", None, "default: plain decoding", metavar=SPEC)
    one("--repeats", 3, "times that each side runs")
    one("--seed", 0, "seed of the requests")

    one = command("kernels")
    one("--form", FORMS, "dense: a cache of --dtype; int8: of integers; pages: a shuffled pool; prefix: one cache for "
        "all rows; weights: the attention that slots receive; draw: tokens by temperature and top-p (default: all)",
        nargs="+", choices=FORMS)
    one("--batch", 8, "rows")
    one("--window", 1, "queries of a row")
    one("--heads", 32, "query heads")
    one("--kv-heads", 8, "key/value heads")
    one("--width", 128, "width of a head")
    one("--capacity", 2048, "slots of a row")
    one("--live", None, "entries of each row (default: half the capacity)", type=int)
    one("--page", 256, "slots of a page")
    one("--vocabulary", 128_256, "vocabulary of draws")
    one("--dtype", "bfloat16", "type of queries and cache")
    one("--inner", 20, "calls in a program")
    one("--repeats", 7, "times that each program runs")

    one = command("tpu")
    one("--topology", "v5e:2x4", "such as v5e:2x4, v5p:2x2x1, v6e:2x4")
    one("--shape", ["8b"], "shapes of the model (default: 8b)", nargs="+", choices=["8b", "1b"])
    one("--mesh", ["1x8"], "devices along the data and model axes; a smaller mesh leaves devices out (default: 1x8)",
        nargs="+", metavar="DATAxMODEL")
    one("--policy", ["temperature"], "top-p is a temperature and top-p 0.95 (default: temperature)", nargs="+",
        choices=["greedy", "temperature", "top-p"])
    one("--weights", ["bfloat16"], "arrays of bfloat16 (default), or packed kernels", nargs="+",
        choices=["bfloat16", "int8", "int4", "fp8"])
    one("--window", [1], "tokens scored in a round: 1 is plain decoding, more is prompt lookup with window - 1 drafts",
        nargs="*", type=int)
    one("--tree", [], "also rounds of token recycling with trees of this many nodes", nargs="+", type=int,
        metavar="NODES")
    one("--batch", 16, "rows")
    one("--capacity", 2048, "slots of the cache")
    one("--live", None, "entries of each row (default: the capacity)", type=int)
    one("--layers", None, "fewer layers than the shape has compile faster", type=int)
    one("--json", False, "print a JSON object a line", action="store_true")
    one("--dumped", False, "read the text that the compiler writes itself (gigabytes, in a temporary directory), for "
        "programs that XLA cannot print afterwards; without estimates of cycles", action="store_true")
    one("--text", None, "file for the last optimised program", type=Path)
    return p


def main(argv: list[str] | None = None) -> int:
    """Runs a command line and returns the exit status."""
    args = parser().parse_args(argv)
    if args.command in ("rounds", "weights"):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    try:
        importlib.import_module(f"benchmarks.{args.command}").main(args)
    except (ValueError, FileNotFoundError, ModuleNotFoundError) as error:
        print(f"benchmark.py {args.command}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
