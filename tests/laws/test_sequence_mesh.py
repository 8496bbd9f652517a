"""Prompts read by a chain of devices or a pipeline, and requests that move between meshes: the same tokens."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from decodax.algorithms.plain import Autoregressive
from decodax.core import drivers
from decodax.core.types import Params
from decodax.models.config import llama
from decodax.models.transformer import Transformer
from decodax.sampling import build
from decodax.sharding import (
    LayerCost,
    PartitionTable,
    PrefillChain,
    PrefillPipeline,
    chain_time,
    chunks,
    partition,
    place,
)

NETWORK = Transformer(llama(vocab=16, width=16, layers=3, heads=4, kv_heads=2, mlp=24, context=256))
WEIGHTS = jax.tree.map(lambda x: 8 * x if x.ndim > 1 else x, NETWORK.init_params(jax.random.key(5)))
LENGTHS = np.array([41, 7, 1, 30], np.int32)
ALGORITHM = Autoregressive()


def begun(chain: Any) -> Any:
    tokens = np.random.default_rng(0).integers(0, 16, (4, 48)).astype(np.int32)
    return drivers.begin(ALGORITHM, NETWORK, Params(WEIGHTS), chain, tokens, LENGTHS, size=64, max_new=np.int32(12))


def policy() -> Any:
    return build(4, vocab_size=16, temperature=[0.0, 0.9, 0.9, 0.0], repetition_penalty=1.1)


def finished(s: Any, chain: Any, params: Any = None, rounds: int = 99) -> Any:
    return drivers.advance(ALGORITHM, NETWORK, params or Params(WEIGHTS), chain, s, jnp.int32(rounds))


@pytest.fixture(scope="module")
def wanted() -> np.ndarray:
    s = drivers.prefill(ALGORITHM, NETWORK, Params(WEIGHTS), begun(policy()), width=16)
    return np.asarray(finished(s, policy()).tokens)


@pytest.mark.mesh
def test_a_chain_of_slices_gives_the_tokens_of_one_device(wanted: np.ndarray) -> None:
    chain = PrefillChain.of(NETWORK, WEIGHTS, jax.devices()[:3])
    slices = partition(40, 3, NETWORK.depth, LayerCost.of(NETWORK, 4, 1e9))
    assert slices[0] > slices[2]
    s = chain.prefill(begun(policy()), slices)
    assert np.array_equal(finished(s, policy()).tokens, wanted)
    with pytest.raises(ValueError, match="takes 3 that add up to 40 tokens"):
        chain.prefill(begun(policy()), [20, 20])


@pytest.mark.mesh
@pytest.mark.parametrize("stages", [2, 3])
def test_a_pipeline_of_layers_gives_the_tokens_of_one_device(wanted: np.ndarray, stages: int) -> None:
    pipe = PrefillPipeline.of(NETWORK, WEIGHTS, jax.devices()[:stages])
    held = [sum(x.size for x in jax.tree.leaves(w["layers"])) for w in pipe.weights]
    assert sum(held) == sum(x.size for x in jax.tree.leaves(WEIGHTS["layers"]))
    sizes = chunks(40, 4e-4, NETWORK.depth, LayerCost.of(NETWORK, 4, 1e9), (4, 8, 16))
    assert len(set(sizes)) > 1 and sizes[0] >= sizes[-1]
    s = pipe.prefill(begun(policy()), sizes)
    assert np.array_equal(finished(s, policy()).tokens, wanted)


@pytest.mark.mesh
def test_requests_move_between_meshes_in_the_middle_of_decoding(wanted: np.ndarray) -> None:
    """AcceLLM's partners: a copy of a state on another mesh goes on with the same tokens, and so does the first one."""
    meshes = [jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[a:a + 4], axis_types=(AxisType.Auto,) * 2)
              for a in (0, 4)]
    s = drivers.prefill(ALGORITHM, NETWORK, Params(WEIGHTS), begun(policy()), width=16)
    chain = policy()
    for mesh, rounds in zip((*meshes, meshes[0]), (3, 4, 99), strict=True):
        params = Params(jax.device_put(WEIGHTS, NETWORK.shardings(mesh)))
        with jax.set_mesh(mesh):
            s, chain = place(mesh, s), place(mesh, chain)
            assert s.tokens.sharding.device_set == set(mesh.devices.flat)
            s = finished(s, chain, params, rounds)
    assert np.array_equal(s.tokens, wanted)


