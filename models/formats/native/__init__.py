"""Products on CPU with packed kernels in C++, which is compiled on the user's machine.

XLA's CPU backend reads kernels of codes at a fraction of the memory's speed, and those of floats only for one row at
the whole of it. native.cc has the same products as custom calls. It is compiled once, where a C++ compiler is found,
for the processor that it runs on; without one, XLA's products are used. `DECODAX_NATIVE=0` in the environment switches
it off.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform as machine
import shutil
import subprocess
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib
from jax import Array

from decodax.common.axes import free_axes, platform

LOG = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
"""Folder of the C++ sources, native.cc and what it includes."""

TARGETS = {"decodax_matmul": "DecodaxMatmul", "decodax_rows": "DecodaxRows"}
"""Names of the custom calls, and of their functions in the library."""

COMPILERS = ("c++", "g++", "clang++")
"""Programs that are looked for, after the one that $CXX names."""

OPTIONS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-shared", "-fPIC", "-w")
"""Options of the compiler. Products and sums are joined where the sources say so, not where the compiler chooses."""

KINDS = ((32, 4), (32, 5), (32, 8), (16, 6))
"""Numbers of inputs of a group and bits of a code for which there is a product."""


def usable() -> bool:
    """Returns True if the process computes on CPU and the library is there or could be compiled."""
    return platform() == "cpu" and registered()


def takes() -> bool:
    """Returns True if products are computed here: in a program for one device or one shard."""
    return usable() and not free_axes()


def matmul(x: Array, codes: Array, scales: Array, *, group: int, bits: int, offset: int = 0,
           minima: Array | None = None, high: Array | None = None, steps: Array | None = None,
           minimum_steps: Array | None = None) -> Array:
    """Multiplies rows by a kernel: `f32[R, N]`. A row's result does not depend on the number of rows.

    Args:
        x: `f[R, K]`.
        codes: `u8[N, G, group // 2]`, two codes a byte, or `i8[N, G, group]`.
        scales: `f16[N, S]` or `f32[N, S]`, one for each `G // S` consecutive groups.
        group: number of inputs of a group; with `bits` one of `KINDS`.
        bits: number of bits of a code.
        offset: subtracted from the codes.
        minima, high, steps, minimum_steps: as in `GgmlBlocks`.
    """
    parts = dict(minima=minima, high=high, steps=steps, minimum_steps=minimum_steps)
    made = jax.ShapeDtypeStruct((len(x), len(codes)), jnp.float32)
    call = jax.ffi.ffi_call("decodax_matmul", made, vmap_method="sequential")
    return call(x.astype(jnp.float32), codes, scales, *[a for a in parts.values() if a is not None], group=group,
                bits=bits, offset=offset, **{name: a is not None for name, a in parts.items()})


ROWS = 16
"""Largest number of rows that `rows` multiplies faster than XLA."""

WIDE = ("float32", "bfloat16", "float16", "int8")
"""Types of the weights that `rows` takes."""


def rows(x: Array, kernel: Array) -> Array:
    """Multiplies rows by a kernel: `f32[R, N]`. A row's result does not depend on the number of rows.

    Args:
        x: `f[R, K]`.
        kernel: `[N, K]`, with a dtype of `WIDE`.
    """
    made = jax.ShapeDtypeStruct((len(x), len(kernel)), jnp.float32)
    call = jax.ffi.ffi_call("decodax_rows", made, vmap_method="sequential")
    return call(x.astype(jnp.float32), kernel)


@functools.cache
def registered() -> bool:
    """Compiles and registers the library. Returns False, with a log message, if that is not possible."""
    if os.environ.get("DECODAX_NATIVE") == "0":
        return False
    given = os.environ.get("CXX")
    compiler = next(filter(None, map(shutil.which, (given, *COMPILERS) if given else COMPILERS)), None)
    if compiler is None:
        LOG.info("packed weights are multiplied by XLA: no C++ compiler (%s)", ", ".join(COMPILERS))
        return False
    try:
        library = ctypes.cdll.LoadLibrary(str(compiled(compiler)))
        for target, function in TARGETS.items():
            jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(library, function)), platform="cpu")
    except (OSError, subprocess.SubprocessError) as error:
        told = getattr(error, "stderr", None) or str(error)
        LOG.warning("packed weights are multiplied by XLA, which is slower: %s: %s", compiler,
                    told.strip().splitlines()[0] if told.strip() else "failed")
        return False
    return True


def compiled(compiler: str) -> Path:
    """Returns the compiled library, in the cache folder ($XDG_CACHE_HOME or ~/.cache) or else in a temporary one.

    Raises:
        OSError: the folder cannot be written.
        subprocess.SubprocessError: the compiler failed or took longer than ten minutes.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "decodax" / "native"
    library = folder / f"{_digest(compiler)}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    LOG.info("compiling the product of packed weights for this processor: %s", library)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        made = Path(place) / "native.so"
        source = str(SOURCES / "native.cc")
        subprocess.run([compiler, *OPTIONS, f"-I{jax.ffi.include_dir()}", source, "-o", str(made)], check=True,
                       capture_output=True, text=True, timeout=600)
        os.replace(made, library)       # other processes see no half of it
    return library


def _digest(compiler: str) -> str:
    """Returns a name for the library: of its sources, of what it is compiled with, and of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    except OSError:
        processor = [machine.processor()]
    of = repr((compiler, OPTIONS, jaxlib.__version__, machine.machine(), processor))
    sources = b"".join(path.read_bytes() for path in sorted([*SOURCES.glob("*.cc"), *SOURCES.glob("*.h")]))
    return hashlib.sha256(sources + of.encode()).hexdigest()[:24]
