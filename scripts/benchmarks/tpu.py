"""Compiles the decoding loop for TPU slices without a TPU, and reports what one round of it costs.

The compile-only client of `libtpu` runs XLA's real TPU compiler on any Linux machine; no array is allocated. The
program is `decodax.core.drivers.advance`, which `generate` runs. Models are Llama 3 shapes in bfloat16: "8b" (32
layers, width 4096, 32/8 heads of 128, MLP 14336) and "1b" (16 layers, width 2048, 32/8 heads of 64, MLP 8192, tied),
both with a vocabulary of 128256. See docs/results/tpu.md for the meaning of the figures.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import itertools
import json
import math
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AxisType

from decodax.algorithms.speculative import Speculative
from decodax.algorithms.speculative.drafts import PromptLookup
from decodax.algorithms.speculative.drafts.text.token_recycling import TokenRecycling, template
from decodax.bench.plan.aot import devices, loops
from decodax.bench.plan.count import count, local, setup
from decodax.bench.report import callbacks, collectives, copies, cycles, parse, total, traffic
from decodax.io.load import LM
from decodax.models import Transformer, llama
from decodax.models.packed import Packed

VOCABULARY = 128_256
SHAPES: dict[str, dict[str, Any]] = {
    "8b": dict(width=4096, layers=32, heads=32, kv_heads=8, head_dim=128, mlp=14_336, theta=500_000.0),
    "1b": dict(width=2048, layers=16, heads=32, kv_heads=8, head_dim=64, mlp=8192, theta=500_000.0, tied=True),
}
POLICIES: dict[str, dict[str, Any]] = {"greedy": dict(temperature=0.0), "temperature": dict(temperature=0.7),
                                       "top-p": dict(temperature=0.7, top_p=0.95)}


def dumped(dumps: Path) -> str:
    """Returns the optimised program that the compiler wrote to a directory, which is emptied."""
    texts = [path.read_text() for path in sorted(dumps.glob("*-TLP-hlo.txt"), key=lambda path: path.stat().st_mtime)]
    for path in dumps.iterdir():
        path.unlink()
    found = [text for text in texts if text.startswith("HloModule jit_advance")]
    if not found:
        raise RuntimeError(f"{dumps}: libtpu wrote no program of `advance` there; this version may name its files in "
                           "another way")
    return found[-1]


def report(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the figures of one combination; bytes are those of one device, in a call that runs one round."""
    axes, there = tuple(map(int, args.mesh.split("x"))), devices(args.topology)
    if math.prod(axes) > len(there):
        raise ValueError(f"--mesh: got {args.mesh}, {args.topology} has {len(there)} devices")
    there = there[:math.prod(axes)]
    shape = SHAPES[args.shape] | ({} if args.layers is None else {"layers": args.layers})
    model = Transformer(llama(vocab=VOCABULARY, context=8192, **shape), dtype="bfloat16")
    lm = LM(model=model, params=model.abstract_params("bfloat16"), vocab_size=VOCABULARY)
    alg: Any = None if args.window == 1 else Speculative(PromptLookup(length=args.window - 1))
    if args.tree:
        alg = Speculative(TokenRecycling(tree=template(args.tree - 1)))
    with jax.set_mesh(jax.make_mesh(axes, ("data", "model"), (AxisType.Auto,) * 2, devices=there)):    # for formats
        s = setup(lm, there, axes, batch=args.batch, capacity=args.capacity, live=args.live, algorithm=alg,
                  weights=args.weights, sampling=POLICIES[args.policy])
    clock = time.perf_counter()
    compiled = s.lower().compile()
    seconds, counts = time.perf_counter() - clock, count(s)
    program = parse(dumped(args.dumps) if args.dumps else compiled.as_text())
    outer, walks, trips = loops(s, program)
    parts = lambda tree: [x.sharding.shard_shape(x.shape) for x in jax.tree.leaves(tree)]
    cached = {math.prod(part) for part in parts(s.state.cache) if len(part) >= 3}
    kernels = {max(map(math.prod, parts(x))) for x in jax.tree.leaves(
        s.params.target, is_leaf=lambda x: isinstance(x, Packed)) if isinstance(x, Packed)}
    needs = {"weights": int(counts.weights_read), "cache_read": int(counts.cache_read),
             "cache_written": int(counts.cache_written)}
    memory = compiled.memory_analysis()
    needed, moved = sum(needs.values()), traffic(program, trips)
    body = (outer.attribute("body") if outer is not None else None) or ""
    inner = [x for x in program.inside(body) if x.opcode == "while"]
    waits = collectives(program, body)
    sampling = [x for loop in inner if not walks(loop) for x, _ in collectives(program, loop.attribute("body"))]
    # of the cache's type: a kernel of integers may have as many elements, and is transposed within its product
    around = [x for n in cached for x in copies(program, n) if x.result[0].type == "bf16"]
    fused = {x.attribute("calls") for x in program.all() if x.opcode == "fusion"}
    written = [b for name, operations in program.computations.items() if name not in fused
               for x in operations.values() if x.opcode in ("fusion", "convert", "multiply", "broadcast", "copy")
               for b in x.result if b.type in ("bf16", "f32") and math.prod(b.dims) in kernels
               # what is as large and of the same type before is the cache, which may have as many elements
               and not any(b.type == own.type and math.prod(own.dims) == math.prod(b.dims)
                           for name in x.operands if name in operations for own in operations[name].result)]
    largest = max((sum(b.bytes for b in x.result) for x, _ in waits), default=0)
    return {
        "versions": {"jax": jax.__version__, "libtpu": importlib.metadata.version("libtpu")},
        "options": {k: v for k, v in vars(args).items()
                    if k not in ("command", "json", "dumped", "dumps")} | {"layers": shape["layers"]},
        "compile_seconds": round(seconds, 1),
        "needed_bytes": {**needs, "total": needed},
        "moved_bytes": moved, "moved_over_needed": moved / needed,
        "temporary_bytes": memory.temp_size_in_bytes, "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes, "donated_bytes": memory.alias_size_in_bytes,
        "cache_bytes": local(s.state.cache), "cache_copies": len(around),
        "converted_kernels": len(written),
        "loops": {"walks of the cache": sum(map(walks, inner)), "others": sum(not walks(x) for x in inner)},
        "operations": total(program, trips), "cycles": None if args.dumps else cycles(program, trips),
        "collectives": len(waits), "collectives_in_sampling_loops": len(sampling),
        "largest_collective_bytes": largest, "callbacks": len(callbacks(program)),
    }


