"""Two halves of a batch in one loop: the tokens of `run`, and no collective of one half waits for the other."""

import functools
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from decodax.algorithms.beams import BeamSearch
from decodax.bench.report import Instruction, Program, collectives, parse
from decodax.core import drivers
from decodax.core.round import run
from decodax.core.types import Params
from decodax.models.config import llama
from decodax.models.transformer import Transformer
from decodax.sampling import build
from decodax.sharding import place, weave
from tests.laws.cases import ALGORITHMS, POLICIES, VOCABULARY, padded, prompts, texts

# in a process of their own, as those of tests/laws/test_mesh.py
pytestmark = pytest.mark.mesh

LAYERS = 1
NETWORK = Transformer(llama(vocab=VOCABULARY, width=16, layers=LAYERS, heads=4, kv_heads=4, mlp=16, context=128))
ROWS = 6        # three a replica, so the halves have two rows and four


@functools.cache
def weights() -> Any:
    return jax.tree.map(lambda x: x * 8 if x.ndim > 1 else x, NETWORK.init_params(jax.random.key(1)))


def begun(algorithm: str, policy: str, mesh: Any = None) -> tuple[Any, ...]:
    tokens, lengths = padded(prompts(ROWS), 48)
    params = Params(weights() if mesh is None else jax.device_put(weights(), NETWORK.shardings(mesh)))
    chain = place(mesh, build(ROWS, vocab_size=VOCABULARY, eos_token_id=[1], **POLICIES[policy]))
    tokens, lengths = place(mesh, jnp.asarray(tokens)), place(mesh, jnp.asarray(lengths))
    alg = ALGORITHMS[algorithm]
    s = drivers.begin(alg, NETWORK, params, chain, tokens, lengths, size=48, seed=np.uint32(7),
                      max_new=np.int32([4, 12, 16, 5, 9, 3]))
    return alg, params, chain, drivers.prefill(alg, NETWORK, params, s, width=24)


@functools.cache
def single(algorithm: str, policy: str) -> Any:
    alg, params, chain, s = begun(algorithm, policy)
    return drivers.advance(alg, NETWORK, params, chain, s, jnp.int32(100))


def mesh_of(kind: AxisType) -> Any:
    if len(jax.devices()) < 8:
        pytest.skip("needs 8 devices: XLA_FLAGS=--xla_force_host_platform_device_count=8")
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2)


def equal(many: Any, one: Any) -> None:
    assert texts(many) == texts(one)
    assert np.array_equal(many.status, one.status) and np.array_equal(many.stats.rounds, one.stats.rounds)
    assert many.tokens.sharding.spec[0] == "data"


def reads(program: Program, body: str) -> dict[str, frozenset[int]]:
    """For each collective of a loop's body, or what calls one: which entries of the carry it depends on, of those that
    the body changes."""
    lines = program.computations[body]
    views = ("copy", "bitcast")
    origin = lambda x: origin(lines[x.operands[0]]) if x.opcode in views else x
    given: dict[str, int] = {}
    for x in lines.values():
        if x.opcode == "get-tuple-element" and lines[x.operands[0]].opcode == "parameter":
            found = re.search(r"index=(\d+)", x.text)
            assert found
            given[x.name] = int(found.group(1))
    root = next(x for x in lines.values() if x.root)
    kept = {i for i, name in enumerate(root.operands) if given.get(origin(lines[name]).name) == i}
    known: dict[str, frozenset[int]] = {}

    def of(name: str) -> frozenset[int]:
        if name not in known:
            own = frozenset({given[name]} - kept) if name in given else frozenset()
            known[name] = own.union(*map(of, [] if name in given else lines[name].operands))
        return known[name]

    return {x.name: of(x.name) for x in lines.values() if waits(program, x)}


