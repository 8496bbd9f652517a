"""GGML's block formats: weights and products are those of the package gguf's own decoding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decodax.models.formats import ggml
from decodax.models.formats.ggml import TYPES, Ggml, GgmlBlocks, unpack
from decodax.models.formats.scaled import Scaled
from decodax.models.packed import multiply
from tests.models.formats.ggml_blocks import K, N, gguf, kind, random_blocks


def kernel(name: str) -> tuple[GgmlBlocks, np.ndarray]:
    raw = random_blocks(name)
    return jax.tree.map(jnp.asarray, unpack(name, raw)), gguf.quants.dequantize(raw.reshape(N, -1), kind(name))


@pytest.mark.parametrize("name", TYPES)
def test_weights_are_those_that_gguf_decodes(name: str) -> None:
    packed, wanted = kernel(name)
    assert packed.shape == (N, K)
    np.testing.assert_array_equal(packed.values(jnp.float32), wanted)
    np.testing.assert_array_equal(packed.rows(jnp.array([7, 3]), jnp.float32), wanted[[7, 3]])


@pytest.mark.parametrize("name", TYPES)
def test_products_of_one_row_and_of_several(name: str) -> None:
    packed, wanted = kernel(name)
    x = np.random.default_rng(2).normal(size=(3, K)).astype(np.float32)
    run = jax.jit(lambda x, packed: multiply(x, packed, jnp.float32))
    for rows in (x, x[:1]):
        np.testing.assert_allclose(run(rows, packed), rows @ wanted.T, atol=1e-5 * np.abs(x @ wanted.T).max())


@pytest.mark.parametrize("name", TYPES)
def test_the_form_for_accelerators_has_the_same_weights(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    packed, wanted = kernel(name)
    monkeypatch.setattr(ggml.blocks, "platform", lambda: "tpu")
    made = packed.here()
    codes = made.codes if isinstance(made, Scaled) else made.kernel.codes       # type: ignore[attr-defined]
    assert codes.dtype == (jnp.int4 if "4" in name else jnp.int8) and made.shape == (N, K)
    np.testing.assert_allclose(made.values(jnp.float32), wanted, atol=1e-5 * np.abs(wanted).max())
    x = np.random.default_rng(2).normal(size=(3, K)).astype(np.float32)
    np.testing.assert_allclose(multiply(x, made.stored(), jnp.float32), x @ wanted.T,
                               atol=1e-5 * np.abs(x @ wanted.T).max())


@pytest.mark.parametrize("name", [name for name in TYPES if not name.endswith("k")])
def test_kernels_are_packed_as_gguf_packs_them(name: str) -> None:
    w = np.random.default_rng(3).normal(size=(N, K)).astype(np.float32)
    wanted = unpack(name, gguf.quants.quantize(w, kind(name)).reshape(N, K // 32, -1))
    jax.tree.map(np.testing.assert_array_equal, Ggml(name).pack(jnp.asarray(w.T)).stored(), wanted)


@pytest.mark.parametrize(("name", "error"), [("q4_k", 0.081), ("q5_k", 0.040), ("q6_k", 0.020)])
def test_k_quants_keep_normal_weights_within_their_errors(name: str, error: float) -> None:
    w = np.random.default_rng(3).normal(size=(K, N)).astype(np.float32)
    made = np.asarray(Ggml(name).pack(jnp.asarray(w)).values(jnp.float32)).T
    assert np.sqrt(np.square(made - w).mean()) < error


def test_kernels_that_do_not_divide_into_groups_are_named() -> None:
    with pytest.raises(ValueError, match=r"^kernel: got 40 inputs, q4_0 takes a multiple of 32"):
        Ggml("q4_0").pack(jnp.zeros((40, 2)))
    with pytest.raises(ValueError, match=r"^type: got 'q2_k', takes 'q4_0'"):
        Ggml("q2_k")


@pytest.mark.parametrize("name", ["q5_0", "q4_k"])
def test_experts_have_a_leading_axis(name: str) -> None:
    w = np.random.default_rng(3).normal(size=(2, K, N)).astype(np.float32)
    both, one = Ggml(name).pack(jnp.asarray(w)), Ggml(name).pack(jnp.asarray(w[1]))
    assert both.shape == (2, N, K)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[1], b), both, one)
