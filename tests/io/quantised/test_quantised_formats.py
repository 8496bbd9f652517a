"""Layers of quantised checkpoints: their weights are those of the packages that define the formats.

`published.json` has small layers that those packages wrote, or random bits where a package only reads, and the product
of the dequantised weights with `sin(1), sin(2), ...`, computed once by the package.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decodax.io.files import CheckpointError, Files
from decodax.io.packed import on_devices
from decodax.io.quantised import METHODS
from decodax.io.quantised.scheme import StoredLinear, halves, halves_of_pairs, unpack
from decodax.io.quantised.tensors import TensorReader
from decodax.models.formats import published, scaled
from decodax.models.formats.mxfp4 import Mxfp4Blocks
from decodax.models.formats.nvfp4 import Nvfp4Blocks
from decodax.models.formats.published import InputsPermuted, Levels, ZeroPoints
from decodax.models.formats.scaled import Scaled
from decodax.models.packed import Packed, multiply
from tests.io.quantised.writer import NAMES, Tensors, dense, float8, write_safetensors

PUBLISHED = json.loads((Path(__file__).parent / "published.json").read_text())
N, K = 32, 64
PLAIN = {"w4a16": Scaled, "w4a16-asymmetric": ZeroPoints, "w8a8": Scaled, "fp8-block": Scaled, "nf4": Levels,
         "mxfp4": Mxfp4Blocks, "nvfp4": Nvfp4Blocks, "modelopt-nvfp4": Nvfp4Blocks, "mxfp8": Scaled,
         "bnb-int8": Scaled, "awq": ZeroPoints, "gptq-4": ZeroPoints,
         "gptq-4-act-order": InputsPermuted}


def tensors_of(kind: str) -> Tensors:
    forms = {form: jnp.dtype(name) for name, form in NAMES.items()}
    return {name: np.frombuffer(base64.b64decode(own["data"]), forms[own["dtype"]]).reshape(own["shape"])
            for name, own in PUBLISHED[kind]["tensors"].items()}


def layer(root: Path, kind: str, tensors: Tensors) -> StoredLinear:
    write_safetensors(root / "model.safetensors", {f"layer.{name}": value for name, value in tensors.items()})
    config = PUBLISHED[kind]["quantization_config"]
    made = METHODS[config["quant_method"]].of(config).linear(TensorReader(Files(root)), "layer", N, K)
    assert made is not None and set(made.tensors) == {f"layer.{name}" for name in tensors}
    return made


def kernel(own: StoredLinear, which: np.ndarray | None = None) -> Packed:
    made = own.read(np.arange(N) if which is None else which, own.zeroed, own.order is not None)
    if own.order is not None:
        made = InputsPermuted(kernel=made, order=own.order)     # type: ignore[arg-type]
    return on_devices(made, False, jax.sharding.SingleDeviceSharding(jax.devices()[0]))


@pytest.mark.parametrize("kind", PUBLISHED)
@pytest.mark.wide(but=("gptq-4-act-order", "awq", "w4a16-asymmetric", "fp8-block", "nf4-double", "bnb-int8"))
def test_products_are_those_of_the_package_that_defines_the_format(kind: str, tmp_path: Path) -> None:
    made = kernel(layer(tmp_path, kind, tensors_of(kind)))
    assert type(made) is PLAIN.get(kind, type(made)) and made.shape == (N, K)
    x, wanted = np.sin(np.arange(K, dtype=np.float32) + 1), np.array(PUBLISHED[kind]["product"])
    run = jax.jit(lambda x, kernel: multiply(x, kernel, jnp.float32))
    for rows in (x[None], np.stack([x, -x, 2 * x])):
        np.testing.assert_allclose(run(rows, made)[0], wanted, atol=2e-6 * (1 + np.abs(wanted).max()), rtol=1e-5)
    np.testing.assert_allclose(made.values(jnp.float32) @ x, wanted, atol=2e-6 * (1 + np.abs(wanted).max()), rtol=1e-5)


@pytest.mark.parametrize("kind", ["gptq-4-act-order", "awq", "w4a16-asymmetric", "nf4-double", "fp8-block", "bnb-int8",
                                  "mxfp4", "nvfp4", "mxfp8"])
@pytest.mark.wide(but=("gptq-4-act-order", "awq"))
def test_outputs_are_read_by_themselves(kind: str, tmp_path: Path) -> None:
    own = layer(tmp_path, kind, tensors_of(kind))
    which = np.array([3, 4, 9, 10, 30])
    whole, some = kernel(own).values(jnp.float32), kernel(own, which)
    np.testing.assert_array_equal(some.values(jnp.float32), whole[which])
    np.testing.assert_array_equal(some.rows(jnp.array([4, 0]), jnp.float32), whole[which][jnp.array([4, 0])])


@pytest.mark.parametrize("kind", ["gptq-4-act-order", "w4a16", "w8a16", "fp8-block", "nf4"])
@pytest.mark.wide(but=("gptq-4-act-order", "nf4"))
def test_the_form_for_accelerators_has_the_same_weights(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                       ) -> None:
    made = kernel(layer(tmp_path, kind, tensors_of(kind)))
    wanted = made.values(jnp.float32)
    for module in (published, scaled):
        monkeypatch.setattr(module, "platform", lambda: "tpu")
    here = made.here()
    np.testing.assert_allclose(here.values(jnp.float32), wanted, atol=1e-6 * np.abs(wanted).max())
    x = np.random.default_rng(1).normal(size=(3, K)).astype(np.float32)
    y = x @ np.asarray(wanted).T
    np.testing.assert_allclose(multiply(x, here, jnp.float32), y, atol=1e-5 * np.abs(y).max())
    np.testing.assert_allclose(here.stored().values(jnp.float32), wanted, atol=1e-6 * np.abs(wanted).max())


def test_blocks_of_128_of_which_the_last_are_smaller(tmp_path: Path) -> None:
    w = np.random.default_rng(0).normal(size=(160, 192)).astype(np.float32)
    tensors, wanted = float8("layer", w, (128, 128), "weight_scale_inv")
    write_safetensors(tmp_path / "model.safetensors", tensors)
    scheme = METHODS["fp8"].of({"weight_block_size": [128, 128]})
    own = scheme.linear(TensorReader(Files(tmp_path)), "layer", 160, 192)
    assert own is not None
    np.testing.assert_array_equal(kernel(own, np.arange(160)).values(jnp.float32), wanted)


def test_codes_of_all_widths_are_unpacked() -> None:
    draw = np.random.default_rng(0)
    for bits in range(2, 9):
        codes = draw.integers(0, 2 ** bits, (3, 44))
        np.testing.assert_array_equal(unpack(dense(codes, bits), bits, 44), codes)
    codes = draw.integers(0, 16, (3, 44)).astype(np.uint8)
    for middle in (0, 8):
        pairs = codes[:, ::2] | codes[:, 1::2] << 4
        np.testing.assert_array_equal(halves_of_pairs(pairs, middle), halves(codes, middle))


@pytest.mark.parametrize(("kind", "change", "said"), [
    ("gptq-4", {"scales": None}, "lacks tensor layer.scales, which its quantization requires"),
    ("gptq-4", {"qweight": np.zeros((8, 31), np.int32)}, r"tensor layer.qweight: has shape \(8, 31\), takes \(8, 32\)"),
    ("gptq-4", {"qzeros": np.zeros((2, 4), np.uint8)}, "tensor layer.qzeros: got U8, takes I32"),
    ("gptq-4-act-order", {"g_idx": np.zeros(64, np.int32)}, "tensor layer.g_idx: takes 32 inputs for each of 2 groups"),
    ("awq", {"qzeros": None}, "lacks tensor layer.qzeros"),
    ("w4a16", {"weight_shape": np.array([32, 60])}, r"tensor layer.weight_shape: got \[32, 60\], the configuration"),
    ("w4a16", {"weight_scale": np.zeros((32, 4), np.float16)}, r"has shape \(32, 4\), takes \(32, 2\) or \(32, 1\)"),
    ("w8a8", {"weight_scale": None}, "lacks tensor layer.weight_scale"),
    ("fp8-block", {"weight_scale": np.zeros((2, 3), np.float32)}, r"has shape \(2, 3\), takes \(2, 2\) or \(32, 1\)"),
    ("nf4", {"weight.absmax": np.zeros(31, np.float32)}, r"layer.weight.absmax: has shape \(31,\), takes \(32,\)"),
    ("nf4", {"weight.quant_state.bitsandbytes__nf4": np.zeros(4, np.uint8)}, "nf4: not the JSON of a state"),
    ("bnb-int8", {"weight_format": np.ones((), np.uint8)}, r"layer.weight_format: got 1, takes 0 \(by rows\)"),
])
def test_tensors_that_do_not_fit_are_named(kind: str, change: dict[str, Any], said: str, tmp_path: Path) -> None:
    tensors = {name: value for name, value in {**tensors_of(kind), **change}.items() if value is not None}
    with pytest.raises(CheckpointError, match=said):
        kernel(layer(tmp_path, kind, tensors))
