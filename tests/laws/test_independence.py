"""The tokens of a row do not depend on how rows are batched, ordered, padded, read in chunks or streamed."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from decodax.algorithms.plain import Autoregressive
from decodax.core import drivers
from decodax.core.round import python_loop, run
from tests.laws.cases import ALGORITHMS, ANY_ORDER, POLICIES, decode, prompts, start, texts
from tests.matrix import often

IDS = prompts(4)        # the same in every test, so that they share programs


def takes(algorithm: str, policy: str) -> bool:
    return policy in ANY_ORDER or not algorithm.startswith("llada")


# each algorithm with the policy that has most in it of those that it takes; greedy batches take another branch
CASES = [(a, "together" if takes(a, "together") else "penalised") for a in ALGORITHMS]
CASES += [(a, "greedy") for a in ("autoregressive", "lookup", "llada")]
CASES = often([("lookup", "together"), ("llada-random-shifted", "penalised")], CASES)


@pytest.mark.wide(but=("lookup-together",))
@pytest.mark.parametrize(("algorithm", "policy"), CASES)
def test_a_row_does_not_depend_on_its_batch_mates_or_their_order(algorithm, policy):
    ids, alg = IDS, ALGORITHMS[algorithm]
    together = texts(decode(alg, "llama", ids, POLICIES[policy]))
    for i in (0, 3):
        assert texts(decode(alg, "llama", [ids[i]], POLICIES[policy], request=[i])) == [together[i]]
    back = decode(alg, "llama", ids[::-1], POLICIES[policy], request=[3, 2, 1, 0])
    assert texts(back) == together[::-1]


@pytest.mark.wide
@pytest.mark.parametrize(("algorithm", "policy"), CASES)
def test_a_row_does_not_depend_on_padding_or_chunks(algorithm, policy):
    ids, alg = IDS, ALGORITHMS[algorithm]
    one = texts(decode(alg, "llama", ids, POLICIES[policy]))
    assert texts(decode(alg, "llama", ids, POLICIES[policy], width=5)) == one
    assert texts(decode(alg, "llama", ids, POLICIES[policy], size=256)) == one


@pytest.mark.parametrize(("algorithm", "policy"), CASES)
def test_python_loop_bursts_and_one_run_agree(algorithm, policy):
    ids, alg = IDS, ALGORITHMS[algorithm]
    whole = decode(alg, "llama", ids, POLICIES[policy])
    network, params, chain, s = start(alg, "llama", ids, POLICIES[policy])
    eager = run(alg, network, params, chain, s, 500, loop=python_loop)
    assert np.array_equal(eager.tokens, whole.tokens) and np.array_equal(eager.status, whole.status)
    network, params, chain, s = start(alg, "llama", ids, POLICIES[policy])
    bursts = 0
    while bool(s.running.any()):
        s = drivers.advance(alg, network, params, chain, s, jnp.int32(3))
        bursts += 1
    assert bursts > 1
    assert np.array_equal(s.tokens, whole.tokens) and np.array_equal(s.status, whole.status)


def test_seeds_requests_and_samples_address_different_draws():
    ids = [[1, 2, 3]] * 3
    policy = POLICIES["sampled"]
    plain = texts(decode(ALGORITHMS["autoregressive"], "llama", ids, policy, new=16))
    assert len({tuple(t) for t in plain}) == 3                            # requests differ
    again = texts(decode(ALGORITHMS["autoregressive"], "llama", ids, policy, new=16, seed=8))
    assert all(a != b for a, b in zip(plain, again, strict=True))         # seeds differ
    mixed = decode(ALGORITHMS["autoregressive"], "llama", ids, policy, new=16, seed=[7, 8, 7])
    assert texts(mixed) == [plain[0], again[1], plain[2]]                 # and belong to a row


def test_algorithms_are_values():
    assert all(dataclasses.replace(a) == a and hash(dataclasses.replace(a)) == hash(a) for a in ALGORITHMS.values())


@pytest.mark.wide(but=("llada",))
@pytest.mark.parametrize("algorithm", often(["lookup", "llada"], ALGORITHMS))
def test_a_selected_state_decodes_as_the_rows_it_came_from(algorithm):
    alg, ids, policy = ALGORITHMS[algorithm], prompts(3), POLICIES["sampled"]
    plain = texts(decode(alg, "llama", ids, policy))
    network, params, chain, s = start(alg, "llama", ids, policy)
    s = drivers.advance(alg, network, params, chain, s, jnp.int32(2))
    rows = jnp.array([2, 0, 2])
    s = drivers.advance(alg, network, params, chain.select(rows), s.select(rows), jnp.int32(100))
    assert texts(s) == [plain[2], plain[0], plain[2]]


def test_one_token_of_prompt_needs_no_prefill():
    assert len(texts(decode(Autoregressive(), "llama", [[3]], {}))[0]) == 12
