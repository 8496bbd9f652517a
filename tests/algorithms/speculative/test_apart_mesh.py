"""Draft model and target on halves of a mesh give the tokens and the rounds of one device."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from decodax.algorithms.plain import Autoregressive
from decodax.algorithms.speculative import Lengths, Speculative
from decodax.algorithms.speculative.adaptive.lengths import always
from decodax.algorithms.speculative.drafts import DraftModel, PromptLookup, SpecBranch
from decodax.algorithms.speculative.halves import apart
from decodax.core import drivers
from decodax.core.types import Params
from decodax.models.config import llama
from decodax.models.transformer import Transformer
from decodax.sampling import build
from decodax.sharding import place
from tests.laws.cases import POLICIES, VOCABULARY, padded, prompts, texts

# in a process of their own, as those of tests/laws/test_mesh.py
pytestmark = pytest.mark.mesh

NETWORK = Transformer(llama(vocab=VOCABULARY, width=16, layers=1, heads=4, kv_heads=2, mlp=32, context=256))
ROWS = 4
DRAFTS = {"pearl": SpecBranch(DraftModel(NETWORK), 3, 1, 0.0),
          "specbranch": SpecBranch(DraftModel(NETWORK), 3, 2, 0.2, Lengths(layers=1))}


@functools.cache
def weights():
    keys = jax.random.split(jax.random.key(5), 100)
    target = jax.tree.map(lambda x: x * 8 if x.ndim > 1 else x, NETWORK.init_params(jax.random.key(1)))
    leaves, form = jax.tree.flatten(target)
    near = [x + 0.3 * x.std() * jax.random.normal(k, x.shape) if x.ndim > 1 else x
            for x, k in zip(leaves, keys, strict=False)]
    return target, jax.tree.unflatten(form, near)


def begun(name, policy, mesh=None):
    tokens, lengths = padded(prompts(ROWS), 64)
    put = lambda x: x if mesh is None else jax.device_put(x, NETWORK.shardings(mesh))
    target, near = map(put, weights())
    alg = Autoregressive() if name is None else Speculative(DRAFTS[name])
    if name == "specbranch":        # by what the target's state says of it: some continuations do not wait, some do
        by_state = always(0, 16, VOCABULARY) | dict(hidden=jnp.ones((16, 1)), second=jnp.ones((1, 1)),
                                                    third=jnp.array([[0.0, 0, 2]]))
        near = {"source": near, "lengths": by_state}
    params = Params(target, None if name is None else near)
    chain = place(mesh, build(ROWS, vocab_size=VOCABULARY, eos_token_id=[1], **POLICIES[policy]))
    tokens, lengths = place(mesh, jnp.asarray(tokens)), place(mesh, jnp.asarray(lengths))
    s = drivers.begin(alg, NETWORK, params, chain, tokens, lengths, size=64, max_new=np.full(ROWS, 16, np.int32),
                      seed=np.uint32(7))
    return alg, params, chain, drivers.prefill(alg, NETWORK, params, s, width=16)


@functools.cache
def single(name, policy):
    alg, params, chain, s = begun(name, policy)
    return drivers.advance(alg, NETWORK, params, chain, s, jnp.int32(200))


def halves(data, model):
    count = 2 * data * model
    if len(jax.devices()) < count:
        pytest.skip(f"needs {count} devices: XLA_FLAGS=--xla_force_host_platform_device_count=8")
    return jax.make_mesh((2, data, model), ("role", "data", "model"), axis_types=(AxisType.Auto,) * 3,
                         devices=jax.devices()[:count])


def program(alg, mesh):
    return jax.jit(lambda params, chain, s, rounds: apart(alg, NETWORK, params, chain, s, rounds, mesh))


def equal(s, one):
    assert texts(s) == texts(one)
    for field in ("rounds", "drafted", "accepted"):
        assert np.array_equal(getattr(s.stats, field), getattr(one.stats, field)), field
    assert np.asarray(one.stats.accepted).sum() > 0
    assert np.array_equal(s.status, one.status)


@pytest.mark.wide
def test_halves_exchange_tokens_alone_and_give_those_of_one_device():
    mesh = halves(4, 1)
    alg, params, chain, s = begun("pearl", "sampled", mesh)
    rounds = jnp.int32(200)
    compiled = program(alg, mesh).lower(params, chain, s, rounds).compile()
    equal(compiled(params, chain, s, rounds), single("pearl", "sampled"))
    inside = [line for line in compiled.as_text().splitlines() if "while/body" in line]
    exchanged = [line.split("all-reduce(")[0] for line in inside if re.search(r"= .*all-reduce\(", line)]
    assert exchanged and not any(re.search(r"\b(f32|bf16)\[", made) for made in exchanged)
    # each model's products stand in a branch that its half takes
    products = [line for line in inside if re.search(r" dot\(", line)]
    assert products and all("/branch_1_fun/" in line for line in products)


@pytest.mark.full
@pytest.mark.parametrize(("name", "policy"), [("pearl", "greedy"), ("specbranch", "stateful")])
def test_weights_and_rows_are_divided_within_a_half(name, policy):
    mesh = halves(2, 2)
    alg, params, chain, s = begun(name, policy, mesh)
    run = program(alg, mesh)
    for rounds in (3, 200):         # between calls the state is whole
        s = run(params, chain, s, jnp.int32(rounds))
    equal(s, single(name, policy))
    assert texts(s) == texts(single(None, policy))


def test_methods_and_meshes_without_two_roles_are_refused_by_name():
    mesh = halves(1, 1)
    alg, params, chain, s = begun("pearl", "greedy")
    with pytest.raises(ValueError, match=r"alg: got Speculative\(PromptLookup\), takes Speculative with drafts that"):
        apart(Speculative(PromptLookup()), NETWORK, params, chain, s, 1, mesh)
    plain = jax.make_mesh((1, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:2])
    with pytest.raises(ValueError, match=r"mesh: got axes .*, takes one with an axis 'role' of size 2"):
        apart(alg, NETWORK, params, chain, s, 1, plain)
