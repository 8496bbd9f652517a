"""Models, data and helpers of `test_ggml.py` that other tests use too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")
N, K = 12, 512
FLOATS = {"q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q8_0": (0,), "q4_k": (0, 2), "q5_k": (0, 2),
          "q6_k": (208,)}
"""Offsets of the 16-bit floats in a block, in bytes."""


def kind(name: str) -> Any:
    return gguf.GGMLQuantizationType[name.upper()]


def random_blocks(name: str, rows: int = N) -> np.ndarray:
    """Random bytes, with floats of a usual size."""
    draw = np.random.default_rng(1)
    block, size = gguf.GGML_QUANT_SIZES[kind(name)]
    raw = draw.integers(0, 256, (rows, K // block, size), dtype=np.uint8)
    for at in FLOATS[name]:
        raw[..., at:at + 2] = draw.normal(0, 0.1, (rows, K // block, 1)).astype(np.float16).view(np.uint8)
    return raw
