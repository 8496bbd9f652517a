"""Compiles the decoding loop for TPU slices without a TPU, and reports what one round of it costs.

The compile-only client of `libtpu` runs XLA's real TPU compiler on any Linux machine; no array is allocated. The
program is `decodax.core.drivers.advance`, which `generate` runs. Models are Llama 3 shapes in bfloat16: "8b" (32
layers, width 4096, 32/8 heads of 128, MLP 14336) and "1b" (16 layers, width 2048, 32/8 heads of 64, MLP 8192, tied),
both with a vocabulary of 128256. See docs/results/tpu.md for the meaning of the figures.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import itertools
import json
import math
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from decodax.bench.tpu import environment

SHAPES: dict[str, dict[str, Any]] = {
    "8b": dict(width=4096, layers=32, heads=32, kv_heads=8, head_dim=128, mlp=14_336, theta=500_000.0),
    "1b": dict(width=2048, layers=16, heads=32, kv_heads=8, head_dim=64, mlp=8192, theta=500_000.0, tied=True),
}

VOCABULARY = 128_256


def compiled(args: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """Returns the compiled loop, and facts of one device, such as the bytes that every program has to move."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.dtypes import itemsize_bits
    from jax.experimental import topologies
    from jax.sharding import AxisType, Mesh, NamedSharding

    from decodax.algorithms.plain import Autoregressive
    from decodax.algorithms.speculative import Speculative
    from decodax.algorithms.speculative.drafts import PromptLookup
    from decodax.algorithms.speculative.drafts.text.token_recycling import TokenRecycling, template
    from decodax.common.axes import DATA, MODEL
    from decodax.core.drivers import advance
    from decodax.core.mesh import heads
    from decodax.core.start import init_state
    from decodax.core.types import Params
    from decodax.models.config import llama
    from decodax.models.formats import pack
    from decodax.models.packed import Packed
    from decodax.models.transformer import Transformer
    from decodax.sampling import build

    data, model_axis = map(int, args.mesh.split("x"))
    devices = list(topologies.get_topology_desc(platform="tpu", topology_name=args.topology).devices)
    if data * model_axis > len(devices):
        raise SystemExit(f"--mesh: got {args.mesh}, {args.topology} has {len(devices)} devices")
    mesh = Mesh(np.array(devices[:data * model_axis]).reshape(data, model_axis), (DATA, MODEL),
                axis_types=(AxisType.Auto,) * 2)
    shape = SHAPES[args.shape] | ({} if args.layers is None else {"layers": args.layers})
    model = Transformer(llama(vocab=VOCABULARY, context=8192, **shape), dtype="bfloat16")
    shaped = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    def laid_out(path: Any, x: Any, sharding: NamedSharding) -> Any:
        if not isinstance(x, Packed):
            return shaped(x, sharding)
        inputs, outputs = sharding.spec[::-1] if path[0].key == "embed" else sharding.spec
        x = x.placed(outputs, inputs)
        return jax.tree.map(lambda a, spec: shaped(a, NamedSharding(mesh, spec)), x,
                            x.specs(outputs, inputs, dict(mesh.shape)))

    weights = model.abstract_params(jnp.bfloat16)
    if args.weights != "bfloat16":
        with jax.set_mesh(mesh):        # formats go by the platform
            weights = jax.eval_shape(functools.partial(pack, weights=args.weights), weights)
    weights = jax.tree_util.tree_map_with_path(laid_out, weights, model.shardings(mesh),
                                               is_leaf=lambda x: isinstance(x, Packed))
    params = Params(target=weights)
    alg: Any = Autoregressive() if args.window == 1 else Speculative(PromptLookup(length=args.window - 1))
    if args.tree:
        alg = Speculative(TokenRecycling(tree=template(args.tree - 1)))
    width = args.tree or args.window

    options = {"greedy": dict(temperature=0.0), "temperature": dict(temperature=0.7),
               "top-p": dict(temperature=0.7, top_p=0.95)}[args.policy]
    row: Any = lambda dtype, *more: jax.ShapeDtypeStruct((args.batch, *more), dtype)
    policy = jax.eval_shape(lambda: build(args.batch, vocab_size=VOCABULARY, eos_token_id=[1, 2], **options))
    begin = lambda policy, tokens, length: init_state(alg, model, params, policy, tokens, length, size=args.capacity,
                                                      max_new=jnp.int32(0))
    place = lambda tree: jax.tree.map(lambda x, spec: shaped(x, NamedSharding(mesh, spec)), tree, heads(tree))
    with jax.set_mesh(mesh):
        s = jax.eval_shape(begin, policy, row(jnp.int32, args.capacity), row(jnp.int32))
        s, policy = place(s), place(policy)
        clock = time.perf_counter()
        lowered = advance.lower(alg, model, params, policy, s, jax.ShapeDtypeStruct((), jnp.int32))
        compiled = lowered.compile()
        seconds = time.perf_counter() - clock

    def local(tree: Any) -> int:
        return sum(math.prod(x.sharding.shard_shape(x.shape)) * itemsize_bits(x.dtype) // 8
                   for x in jax.tree.leaves(tree))

    # what a cache holds, counted by the shape of the model: a layout may take more
    rows, own = args.batch // data, shape["kv_heads"] // math.gcd(shape["kv_heads"], model_axis)
    entry = rows * own * shape["head_dim"] * 2 * 2 * shape["layers"]
    embedded = rows * width * shape["width"] * 2
    table = 0 if shape.get("tied") else local(weights["embed"]) - embedded
    packed = [x for x in jax.tree.leaves(weights, is_leaf=lambda x: isinstance(x, Packed)) if isinstance(x, Packed)]
    needs = {"weights": local(weights) - table, "cache_read": entry * args.live, "cache_written": entry * width}
    return compiled, {"compile_seconds": seconds, "cache_bytes": local(s.cache), "needs": needs,
                      "cache_elements": {math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(s.cache)
                                         if x.ndim >= 3},
                      "kernel_elements": {max(math.prod(a.sharding.shard_shape(a.shape)) for a in jax.tree.leaves(x))
                                          for x in packed},
                      "layers": shape["layers"], "rows": rows}


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
    import jax

    from decodax.bench.report import Instruction, callbacks, collectives, copies, cycles, parse, rounds, total, traffic
    from decodax.pallas_kernels.window_attention.reference import WIDE_BLOCK, block_of

    program_, facts = compiled(args)
    text = dumped(args.dumps) if args.dumps else program_.as_text()
    program = parse(text)
    blocks = -(-args.live // block_of(args.capacity, WIDE_BLOCK))
    outer = max((x for x in program.computations[program.entry].values() if x.opcode == "while"),
                key=lambda x: sum(b.bytes for b in x.result))

    def walks(loop: Instruction) -> bool:      # a walk over the cache carries it; other loops go over rows
        return loop is not outer and any(math.prod(b.dims) in facts["cache_elements"] for b in loop.result)

    def trips(loop: Instruction) -> int:
        return 1 if loop is outer else blocks if walks(loop) else rounds(program, loop) or facts["rows"]

    memory = program_.memory_analysis()
    needed, moved = sum(facts["needs"].values()), traffic(program, trips)
    body = outer.attribute("body") or ""
    inner = [x for x in program.inside(body) if x.opcode == "while"]
    waits = collectives(program, body)
    sampling = [x for loop in inner if not walks(loop) for x, _ in collectives(program, loop.attribute("body"))]
    # of the cache's type: a kernel of integers may have as many elements, and is transposed within its product
    around = [x for n in facts["cache_elements"] for x in copies(program, n) if x.result[0].type == "bf16"]
    fused = {x.attribute("calls") for x in program.all() if x.opcode == "fusion"}
    written = [b for name, operations in program.computations.items() if name not in fused
               for x in operations.values() if x.opcode in ("fusion", "convert", "multiply", "broadcast", "copy")
               for b in x.result if b.type in ("bf16", "f32") and math.prod(b.dims) in facts["kernel_elements"]
               # what is as large and of the same type before is the cache, which may have as many elements
               and not any(b.type == own.type and math.prod(own.dims) == math.prod(b.dims)
                           for name in x.operands if name in operations for own in operations[name].result)]
    largest = max((sum(b.bytes for b in x.result) for x, _ in waits), default=0)
    return {
        "versions": {"jax": jax.__version__, "libtpu": importlib.metadata.version("libtpu")},
        "options": {k: v for k, v in vars(args).items()
                    if k not in ("command", "json", "dumped", "dumps")} | {"layers": facts["layers"]},
        "compile_seconds": round(facts["compile_seconds"], 1),
        "needed_bytes": {**facts["needs"], "total": needed},
        "moved_bytes": moved, "moved_over_needed": moved / needed,
        "temporary_bytes": memory.temp_size_in_bytes, "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes, "donated_bytes": memory.alias_size_in_bytes,
        "cache_bytes": facts["cache_bytes"], "cache_copies": len(around),
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
    for name, value in {"JAX_PLATFORMS": "cpu", **environment(args.topology)}.items():
        os.environ.setdefault(name, value)
    try:
        importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        raise FileNotFoundError("libtpu is not installed; pip install 'decodax[tpu-aot]'") from None
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
