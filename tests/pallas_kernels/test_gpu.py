"""The kernels for GPUs as they are compiled for one, against attention in float64.

    JAX_PLATFORMS=cuda pytest -m gpu tests/pallas_kernels/test_gpu.py
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decodax.pallas_kernels.window_attention import gpu, reference
from tests.pallas_kernels.caches import FORMS, HELD, agrees_with_float64, arrays

pytestmark = pytest.mark.gpu

STATIC = "scale", "sliding", "softcap"
ATTEND = jax.jit(gpu.cache_attention, static_argnames=(*STATIC, "value_width"))
WEIGH = jax.jit(gpu.slot_weights, static_argnames=(*STATIC, "causal"))
WIDTHS = (64, 64), (96, 96), (128, 128), (256, 128)


@pytest.mark.parametrize(("form", "widths", "sliding", "held"), [*itertools.product(
    ("dense", *FORMS), WIDTHS, (None, 70), HELD)])
def test_each_form_of_a_cache_is_attended_to_as_in_float64(form: str, widths: tuple[int, int], sliding: int | None,
                                                           held: str) -> None:
    for causal in (False, True):
        agrees_with_float64(ATTEND, WEIGH, form, widths, sliding, held, causal)


@pytest.mark.parametrize("rows", [1, 5, 40, 300])
@pytest.mark.parametrize("width", [64, 96, 128, 256])
def test_bfloat16_is_rounded_as_by_the_reference(width: int, rows: int) -> None:
    q, cache, length, positions, held = arrays(width, width, "some of each head")
    q, positions = (np.concatenate([x] * 60, -2 if x.ndim > 2 else -1) for x in (q, positions))
    given = (jnp.asarray(q[:, :, :rows], jnp.bfloat16), jnp.asarray(cache, jnp.bfloat16), length, positions[:, :rows],
             held)
    options: dict[str, Any] = dict(scale=width ** -0.5, value_width=width)
    out, lse = ATTEND(*given, **options)
    want, sums = jax.jit(lambda *a: reference.cache_attention(*a, **options))(*given)
    np.testing.assert_allclose(out, want, atol=8e-3)
    np.testing.assert_allclose(lse, sums, rtol=1e-3)
