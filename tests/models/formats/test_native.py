"""Products in C++: those of the decoded weights, for every format, with the same bits for a row alone."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decodax.models.formats import native
from decodax.models.formats.ggml import TYPES, Ggml, GgmlBlocks, unpack
from decodax.models.formats.scaled import Floats, Int8
from decodax.models.packed import multiply
from tests.models.formats.ggml_blocks import K, N, gguf, kind, random_blocks

pytestmark = pytest.mark.skipif(not any(map(shutil.which, native.COMPILERS)), reason="no C++ compiler")


def test_the_source_compiles() -> None:
    assert native.usable()


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache folder, with what was registered forgotten."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.registered.cache_clear()
    yield tmp_path
    native.registered.cache_clear()


def kernel(name: str) -> tuple[GgmlBlocks, np.ndarray]:
    raw = random_blocks(name)
    packed = jax.tree.map(jnp.asarray, unpack(name, raw, by_group=True))
    return packed, gguf.quants.dequantize(raw.reshape(N, -1), kind(name))


@pytest.mark.parametrize("name", TYPES)
def test_products_are_those_of_the_weights_and_a_row_is_independent_of_the_others(name: str) -> None:
    packed, wanted = kernel(name)
    np.testing.assert_array_equal(packed.values(jnp.float32), wanted)
    x = np.random.default_rng(2).normal(size=(37, K)).astype(np.float32)
    run = jax.jit(lambda x, packed: multiply(x, packed, jnp.float32))
    assert "custom_call_target=\"decodax_matmul\"" in run.lower(x, packed).compile().as_text()
    whole = np.asarray(run(x, packed))
    exact = x.astype(np.float64) @ wanted.T.astype(np.float64)
    np.testing.assert_allclose(whole, exact, atol=1e-6 * np.abs(exact).max())
    for rows in (1, 2, 3, 5, 15):
        np.testing.assert_array_equal(run(x[:rows], packed), whole[:rows])


@pytest.mark.parametrize("K", [K, 37])        # a number of whole vectors, and one with a rest
@pytest.mark.parametrize("name", native.WIDE)
def test_kernels_of_floats_and_integers_are_multiplied_row_by_row(name: str, K: int) -> None:
    draw = np.random.default_rng(4)
    w = draw.normal(size=(K, 75)).astype(np.float32)
    packed = (Int8() if name == "int8" else Floats(name)).pack(jnp.asarray(w))
    x = draw.normal(size=(native.ROWS, K)).astype(np.float32)
    run = jax.jit(lambda x, packed: multiply(x, packed, jnp.float32))
    assert "custom_call_target=\"decodax_rows\"" in run.lower(x, packed).compile().as_text()
    whole = np.asarray(run(x, packed))
    exact = x.astype(np.float64) @ np.asarray(packed.values(jnp.float32), np.float64).T
    np.testing.assert_allclose(whole, exact, atol=1e-6 * np.abs(exact).max())
    for rows in range(1, native.ROWS):
        np.testing.assert_array_equal(run(x[:rows], packed), whole[:rows])
    many = np.repeat(x, 2, 0)                   # XLA is faster then
    assert "decodax_rows" not in run.lower(many, packed).compile().as_text()


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_weights_that_are_not_finite_are_not_hidden(bad: float) -> None:
    packed = Floats("float32").pack(jnp.ones((37, 5)).at[36, 0].set(bad))
    y = multiply(jnp.ones((3, 37)), packed, jnp.float32)
    assert not np.isfinite(y[:, 0]).any() and np.isfinite(y[:, 1:]).all()


@pytest.mark.parametrize("name", TYPES)
def test_both_orders_of_the_codes_are_one_kernel(name: str) -> None:
    raw = random_blocks(name)
    plain = jax.tree.map(jnp.asarray, unpack(name, raw))
    made, read = plain.here(), unpack(name, raw, by_group=True)
    assert made.by_group and not plain.by_group
    jax.tree.map(np.testing.assert_array_equal, made, read)
    jax.tree.map(np.testing.assert_array_equal, made.stored(), plain)
    np.testing.assert_array_equal(made.rows(jnp.array([7, 3]), jnp.float32), plain.rows(jnp.array([7, 3]), jnp.float32))


def test_infinite_scales_are_not_hidden() -> None:
    packed, _ = kernel("q8_0")
    for bad in (np.inf, -np.inf, np.nan):
        broken = packed.replace(scales=packed.scales.at[0, 0].set(bad))
        y = multiply(jnp.ones((1, K)), broken, jnp.float32)
        assert not np.isfinite(y[0, 0]) and np.isfinite(y[0, 1:]).all()


def test_experts_and_batches_of_kernels() -> None:
    w = np.random.default_rng(3).normal(size=(2, K, N)).astype(np.float32)
    x = np.random.default_rng(2).normal(size=(2, 3, K)).astype(np.float32)
    both = Ggml("q5_0").pack(jnp.asarray(w))
    made = jax.jit(jax.vmap(lambda x, k: multiply(x, k, jnp.float32)))(x, both)
    for e in range(2):
        one = multiply(x[e], Ggml("q5_0").pack(jnp.asarray(w[e])), jnp.float32)
        np.testing.assert_array_equal(made[e], one)


def test_without_a_compiler_or_when_switched_off_xla_multiplies(elsewhere: Path, monkeypatch: pytest.MonkeyPatch,
                                                                caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("DECODAX_NATIVE", "0")
    assert not native.usable()
    assert not Ggml("q4_0").pack(jnp.ones((K, N))).by_group
    monkeypatch.setenv("DECODAX_NATIVE", "1")
    native.registered.cache_clear()
    monkeypatch.setenv("CXX", "false")
    with caplog.at_level(logging.WARNING, "decodax"):
        assert not native.usable()
    assert "multiplied by XLA, which is slower" in caplog.text and not list(elsewhere.rglob("*.so"))
    native.registered.cache_clear()
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    assert not native.usable()


@pytest.mark.wide
def test_it_is_compiled_once(elsewhere: Path) -> None:
    compiler = next(filter(None, map(shutil.which, native.COMPILERS)))
    made = native.compiled(compiler)     # not registered: a process may register one library only
    when = made.stat().st_mtime_ns
    assert native.compiled(compiler) == made and made.stat().st_mtime_ns == when
    assert [*elsewhere.rglob("*.so")] == [made]
