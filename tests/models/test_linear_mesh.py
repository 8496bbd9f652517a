"""Linear attention on a mesh. It imports no torch, beside which collectives on CPU crash."""

import numpy as np
import pytest

import decodax as dx
from decodax.models import EncoderText
from tests.caches.small import PROMPTS
from tests.meshes import mesh_of, spread
from tests.models.networks.linear import CONFIGS, lm

pytestmark = pytest.mark.mesh


@pytest.mark.wide
@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "elu"])
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_the_same_tokens(name: str, kind: str) -> None:
    """Rows over one axis and heads over the other, with drafts."""
    mesh = mesh_of(kind, data=2, model=2)
    alone, prompts = lm(name), [*PROMPTS, PROMPTS[0][:30]]
    inputs = EncoderText.of(prompts) if name == "jrt" else None
    want, got = (dx.generate(each, prompts, inputs=inputs, max_new_tokens=16, algorithm="prompt-lookup").tokens
                 for each in (alone, spread(alone, mesh)))
    np.testing.assert_array_equal(got, want)