def waits(program: Program, x: Instruction) -> int:
    """How many collectives an instruction is, or calls."""
    called = [*re.findall(r"(?:calls|body|condition|to_apply)=%?([\w.\-]+)", x.text), *x.branches]
    inside = sum(len(collectives(program, c)) for c in called) if x.opcode in ("while", "conditional", "call") else 0
    return inside + (x.opcode.startswith(("all-", "reduce-scatter", "collective-")) and not x.opcode.endswith("-done"))


def apart(text: str) -> list[int]:
    """The collectives of a round in groups that share nothing that a round changes: how many each has."""
    program = parse(text)
    loop = max(program.loops(), key=lambda x: len(collectives(program, x.attribute("body"))))
    body = loop.attribute("body") or ""
    groups: list[tuple[frozenset[int], int]] = []
    for name, depends in reads(program, body).items():
        count = waits(program, program.computations[body][name])
        if not depends:         # on constants and weights alone
            continue
        touched = [g for g in groups if g[0] & depends]
        groups = [g for g in groups if not g[0] & depends]
        groups.append((depends.union(*(g[0] for g in touched)), count + sum(g[1] for g in touched)))
    return sorted(count for _, count in groups)


@pytest.mark.wide
def test_no_collective_of_one_half_depends_on_the_other() -> None:
    mesh = mesh_of(AxisType.Auto)
    alg, params, chain, s = begun("autoregressive", "sampled", mesh)
    lowered = jax.jit(lambda params, chain, s, rounds: weave(alg, NETWORK, params, chain, s, rounds, mesh)).lower(
        params, chain, s, jnp.int32(100))
    # XLA would combine sums of one half with sums of the other
    woven = lowered.compile(compiler_options={"xla_disable_hlo_passes": "cpu-all-reduce-combiner"})
    equal(woven(params, chain, s, jnp.int32(100)), single("autoregressive", "sampled"))
    halves = apart(woven.as_text())
    assert len(halves) == 2 and halves[0] >= 2 * LAYERS         # the sums behind attention and MLP


@pytest.mark.full
def test_of_one_batch_all_collectives_hang_together() -> None:
    mesh = mesh_of(AxisType.Auto)
    alg, params, chain, s = begun("autoregressive", "sampled", mesh)
    lowered = jax.jit(lambda params, chain, s, rounds: run(alg, NETWORK, params, chain, s, rounds)).lower(
        params, chain, s, jnp.int32(100))
    compiled = lowered.compile(compiler_options={"xla_disable_hlo_passes": "cpu-all-reduce-combiner"})
    assert len(apart(compiled.as_text())) == 1


@pytest.mark.full
@pytest.mark.parametrize(("kind", "algorithm", "policy"), list(itertools.product(
    ("auto", "explicit"), ("autoregressive", "lookup", "lookup-rejection", "llada"), ("greedy", "sampled"))))
def test_halves_give_the_tokens_of_one_batch(kind: str, algorithm: str, policy: str) -> None:
    mesh = mesh_of(AxisType.Explicit if kind == "explicit" else AxisType.Auto)
    woven = jax.jit(lambda alg, params, chain, s, rounds: weave(alg, NETWORK, params, chain, s, rounds, mesh),
                    static_argnums=0)

    def decode() -> Any:
        alg, params, chain, s = begun(algorithm, policy, mesh)
        for rounds in (2, 100):         # between calls the state is whole
            s = woven(alg, params, chain, s, jnp.int32(rounds))
        return s

    if kind == "explicit":
        with jax.set_mesh(mesh):
            equal(decode(), single(algorithm, policy))
    else:
        equal(decode(), single(algorithm, policy))


def test_batches_that_cannot_be_halved_are_refused() -> None:
    mesh = mesh_of(AxisType.Auto)
    alg, params, chain, s = begun("autoregressive", "greedy")
    with pytest.raises(ValueError, match="s: got 3 rows, takes a multiple of 2 replicas"):
        weave(alg, NETWORK, params, chain, s.select(jnp.arange(3)), 1, mesh)
    with pytest.raises(ValueError, match=r"alg: got .*, which works on 2 rows of a prompt together"):
        weave(BeamSearch(2), NETWORK, params, chain, s, 1, mesh)
