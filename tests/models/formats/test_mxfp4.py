"""MXFP4: weights and products are those of the codes' definition, and packing rounds as ml_dtypes does."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from decodax.models.formats.mxfp4 import Mxfp4, Mxfp4Blocks
from decodax.models.packed import multiply

N, G = 12, 4
CODES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def kernel() -> tuple[Mxfp4Blocks, np.ndarray]:
    """A kernel of random bytes, and its weights `f32[N, K]`."""
    draw = np.random.default_rng(0)
    blocks = draw.integers(0, 256, (N, G, 16), dtype=np.uint8)
    scales = draw.integers(118, 134, (N, G)).astype(np.uint8)
    scales[0, :2] = 20, 235
    weights = np.stack([CODES[blocks & 15], CODES[blocks >> 4]], -1).reshape(N, G, 32)
    weights *= np.exp2(scales[..., None].astype(np.float32) - 127)
    packed = Mxfp4Blocks(codes=jnp.asarray(np.swapaxes(blocks, -1, -2)), scales=jnp.asarray(scales))
    return packed, weights.reshape(N, -1)


def test_weights_are_the_codes_times_powers_of_two() -> None:
    packed, wanted = kernel()
    assert packed.shape == wanted.shape
    np.testing.assert_array_equal(packed.values(jnp.float32), wanted)
    np.testing.assert_array_equal(packed.rows(jnp.array([7, 0]), jnp.float32), wanted[[7, 0]])


def test_products_of_one_row_and_of_several_are_those_of_the_weights() -> None:
    packed, wanted = kernel()
    packed, wanted = jax.tree.map(lambda x: x[1:], packed), wanted[1:]
    x = np.random.default_rng(2).normal(size=(3, 32 * G)).astype(np.float32)
    run = jax.jit(lambda x, packed: multiply(x, packed, jnp.float32))
    for rows in (x, x[:1]):
        np.testing.assert_allclose(run(rows, packed), rows @ wanted.T, atol=1e-6 * np.abs(x @ wanted.T).max())


def test_weights_are_rounded_to_the_nearest_code_and_kept_if_they_are_codes() -> None:
    w = np.random.default_rng(3).normal(size=(2, 96, 7)).astype(np.float32)
    w[0, 40:42, 0] = 0.25, 5.0      # in the middle between two codes
    groups = w.swapaxes(1, 2).reshape(2, 7, 3, 32)
    scales = np.exp2(np.floor(np.log2(np.abs(groups).max(-1, keepdims=True))) - 2)
    wanted = np.clip(groups / scales, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32) * scales
    packed = Mxfp4().pack(jnp.asarray(w))
    np.testing.assert_array_equal(packed.values(jnp.float32), wanted.reshape(2, 7, 96))
    again = Mxfp4().pack(packed.values(jnp.float32).swapaxes(1, 2))
    np.testing.assert_array_equal(again.values(jnp.float32), packed.values(jnp.float32))
    np.testing.assert_array_equal(Mxfp4().pack(jnp.zeros((32, 2))).values(jnp.float32), 0)
    assert packed.codes.nbytes + packed.scales.nbytes == w.size * 17 // 32


def test_kernels_that_do_not_divide_into_groups_are_named() -> None:
    with pytest.raises(ValueError, match=r"^kernel: got 40 inputs, mxfp4 takes a multiple of 32"):
        Mxfp4().pack(jnp.zeros((40, 2)))
