"""Measures speed and memory on this machine, side by side in one process.

    python scripts/benchmark.py rounds                        # the README's figures, ten minutes on two idle cores
    python scripts/benchmark.py rounds --only batch capacity --repeats 3
    python scripts/benchmark.py weights --formats int8        # needs `pip install xllamacpp gguf` for llama.cpp
    python scripts/benchmark.py load --size 3.8
    python scripts/benchmark.py caches --policies snapkv:budget=1024 h2o:budget=1024 --layers 4
    python scripts/benchmark.py caches --shared 1024 --batch 32 --policies hydragen
    python scripts/benchmark.py beams
    python scripts/benchmark.py constraints
    python scripts/benchmark.py jobs --requests 2000 --batch-size 64 --algorithm prompt-lookup
    python scripts/benchmark.py kernels --form int8 pages --batch 64 --capacity 8192 --live 8192
    python scripts/benchmark.py tpu --shape 8b 1b --mesh 1x8 2x4 --policy greedy top-p
    python scripts/benchmark.py presets lfm2-1.2b phi-4

`rounds`, `weights`, `load` and `beams` need the test extra (torch, transformers); `tpu` and `presets` need the extra
`tpu-aot` and no TPU. `benchmark.py NAME --help` lists the options.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import commands
from commands import Command

PARTS = ("batch", "capacity", "window", "overhead", "lookup", "draft", "heads", "automatic", "cold")
FORMS = ("dense", "int8", "pages", "prefix", "weights")
POLICIES = ("snapkv:budget=512", "knorm:budget=512,skip_layers=()", "h2o:budget=512", "adakv:budget=512")
some = lambda default, choices: dict(default=default, nargs="+", choices=choices)

BENCHMARKS = {
    "rounds": Command("the decoding round against transformers and against itself", only=some(PARTS, PARTS), repeats=5,
                      new=128, json=Path),
    "weights": Command("formats of weights against float32 arrays and llama.cpp, on a CPU", formats=(str,), file=Path,
                       repeats=5, new=128),
    "load": Command("loading a checkpoint against transformers: time and memory",
                    size=dict(default=3.8, type=float, help="gigabytes of the checkpoint"),
                    width=dict(default=2048, type=int, help="width of its model"), repeats=3,
                    model=dict(default=None, help="a model directory, in place of random weights"), scratch=Path),
    "caches": Command("memory and time of cache policies against dense caches", policies=POLICIES, batch=8, prompt=4096,
                      held=512, shared=int, new=128, layers=12, repeats=12),
    "beams": Command("a step of beam search against samples and transformers", beams=4, new=64, repeats=7),
    "constraints": Command("making automata, and a constrained round", model="pycode", size=150_000, batch=8,
                           repeats=7),
    "jobs": Command("continuous batches against static ones", model="pycode", requests=500, batch_size=16, longest=512,
                    header=0, new=int, token_budget=int, algorithm=str, repeats=3, seed=0),
    "kernels": Command("forms of window attention, on the devices that JAX finds", form=some(FORMS, FORMS),
                       batch=8, window=1, heads=32, kv_heads=8, width=128, capacity=2048, live=int, page=256,
                       dtype="bfloat16", inner=20, repeats=7),
    "tpu": Command("cost of a round as XLA compiles it for TPU slices; options with several values are combined",
                   topology="v5e:2x4", shape=some(("8b",), ("8b", "1b")), mesh=("1x8",),
                   policy=some(("temperature",), ("greedy", "temperature", "top-p")),
                   weights=some(("bfloat16",), ("bfloat16", "int8", "int4", "fp8")),
                   window=dict(default=(1,), nargs="*", type=int), tree=dict(default=(), nargs="+", type=int), batch=16,
                   capacity=2048, live=int, layers=dict(type=int, help="layers, which may be fewer than the shape has"),
                   json=dict(default=False, help="print a JSON object a line"), dumped=False),
    "presets": Command("presets of `decodax plan`, each compiled for a TPU slice that it fits",
                       names=dict(default=(), nargs="*", positional=True, help="presets (default: all)"), batch=16,
                       capacity=8192, counted=False, json=dict(default=False, help="print a JSON object a line")),
}
MEANING = {
    "only": "comparisons to run", "repeats": "times that each side runs", "new": "new tokens (of jobs: log-normal)",
    "json": "file for the figures and all times", "formats": "formats of weights (default: those that need no data)",
    "scratch": "directory for the checkpoint (default: that of temporary files)",
    "file": "a GGUF file, which takes the place of the random weights",
    "policies": "cache policies, NAME[:OPTION=VALUE,...]", "batch": "rows", "prompt": "tokens of the longest prompt",
    "held": "tokens of the prompts of the dense cache that times are compared with",
    "shared": "tokens that all prompts begin with", "layers": "layers of the model", "beams": "beams of each prompt",
    "size": "size of the vocabulary", "model": "name or directory", "requests": "number of requests",
    "batch_size": "prompts at once", "longest": "tokens of a row at most", "header": "tokens that all prompts share",
    "token_budget": "also read prompts in the rounds of others, with this budget",
    "algorithm": "NAME[:OPTION=VALUE,...] (default: plain decoding)", "seed": "seed of the requests",
    "form": "dense: a cache of --dtype; int8: of integers; pages: a shuffled pool; prefix: one cache for all rows; "
            "weights: the attention that slots receive",
    "window": "queries of a row; of tpu 1 is plain decoding, more is prompt lookup with window - 1 drafts",
    "heads": "query heads", "kv_heads": "key/value heads", "width": "width of a head", "capacity": "slots of a row",
    "live": "entries of each row (default: half the capacity; of tpu all of it)", "page": "slots of a page",
    "dtype": "type of queries and cache", "inner": "calls in a program",
    "topology": "such as v5e:2x4, v5p:2x2x1, v6e:2x4", "shape": "shapes of the model",
    "mesh": "devices along the data and model axes; a smaller mesh leaves devices out",
    "policy": "rules of sampling; top-p is a temperature and top-p 0.95",
    "weights": "arrays of bfloat16, or packed kernels", "counted": "count from shapes alone, without the compiler",
    "tree": "also token recycling with trees of this many nodes",
    "dumped": "read the text that the compiler writes itself (gigabytes, in a temporary directory), for programs that "
              "XLA cannot print afterwards; without estimates of cycles"}
"""Help of the options."""


HOME = dict.fromkeys(("caches", "beams", "constraints", "jobs"), "calls")
"""Modules of subcommands that have none of their own."""


def main(argv: list[str] | None = None) -> int:
    """Runs a command line and returns the exit status."""
    args = commands.parser(__doc__, BENCHMARKS, MEANING, "Measures").parse_args(argv)
    if args.command in ("rounds", "weights", "load", "tpu", "presets"):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    return commands.run("benchmark.py", args, lambda args: importlib.import_module(
        f"benchmarks.{HOME.get(args.command, args.command)}").main(args))


if __name__ == "__main__":
    raise SystemExit(main())
