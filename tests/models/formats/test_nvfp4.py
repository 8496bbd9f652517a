"""NVFP4: weights and products are those of the codes' definition, and packing rounds as ml_dtypes does."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import decodax as dx
from decodax.models.formats.nvfp4 import Nvfp4
from decodax.models.packed import multiply


def test_weights_are_rounded_to_the_nearest_code_and_kept_if_they_are_codes() -> None:
    w = np.random.default_rng(3).normal(size=(2, 96, 7)).astype(np.float32)
    groups = w.swapaxes(1, 2).reshape(2, 7, 6, 16)
    largest = np.abs(groups).max(-1, keepdims=True)
    factor = largest.max((1, 2, 3), keepdims=True) / np.float32(6 * 448)
    scales = (largest / (6 * factor)).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * factor
    wanted = np.clip(groups / scales, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32) * scales
    packed = Nvfp4().pack(jnp.asarray(w))
    np.testing.assert_allclose(packed.values(jnp.float32), wanted.reshape(2, 7, 96), rtol=1e-6)
    again = Nvfp4().pack(packed.values(jnp.float32).swapaxes(1, 2))
    np.testing.assert_allclose(again.values(jnp.float32), packed.values(jnp.float32), rtol=1e-6)
    np.testing.assert_array_equal(Nvfp4().pack(jnp.zeros((32, 2))).values(jnp.float32), 0)
    assert packed.codes.nbytes + packed.scales.nbytes == w.size * 9 // 16


def test_products_of_one_row_and_of_several_are_those_of_the_weights() -> None:
    packed = Nvfp4().pack(jnp.asarray(np.random.default_rng(1).normal(size=(96, 12)), jnp.float32))
    wanted = np.asarray(packed.values(jnp.float32))
    x = np.random.default_rng(2).normal(size=(3, 96)).astype(np.float32)
    run = jax.jit(lambda x, packed: multiply(x, packed, jnp.float32))
    for rows in (x, x[:1]):
        np.testing.assert_allclose(run(rows, packed), rows @ wanted.T, atol=1e-6 * np.abs(x @ wanted.T).max())


def test_kernels_that_do_not_divide_into_groups_are_named() -> None:
    with pytest.raises(ValueError, match=r"^kernel: got 40 inputs, nvfp4 takes a multiple of 16"):
        Nvfp4().pack(jnp.zeros((40, 2)))


def test_a_model_in_nvfp4_decodes_and_is_saved(tmp_path: object) -> None:
    lm = dx.load("pycode", weights="nvfp4")
    before = dx.generate(lm, "def add(a, b):", max_new_tokens=8).tokens
    dx.save(lm, f"{tmp_path}/saved")
    after = dx.generate(dx.load(f"{tmp_path}/saved"), "def add(a, b):", max_new_tokens=8).tokens
    np.testing.assert_array_equal(before, after)
