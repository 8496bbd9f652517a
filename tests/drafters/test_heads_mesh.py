"""A trained drafter beside a target on a mesh."""

import jax
import numpy as np
import pytest

import decodax as dx
from decodax.io.drafters import load_drafter, save_drafter
from tests.drafters.fresh import fresh

pytestmark = [pytest.mark.mesh, pytest.mark.wide]
PROMPTS = ["def area(r):", "import os\n", "class Point:\n    def", "for i in"]


@pytest.mark.parametrize("name", ["eagle-3", "hydra", "dspark"])
def test_a_drafter_goes_where_its_target_is(name, tmp_path):
    """Rows over one axis and the target's heads over the other: the tokens are those of plain decoding there."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    alone, lm = dx.load("pycode"), dx.load("pycode", mesh=mesh)
    save_drafter(tmp_path, fresh(name, alone), dtype="float32")
    options = dict(max_new_tokens=12, temperature=[0.0, 0.8, 0.0, 1.0], seed=3)
    wanted = dx.generate(lm, PROMPTS, **options)
    found = dx.generate(lm, PROMPTS, algorithm=name, draft=load_drafter(tmp_path, lm), **options)
    np.testing.assert_array_equal(found.tokens, wanted.tokens)
    assert found.stats.drafted.sum() > 0
