"""Loading a quantised checkpoint needs little more memory than its packed weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from decodax.models import Transformer
from decodax.models.families import read_config
from decodax.models.names import sources
from tests.io.memory import MEASURED, check_peak
from tests.io.quantised.writer import EXPERTS, KINDS, LLAMA, NF4, Tensors, write_safetensors

WIDTH, MLP, EXPERT = 2048, 5632, 512

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
    if kind == "nvfp4":
        return {"weight_packed": draw.integers(0, 256, (N, K // 2), dtype=np.uint8),
                "weight_scale": draw.integers(0, 0x7F, (N, K // 16), dtype=np.uint8).view(jnp.float8_e4m3fn),
                "weight_global_scale": np.ones(1, np.float32)}
    codes = draw.integers(0, 0x7F, (N, K), dtype=np.uint8)
    if kind == "mxfp8":
        return {"weight": codes.view(jnp.float8_e4m3fn),
                "weight_scale": draw.integers(120, 128, (N, K // 32), dtype=np.uint8)}
    if kind == "fp8":
        return {"weight": codes.view(jnp.float8_e4m3fn),
                "weight_scale_inv": draw.random((N // 128, K // 128), dtype=np.float32)}
    tail = "SCB" if kind == "bnb-8" else "weight_scale"
    return {"weight": codes.view(np.int8), tail: draw.random((N, 1)[:1 if tail == "SCB" else 2], dtype=np.float32)}


def write(root: Path, kind: str, entries: dict[str, Any]) -> Path:
    """A checkpoint whose layers of attention, MLP and experts have random bits in a kind."""
    draw, model, tensors = np.random.default_rng(0), Transformer(read_config(entries)), Tensors()
    for source in sources(entries["model_type"], model.config, model.abstract_params()).values():
        for name in source.tensors:
            stem, experts = name.removesuffix(".weight"), kind == "mxfp4" and len(source.full) == 3
            if experts and not name.endswith("bias"):
                E, K, N = source.full
                tensors[f"{stem}_blocks"] = draw.integers(0, 256, (E, N, K // 32, 16), dtype=np.uint8)
                tensors[f"{stem}_scales"] = draw.integers(120, 128, (E, N, K // 32), dtype=np.uint8)
            elif kind != "mxfp4" and stem.endswith("_proj"):
                N, K = source.full
                tensors |= {f"{stem}.{key}": value for key, value in layer(kind, N, K, draw).items()}
            else:
                tensors[name] = np.ones(source.full, np.float16 if kind != "mxfp4" else jnp.bfloat16)
    own = json.dumps(KINDS[kind][0] if kind != "mxfp4" else MXFP4)
    config = json.loads(own if kind.startswith("mx") else own.replace("32", "128"))
    if kind == "fp8":
        config["weight_block_size"] = [128, 128]
    root.mkdir()
    write_safetensors(root / "model.safetensors", tensors)
    (root / "config.json").write_text(json.dumps({**entries, "quantization_config": config}))
    return root


MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
MIXTURE = {**EXPERTS, "num_experts": 16}
GPT_OSS: dict[str, Any] = {"model_type": "gpt_oss", "num_local_experts": 16, "num_experts_per_tok": 4,
                           "max_position_embeddings": 64}
CASES = {
    **{kind: (kind, LLAMA) for kind in ("gptq", "gptq-act-order", "awq", "w4a16", "w4a16-asym", "nf4-double", "fp8",
                                        "w8a8", "bnb-8", "nvfp4", "mxfp8")},
    **{f"{kind}-experts": (kind, MIXTURE) for kind in (
        "gptq-act-order", "awq", "w4a16", "nf4-double", "fp8", "w8a8", "nvfp4", "mxfp8")},
    "mxfp4-experts": ("mxfp4", GPT_OSS)}


def sized(family: dict[str, Any], layers: int, width: int, mlp: int) -> dict[str, Any]:
    """A family's entries with sizes; a mixture has one head, so that most of it is experts."""
    heads = width // 128 if family is LLAMA else 1
    return {**family, "num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": 128,
            "hidden_size": width, "intermediate_size": mlp, "num_hidden_layers": layers, "vocab_size": 512,
            **({"moe_intermediate_size": mlp} if "moe_intermediate_size" in family else {})}


@pytest.mark.full
@pytest.mark.skipif(not MEASURED, reason="reads the peak from Linux")
@pytest.mark.parametrize("case", CASES)
def test_the_load_holds_at_most_1_15_of_the_packed_size(case: str, tmp_path: Path) -> None:
    """About 200 MB. The packed size is that of the arrays on the device, which on CPU is the host."""
    kind, family = CASES[case]
    layers, mlp = 4 if kind in ("fp8", "w8a8", "bnb-8", "mxfp8") else 8, MLP if family is LLAMA else EXPERT
    small = write(tmp_path / "small", kind, sized(family, 1, 128, 256))
    large = write(tmp_path / "large", kind, sized(family, layers, WIDTH, mlp))
    check_peak(case, small, large, (large / "model.safetensors").stat().st_size)
