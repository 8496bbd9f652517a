"""Draft model and target in two programs on devices of their own give the tokens of plain decoding."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from decodax.algorithms.plain import Autoregressive
from decodax.algorithms.speculative import Rejection, Speculative
from decodax.algorithms.speculative.drafts import DraftModel, PromptLookup
from decodax.algorithms.speculative.split import Costs, Split
from decodax.algorithms.speculative.trees import Chain
from decodax.common.struct import struct
from decodax.core import drivers
from decodax.core.types import Params
from decodax.models.config import llama
from decodax.models.transformer import Transformer
from decodax.sampling import build
from decodax.sampling.base import Context, Transform
from decodax.sharding import place
from tests.laws.cases import POLICIES, VOCABULARY, padded, prompts, texts

# in a process of their own, as those of tests/laws/test_mesh.py
pytestmark = pytest.mark.mesh

NETWORK = Transformer(llama(vocab=VOCABULARY, width=16, layers=1, heads=4, kv_heads=2, mlp=32, context=256))
SMALL = Transformer(llama(vocab=VOCABULARY, width=16, layers=1, heads=2, kv_heads=2, mlp=32, context=256))
ROWS = 4
EVEN = Costs((1.0, 1.0), (1.0, 1.0))


@functools.cache
def weights(network: Any = NETWORK) -> Any:
    return jax.tree.map(lambda x: x * 8 if x.ndim > 1 else x, network.init_params(jax.random.key(1)))


@struct
class Alternating(Transform):
    """Lets even and odd tokens through in turn."""

    by_token = True

    def init(self, ctx: Context) -> Any:
        return ctx.tokens[ctx.length - 1] % 2

    def logits(self, state: Any, ctx: Context, logits: Any) -> Any:
        return jnp.where(jnp.arange(logits.shape[-1]) % 2 == state, -jnp.inf, logits)

    def advance(self, state: Any, token: Any, log_prob: Any) -> Any:
        return token % 2


CHAINS: dict[str, Any] = {**POLICIES, "held": dict(transforms=(Alternating(),))}


def mesh_of(devices: Any, kind: AxisType = AxisType.Auto) -> Any:
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2, devices=devices)


def begun(alg: Any, policy: str, where: Any = None, draft: Any = None, new: int = 16) -> tuple[Any, ...]:
    """Weights, policy and a prefilled state, on a mesh or a device."""
    tokens, lengths = padded(prompts(ROWS), 64)
    mesh = where if isinstance(where, jax.sharding.Mesh) else None
    put = (lambda x: place(mesh, x)) if mesh else lambda x: jax.device_put(x, where)
    target = jax.device_put(weights(), NETWORK.shardings(mesh) if mesh else where)
    chain = put(build(ROWS, vocab_size=VOCABULARY, eos_token_id=[1] if policy != "greedy" else None, **CHAINS[policy]))
    params = Params(target, draft)
    s = drivers.begin(alg, NETWORK, params, chain, put(jnp.asarray(tokens)), put(jnp.asarray(lengths)), size=64,
                      max_new=np.full(ROWS, new, np.int32), seed=np.uint32(7))
    return params, chain, drivers.prefill(alg, NETWORK, params, s, width=32)


@functools.cache
def single(alg: Any, policy: str, draft: bool = False) -> Any:
    params, chain, s = begun(alg, policy, draft=weights(SMALL) if draft else None)
    return drivers.advance(alg, NETWORK, params, chain, s, jnp.int32(100))


def both() -> Any:
    if len(jax.devices()) < 8:
        pytest.skip("needs 8 devices: XLA_FLAGS=--xla_force_host_platform_device_count=8")
    return jax.devices()[:4], jax.devices()[4:]


def split_run(split: Split, policy: str, here: Any, there: Any, explicit: bool = False) -> Any:
    kind = AxisType.Explicit if explicit else AxisType.Auto
    mesh = mesh_of(here, kind)
    with jax.set_mesh(mesh):
        params, chain, s = begun(split.target, policy, mesh)
    beside = mesh_of(there) if len(there) > 1 else there[0]
    draft = jax.device_put(weights(SMALL), SMALL.shardings(beside) if len(there) > 1 else beside)
    side = split.begin(draft, chain, s, beside)
    s, side, first = split.advance(NETWORK, params.target, chain, s, side, max_rounds=2)
    s, side, rest = split.advance(NETWORK, params.target, chain, s, side, max_rounds=100)
    devices = lambda tree: set().union(*(x.sharding.device_set for x in jax.tree.leaves(tree)))
    assert devices(s) <= set(here) and devices(side) <= set(there)
    return s, (*first, *rest)


@pytest.mark.full
@pytest.mark.parametrize(("beside", "policy"), list(itertools.product(
    ("device", "mesh", "explicit"), ("greedy", "sampled", "together", "stateful", "held"))))
def test_two_programs_give_the_tokens_and_rounds_of_one(beside: str, policy: str) -> None:
    here, there = both()
    # first, so that no weights are made in the context of a mesh
    one = single(Speculative(DraftModel(SMALL), shape=Chain(3)), policy, draft=True)
    split = Split(DraftModel(SMALL), lengths=(3,))
    s, chosen = split_run(split, policy, here, there[:1] if beside == "device" else there, beside == "explicit")
    assert texts(s) == texts(single(Autoregressive(), policy))
    for field in ("rounds", "drafted", "accepted"):
        assert np.array_equal(getattr(s.stats, field), getattr(one.stats, field)), field
    assert np.array_equal(s.status, one.status) and len(chosen) == one.stats.rounds.max()
    assert set(chosen) == {3} and np.asarray(one.stats.accepted).sum() > 0


@functools.cache
def by_costs(costs: Costs) -> tuple[Any, tuple[int, ...]]:
    """The target as its own draft model, which is always right."""
    here, there = both()
    split = Split(DraftModel(NETWORK), lengths=(0, 3), costs=costs)
    params, chain, s = begun(split.target, "greedy", here[0])
    side = split.begin(jax.device_put(weights(), there[0]), chain, s, there[0])
    s, _, chosen = split.advance(NETWORK, params.target, chain, s, side, max_rounds=100)
    return s, chosen


@pytest.mark.full
def test_a_round_is_as_long_as_the_costs_of_verifying_say() -> None:
    # a wider window costs the target nothing: four tokens a round, of which the first sizes are known to hold
    s, chosen = by_costs(EVEN)
    assert texts(s) == texts(single(Autoregressive(), "greedy")) and chosen == (3,) * 4
    # it costs more than the tokens that it brings
    s, chosen = by_costs(Costs((0.1, 1.0), (1.0, 4.0)))
    assert texts(s) == texts(single(Autoregressive(), "greedy")) and chosen == (0,) * 16


@pytest.mark.wide
def test_costs_are_measured_while_the_text_is_written() -> None:
    here, there = both()
    split = Split(DraftModel(NETWORK), lengths=(0, 3))
    params, chain, s = begun(split.target, "greedy", here[0])
    side = split.begin(jax.device_put(weights(), there[0]), chain, s, there[0])
    with pytest.raises(ValueError, match=r"costs: got none for the sizes \(0, 3\)"):
        split.advance(NETWORK, params.target, chain, s, side, max_rounds=1)
    with pytest.raises(ValueError, match=r"devices: got a mesh with axes of types .*, takes Auto ones"):
        split.begin(None, chain, s, mesh_of(there, AxisType.Explicit))
    split, s, side = split.measured(NETWORK, params.target, chain, s, side, repeats=1)
    assert split.costs is not None and min(split.costs.total) > 0
    assert np.array_equal(s.length - s.prompt_length, [10] * ROWS)      # twice a round of 1 token and one of 4
    s, side, _ = split.advance(NETWORK, params.target, chain, s, side, max_rounds=100)
    assert texts(s) == texts(single(Autoregressive(), "greedy"))


def test_drafts_that_cannot_be_split_are_refused() -> None:
    draft: Any = PromptLookup()
    with pytest.raises(ValueError, match="draft: got PromptLookup, takes a DraftModel"):
        Split(draft)
    with pytest.raises(ValueError, match="verify: got Rejection, which compares distributions"):
        Split(DraftModel(SMALL), verify=Rejection())
    for lengths in ((), (0,), (4, 2), (-1, 2)):
        with pytest.raises(ValueError, match=r"lengths: got .*, takes numbers from 0 on, ascending"):
            Split(DraftModel(SMALL), lengths=lengths)
    with pytest.raises(ValueError, match="costs: got those of 2 and 2 sizes, takes one of each for the 1 lengths"):
        dataclasses.replace(Split(DraftModel(SMALL), lengths=(3,)), costs=EVEN)
