"""Rotary scalings of GGUF files give the network of the `rope_scaling` from which llama.cpp's converter makes them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.io.files import CheckpointError
from decodax.models.families import read_config
from decodax.models.transformer import Transformer
from tests.io.gguf.writing import CONTEXT, HEAD, SHAPES, Type, network, restored, write

IDS = jnp.asarray(np.arange(3, 23)[None] * 7 % 250)
TRAINED = CONTEXT // 4
SHORT, LONG = ([1 + spread * i for i in range(HEAD // 2)] for spread in (0.01, 0.25))
Change = Callable[[gguf.GGUFWriter], None]


def scaling(kind: gguf.RopeScalingType, **more: float) -> Change:
    """Returns a change of a file that adds a scaling with a factor of 4, and more entries of `rope.scaling`."""
    def change(file: gguf.GGUFWriter) -> None:
        file.add_rope_scaling_type(kind)
        file.add_rope_scaling_factor(4.0)
        file.add_rope_scaling_orig_ctx_len(TRAINED)
        for key, value in more.items():
            file.add_float32(f"{file.arch}.rope.scaling.{key}", value)

    return change


def llama3(file: gguf.GGUFWriter) -> None:
    """Adds the divisors of Llama 3.1's scaling with factor 8, low 1 and high 4."""
    found = []
    for i in range(HEAD // 2):
        length = 2 * math.pi * 10_000 ** (2 * i / HEAD)
        smooth = min(max((TRAINED / length - 1) / 3, 0), 1)
        found.append(1 / ((1 - smooth) / 8 + smooth))
    file.add_tensor("rope_freqs.weight", np.array(found, np.float32))


def longrope(file: gguf.GGUFWriter) -> None:
    scaling(gguf.RopeScalingType.LONGROPE, attn_factor=math.sqrt(1 + math.log(4) / math.log(TRAINED)))(file)
    file.add_tensor("rope_factors_short.weight", np.array(SHORT, np.float32))
    file.add_tensor("rope_factors_long.weight", np.array(LONG, np.float32))


YARN, LINEAR = gguf.RopeScalingType.YARN, gguf.RopeScalingType.LINEAR
CASES: dict[str, tuple[dict[str, Any], Change]] = {
    "llama3": (dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0), llama3),
    "linear": (dict(rope_type="linear", factor=4.0), scaling(LINEAR)),
    "yarn": (dict(rope_type="yarn", factor=4.0), scaling(YARN)),
    "yarn-betas": (dict(rope_type="yarn", factor=4.0, beta_fast=4.0, beta_slow=0.5, attention_factor=1.3),
                   scaling(YARN, yarn_beta_fast=4.0, yarn_beta_slow=0.5, yarn_attn_factor=1.3, yarn_ext_factor=1.0)),
    "yarn-attention": (dict(rope_type="yarn", factor=4.0, attention_factor=1.3), scaling(YARN, attn_factor=1.3)),
    "longrope": (dict(rope_type="longrope", short_factor=SHORT, long_factor=LONG,
                      attention_factor=math.sqrt(1 + math.log(4) / math.log(TRAINED))), longrope),
}


@pytest.mark.parametrize("case", CASES)
def test_a_scaling_is_that_of_the_entry_it_was_made_from(case: str, tmp_path: Path) -> None:
    entry, change = CASES[case]
    if entry["rope_type"] != "linear":
        entry = entry | {"original_max_position_embeddings": TRAINED}
    model = Transformer(read_config(SHAPES["llama"].entries | {"rope_scaling": entry}))
    kept = write(tmp_path / "m.gguf", "llama", network("llama")[1], lambda tensor: Type.F32, change)
    for context in (None, CONTEXT):
        lm: Any = dx.load(tmp_path / "m.gguf", context=context)
        own: Any = Transformer(model.config, context=context)
        for one, other in zip(lm.model.config.layers, own.config.layers, strict=True):
            (found, factor), (wanted, by) = (layer.rope.scaling.scaled(HEAD, 1e4, context) for layer in (one, other))
            np.testing.assert_allclose([*found, factor], [*wanted, by], rtol=1e-6)
        np.testing.assert_allclose(lm.model.forward(lm.params, IDS), own.forward(restored(own, kept), IDS), atol=2e-4)


@pytest.mark.parametrize("key", ["yarn_ext_factor", "yarn_log_multiplier"])
def test_a_part_of_yarn_that_is_not_supported_is_named(key: str, tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", "llama", network("llama")[1], lambda tensor: Type.F32, scaling(YARN, **{key: 0.5}))
    with pytest.raises(CheckpointError, match=rf"llama\.rope\.scaling\.{key}: got 0\.5, takes "):
        dx.load(tmp_path / "m.gguf")


@pytest.mark.parametrize("kind", [YARN, LINEAR])
def test_a_scaling_without_a_factor_is_named(kind: gguf.RopeScalingType, tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", "llama", network("llama")[1], lambda tensor: Type.F32,
          lambda file: file.add_rope_scaling_type(kind))
    with pytest.raises(CheckpointError, match=r"lacks llama\.rope\.scaling\.factor"):
        dx.load(tmp_path / "m.gguf")