def best(tokens: int, devices: int, layers: int, cost: LayerCost, send: float) -> float:
    cuts = itertools.combinations(range(1, tokens), devices - 1)
    return min(chain_time([b - a for a, b in itertools.pairwise((0, *cut, tokens))], layers, cost, send)
               for cut in cuts)


@pytest.mark.parametrize(("tokens", "devices"), [(24, 2), (24, 3), (18, 4)])
@pytest.mark.parametrize("send", [0.0, 2.0])
@pytest.mark.parametrize("pair", [0.0, 0.3, 4.0])
def test_the_slices_found_are_the_best_of_all(tokens: int, devices: int, send: float, pair: float) -> None:
    cost = LayerCost(linear=3.0, pair=pair, fixed=1.0)
    found = partition(tokens, devices, 4, cost, send)
    assert sum(found) == tokens and len(found) == devices
    assert chain_time(found, 4, cost, send) <= 1.02 * best(tokens, devices, 4, cost, send)


def test_costs_are_fitted_to_measured_times_of_any_scale() -> None:
    true = LayerCost(4e-8, 1e-12, 2e-6)
    times = {(n, c): true(n, c) for n, c in itertools.product((1, 128, 4096), (0, 4096, 131072))}
    found = LayerCost.fit(times)
    np.testing.assert_allclose(dataclasses.astuple(found), dataclasses.astuple(true), rtol=1e-6)
    noise = np.random.default_rng(0)
    near = LayerCost.fit({at: time * noise.uniform(0.98, 1.02) for at, time in times.items()})
    assert abs(near(8192, 65536) / true(8192, 65536) - 1) < 0.05
    falling = LayerCost.fit({(n, 0): 1 - 0.01 * n for n in (1, 2, 3, 4)})      # no time falls with the tokens
    assert falling.linear == falling.pair == 0 and falling.fixed == pytest.approx(0.975)
    with pytest.raises(ValueError, match=r"^times: got 2"):
        LayerCost.fit({(1, 0): 1.0, (2, 0): 2.0})


def test_a_table_of_partitions_is_nearly_the_search_between_its_lengths() -> None:
    cost = LayerCost(4e-8, 1e-11)
    found = lambda tokens: partition(tokens, 4, 8, cost, 1e-8, unit=64)
    table = PartitionTable({n: found(n) for n in (4096, 16384, 65536)})
    for tokens in (4096, 9000, 30000, 65536):
        slices, searched = table(tokens), found(tokens)
        assert sum(slices) == tokens and len(slices) == 4
        even, best, near = (chain_time(x, 8, cost, 1e-8) for x in ([tokens // 4] * 4, searched, slices))
        assert best < 0.98 * even and near < 1.03 * best
    assert table(4) == [1] * 4 and table(16384) == list(table.known[16384])
    for known in ({}, {8: [4, 4], 9: [3, 3, 3]}, {8: [4, 5]}):
        with pytest.raises(ValueError, match=r"^known: got"):
            PartitionTable(known)
    with pytest.raises(ValueError, match=r"^tokens: got 3 for 4"):
        table(3)


def test_no_chunk_takes_longer_than_the_budget_and_none_could_be_longer() -> None:
    cost, sizes = LayerCost(linear=1.0, pair=0.01), (8, 16, 32, 64)
    found = chunks(1000, 200.0, 2, cost, sizes)
    assert sum(found) == 1000 and found[0] == 64 and found[-2] < 64
    for i, size in enumerate(found[:-1]):
        before = sum(found[:i])
        assert 2 * cost(size, before) <= 200.0 or size == 8
        assert all(2 * cost(more, before) > 200.0 for more in sizes if more > size)
