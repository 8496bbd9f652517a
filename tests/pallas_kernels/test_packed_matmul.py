"""The product with packed kernels and its XLA reference, both against float64."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from decodax.pallas_kernels.packed_matmul import packed_matmul, tpu
from tests.matrix import often
from tests.pallas_kernels.races import no_races

IMPLEMENTATIONS: dict[str, Any] = {name: functools.partial(packed_matmul, implementation=name)
                                   for name in ("xla", "mosaic_tpu")}


def arrays(R: int, N: int, K: int, groups: int, dtype: Any) -> tuple[Any, Any, Any]:
    """Rows, codes and scales."""
    r = np.random.default_rng(R + N + K)
    largest = 7 if dtype == jnp.int4 else 127
    codes = jnp.asarray(r.integers(-largest, largest + 1, (N, K)), dtype)
    return jnp.asarray(r.normal(size=(R, K)), jnp.bfloat16), codes, jnp.asarray(r.uniform(0.1, 2, (N, groups)),
                                                                               jnp.float32)


def exact(x: Any, codes: Any, scales: Any) -> Any:
    each = np.repeat(np.asarray(scales, np.float64), codes.shape[1] // scales.shape[1], 1)
    return np.asarray(x, np.float64) @ (np.asarray(codes, np.float64) * each).T


SIZES = [(1, 128, 256, 2), (5, 200, 512, 2), (16, 7, 384, 3), (33, 513, 1408, 11), (16, 256, 2048, 1)]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("sizes", "dtype"), often(
    [(SIZES[1], jnp.int4), (SIZES[2], jnp.int4), (SIZES[3], jnp.int4), (SIZES[4], jnp.int8)],
    [(sizes, dtype) for sizes in SIZES for dtype in (jnp.int4, jnp.int8)]))
def test_a_product_is_that_of_float64(implementation: str, sizes: tuple[int, ...], dtype: Any) -> None:
    """With rows and outputs that do not fill their blocks. The reference rounds weights to bfloat16."""
    x, codes, scales = arrays(*sizes, dtype)
    got, want = IMPLEMENTATIONS[implementation](x, codes, scales, dtype=jnp.float32), exact(x, codes, scales)
    assert got.shape == want.shape and got.dtype == jnp.float32
    assert IMPLEMENTATIONS[implementation](x, codes, scales).dtype == jnp.bfloat16
    np.testing.assert_allclose(got, want, atol=(5e-3 if implementation == "xla" else 1e-6) * np.abs(want).max())


def test_tiles_of_rows_and_blocks_of_outputs_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x, codes, scales = arrays(40, 520, 512, 4, jnp.int4)
    kernel = functools.partial(tpu.packed_matmul, dtype=jnp.float32, interpret=True)
    whole = kernel(x, codes, scales, block=640)
    monkeypatch.setattr(tpu, "INPUTS", 2 * 512 * 16)        # 16 rows
    np.testing.assert_array_equal(kernel(x, codes, scales, block=128), whole)
    np.testing.assert_allclose(whole, exact(x, codes, scales), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_nan_stays_one(implementation: str) -> None:
    x, codes, scales = arrays(5, 200, 512, 4, jnp.int4)
    got = np.asarray(IMPLEMENTATIONS[implementation](x.at[3, 400].set(jnp.nan), codes, scales.at[150, 2].set(jnp.nan),
                                                     dtype=jnp.float32))
    bad = np.zeros((5, 200), bool)
    bad[3], bad[:, 150] = True, True
    np.testing.assert_array_equal(np.isnan(got), bad)


def test_the_kernel_runs_in_a_loop() -> None:
    x, codes, scales = arrays(16, 256, 256, 2, jnp.int4)

    def body(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        i, x = carry
        y = tpu.packed_matmul(x, codes, scales, jnp.float32, interpret=True)
        return i + 1, (y / jnp.abs(y).max()).astype(x.dtype)

    looped = jax.jit(lambda x: jax.lax.while_loop(lambda c: c[0] < 3, body, (jnp.int32(0), x))[1])(x)
    for i in range(3):
        x = body((jnp.int32(i), x))[1]
    np.testing.assert_array_equal(looped, x)


def test_the_kernel_has_no_races(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpu, "INPUTS", 2 * 256 * 16)
    x, codes, scales = arrays(33, 300, 256, 2, jnp.int4)
    got = no_races(tpu.packed_matmul, x, codes, scales, jnp.float32, block=128)
    np.testing.assert_allclose(got, exact(x, codes, scales), rtol=1e-5, atol=1e-4)


def test_arguments_that_the_kernel_does_not_take_are_refused() -> None:
    x, codes, scales = arrays(5, 128, 256, 4, jnp.int4)
    with pytest.raises(ValueError, match=r"^scales: got 4 groups of 256 inputs"):
        packed_matmul(x, codes, scales, implementation="mosaic_tpu")
    with pytest.raises(ValueError, match=r"^x: got float32"):
        packed_matmul(x.astype(jnp.float32), codes, scales[:, :2], implementation="mosaic_tpu")
    with pytest.raises(ValueError, match=r"^implementation: got 'pallas'"):
        packed_matmul(x, codes, scales, implementation="pallas")        # type: ignore[arg-type]


@pytest.mark.mesh
@pytest.mark.parametrize("axes", [("model", None), (None, "model"), (None, None)])
def test_devices_share_a_product(axes: Any) -> None:
    """Outputs, inputs, whose parts are added up, or nothing."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    x, codes, scales = arrays(6, 512, 1024, 8, jnp.int4)
    with jax.set_mesh(mesh):
        codes, scales = (jax.device_put(a, NamedSharding(mesh, P(*axes))) for a in (codes, scales))
        got = jax.jit(functools.partial(packed_matmul, dtype="float32", axes=axes,
                                        implementation="mosaic_tpu"))(x, codes, scales)
    want = exact(x, codes, scales)
    np.testing.assert_allclose(got, want, atol=1e-6 * np.abs(want).max())
