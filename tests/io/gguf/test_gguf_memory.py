"""Loading a GGUF file needs little more memory than its packed weights."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from decodax.io.gguf.architectures import ARCHITECTURES
from decodax.models import Transformer
from decodax.models.families import read_config
from decodax.models.names import flatten
from tests.io.gguf import writing
from tests.io.memory import MEASURED, check_peak

MIXES = {"Q4_K_M": ("Q4_K", "Q6_K"), "Q5_K_M": ("Q5_K", "Q6_K"), "Q4_K_S": ("Q4_K", "Q5_K")}
"""Types of most kernels and of those of values and outputs of MLPs, by the names of llama.cpp's mixtures."""


def type_of(tensor: str, kind: str, experts: str) -> Type:
    if "_exps" in tensor:
        return Type[experts]
    most, some = MIXES.get(kind, (kind, kind))
    return Type[some if "attn_v" in tensor or "ffn_down" in tensor else most]


def write(path: Path, name: str, kind: str, experts: str, **sizes: Any) -> Path:
    """A file whose kernels have random blocks, those of experts of a type of their own."""
    entries = {**writing.SHAPES[name].entries, **sizes}
    config, draw = read_config(entries), np.random.default_rng(0)
    metadata = {**writing.SHAPES[name].metadata, **({
        "expert_count": sizes["num_experts"], "expert_feed_forward_length": sizes["moe_intermediate_size"]}
        if "num_experts" in sizes else {})}
    shape = writing.Shape(entries, metadata)
    file = gguf.GGUFWriter(str(path), name)
    writing._metadata(file, config, shape)
    writing.byte_level(file)
    for where, leaf in flatten(Transformer(config).abstract_params()).items():
        # Only name and shape are taken from it.
        tensor, array = writing._tensor(where, np.empty(leaf.shape, np.uint8), config, shape, ARCHITECTURES[name].names)
        if array.ndim < 2 or "gate_inp" in tensor:
            file.add_tensor(tensor, np.ones(array.shape, np.float32))
            continue
        own = type_of(tensor, kind, experts)
        block, size = gguf.GGML_QUANT_SIZES[own]
        raw = draw.integers(0, 256, (*array.shape[:-1], array.shape[-1] // block * size), dtype=np.uint8)
        file.add_tensor(tensor, raw, raw_dtype=own)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return path


@pytest.mark.full
@pytest.mark.skipif(not MEASURED, reason="reads the peak from Linux")
@pytest.mark.parametrize(("name", "kind", "experts"), [
    *(("llama", kind, kind) for kind in (
        "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4", "F16", *MIXES)),
    *(("qwen3moe", kind, own) for kind, own in (("Q8_0", "Q4_K"), ("Q8_0", "MXFP4"), ("Q4_K_M", "Q5_K")))])
def test_the_load_holds_at_most_1_15_of_the_packed_size(name: str, kind: str, experts: str, tmp_path: Path) -> None:
    """About 200 MB."""
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 4 if kind in ("Q8_0", "F16") else 8,
             "num_attention_heads": 32, "num_key_value_heads": 32}
    if name == "qwen3moe":
        sizes |= {"num_experts": 16, "moe_intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4,
                  "num_hidden_layers": 8}
    small = write(tmp_path / "small.gguf", name, kind, experts, **{
        "num_experts": 4, "moe_intermediate_size": 256} if name == "qwen3moe" else {})
    large = write(tmp_path / "large.gguf", name, kind, experts, **sizes)
    check_peak(f"{name} {experts}", small, large, large.stat().st_size)
