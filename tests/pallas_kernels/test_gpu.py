"""The kernels for GPUs as they are compiled for one, against attention in float64.

    JAX_PLATFORMS=cuda pytest -m gpu tests/pallas_kernels/test_gpu.py
"""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decodax.pallas_kernels.window_attention import gpu, reference
from tests.pallas_kernels.caches import FORMS, HELD, arrays, exact, exact_weights, stored

pytestmark = pytest.mark.gpu

WIDTHS = (64, 64), (96, 96), (128, 128), (256, 128)


@pytest.mark.parametrize(("form", "widths", "sliding", "held"), itertools.product(
    ("dense", *FORMS), WIDTHS, (None, 70), HELD))
def test_each_form_of_a_cache_is_attended_to_as_in_float64(form: str, widths: tuple[int, int], sliding: int | None,
                                                           held: str) -> None:
    q, cache, *where = arrays(*widths, held)
    kept, given, meant = (cache, {}, cache) if form == "dense" else stored(cache, widths[0], form)
    options: dict[str, Any] = dict(scale=0.3, sliding=sliding, softcap=5.0 if sliding else None)
    attend = jax.jit(lambda *a: gpu.cache_attention(*a, **given, **options, value_width=widths[1]))
    out, lse = attend(q, kept, *where)
    want, sums = exact(q, meant, *where, **options, value_width=widths[1])
    np.testing.assert_allclose(out, want, atol=3e-5)
    np.testing.assert_allclose(np.where(sums > -1e29, lse, 0), np.where(sums > -1e29, sums, 0), atol=2e-5)
    assert (np.asarray(lse)[sums < -1e29] < -1e29).all()
    for causal in (False, True):
        weigh = jax.jit(lambda *a, causal=causal: gpu.slot_weights(*a, **given, **options, causal=causal))
        got = weigh(q, np.where(sums > -1e29, sums, 0).astype(np.float32), kept, *where)
        np.testing.assert_allclose(got, exact_weights(q, sums, meant, *where, **options, causal=causal), rtol=1e-4,
                                   atol=1e-6)


@pytest.mark.parametrize("rows", [1, 5, 40, 300])
@pytest.mark.parametrize("width", [64, 96, 128, 256])
def test_bfloat16_is_rounded_as_by_the_reference(width: int, rows: int) -> None:
    q, cache, length, positions, held = arrays(width, width, "some of each head")
    q, positions = (np.concatenate([x] * 60, -2 if x.ndim > 2 else -1) for x in (q, positions))
    given = (jnp.asarray(q[:, :, :rows], jnp.bfloat16), jnp.asarray(cache, jnp.bfloat16), length, positions[:, :rows],
             held)
    options: dict[str, Any] = dict(scale=width ** -0.5, value_width=width)
    out, lse = jax.jit(lambda *a: gpu.cache_attention(*a, **options))(*given)
    want, sums = jax.jit(lambda *a: reference.cache_attention(*a, **options))(*given)
    np.testing.assert_allclose(out, want, atol=8e-3)
    np.testing.assert_allclose(lse, sums, rtol=1e-3)