COLUMNS = ("shape", "mesh", "policy", "weights", "round", "needed GB", "moved", "temporaries", "Mcycles", "operations",
           "copies", "collectives", "in sampling")


def line(r: dict[str, Any]) -> tuple[str, ...]:
    """Returns the cells of a row, by `COLUMNS`."""
    o = r["options"]
    what = f"tree of {o['tree']}" if o["tree"] else f"window of {o['window']}" if o["window"] > 1 else "plain"
    return (f"{o['shape']}, {o['layers']} layers", o["mesh"], o["policy"], o["weights"], what,
            f"{r['needed_bytes']['total'] / 1e9:.3f}", f"{r['moved_over_needed']:.3f}",
            f"{100 * r['temporary_bytes'] / r['argument_bytes']:.1f}%",
            "" if r["cycles"] is None else f"{r['cycles'] / 1e6:.2f}",
            f"{r['operations']:,}", str(r["cache_copies"]), str(r["collectives"]),
            str(r["collectives_in_sampling_loops"]))


def main(args: argparse.Namespace) -> None:
    """Compiles every combination and prints a line for each."""
    args.live = args.capacity if args.live is None else args.live
    if not 0 < args.live <= args.capacity:
        raise ValueError(f"--live: got {args.live}, takes 1 to the capacity of {args.capacity}")
    if importlib.util.find_spec("libtpu") is None:
        raise FileNotFoundError("libtpu is not installed; pip install 'decodax[tpu-aot]'")
    dumps = tempfile.TemporaryDirectory() if args.dumped else None      # deleted with this name
    if dumps is not None:
        own = f"--xla_jf_dump_to={dumps.name} --xla_jf_dump_hlo_text=true --xla_jf_dump_llo_text=false"
        os.environ["LIBTPU_INIT_ARGS"] = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {own}"
    args.dumps = None if dumps is None else Path(dumps.name)
    rounds = [(w, 0) for w in args.window] + [(1, t) for t in args.tree]
    if not args.json:
        print(f"{args.topology}, batch {args.batch}, {args.live} of {args.capacity} entries live, jax "
              f"{importlib.metadata.version('jax')}, libtpu {importlib.metadata.version('libtpu')}\n")
        print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    for shape, mesh, policy, weights, (window, tree) in itertools.product(args.shape, args.mesh, args.policy,
                                                                          args.weights, rounds):
        r = report(argparse.Namespace(**vars(args) | dict(shape=shape, mesh=mesh, policy=policy, weights=weights,
                                                          window=window, tree=tree)))
        print(json.dumps(r) if args.json else f"| {' | '.join(line(r))} |", flush=True)
