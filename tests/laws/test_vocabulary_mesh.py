"""A vocabulary that is divided over devices stays so: head, statistics and draws exchange a few numbers a row.

The vocabulary has 500,000 entries, as the codebook of UniCode^2 (2025).
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from decodax.algorithms.beams import BeamSearch, DynamicBeams, StochasticBeams
from decodax.algorithms.contrastive.adadec import AdaDec
from decodax.algorithms.contrastive.contrastive_search import ContrastiveSearch
from decodax.algorithms.parallel.superposed import Superposed
from decodax.algorithms.plain import Autoregressive
from decodax.bench.report import collectives, parse
from decodax.core import drivers
from decodax.core.algorithm import name_of
from decodax.core.types import Params
from decodax.models.config import llama
from decodax.models.transformer import Transformer
from decodax.sampling import build
from decodax.sharding import place
from tests.matrix import often

pytestmark = pytest.mark.mesh

V = 500_000
PLAIN = Autoregressive()
NETWORK = Transformer(llama(vocab=V, width=8, layers=1, heads=4, kv_heads=4, mlp=8, context=64))
CHAINS: dict[str, dict[str, Any]] = {
    "greedy": {}, "temperature": dict(temperature=0.9), "top-p": dict(temperature=0.9, top_p=0.9),
    "top-k": dict(temperature=0.9, top_k=50), "min-p": dict(temperature=0.9, min_p=0.02)}


@functools.cache
def weights() -> Any:
    return jax.tree.map(lambda x: 8 * x, NETWORK.init_params(jax.random.key(0)))


def start(mesh: Any, chain: dict[str, Any], algorithm: Any = PLAIN) -> tuple[Any, ...]:
    params = Params(weights() if mesh is None else jax.device_put(weights(), NETWORK.shardings(mesh)),
                    algorithm.weights)
    policy, algorithm = place(mesh, build(4, vocab_size=V, **chain)), algorithm.bare()
    tokens, lengths = place(mesh, jnp.ones((4, 8), jnp.int32)), place(mesh, jnp.full(4, 8, jnp.int32))
    s = drivers.begin(algorithm, NETWORK, params, policy, tokens, lengths, size=32, max_new=np.int32(4))
    return algorithm, NETWORK, params, policy, s, jnp.int32(9)


@pytest.mark.wide
@pytest.mark.parametrize("chain", often(["greedy", "top-p", "top-k"], CHAINS))
def test_no_round_gathers_what_has_a_number_for_each_token(chain: str) -> None:
    check(CHAINS[chain])


@pytest.mark.wide
@pytest.mark.parametrize("search", [BeamSearch(2), StochasticBeams(k=3), ContrastiveSearch(8), *(
    pytest.param(search, marks=pytest.mark.full) for search in (
        DynamicBeams(2, phrases=((3,),)), AdaDec(), Superposed(2)))], ids=name_of)
def test_nor_does_one_of_a_search(search: Any) -> None:
    check({}, search)


def check(*chain: Any) -> None:
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        program = drivers.advance.lower(*start(mesh, *chain)).compile()
        waits = collectives(parse(program.as_text()))
        tokens = np.asarray(drivers.advance(*start(mesh, *chain)).tokens)
    assert waits        # of which each has less than a device has of one row
    assert max(math.prod(buffer.dims) for x, _ in waits for buffer in x.result) < V // 4
    assert np.array_equal(tokens, drivers.advance(*start(None, *chain)).tokens)
