"""Prompts that take one another's places, over a mesh."""

import dataclasses

import jax
import pytest
from jax.sharding import AxisType

import decodax as dx
from tests.caches.small import MODEL, SMALL
from tests.jobs.slots import OPTIONS, PROMPTS
from tests.matrix import often

pytestmark = pytest.mark.mesh


@pytest.mark.parametrize(("kind", "algorithm", "cache"), often([(AxisType.Auto, "prompt-lookup:length=4", None)], [
    (kind, algorithm, cache) for kind in list(AxisType)[:2] for algorithm in (None, "prompt-lookup:length=4")
    for cache in (None, "h2o:budget=14,every=5")]))
def test_a_mesh_gives_the_tokens_of_one_device(kind: AxisType, algorithm: str | None, cache: str | None) -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    spread = dataclasses.replace(SMALL, params=jax.device_put(SMALL.params, MODEL.shardings(mesh)), mesh=mesh)
    out, alone = (dx.generate(lm, PROMPTS, algorithm=algorithm, cache=cache, batch_size=size, **OPTIONS)
                  for lm, size in ((spread, 4), (SMALL, None)))
    assert out.tokens.tolist() == alone.tokens.tolist()
    assert out.status == alone.status
