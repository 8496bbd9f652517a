"""Seed-exact speculation gives the tokens of plain decoding, and a perfect draft is accepted whole."""

import itertools

import numpy as np
import pytest

from decodax.algorithms.plain import Autoregressive
from decodax.algorithms.speculative import Rejection, Speculative
from tests.laws.cases import LEFT_TO_RIGHT, MODELS, POLICIES, Sampled, Scripted, decode, prompts, texts
from tests.matrix import often

# on the smallest model the policies whose parts "together" lacks; every draft and model with "together"
OFTEN = [*(("toy", "lookup", policy) for policy in ("greedy", "penalised", "n-gram", "stateful")),
         ("llama", "lookup", "together"), ("sliding", "lookup", "together"), ("llama", "lookup-bigrams", "together"),
         ("llama", "lookup-long", "together")]


@pytest.mark.wide(but=("llama-lookup-long-together", "toy-lookup-greedy", "toy-lookup-penalised",
                       "toy-lookup-stateful"))
@pytest.mark.parametrize(("which", "draft", "policy"), often(OFTEN, itertools.product(MODELS, LEFT_TO_RIGHT, POLICIES)))
def test_speculative_equals_plain_decoding(which, draft, policy):
    ids = prompts(6)
    plain = decode(Autoregressive(), which, ids, POLICIES[policy], eos=[1])
    drafted = decode(LEFT_TO_RIGHT[draft], which, ids, POLICIES[policy], eos=[1])
    assert texts(drafted) == texts(plain)
    assert np.array_equal(drafted.status, plain.status)


@pytest.mark.wide
@pytest.mark.parametrize("rows", often([16], [1, 2, 5, 16, 64]))
def test_ragged_batches_of_any_size_equal_plain_decoding(rows):
    """Rows by turns sampled and greedy."""
    ids, policy = prompts(rows, longest=40, seed=rows), POLICIES["together"]
    policy = policy | dict(temperature=[0.7, 0.0] * (rows // 2) + [0.7] * (rows % 2))
    plain = decode(Autoregressive(), "llama", ids, policy, new=20)
    drafted = decode(LEFT_TO_RIGHT["lookup"], "llama", ids, policy, new=20)
    assert texts(drafted) == texts(plain)


@pytest.mark.wide
def test_a_draft_that_samples_equals_plain_decoding():
    ids = prompts(5)
    plain = decode(Autoregressive(), "toy", ids, POLICIES["together"])
    assert texts(decode(Speculative(Sampled()), "toy", ids, POLICIES["together"])) == texts(plain)


@pytest.mark.wide
@pytest.mark.parametrize("verify", often([Rejection()], [Speculative(Sampled()).verify, Rejection()]))
def test_greedy_decoding_has_one_result_whatever_the_verifier(verify):
    ids = prompts(5)
    plain = decode(Autoregressive(), "llama", ids, {})
    assert texts(decode(Speculative(Sampled(), verify), "llama", ids, {})) == texts(plain)


@pytest.mark.full
@pytest.mark.parametrize("policy", often(["penalised"], ["greedy", "sampled", "penalised"]))
def test_a_perfect_draft_is_accepted_whole(policy):
    ids = prompts(4)
    script = tuple(map(tuple, texts(decode(Autoregressive(), "llama", ids, POLICIES[policy], new=16))))
    s = decode(Speculative(Scripted(script, length=3)), "llama", ids, POLICIES[policy], new=16)
    assert texts(s) == [list(row) for row in script]
    stats = s.stats
    assert np.asarray(stats.rounds).tolist() == [4] * 4
    assert (1 + np.asarray(stats.accepted) / np.asarray(stats.rounds)).tolist() == [4.0] * 4      # K + 1
    assert np.asarray(stats.histogram).tolist() == [[0, 0, 0, 0, 4]] * 4


def test_lookup_finds_repeats():
    s = decode(LEFT_TO_RIGHT["lookup"], "toy", [[1, 2, 3, 4, 5, 6] * 3], {}, new=20)
    assert np.asarray(s.stats.drafted).sum() > 0
    assert np.asarray(s.stats.accepted).sum() <= np.asarray(s.stats.drafted).sum()
