#!/usr/bin/env python3
"""Compiles one decoding round for a TPU slice that is not there, and reports what it costs.

The compile-only client of `libtpu` runs XLA's real TPU compiler on any Linux machine; no array is allocated. The model
is an 8B Llama 3 shape (32 layers, width 4096, 32/8 heads of 128, MLP 14336, vocabulary 128256), weights and cache in
bfloat16, heads, MLP and vocabulary split over the slice. See docs/tpu.md for what the figures mean.

    python scripts/tpu_report.py --topology v5e:2x4 --batch 16 --capacity 2048
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

ACCELERATORS = {"v4": "v4-8", "v5e": "v5litepod-8", "v5p": "v5p-8", "v6e": "v6e-8"}
"""What libtpu wants to be told it runs on, by the topology's first part."""


def environment(topology: str) -> dict[str, str]:
    """Environment variables under which libtpu compiles without a TPU. They must be set before JAX is imported."""
    kind = topology.partition(":")[0]
    return {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_ACCELERATOR_TYPE": ACCELERATORS.get(kind, f"{kind}-8")}


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--topology", default="v5e:2x4", help="such as v5e:2x4, v5p:2x2x1, v6e:2x4 (default %(default)s)")
    p.add_argument("--replicas", type=int, default=1, help="devices along the data axis; the rest split the model")
    p.add_argument("--batch", type=int, default=16, help="rows (default %(default)s)")
    p.add_argument("--capacity", type=int, default=2048, help="slots of the cache (default %(default)s)")
    p.add_argument("--live", type=int, help="entries that each row holds (default: the capacity)")
    p.add_argument("--window", type=int, default=1,
                   help="tokens scored in a round: 1 is plain decoding, more is prompt lookup with window - 1 drafts")
    p.add_argument("--layers", type=int, default=32, help="fewer compile faster (default %(default)s)")
    p.add_argument("--json", action="store_true", help="print one JSON object")
    p.add_argument("--text", type=Path, metavar="FILE", help="write the optimised program there")
    return p


def compile_step(args: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """The compiled round, and what is known of one device: the bytes that no program can avoid moving, the cache's."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import AxisType, Mesh, NamedSharding

    from decodax.autoregressive import Autoregressive
    from decodax.core.mesh import DATA, MODEL, heads
    from decodax.core.round import step
    from decodax.core.start import init_state
    from decodax.core.types import Params
    from decodax.models.config import llama
    from decodax.models.transformer import Transformer
    from decodax.policy.base import Policy, Temperature
    from decodax.speculative import Speculative
    from decodax.speculative.drafts import PromptLookup

    devices: np.ndarray = np.array(topologies.get_topology_desc(platform="tpu", topology_name=args.topology).devices)
    mesh = Mesh(devices.reshape(args.replicas, -1), (DATA, MODEL), axis_types=(AxisType.Auto,) * 2)
    model = Transformer(llama(vocab=128_256, width=4096, layers=args.layers, heads=32, kv_heads=8, head_dim=128,
                              mlp=14_336, context=8192, theta=500_000.0), dtype="bfloat16")
    shaped = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    weights = jax.tree.map(shaped, model.abstract_params(jnp.bfloat16), model.shardings(mesh))
    params = Params(target=weights)
    alg = Autoregressive() if args.window == 1 else Speculative(PromptLookup(length=args.window - 1))

    row: Any = lambda dtype, *more: jax.ShapeDtypeStruct((args.batch, *more), dtype)
    policy = Policy(transforms=(Temperature(row(jnp.float32)),), eos=row(jnp.int32, 2))
    begin = lambda policy, tokens, length: init_state(alg, model, params, policy, tokens, length, size=args.capacity,
                                                      max_new=jnp.int32(0))
    s = jax.eval_shape(begin, policy, row(jnp.int32, args.capacity), row(jnp.int32))
    place = lambda tree: jax.tree.map(lambda x, spec: shaped(x, NamedSharding(mesh, spec)), tree, heads(tree))
    s, policy = place(s), place(policy)
    clock = time.perf_counter()
    compiled = jax.jit(step, static_argnums=(0, 1), donate_argnums=(4,)).lower(alg, model, params, policy, s).compile()
    seconds = time.perf_counter() - clock

    def local(tree: Any) -> int:
        return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))

    keys = s.cache.keys[0].sharding.shard_shape(s.cache.keys[0].shape)
    entry = keys[0] * keys[1] * keys[3] * s.cache.keys[0].dtype.itemsize * 2 * args.layers     # one of each row
    embedded = args.batch // args.replicas * args.window * model.config.width * 2
    needs = {"weights": local(weights) - local(weights["embed"]) + embedded, "cache_read": entry * args.live,
             "cache_written": entry * args.window}
    return compiled, {"compile_seconds": seconds, "cache_bytes": local((s.cache.keys, s.cache.values)),
                      "cache_dims": keys, "needs": needs}


def report(args: argparse.Namespace) -> dict[str, Any]:
    """The figures, as a dict; bytes are those of one device."""
    import jax

    from decodax.bench.report import Instruction, callbacks, collectives, copies, cycles, parse, total, traffic
    from decodax.pallas_kernels.window_attention.reference import WIDE_BLOCK, block_of

    compiled, facts = compile_step(args)
    text = compiled.as_text()
    if args.text:
        args.text.write_text(text)
    program = parse(text)
    dims = tuple(facts["cache_dims"])
    blocks = -(-args.live // block_of(args.capacity, WIDE_BLOCK))

    def walks(loop: Instruction) -> bool:      # a walk over the cache carries it; other loops go over rows
        return any(b.dims == dims for b in loop.result)

    trips = lambda loop: blocks if walks(loop) else dims[0]
    once = lambda loop: 1
    outside = lambda loop: 0 if walks(loop) else dims[0]
    everything = lambda buffer: True
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
    needed = sum(facts["needs"].values())
    moved, raw = traffic(program, trips), int(cost["bytes accessed"])
    unrolled = raw + traffic(program, trips, everything) - traffic(program, once, everything)
    waits = collectives(program)
    largest = max((sum(b.bytes for b in x.result) for x, _ in waits), default=0)
    return {
        "versions": {"jax": jax.__version__, "libtpu": importlib.metadata.version("libtpu")},
        "shape": {k: v for k, v in vars(args).items() if k not in ("json", "text")},
        "compile_seconds": round(facts["compile_seconds"], 1),
        "needed_bytes": {**facts["needs"], "total": needed},
        "moved_bytes": moved, "moved_over_needed": moved / needed,
        "xla_bytes_accessed": raw, "xla_over_needed": raw / needed,
        "xla_with_loops": unrolled, "xla_with_loops_over_needed": unrolled / needed,
        "temporary_bytes": memory.temp_size_in_bytes, "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes, "donated_bytes": memory.alias_size_in_bytes,
        "cache_bytes": facts["cache_bytes"], "cache_copies": len(copies(program, math.prod(dims))),
        "loops": {"walks of the cache": sum(map(walks, program.loops())),
                  "others": sum(not walks(x) for x in program.loops())},
        "operations": {"all": total(program, trips), "outside the walks": total(program, outside)},
        "cycles": {"all": cycles(program, trips), "outside the walks": cycles(program, outside)},
        "collectives": len(waits), "largest_collective_bytes": largest, "callbacks": len(callbacks(program)),
    }


def show(r: dict[str, Any]) -> None:
    """Prints the figures for people."""
    shape, size = r["shape"], lambda n: f"{n / 1e9:.3f} GB" if n >= 1e8 else f"{n / 1e6:.1f} MB"
    print(f"8B Llama 3 shape, {shape['layers']} layers, bfloat16, {shape['topology']}, batch {shape['batch']}, "
          f"capacity {shape['capacity']}, {shape['live']} live, window {shape['window']}")
    print(f"jax {r['versions']['jax']}, libtpu {r['versions']['libtpu']}, compiled in {r['compile_seconds']} s\n")
    needs = ", ".join(f"{k.replace('_', ' ')} {size(v)}" for k, v in r["needed_bytes"].items() if k != "total")
    lines = [
        ("unavoidable bytes", f"{size(r['needed_bytes']['total'])}  ({needs})"),
        ("main-memory traffic", f"{size(r['moved_bytes'])}  {r['moved_over_needed']:.3f}x"),
        ("XLA's bytes accessed", f"{size(r['xla_bytes_accessed'])}  {r['xla_over_needed']:.3f}x  (fast memory too, "
                                 "each loop once)"),
        ("  with loops unrolled", f"{size(r['xla_with_loops'])}  {r['xla_with_loops_over_needed']:.3f}x"),
        ("temporaries", size(r["temporary_bytes"])),
        ("donated", f"{size(r['donated_bytes'])} of {size(r['output_bytes'])} results; the cache is "
                    f"{size(r['cache_bytes'])}"),
        ("copies of the cache", str(r["cache_copies"])),
        *((what, ", ".join(f"{n:,} {where}" for where, n in r[key].items()))
          for what, key in (("operations run", "operations"), ("cycles (XLA's estimate)", "cycles"))),
        ("loops", ", ".join(f"{n} {what}" for what, n in r["loops"].items())),
        ("collectives", f"{r['collectives']}, the largest {size(r['largest_collective_bytes'])}"),
        ("host callbacks", str(r["callbacks"])),
    ]
    for name, value in lines:
        print(f"{name:24}{value}")


def main() -> int:
    args = parser().parse_args()
    args.live = args.capacity if args.live is None else args.live
    if not 0 < args.live <= args.capacity:
        raise SystemExit(f"--live: got {args.live}, takes 1 to the capacity of {args.capacity}")
    for name, value in environment(args.topology).items():
        os.environ.setdefault(name, value)
    try:
        importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        print("libtpu is not installed; pip install 'decodax[tpu-aot]'", file=sys.stderr)
        return 2
    r = report(args)
    print(json.dumps(r)) if args.json else show(r)
    return 0


if __name__ == "__main__":
    sys.exit(main())
