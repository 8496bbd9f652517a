"""Cache policies over a mesh: rows over one axis, heads over the other."""

from __future__ import annotations

import dataclasses

import jax
import pytest
from jax.sharding import AxisType

import decodax as dx
from decodax.kvcache import kv
from tests.kvcache.test_policies import DEEP, DEEPER, LOOKUP, MODEL, OPTIONS, PROMPTS, SMALL
from tests.matrix import often

pytestmark = pytest.mark.mesh


@pytest.mark.parametrize("kind", often([AxisType.Auto], list(AxisType)[:2]))
@pytest.mark.parametrize("name", often(["adakv"], OPTIONS))
def test_a_mesh_gives_the_tokens_of_one_device(name: str, kind: AxisType) -> None:
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)
    lm = DEEP if name in DEEPER else SMALL
    spread = dataclasses.replace(lm, params=jax.device_put(lm.params, lm.model.shardings(mesh)), mesh=mesh)
    prompts = [*PROMPTS, PROMPTS[0][:30]]
    out, alone = (dx.generate(lm, prompts, cache=kv(name, **OPTIONS[name]), max_new_tokens=16, algorithm=LOOKUP)
                  for lm in (spread, lm))
    assert out.tokens.tolist() == alone.tokens.tolist()


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_so_it_does_with_pages_in_the_memory_of_each_host(kind: AxisType) -> None:
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)
    spread = dataclasses.replace(SMALL, params=jax.device_put(SMALL.params, MODEL.shardings(mesh)), mesh=mesh)
    cache = kv("quest", **OPTIONS["quest"], offload=True)
    out, alone = (dx.generate(lm, PROMPTS[:2], cache=cache, max_new_tokens=8, algorithm=LOOKUP, num_samples=samples)
                  for lm, samples in ((spread, 2), (SMALL, 2)))
    assert out.tokens.tolist() == alone.tokens.tolist()
