"""Auto axes, Explicit axes and lanes on 8 CPU devices give the tokens of one device."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from decodax.core import drivers
from decodax.core.types import Params
from decodax.models.config import llama
from decodax.models.transformer import Transformer
from decodax.sampling import build
from decodax.sharding import lanes, place
from tests.laws.cases import ALGORITHMS, MASK, POLICIES, VOCABULARY, padded, prompts, texts
from tests.matrix import often

# in a process of their own (scripts/test.sh): JAX's CPU collectives have crashed in one that had also loaded torch
pytestmark = pytest.mark.mesh

NETWORK = Transformer(llama(vocab=VOCABULARY, width=32, layers=2, heads=8, kv_heads=4, mlp=64, context=256))
ROWS = 8


@functools.cache
def weights():
    return jax.tree.map(lambda x: x * 8 if x.ndim > 1 else x, NETWORK.init_params(jax.random.key(1)))


def decode(alg, policy, mesh=None, lane=False):
    tokens, lengths = padded(prompts(ROWS), 64)
    params = Params(weights() if mesh is None else jax.device_put(weights(), NETWORK.shardings(mesh)))
    chain = place(mesh, build(ROWS, vocab_size=VOCABULARY, eos_token_id=[1], **policy))
    tokens, lengths = place(mesh, jnp.asarray(tokens)), place(mesh, jnp.asarray(lengths))
    # one replica is done long before the other
    budget = np.repeat(np.int32([6, 20]), ROWS // 2)
    s = drivers.begin(alg, NETWORK, params, chain, tokens, lengths, size=64, max_new=budget, seed=np.uint32(7))
    s = drivers.prefill(alg, NETWORK, params, s, width=16)
    if lane:
        return jax.jit(lambda p, c, s: lanes(alg, NETWORK, p, c, s, jnp.int32(200), mesh))(params, chain, s)
    return drivers.advance(alg, NETWORK, params, chain, s, jnp.int32(200))


KINDS = "auto", "explicit", "lanes"
# of the others, drafts that are sampled have all that a round of plain decoding or of exact drafts has
OFTEN = [*itertools.product(KINDS, ("lookup-rejection", "llada"), ("together",)), ("auto", "autoregressive", "greedy")]


@functools.cache
def single(algorithm, policy):
    """The outcome on one device."""
    return decode(ALGORITHMS[algorithm], POLICIES[policy])


@pytest.mark.parametrize(("kind", "algorithm", "policy"), often(OFTEN, itertools.product(
    KINDS, ("autoregressive", "lookup", "lookup-rejection", "llada"), ("greedy", "together"))))
def test_a_mesh_gives_the_tokens_of_one_device(kind, algorithm, policy):
    if len(jax.devices()) < 8:
        pytest.skip("needs 8 devices: XLA_FLAGS=--xla_force_host_platform_device_count=8")
    if algorithm == "llada" and policy == "together":
        policy = "penalised"
    alg = ALGORITHMS[algorithm]
    one = single(algorithm, policy)
    if kind == "explicit":
        with jax.set_mesh(jax.make_mesh((2, 4), ("data", "model"))):
            many = decode(alg, POLICIES[policy], jax.sharding.get_mesh())
    else:
        mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
        many = decode(alg, POLICIES[policy], mesh, lane=kind == "lanes")
    assert texts(many) == texts(one)
    assert one.stats.rounds[:4].max() < one.stats.rounds[4:].max()
    assert np.array_equal(many.status, one.status)
    assert many.tokens.sharding.spec[0] == "data"
    if alg.traits.caches:
        assert many.cache.kv[0].sharding.spec[:2] == ("data", "model")
    assert all(MASK not in row for row in texts(many)) or algorithm != "llada"


def test_a_batch_that_does_not_divide_is_named():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    with pytest.raises(ValueError, match="batch: got 3 rows, takes a multiple of the 2 replicas"):
        place(mesh, jnp.zeros((3, 4)))
