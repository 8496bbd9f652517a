"""Loading a quantised checkpoint needs little more memory than its packed weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from tests.io.quantised.writer import KINDS, LLAMA, NF4, Tensors, write_safetensors

WIDTH, MLP = 2048, 5632

LOAD = """
import resource, sys, time
import jax
import decodax as dx
from decodax.models.names import flatten

def status(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)) * 1024

dx.load(sys.argv[1])                        # what programs and imports take is not counted
before = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")
clock = time.perf_counter()
params = dx.load(sys.argv[2]).params
size = sum(x.nbytes for x in jax.tree.leaves(params))
print((status("VmHWM") - before) / size, size, time.perf_counter() - clock)
"""


def layer(kind: str, N: int, K: int, draw: np.random.Generator) -> Tensors:
    """Random bits in the layout of a kind, with groups of 128."""
    words = lambda *shape: draw.integers(-2**31, 2**31, shape, dtype=np.int64).astype(np.int32)
    scales = lambda *shape: draw.random(shape, dtype=np.float32).astype(np.float16)
    groups = K // 128
    if kind.startswith("gptq"):
        order = draw.permutation(K) if "act" in kind else np.arange(K)
        return {"qweight": words(K // 8, N), "qzeros": words(groups, N // 8), "scales": scales(groups, N),
                "g_idx": (order // 128).astype(np.int32)}
    if kind == "awq":
        return {"qweight": words(K, N // 8), "qzeros": words(groups, N // 8), "scales": scales(groups, N)}
    if kind.startswith("w4a16"):
        zeros = {"weight_zero_point": words(N // 8, groups)} if "asym" in kind else {}
        return {"weight_packed": words(N, K // 8), "weight_scale": scales(N, groups), **zeros}
    if kind.startswith("nf4"):
        state = {"blocksize": 64, "shape": [N, K], "nested_blocksize": 256, "nested_offset": 0.1}
        return {"weight": draw.integers(0, 256, (N * K // 2, 1), dtype=np.uint8), "weight.quant_map": NF4,
                "weight.absmax": draw.integers(0, 256, N * K // 64, dtype=np.uint8),
                "weight.nested_absmax": draw.random(-(-N * K // 64 // 256), dtype=np.float32),
                "weight.nested_quant_map": draw.random(256, dtype=np.float32),
                "weight.quant_state.bitsandbytes__nf4": np.frombuffer(json.dumps(state).encode(), np.uint8)}
    codes = draw.integers(0, 0x7F, (N, K), dtype=np.uint8)
    if kind == "fp8":
        return {"weight": codes.view(jnp.float8_e4m3fn),
                "weight_scale_inv": draw.random((N // 128, K // 128), dtype=np.float32)}
    tail = "SCB" if kind == "bnb-8" else "weight_scale"
    return {"weight": codes.view(np.int8), tail: draw.random((N, 1)[:1 if tail == "SCB" else 2], dtype=np.float32)}


def write(root: Path, kind: str, layers: int, width: int, mlp: int) -> Path:
    draw = np.random.default_rng(0)
    tensors: Tensors = {name: np.ones((512, width) if "norm" not in name else width, np.float16)
                        for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight")}
    for i in range(layers):
        for name, N, K in (*((f"self_attn.{x}_proj", width, width) for x in "qkvo"), ("mlp.gate_proj", mlp, width),
                           ("mlp.up_proj", mlp, width), ("mlp.down_proj", width, mlp)):
            tensors |= {f"model.layers.{i}.{name}.{key}": value for key, value in layer(kind, N, K, draw).items()}
        tensors |= {f"model.layers.{i}.{norm}_layernorm.weight": np.ones(width, np.float16)
                    for norm in ("input", "post_attention")}
    config = json.loads(json.dumps(KINDS[kind][0]).replace("32", "128"))
    if kind == "fp8":
        config["weight_block_size"] = [128, 128]
    root.mkdir()
    write_safetensors(root / "model.safetensors", tensors)
    (root / "config.json").write_text(json.dumps({
        **LLAMA, "vocab_size": 512, "hidden_size": width, "intermediate_size": mlp, "num_hidden_layers": layers,
        "num_attention_heads": width // 128, "num_key_value_heads": width // 128, "head_dim": 128,
        "quantization_config": config}))
    return root


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the peak from Linux")
@pytest.mark.parametrize("kind", ["gptq", "gptq-act-order", "awq", "w4a16", "w4a16-asym", "nf4-double", "fp8", "w8a8",
                                  "bnb-8"])
def test_the_load_holds_at_most_1_15_of_the_packed_size(kind: str, tmp_path: Path) -> None:
    """About 200 MB. The packed size is that of the arrays on the device, which on CPU is the host."""
    eight = kind in ("fp8", "w8a8", "bnb-8")
    small, large = write(tmp_path / "small", kind, 1, 128, 256), write(tmp_path / "large", kind, 4 if eight else 8,
                                                                        WIDTH, MLP)
    made = subprocess.run([sys.executable, "-c", LOAD, small, large], check=True, capture_output=True, text=True)
    peak, size, seconds = map(float, made.stdout.split())
    stored = (large / "model.safetensors").stat().st_size
    print(f"{kind}: peak {peak:.3f} of {size / 1e6:.0f} MB, {size / stored:.3f} of the file, {seconds:.1f} s")
    assert peak < 1.15 and size < 1.15 * stored
