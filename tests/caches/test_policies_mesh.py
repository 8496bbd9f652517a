"""Cache policies over a mesh: rows over one axis, heads over the other."""

import pytest
from jax.sharding import AxisType

import decodax as dx
from decodax.caches import blended, edited, make, read_prefix
from decodax.caches.prefix.kvshare import KVShareConfig
from decodax.io.load import LM
from tests.caches.small import DEEP, DEEPER, LOOKUP, OPTIONS, PROMPTS, SMALL
from tests.matrix import often
from tests.meshes import mesh_of, spread

pytestmark = pytest.mark.mesh


@pytest.mark.wide
@pytest.mark.parametrize("kind", often([AxisType.Auto], list(AxisType)[:2]))
@pytest.mark.parametrize("name", often(["adakv"], OPTIONS))
def test_a_mesh_gives_the_tokens_of_one_device(name: str, kind: AxisType) -> None:
    mesh = mesh_of(kind, data=2, model=2)
    lm = DEEP if name in DEEPER else SMALL
    prompts = [*PROMPTS, PROMPTS[0][:30]]
    out, alone = (dx.generate(lm, prompts, cache=make(name, **OPTIONS[name]), max_new_tokens=16, algorithm=LOOKUP)
                  for lm in (spread(lm, mesh), lm))
    assert out.tokens.tolist() == alone.tokens.tolist()


@pytest.mark.wide
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_mesh_gives_the_tokens_of_one_device_with_pages_on_each_host(kind: AxisType) -> None:
    mesh = mesh_of(kind, data=2, model=2)
    cache = make("quest", **OPTIONS["quest"], offload=True)
    out, alone = (dx.generate(lm, PROMPTS[:2], cache=cache, max_new_tokens=8, algorithm=LOOKUP, num_samples=samples)
                  for lm, samples in ((spread(SMALL, mesh), 2), (SMALL, 2)))
    assert out.tokens.tolist() == alone.tokens.tolist()


@pytest.mark.wide
@pytest.mark.parametrize("kind", often([AxisType.Explicit], list(AxisType)[:2]))
def test_texts_are_read_edited_put_together_and_brought_there(kind: AxisType) -> None:
    mesh = mesh_of(kind, data=2, model=2)

    def answers(lm: LM) -> list[list[list[int]]]:
        one, other = (read_prefix(lm, text) for text in PROMPTS[:2])
        both = blended(lm, [edited(lm, one, 3, 5, [7, 7, 7]), other], recompute=0.3, score="kvshare")
        caches = None, make("kivi", **OPTIONS["kivi"]), KVShareConfig(tokens=2)
        return [dx.generate(lm, [[3, 1], [2]], context=both, cache=cache, max_new_tokens=6).tokens.tolist()
                for cache in caches]

    assert answers(spread(DEEP, mesh)) == answers(DEEP)
