"""Context parallelism on virtual devices: the tokens of one device, whatever travels."""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import decodax as dx
from decodax.bench.report import collectives, parse
from decodax.common.axes import CONTEXT
from decodax.core import drivers
from decodax.core.types import Params
from decodax.sampling import build
from decodax.sharding import lanes, place
from tests.caches.small import DEEP, LOOKUP, SMALL, with_sinks_in
from tests.laws.cases import padded
from tests.matrix import often
from tests.meshes import mesh_of, spread

pytestmark = pytest.mark.mesh

PROMPTS = [np.random.default_rng(i).integers(0, 16, n).tolist() for i, n in enumerate((141, 126, 5, 77))]
"""In chunks of 32: several blocks, one of them unfinished, and a prompt within the first."""
MIXED: dict[str, Any] = dict(max_new_tokens=20, chunk=32, temperature=[0, 0.9, 0, 0.9], seed=3, logprobs=0)
MODES: dict[str, dict[str, Any]] = {
    # nothing is hidden and queries are as many as keys: keys travel in the first chunk and queries in the others
    "auto": dict(flops=1e30), "pass-kv": dict(mode="pass-kv"), "pass-q": dict(mode="pass-q")}
SHAPES = (1, 1, 8), (2, 2, 2), (1, 2, 4)
METHODS = {"plain": None, "drafts": LOOKUP}


def divided(shape: tuple[int, ...], kind: AxisType = AxisType.Auto) -> Mesh:
    return mesh_of(kind, **dict(zip(("data", "model", CONTEXT), shape, strict=True)))


@pytest.mark.parametrize(("shape", "kind", "mode", "method"), often(
    [((2, 2, 2), AxisType.Explicit, "auto", "drafts")],
    itertools.product(SHAPES, list(AxisType)[:2], MODES, METHODS)))
def test_a_divided_cache_gives_the_tokens_of_one_device(shape: tuple[int, ...], kind: AxisType, mode: str,
                                                        method: str) -> None:
    want = dx.generate(SMALL, PROMPTS, algorithm=METHODS[method], **MIXED)
    got = dx.generate(spread(SMALL, divided(shape, kind)), PROMPTS, algorithm=METHODS[method],
                      cache=dx.caches.make("context-parallel", block=32, **MODES[mode]), **MIXED)
    assert got.tokens.tolist() == want.tokens.tolist()
    np.testing.assert_allclose(got.logprobs.raw, want.logprobs.raw, atol=1e-5)


@pytest.mark.wide
@pytest.mark.parametrize("mode", ["pass-kv", "pass-q"])
def test_sinks_join_the_softmax_once_over_all_devices(mode: str) -> None:
    lm = with_sinks_in(SMALL)
    got = dx.generate(spread(lm, divided((1, 2, 4))), PROMPTS,
                      cache=dx.caches.make("context-parallel", block=32, **MODES[mode]), **MIXED)
    want = dx.generate(lm, PROMPTS, **MIXED)
    assert got.tokens.tolist() == want.tokens.tolist()
    np.testing.assert_allclose(got.logprobs.raw, want.logprobs.raw, atol=1e-5)
    assert got.tokens.tolist() != dx.generate(SMALL, PROMPTS, **MIXED).tokens.tolist()


def prefilled(mesh: Mesh, chunk: int = 32) -> tuple[Any, ...]:
    """The state behind the prompts, and what goes on from it."""
    lm, alg = spread(DEEP, mesh), dx.Autoregressive()
    model = lm.model.with_cache(dx.caches.make("context-parallel", mode="pass-kv", block=32))
    ids, lengths = padded(PROMPTS, 256)
    chain, params = place(mesh, build(4, vocab_size=16)), Params(lm.params)
    s = drivers.begin(alg, model, params, chain, place(mesh, jnp.asarray(ids)), place(mesh, jnp.asarray(lengths)),
                      size=256, max_new=np.array([3, 9, 20, 12], np.int32))
    return alg, model, params, chain, drivers.prefill(alg, model, params, s, width=chunk)


def elements(found: tuple[Any, Any]) -> int:
    """The most that an array of a collective has."""
    return max(math.prod(buffer.dims) for buffer in found[0].result)


@pytest.mark.wide
def test_the_cache_stays_divided_and_a_round_has_one_exchange_a_layer() -> None:
    mesh = divided((1, 2, 4))
    with jax.set_mesh(mesh):
        alg, model, params, chain, s = prefilled(mesh)
        layer, seen = s.cache.kv[0], s.replace(cache=None, algo=None, policy=None, record=None, stats=None)
        assert layer.sharding.spec[1:] == ("model", CONTEXT)
        assert {x.data.size * 8 for x in layer.addressable_shards} == {layer.size}
        prompts = drivers.commit_prompts.lower(None, model, params, (s.cache, None), seen, width=32, rows=4)
        rounds = drivers.advance.lower(alg, model, params, chain, s, jnp.int32(99))
        prompts, rounds = (collectives(parse(x.compile().as_text())) for x in (prompts, rounds))
    axis = sorted([int(device.id) for device in row] for row in mesh.devices[0])
    assert [x.opcode for x, groups in rounds if sorted(groups) == axis] == ["all-gather"] * DEEP.model.depth
    assert all(x.opcode != "collective-permute" for x, _ in rounds)
    # outputs of 4 rows in a round, keys or values of a device in a prompt: never a layer
    assert max(map(elements, rounds)) <= 4 * 4 * 4 * 5 < layer.size / 8
    assert any(x.opcode.startswith("collective-permute") for x, _ in prompts)
    assert max(map(elements, prompts)) < layer.size / 8


@pytest.mark.full
def test_lanes_attend_a_divided_cache() -> None:
    mesh = divided((2, 1, 4))
    with jax.set_mesh(mesh):
        alg, model, params, chain, s = prefilled(mesh)
        done = jax.jit(lambda p, c, s: lanes(alg, model, p, c, s, jnp.int32(99), mesh))(params, chain, s)
    want = dx.generate(DEEP, PROMPTS, max_new_tokens=[3, 9, 20, 12])
    for i, prompt in enumerate(PROMPTS):
        assert done.tokens[i, len(prompt):done.length[i]].tolist() == want.tokens[i, :want.lengths[i]].tolist()
