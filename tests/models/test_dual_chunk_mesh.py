"""Dual chunk attention on a mesh. It imports no torch, beside which collectives on CPU crash."""

import jax
import numpy as np
import pytest

import decodax as dx

pytestmark = pytest.mark.mesh


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_the_same_tokens(kind: str) -> None:
    """Chunks of 12 tokens, heads over "model", and drafts."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(getattr(jax.sharding.AxisType, kind),) * 2)
    alone, parted = (dx.load("sums", mesh=mesh).with_dual_chunk(16, 4) for mesh in (None, mesh))
    asked = ["34+51-07=\n", "12*13=\n", "99-98+11*2=\n", "11+11=\n"]
    for algorithm in (None, "prompt-lookup:length=3"):
        want, got = (dx.generate(lm, asked, max_new_tokens=30, algorithm=algorithm).tokens for lm in (alone, parted))
        np.testing.assert_array_equal(got, want)
