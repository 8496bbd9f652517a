"""Compiles programs with the real TPU compiler on a machine without a TPU."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from decodax.bench.plan.count import Setup, blocks_of_experts, kv_reads
from decodax.bench.report import WAITING, Instruction, Program, parse, rounds, total, traffic
from decodax.bench.tpu import environment
from decodax.cache.lanes import LANES
from decodax.pallas_kernels.window_attention.reference import WIDE_BLOCK, block_of


def devices(topology: str) -> list[Any]:
    """Returns the devices of a topology such as "v5e:2x4"; they need not exist.

    Raises:
        ValueError: libtpu does not know the topology.
    """
    from jax.experimental import topologies

    for name, value in environment(topology).items():
        os.environ.setdefault(name, value)
    jax.devices()       # reads XLA_FLAGS before they are removed below
    try:
        with _no_flags():
            return list(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)
    except Exception as error:      # XLA raises types of its own
        raise ValueError(f"topology: got {topology!r}, which libtpu does not support ({_first(error)})") from error


@contextlib.contextmanager
def _no_flags() -> Iterator[None]:
    """Removes XLA_FLAGS from the environment within the context. libtpu reads them at its first use and ends the
    process if it does not know one of them."""
    flags = os.environ.pop("XLA_FLAGS", None)
    try:
        yield
    finally:
        if flags is not None:
            os.environ["XLA_FLAGS"] = flags


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Figures that XLA reports about the program of one device. Sizes are in bytes and include the padding of tiles.

    Attributes:
        arguments: memory of the arguments.
        temporaries: memory of temporary arrays.
        moved: bytes moved to and from main memory in one round; None if XLA cannot print the program.
        collectives: number of operations that one round runs and that wait for other devices; None if XLA cannot print
            the program.
        exchanged: bytes of their results on a device.
        fits: True if the program fits into the device's memory.
        error: XLA's message if the program does not fit or cannot be printed.
        text: the optimized program.
    """

    arguments: int
    temporaries: int
    moved: int | None
    collectives: int | None
    exchanged: int | None
    fits: bool
    error: str | None = None
    text: str = ""


def compile_round(s: Setup) -> Compiled:
    """Compiles the decoding loop of `generate` for the devices of a setup, which need not exist on this machine."""
    try:
        with _no_flags():
            made = s.lower().compile()
    except Exception as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return Compiled(0, 0, None, None, None, False, _first(error))
    memory = made.memory_analysis()
    try:
        text = made.as_text()
    except jax.errors.JaxRuntimeError as error:      # libtpu 0.0.51 cannot print some asynchronous copies
        return Compiled(memory.argument_size_in_bytes, memory.temp_size_in_bytes, None, None, None, True, _first(error))
    program = parse(text)
    outer, trips = loops(s, program)
    body = (outer.attribute("body") or "") if outer is not None else program.entry
    waits = total(program, trips, lambda computation, x: int(x.opcode in WAITING), within=body)
    largest = lambda computation, x: max(b.bytes for b in x.result) if x.opcode in WAITING else 0
    exchanged = total(program, trips, largest, within=body)
    return Compiled(memory.argument_size_in_bytes, memory.temp_size_in_bytes, traffic(program, trips) - skipped(
        s, program), waits, exchanged, True, text=text)


def skipped(s: Setup, program: Program) -> int:
    """Returns the bytes of the cache that one device's attention kernel does not read in a round: blocks of slots
    before a sliding window, and those after the entries in use. The text of a compiled program does not show this."""
    calls = [x for x in program.all() if x.opcode == "custom-call" and x.name.startswith("cache_attention")]
    reads = kv_reads(s) if calls else []
    if len(calls) != len(reads):        # a cache of another kind than dense
        return 0
    from decodax.pallas_kernels.window_attention import tpu  # imports Pallas

    model: Any = s.lm.model
    total, item = 0, jnp.dtype(model.dtype).itemsize
    for read in reads:
        block = tpu.block_of(read.heads, s.capacity, read.width, item)
        if block is not None:
            last = -(-s.live // block)
            entry = read.entry * -(-read.width // LANES) * LANES // read.width      # with its tile's padding
            total += entry * (s.capacity - block * (last - (s.live - read.held) // block))
    return total


def loops(s: Setup, program: Program) -> tuple[Instruction | None, Callable[[Instruction], int]]:
    """Returns the decoding loop of a compiled round, and a function that returns the number of iterations of a loop in
    a call of one round."""
    sizes = {math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(s.state.cache) if x.ndim >= 3} \
        if s.algorithm.traits.caches else set()
    blocks, experts = -(-s.live // block_of(s.capacity, WIDE_BLOCK)), blocks_of_experts(s)
    outer = max((x for x in program.computations[program.entry].values() if x.opcode == "while"),
                key=lambda x: sum(b.bytes for b in x.result), default=None)

    def walks(loop: Instruction) -> bool:
        # A loop over the blocks of the cache carries the cache; other loops go over rows.
        return loop is not outer and any(math.prod(b.dims) in sizes for b in loop.result)

    def trips(loop: Instruction) -> int:
        if loop is outer:
            return 1
        # A drafter's loop over its chain carries its cache, too, which may have the shape of the target's.
        count = rounds(program, loop) or (blocks if walks(loop) else s.rows)
        # Of the blocks of a mixture, those without rows of an expert do nothing.
        return experts.get(count, count) if any(x.opcode == "conditional" for x in program.computations[
            loop.attribute("body") or ""].values()) else count

    return outer, trips


def _first(error: Exception) -> str:
    return re.sub(r"\s+", " ", str(error)).partition(" HLO module")[0][:300]
