"""The real TPU compiler on a machine without a TPU: what XLA makes of a round, before anything runs."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from typing import Any

from decodax.plan.count import Setup

ACCELERATORS = {"v4": "v4-8", "v5e": "v5litepod-8", "v5p": "v5p-8", "v6e": "v6e-8"}
"""What libtpu wants to be told it runs on, by the topology's first part."""


def environment(topology: str) -> dict[str, str]:
    """Environment variables under which libtpu compiles without a TPU. They must be set before it is loaded."""
    kind = topology.partition(":")[0]
    return {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "TPU_ACCELERATOR_TYPE": ACCELERATORS.get(kind, f"{kind}-8")}


def devices(topology: str) -> list[Any]:
    """The devices of a topology such as "v5e:2x4", which are not there.

    Raises:
        ValueError: libtpu does not know it.
    """
    from jax.experimental import topologies

    for name, value in environment(topology).items():
        os.environ.setdefault(name, value)
    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)
    except Exception as error:      # XLA's own kinds
        raise ValueError(f"topology: got {topology!r}, which libtpu does not take ({_first(error)})") from error


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What XLA said of one device's program. Bytes; with what fills up tiles.

    Attributes:
        arguments, temporaries: in memory. moved: to and from main memory in a call of one round.
        collectives: operations of a round that wait for other devices.
        fits: whether it compiles for the memory there is. error: what XLA says if not.
        text: the optimised program.
    """

    arguments: int
    temporaries: int
    moved: int
    collectives: int
    fits: bool
    error: str | None = None
    text: str = ""


def compile_round(s: Setup) -> Compiled:
    """Compiles the loop that `generate` runs, for devices that need not be there."""
    import jax

    from decodax.bench.report import Instruction, collectives, parse, rounds, traffic
    from decodax.pallas_kernels.window_attention.reference import WIDE_BLOCK, block_of

    try:
        made = s.lower().compile()
    except Exception as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return Compiled(0, 0, 0, 0, False, _first(error))
    text = made.as_text()
    program = parse(text)
    sizes = {math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(s.state.cache) if x.ndim >= 3} \
        if s.algorithm.caches else set()
    blocks = -(-s.live // block_of(s.capacity, WIDE_BLOCK))
    loops = [x for x in program.computations[program.entry].values() if x.opcode == "while"]
    outer = max(loops, key=lambda x: sum(b.bytes for b in x.result), default=None)

    def trips(loop: Instruction) -> int:
        if loop is outer:
            return 1
        # a walk over the cache carries it; other loops go over rows
        if any(math.prod(b.dims) in sizes for b in loop.result):
            return blocks
        return rounds(program, loop) or s.rows

    memory = made.memory_analysis()
    body = (outer.attribute("body") or "") if outer is not None else program.entry
    return Compiled(memory.argument_size_in_bytes, memory.temp_size_in_bytes, traffic(program, trips),
                    len(collectives(program, body)), True, text=text)


def _first(error: Exception) -> str:
    return re.sub(r"\s+", " ", str(error)).partition(" HLO module")[0][:300]
