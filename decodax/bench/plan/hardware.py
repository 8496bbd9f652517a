"""Figures of devices, and slices of devices by name."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re

GIB = 2 ** 30


@dataclasses.dataclass(frozen=True)
class Device:
    """The figures of one device, as JAX counts devices. They come from the maker and hold for dense matrix products.

    Attributes:
        name: the name, such as "v5e".
        memory: bytes of memory that a program may use.
        bandwidth: bytes per second of that memory.
        flops: operations per second with 16-bit numbers.
        flops8: operations per second with 8-bit numbers.
        link: bytes per second that it sends to its neighbor in a ring of devices, in one direction.
        hop: latency of sending to a neighbor, in seconds.
        host: bytes per second between the device and its host's memory, in one direction; None if the maker does not
            publish it.
        source: source of the figures.
    """

    name: str
    memory: float
    bandwidth: float
    flops: float
    flops8: float
    link: float
    hop: float
    host: float | None
    source: str


_CLOUD = "Google's pages on the chip; memory as XLA's TPU compiler allows it (libtpu 0.0.51)"
_NVIDIA = "NVIDIA's data sheet; 5% of the memory is left to the driver and to JAX"

DEVICES = {d.name: d for d in (
    # When JAX compiles without a v4, it counts two devices for each chip.
    Device("v4", 15.25 * GIB, 614e9, 137.5e12, 137.5e12, 45e9, 1e-6, None, _CLOUD + ", one of a chip's two cores"),
    Device("v5e", 15.75 * GIB, 819e9, 197e12, 394e12, 45e9, 1e-6, None, _CLOUD),
    Device("v5p", 95.74 * GIB, 2765e9, 459e12, 918e12, 90e9, 1e-6, None, _CLOUD),
    Device("v6e", 31.24 * GIB, 1640e9, 918e12, 1836e12, 90e9, 1e-6, None, _CLOUD),
    Device("a100", 0.95 * 80e9, 2039e9, 312e12, 624e12, 300e9, 2e-6, 32e9, _NVIDIA + "; 80 GB, SXM"),
    Device("h100", 0.95 * 80e9, 3350e9, 989e12, 1979e12, 450e9, 2e-6, 64e9, _NVIDIA + "; SXM"),
    Device("h200", 0.95 * 141e9, 4800e9, 989e12, 1979e12, 450e9, 2e-6, 64e9, _NVIDIA + "; SXM"),
    Device("l4", 0.95 * 24e9, 300e9, 121e12, 242e12, 32e9, 5e-6, 32e9, _NVIDIA + "; PCIe"),
)}
"""The devices by name."""

TPUS = ("v4", "v5e", "v5p", "v6e")


@dataclasses.dataclass(frozen=True)
class Slice:
    """A group of connected devices of one kind.

    Attributes:
        name: the requested name, such as "v5e:2x4".
        device: the kind of the devices.
        count: number of devices.
    """

    name: str
    device: Device
    count: int

    @property
    def tpu(self) -> bool:
        return self.device.name in TPUS


def slice_of(name: str) -> Slice:
    """Returns the slice with a name such as "v5e:2x4" (a topology), "h100:8" (a number of devices), or "here" (this
    machine, measured).

    Raises:
        ValueError: the device is unknown, or the name has another form.

    >>> slice_of("v5e:2x4").count, slice_of("h100").device.bandwidth
    (8, 3350000000000.0)
    """
    if name == "here":
        return here()
    kind, _, shape = name.partition(":")
    if kind not in DEVICES:
        close = difflib.get_close_matches(kind, (*DEVICES, "here"), n=3, cutoff=0.5)
        raise ValueError(f"topology: got {name!r}, takes {', '.join(DEVICES)} or here"
                         + (f"; did you mean {' or '.join(close)}?" if close else ""))
    if not re.fullmatch(r"(\d+(x\d+)*)?", shape) or "0" in shape.split("x"):
        raise ValueError(f"topology: got {name!r}, takes a device and its topology, such as v5e:2x4 or h100:8")
    count = math.prod(int(n) for n in (shape or "1").split("x"))
    if kind == "v4":
        count *= 2
    return Slice(name, DEVICES[kind], count)


def here() -> Slice:
    """Returns this machine's devices as a slice. Bandwidth (of a copy) and rate (of a matrix product) of the first
    device are measured.

    The link between devices is not measured; it is assumed to be as fast as the memory.
    """
    import time

    import jax
    import jax.numpy as jnp
    import numpy as np

    devices = jax.local_devices()
    cpu = devices[0].platform == "cpu"
    dtype = jnp.float32 if cpu else jnp.bfloat16
    n, side = (1 << 26, 2048) if cpu else (1 << 29, 8192)

    def fastest(function: object, *arguments: object) -> float:
        compiled = jax.jit(function)        # type: ignore[call-overload]
        jax.block_until_ready(compiled(*arguments))
        times = []
        for _ in range(5):
            clock = time.perf_counter()
            jax.block_until_ready(compiled(*arguments))
            times.append(time.perf_counter() - clock)
        return float(np.min(times))

    vector = jnp.ones(n // 4, dtype)
    matrix = jnp.ones((side, side), dtype)
    bandwidth = 2 * vector.nbytes / fastest(lambda x: x + 1, vector)
    flops = 2 * side ** 3 / fastest(lambda x: x @ x, matrix)
    stats = devices[0].memory_stats() or {}
    if stats.get("bytes_limit"):
        memory = float(stats["bytes_limit"])
    else:
        import os
        memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) / len(devices)
    found = Device("here", memory, bandwidth, flops, flops, bandwidth, 1e-6, None,
                   f"measured on {devices[0].device_kind} with {np.dtype(dtype).name}")
    return Slice("here", found, len(devices))
