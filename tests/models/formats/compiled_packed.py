"""Prints what the compiled products of packed kernels do, one line each. A test runs it as a process of its own: XLA
reads its flags once, and other tests run without its optimisation.
"""

import re
import sys

import jax
import jax.numpy as jnp

from decodax.models.formats import FORMATS, Format, Int4
from decodax.models.packed import multiply

N, K = 1024, 768


def faults(text: str) -> list[str]:
    """Of a compiled program: converted kernels that are written to memory, and sums over inputs in one instruction,
    which XLA adds up one after the other."""
    found = []
    fused = set(re.findall(r"calls=(%?[\w.-]+)", text))
    for name, body in re.findall(r"(?ms)^(?:ENTRY )?(%?[\w.-]+) \(.*?\) -> .*? \{\n(.*?)^\}", text):
        for line in body.splitlines():
            shape = re.search(rf"= \w+\[(?:{N},{K}|{K},{N}|{N},{K // 2})\]\S* (\w[\w-]*)\(", line)
            if shape and name not in fused and shape[1] not in ("parameter", "get-tuple-element", "bitcast"):
                found.append(f"writes a kernel: {line.strip()[:120]}")
            if re.search(rf"= f32\[\S*\b{N}\b\S* reduce\(", line):
                found.append(f"sums in one instruction: {line.strip()[:120]}")
            if re.search(r" dot\(", line) and name in fused and re.search(r" (?:convert|multiply)\(", body):
                found.append(f"converts within a product: {line.strip()[:120]}")
    return found


def main() -> None:
    formats: dict[str, Format] = {name: one for name, one in FORMATS.items() if one.statistic is None}
    formats["int4:group=16"] = Int4(group=16)
    for name in sys.argv[1:]:
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
        print("plain", rows, faults(text) or "fine")


if __name__ == "__main__":
    main()
