"""Samples, beams and constraints over a mesh."""

from pathlib import Path
from typing import Any

import jax
import pytest
from jax.sharding import AxisType

import decodax as dx
from tests.matrix import often
from tests.meshes import mesh_of, spread

pytestmark = pytest.mark.mesh

WAYS: dict[str, dict[str, Any]] = {
    "samples": dict(num_samples=3, temperature=1.0), "beams": dict(algorithm=dx.algorithms.beam_search(2),
                                                                   num_samples=2, logprobs=0),
    "beams under a constraint": dict(algorithm=dx.algorithms.beam_search(2),
                                     constraint=dx.constraints.regex("[a-z]{1,9}")),
    "a grammar with a stack": dict(temperature=1.0,
                                   constraint=dx.constraints.grammar('start: "(" start ")" | /[a-z]/')),
    "contrastive search": dict(algorithm=dx.algorithms.contrastive_search(0.6)),
    "stochastic beams":
    dict(algorithm="stochastic-beam-search:k=3"), "adadec": dict(algorithm="adadec:threshold=0.5,length=2"),
    "superposed": dict(algorithm="superposed-decoding:k=3,temperature=0.5"), "vector fsd": dict(algorithm="vector-fsd"),
    "a temperature for each token": dict(temperature=1.0, deco=True), "even samples": dict(arithmetic_sampling=True,
    num_samples=4, temperature=1.0), "a constraint": dict(temperature=1.0,
                         constraint=dx.constraints.json_schema({"type": "array", "items": {"type": "boolean"}}))}


@pytest.mark.wide
@pytest.mark.parametrize(("kind", "way"), often([(AxisType.Explicit, "beams under a constraint")], [
    (kind, way) for kind in list(AxisType)[:2] for way in WAYS]))
def test_a_mesh_gives_the_texts_of_one_device(tiny_model: Path, kind: AxisType, way: str) -> None:
    alone = dx.load(tiny_model)
    parted = spread(alone, mesh_of(kind, data=4, model=2))
    given = dict(max_new_tokens=10, **WAYS[way])
    if given.pop("deco", False):
        heads = dx.algorithms.contrastive.Heads.init(jax.random.key(0), alone.model.config.width)      # type: ignore[attr-defined]
        alone, parted = (dx.algorithms.contrastive.autodeco(lm, heads) for lm in (alone, parted))
    want, out = (dx.generate(lm, ["one", "def f(", "x", "b"], **given) for lm in (alone, parted))
    assert out.text == want.text and out.status == want.status


def ends_in_a(prompt: Any, texts: Any) -> list[float]:
    return [0.9 if text.endswith(("a", "e")) else 0.3 for text in texts]


@pytest.mark.wide
@pytest.mark.parametrize("kind", often([AxisType.Auto], list(AxisType)[:2]))
def test_searches_over_steps_on_a_mesh(tiny_model: Path, kind: AxisType) -> None:
    alone = dx.load(tiny_model)
    parted = spread(alone, mesh_of(kind, data=4, model=2))
    given: dict[str, Any] = dict(step_tokens=3, max_new_tokens=9, temperature=1.0)
    by = dx.search.particle_filter(reward=ends_in_a, n=4)
    want, out = (dx.search.explore(lm, ["one", "def f("], by, **given) for lm in (alone, parted))
    assert out.texts == want.texts and out.index.tolist() == want.index.tolist()
    by = dx.search.with_tools(act=lambda prompt, text: "x")
    want, out = (dx.search.explore(lm, ["one", "def f("], by, step_tokens=3, max_new_tokens=12)
                 for lm in (alone, parted))
    assert out.texts == want.texts and out.fed > 0
