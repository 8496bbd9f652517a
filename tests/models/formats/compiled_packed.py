"""Prints what the compiled products of packed kernels do, one line each. A test runs it as a process of its own: XLA
reads its flags once, and other tests run without its optimisation.
"""

import math
import re
import sys
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax import Array

from decodax.models.experts import mix
from decodax.models.formats import FORMATS, Format, Int4, Scaled
from decodax.models.formats.ggml import TYPES
from decodax.models.formats.published import InputsPermuted, Levels, ZeroPoints
from decodax.models.packed import Packed, multiply

N, K, EXPERTS, OUTPUTS = 1024, 768, 4, 4096

int4 = Int4(group=128)
PUBLISHED: dict[str, Callable[[Array], Packed]] = {
    "zero-points": lambda w: ZeroPoints(kernel=int4.pack(w), zeros=jnp.zeros((*_outputs(w), K // 128), jnp.int8)),
    "permuted": lambda w: InputsPermuted(kernel=int4.pack(w), order=jnp.zeros((*w.shape[:-2], K), jnp.int32)),
    "levels": lambda w: Levels(codes=jnp.zeros((*_outputs(w), K // 2), jnp.uint8), scales=jnp.ones(
        (*_outputs(w), K // 64)), table=tuple(map(float, range(16)))),
    "fp8-blocks": lambda w: Scaled(codes=jnp.zeros((*_outputs(w), K), jnp.float8_e4m3fn), scales=jnp.ones(
        (*_outputs(w), K // 128))),
    "mxfp4": FORMATS["mxfp4"].pack, "nvfp4": FORMATS["nvfp4"].pack,
    **{kind: lambda w, kind=kind: FORMATS[kind].pack(w).stored() for kind in TYPES}}
"""Kernels as checkpoints have them, of inputs by outputs as floats; those of GGUF files as XLA multiplies them."""


def _outputs(w: Array) -> tuple[int, ...]:
    return *w.shape[:-2], w.shape[-1]


VIEWS = ("parameter", "get-tuple-element", "bitcast")
"""Instructions that write nothing to memory."""


def instructions(text: str) -> Iterator[tuple[str, str, bool]]:
    """Yields each line of a compiled program, with the lines of its computation, and True if that is fused."""
    fused = set(re.findall(r"calls=(%?[\w.-]+)", text))
    for name, body in re.findall(r"(?ms)^(?:ENTRY )?(%?[\w.-]+) \(.*?\) -> .*? \{\n(.*?)^\}", text):
        for line in body.splitlines():
            yield line, body, name in fused


def whole(text: str, outputs: int = N) -> list[str]:
    """Returns the instructions of a compiled program that write more floats than half of the weights of a kernel with
    `outputs` outputs. Blocks of outputs (`Packed.by_blocks`) have a third."""
    found = []
    for line, _, fused in instructions(text):
        made = re.search(r" = (\S.*?) ([\w-]+)\(", line)
        if made is None or fused or made[2] in VIEWS:
            continue
        shapes = re.findall(r"\b(?:f32|f16|bf16)\[([\d,]+)\]", made[1])
        sizes = [math.prod(map(int, shape.split(","))) for shape in shapes]
        if max(sizes, default=0) > outputs * K // 2:
            found.append(f"writes a kernel: {line.strip()[:120]}")
    return found


def published(name: str, rows: int) -> list[str]:
    kernel = jax.eval_shape(lambda: PUBLISHED[name](jnp.zeros((K, OUTPUTS))))
    x = jax.ShapeDtypeStruct((rows, K), jnp.float32)
    return whole(jax.jit(multiply).lower(x, kernel).compile().as_text() or "", OUTPUTS)


def experts(name: str, rows: int) -> list[str]:
    """A mixture whose inner channels are as many as its outputs, so that one kernel stands for all three."""
    square = jax.eval_shape(lambda: PUBLISHED[name](jnp.zeros((EXPERTS, K, K))))
    x = jax.ShapeDtypeStruct((rows, K), jnp.float32)
    chosen = jax.ShapeDtypeStruct((rows, 2), jnp.int32), jax.ShapeDtypeStruct((rows, 2), jnp.float32)
    run = jax.jit(lambda x, which, weights, kernel: mix(x, which, weights, kernel, kernel, kernel, jax.nn.silu))
    return whole(run.lower(x, *chosen, square).compile().as_text() or "", K)


def faults(text: str) -> list[str]:
    """Returns the instructions of a compiled program that write a converted kernel to memory, or that sum over inputs
    in one instruction, which XLA adds up one after the other."""
    found = []
    for line, body, fused in instructions(text):
        shape = re.search(rf"= \w+\[(?:{N},{K}|{K},{N}|{N},{K // 2})\]\S* (\w[\w-]*)\(", line)
        if shape and not fused and shape[1] not in VIEWS:
            found.append(f"writes a kernel: {line.strip()[:120]}")
        if re.search(rf"= f32\[\S*\b{N}\b\S* reduce\(", line):
            found.append(f"sums in one instruction: {line.strip()[:120]}")
        if re.search(r" dot\(", line) and fused and re.search(r" (?:convert|multiply)\(", body):
            found.append(f"converts within a product: {line.strip()[:120]}")
    return found


def main() -> None:
    formats: dict[str, Format] = {name: one for name, one in FORMATS.items() if one.statistic is None}
    formats["int4:group=16"] = Int4(group=16)
    for name in sys.argv[1:]:
        if name in PUBLISHED:
            for rows in (1, 8):
                print(name, rows, published(name, rows) or "fine")
            print(name, "experts", experts(name, 4) or "fine")
            continue
        for rows in (1, 8):
            kernel = jax.eval_shape(lambda name=name: formats[name].pack(jnp.zeros((K, N))))
            x = jax.ShapeDtypeStruct((rows, K), jnp.float32)
            text = jax.jit(multiply).lower(x, kernel).compile().as_text()
            assert text
            print(name, rows, faults(text) or "fine")
    # the detector sees what it is for
    plain = jax.jit(lambda x, w: x @ w.astype(jnp.float32).T)
    for rows in (1, 8):
        text = plain.lower(jax.ShapeDtypeStruct((rows, K), jnp.float32), jax.ShapeDtypeStruct((N, K), jnp.int8)
                           ).compile().as_text()
        assert text
        print("plain", rows, [*faults(text), *whole(text)] or "fine")


if __name__ == "__main__":
    main()
