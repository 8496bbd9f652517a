"""Linear attention on a mesh. It imports no torch, beside which collectives on CPU crash."""

import dataclasses

import jax
import numpy as np
import pytest

import decodax as dx
from decodax.models import EncoderText
from tests.caches.small import PROMPTS
from tests.models.networks.linear import CONFIGS, lm

pytestmark = pytest.mark.mesh


@pytest.mark.wide
@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "elu"])
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_the_same_tokens(name: str, kind: str) -> None:
    """Rows over one axis and heads over the other, with drafts."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(getattr(jax.sharding.AxisType, kind),) * 2)
    alone, prompts = lm(name), [*PROMPTS, PROMPTS[0][:30]]
    inputs = EncoderText.of(prompts) if name == "jrt" else None
    spread = dataclasses.replace(alone, mesh=mesh, params=jax.device_put(alone.params, alone.model.shardings(mesh)))
    want, got = (dx.generate(each, prompts, inputs=inputs, max_new_tokens=16, algorithm="prompt-lookup").tokens
                 for each in (alone, spread))
    np.testing.assert_array_equal(got, want)
