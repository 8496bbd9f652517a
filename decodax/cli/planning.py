"""The command `decodax plan`: whether a job fits a slice of devices, and how fast it can be. Imports JAX only when it
runs."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from decodax.cli.common import UsageError, mesh_shape, naming_the_argument, table

EXAMPLES = """\
examples:
  decodax plan --model llama-3-8b --topology v5e:2x4 --batch 64 --capacity 8192
  decodax plan --model qwen3-30b-a3b --topology v5e:4x4 v6e:2x4 --batch 128 --price v5e=1.2 v6e=2.7
  decodax plan --model path/to/model --topology v5p:2x2x1 --algorithm prompt-lookup:length=4 --tokens-per-round 1.8
  decodax plan --model llama-3-70b --topology h100:8 --batch 32 --weights int8

Nothing is allocated, and no accelerator is needed. Times are bounds: no program is faster. For TPUs the real compiler
is asked if libtpu is there (pip install 'decodax[tpu-aot]'); without it, and for GPUs, temporaries are estimates (~).
"""


def add(commands: Any, common: argparse.ArgumentParser, exit_codes: str) -> None:
    """Adds the command to the subparsers `commands`. `common` has the arguments of all commands; `exit_codes` is text
    for the help."""
    p = commands.add_parser("plan", parents=[common], help="whether a job fits a slice, and how fast it can be",
                            formatter_class=argparse.RawDescriptionHelpFormatter, epilog=EXAMPLES + "\n" + exit_codes,
                            description="Counts, and compiles, a round of decoding for devices that are not here: "
                            "memory of each, the least time of a round, the largest batch. One line a mesh, the "
                            "cheapest first.")
    p.set_defaults(command=run)
    p.add_argument("-m", "--model", required=True, metavar="PRESET_OR_PATH",
                   help="llama-3-8b, llama-3-70b, qwen3-8b, qwen3-32b, qwen3-30b-a3b, gemma-3-27b, gpt-oss-20b, "
                   "gpt-oss-120b, llada-8b, a directory with a config.json, or a GGUF file")
    p.add_argument("-t", "--topology", nargs="+", required=True, metavar="SLICE",
                   help="such as v5e:2x4, v5p:2x2x1, v6e:2x2, h100:8; here is this machine, measured")
    p.add_argument("-b", "--batch", type=int, default=16, metavar="N", help="rows of all replicas (default: 16)")
    p.add_argument("-c", "--capacity", type=int, default=8192, metavar="N",
                   help="tokens of a row, prompt and answer (default: 8192)")
    p.add_argument("--live", type=int, metavar="N",
                   help="tokens that each row holds in the round that is timed (default: the capacity)")
    p.add_argument("-n", "--max-new-tokens", type=int, metavar="N",
                   help="how much of it is answer, which caches go by (default: a quarter, at most 256)")
    p.add_argument("--mesh", nargs="+", metavar="DATAxMODEL",
                   help="replicas by devices of each, perhaps by parts of the experts (default: all without the last)")
    p.add_argument("-a", "--algorithm", metavar="NAME[:OPTION=VALUE,...]", help="the decoding method (decodax list)")
    p.add_argument("--draft", metavar="PRESET_OR_PATH",
                   help="the model that the method drafts with, named as --model")
    p.add_argument("--cache", metavar="NAME[:OPTION=VALUE,...]", help="what the cache keeps (decodax list)")
    p.add_argument("-w", "--weights", metavar="FORMAT", help="of the kernels, such as int8 (default: as --dtype)")
    p.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"],
                   help="of activations, cache and weights (default: bfloat16)")
    p.add_argument("--tokens-per-round", type=float, default=1.0, metavar="X",
                   help="new tokens a row and round, as decodax compare measures them (default: 1)")
    p.add_argument("--temperature", type=float, default=1.0, metavar="T", help="0 is greedy (default: 1)")
    p.add_argument("--top-p", type=float, metavar="P", help="nucleus sampling")
    p.add_argument("--price", nargs="+", default=[], metavar="DEVICE=X", help="dollars a device and hour, as v5e=1.2")
    p.add_argument("--no-compile", action="store_true", help="count alone: an answer within a second")


def run(args: argparse.Namespace) -> None:
    """Computes the plans and prints their table."""
    if "here" not in args.topology:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")       # nothing runs
    try:
        prices = {name: float(value) for name, _, value in (given.partition("=") for given in args.price)}
    except ValueError as error:
        raise UsageError(f"--price: takes DEVICE=X, as v5e=1.2 ({error})") from error
    mesh = None if args.mesh is None else list(map(mesh_shape, args.mesh))
    from decodax.bench.plan import COLUMNS, plan
    from decodax.common.axes import by_axes

    sampling = {"temperature": args.temperature} | ({} if args.top_p is None else {"top_p": args.top_p})
    with naming_the_argument():
        found = plan(args.model, args.topology, batch=args.batch, capacity=args.capacity, live=args.live,
                     max_new_tokens=args.max_new_tokens, mesh=mesh, algorithm=args.algorithm, draft=args.draft,
                     cache=args.cache, weights=args.weights, dtype=args.dtype, tokens_per_round=args.tokens_per_round,
                     price=prices, compile=False if args.no_compile else None, progress=sys.stderr.isatty(), **sampling)
    if args.json:
        print(json.dumps([p.json() for p in found]))
        return
    first = found[0]
    print(f"{args.model}, {args.batch} rows of {args.capacity:,} tokens, {first.live:,} of them taken; "
          f"{first.width} scored a round" + (f", {first.tokens:g} of them kept" if first.tokens != 1 else ""))
    table(COLUMNS, [p.cells() for p in found], right=range(2, len(COLUMNS)))
    prompts = [f"{p.slice.name} {by_axes(p.mesh)}: {1e3 * p.prompt:,.1f} ms for {p.live:,} tokens of one row" + (
        "" if p.swap is None else f", {1e3 * p.swap:,.1f} ms for their cache to the host's memory")
        for p in found if p.counts.prompt_flops]
    hosted = [f"{p.slice.name} {by_axes(p.mesh)}: {p.counts.host / 1e9:.2f} GB of the cache for each device"
              for p in found if p.counts.host]
    said = [f"{p.slice.name} {by_axes(p.mesh)}: " + (
        str(p.compiled.error) if p.padded is None or p.compiled.moved is None else
        f"{p.compiled.collectives} collectives, {p.compiled.moved / p.counts.moved:.3f} of the bytes that must move, "
        f"{p.padded:.3f} of the arguments' bytes in memory, {p.counts.flops / 1e9:,.1f} GFLOP"
    ) for p in found if p.compiled is not None]
    assumed = sorted({f"{p.slice.device.name}: {p.slice.device.bandwidth / 1e9:,.0f} GB/s, "
                      f"{p.slice.device.flops / 1e12:,.0f} TFLOP/s, {p.slice.device.memory / 2 ** 30:.2f} GiB, "
                      f"{p.slice.device.link / 1e9:,.0f} GB/s to a neighbour ({p.slice.device.source})" for p in found})
    notes = {"host": hosted, "prompts": prompts, "compiled": said, "assumed": assumed}
    print("\n".join(["", *(f"{name}: {line}" for name, lines in notes.items() for line in lines)]), file=sys.stderr)


def show_lengths(predicted: list[Any], assumed: list[str], args: argparse.Namespace) -> None:
    """Prints predicted speedups by draft length, for `decodax compare --at`: a table for each task, then the
    assumptions.

    Args:
        predicted, assumed: the results of `decodax.bench.plan.windows.windows`.
        args: the arguments of the command.
    """
    from decodax.bench.figures import markdown_table
    from decodax.bench.plan.windows import columns

    lengths = sorted({k for one in predicted for k in one.lengths})
    for task in dict.fromkeys(one.task for one in predicted):
        print(f"\n{task}: predicted for {args.as_model} on {args.on}, a round and its speedup\n")
        rows = [one.cells(lengths) for one in predicted if one.task == task]
        if args.markdown:
            print(markdown_table(columns(lengths), rows))
        else:
            table(columns(lengths), rows, right=range(2, 3 + len(lengths)))
    print("\n".join(["", *(f"assumed: {line}" for line in assumed)]))


def draw_lengths(path: str, predicted: list[Any], setting: str) -> None:
    """Draws the predicted speedup over the draft length, in a panel for each task and batch size."""
    from decodax.bench.figures import plot_lines

    panels: dict[str, dict[str, Any]] = {}
    for one in predicted:
        panels.setdefault(f"{one.task}, batch {one.batch}", {})[one.system] = [
            (0, 1.0), *zip(one.lengths, one.speedups, strict=True)]
    plot_lines(Path(path), panels, "drafts in a round", "predicted speedup", setting)
