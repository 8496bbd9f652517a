"""Prompts that take one another's places, over a mesh."""

import pytest
from jax.sharding import AxisType

import decodax as dx
from tests.caches.small import SMALL
from tests.jobs.slots import OPTIONS, PROMPTS
from tests.matrix import often
from tests.meshes import mesh_of, spread

pytestmark = pytest.mark.mesh


@pytest.mark.parametrize(("kind", "algorithm", "cache"), often([(AxisType.Auto, "prompt-lookup:length=4", None)], [
    (kind, algorithm, cache) for kind in list(AxisType)[:2] for algorithm in (None, "prompt-lookup:length=4")
    for cache in (None, "h2o:budget=14,every=5")]))
def test_a_mesh_gives_the_tokens_of_one_device(kind: AxisType, algorithm: str | None, cache: str | None) -> None:
    parted = spread(SMALL, mesh_of(kind, data=4, model=2))
    out, alone = (dx.generate(lm, PROMPTS, algorithm=algorithm, cache=cache, batch_size=size, **OPTIONS)
                  for lm, size in ((parted, 4), (SMALL, None)))
    assert out.tokens.tolist() == alone.tokens.tolist()
    assert out.status == alone.status
