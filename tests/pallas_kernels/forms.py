"""Compiles the forms of window attention, of packed products and of draws for a TPU slice that is not there, and prints
a JSON object for each.

    python -m tests.pallas_kernels.forms v5e:2x4

A program of its own, since libtpu has to be told what it runs on before JAX is imported.
"""

import argparse
import functools
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

from decodax.bench.tpu import environment

B, W, H, G, S = 16, 4, 32, 8, 2048


def forms() -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Functions and, by the names of their arguments, the shapes and layouts of what they take."""
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P

    from decodax.common.axes import DATA, MODEL
    from decodax.pallas_kernels.packed_matmul import packed_matmul
    from decodax.pallas_kernels.vocabulary import draw
    from decodax.pallas_kernels.window_attention import prefix_attention, slot_weights, window_attention_lse

    rows, heads = P(DATA), P(DATA, None, MODEL)

    def window(width: int = W, d: int = 128, e: int = 128, batch: int = B, slots: int = S) -> dict[str, Any]:
        return dict(q=((batch, width, H, d), jnp.bfloat16, heads), k=((batch, width, G, d), jnp.bfloat16, heads),
                    v=((batch, width, G, e), jnp.bfloat16, heads), mask=((1, width, width), bool, P()),
                    positions=((batch, width), jnp.int32, rows), length=((batch,), jnp.int32, rows),
                    cache=((batch, G, slots, d + e), jnp.bfloat16, P(DATA, MODEL)))

    held = dict(slot_positions=((B, G, S), jnp.int32, P(DATA, MODEL)))
    int8 = lambda d=128: dict(cache=((B, G, S, 2 * d), jnp.int8, P(DATA, MODEL)),
                              scales=((B, G, 2, S), jnp.float32, P(DATA, MODEL)))
    pool = P(None, MODEL)

    def pages(each: int = 128, d: int = 128, table: int = S // 128, batch: int = B) -> dict[str, Any]:
        return dict(cache=((300, G, each, 2 * d), jnp.bfloat16, pool), table=((batch, table), jnp.int32, rows))

    whole_numbers = dict(cache=((300, G, 128, 256), jnp.int8, pool), scales=((300, G, 2, 128), jnp.float32, pool))
    attention = functools.partial(window_attention_lse, scale=0.1)

    def weights(k: Any, v: Any, mask: Any, **given: Any) -> Any:
        return slot_weights(lse=jnp.zeros(given["q"].shape[:3]), scale=0.1, causal=True, **given)

    def prefix(q: Any, positions: Any, cache: Any, length: Any, **given: Any) -> Any:
        return prefix_attention(q, positions, cache, length, scale=0.1)

    def packed(outputs: Any, inputs: Any, N: int, K: int, dtype: Any = jnp.int4, rows: int = B) -> Any:
        weights = P(outputs, inputs)
        return functools.partial(packed_matmul, axes=(outputs, inputs)), dict(
            x=((rows, K), jnp.bfloat16, P(DATA, inputs)), codes=((N, K), dtype, weights),
            scales=((N, K // 128), jnp.float32, weights))

    def drawn(V: int, *names: str, width: int = W) -> Any:
        numbers = {name: ((B,), jnp.int32 if name == "k" else jnp.float32, rows) for name in ("temperature", *names)}
        return draw, dict(logits=((B, width, V), jnp.float32, P(DATA, None, MODEL)),
                          address=((B, width, 2), jnp.uint32, rows), **numbers)

    return {
        "draw, top-p": drawn(128_256, "p", width=1),
        "draw, all, an odd vocabulary": drawn(50_257 + 3, "k", "p", "min_p"),
        "draw, temperature": drawn(151_936),
        "packed, outputs divided": packed(MODEL, None, 128_256, 2048),
        "packed, inputs divided": packed(None, MODEL, 4096, 14_336),
        "packed, whole, of int8": packed(None, None, 1024, 4096, jnp.int8),
        "packed, 250 rows": packed(MODEL, None, 14_336, 4096, rows=250),
        "window": (attention, window()),
        "heads of 64": (attention, window(d=64, e=64)),
        "heads of 96": (attention, window(d=96, e=96)),
        "held": (attention, window() | held),
        "sinks": (attention, window() | dict(sinks=((H,), jnp.float32, P(MODEL)))),
        "int8": (attention, window() | int8()),
        "int8, heads of 64": (attention, window(d=64, e=64) | int8(d=64)),
        "int8, heads of 256": (attention, window(d=256, e=256) | int8(d=256)),
        "weights of int8, held": (weights, window() | int8() | held),
        "pages": (attention, window() | pages()),
        "pages of 512, heads of 64": (attention, window(d=64, e=64) | pages(512, 64, S // 512)),
        "pages of int8": (attention, window() | pages() | whole_numbers),
        "pages, a table of 512 KiB a device": (attention, window(batch=64) | pages(table=2048, batch=64)),
        "weights of pages of int8": (weights, window() | pages() | whole_numbers),
        "prefix": (prefix, window(batch=64) | dict(cache=((1, G, S, 256), jnp.bfloat16, pool),
                                                   length=((1,), jnp.int32, P()))),
        "prefixes of 4 rows": (prefix, window() | dict(cache=((4, G, S, 256), jnp.bfloat16, P(DATA, MODEL)),
                                                       length=((4,), jnp.int32, rows))),
        "chunk of 256": (attention, window(256, batch=2)),
        "chunk of 512, heads of 256": (attention, window(512, 256, 256, batch=2)),
        "weights": (weights, window()),
        "weights, heads of 64, held": (weights, window(d=64, e=64) | held),
        "weights of a chunk of 256": (weights, window(256, batch=2)),
    }


def compiled(topology: str, names: list[str], meshes: list[str]) -> Iterator[dict[str, Any]]:
    """What the programs of forms by name, or of all, contain on meshes such as "2x4" (data x model)."""
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import AxisType, Mesh, NamedSharding

    from decodax.bench.report import collectives, copies, parse
    from decodax.common.axes import DATA, MODEL

    devices = np.array(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)
    for name, (fn, given) in forms().items():
        for dims in meshes if not names or name in names else ():
            data, model = map(int, dims.split("x"))
            mesh = Mesh(devices[:data * model].reshape(data, model), (DATA, MODEL), axis_types=(AxisType.Auto,) * 2)
            shaped = {k: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
                      for k, (shape, dtype, spec) in given.items()}
            with jax.set_mesh(mesh):
                done = jax.jit(lambda fn, given: fn(**given), static_argnums=0).lower(fn, shaped).compile()
            program = parse(done.as_text())
            read = shaped[next(name for name in ("codes", "cache", "logits") if name in shaped)]
            elements = int(np.prod(read.sharding.shard_shape(read.shape)))
            yield {"form": name, "mesh": dims, "kernels": done.as_text().count("tpu_custom_call"),
                   "copies": len(copies(program, elements)), "collectives": len(collectives(program))}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("topology", help="such as v5e:2x4")
    p.add_argument("--form", nargs="+", default=[], help="by name (default: all)")
    p.add_argument("--mesh", nargs="+", default=["1x1", "2x4"], metavar="DATAxMODEL")
    args = p.parse_args()
    os.environ.update(environment(args.topology))
    for r in compiled(args.topology, args.form, args.mesh):
        print(json.dumps(r), flush=True)


if __name__ == "__main__":
    main()
