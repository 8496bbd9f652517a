"""Every finished row has the status of its end, and its text is cut at the right token."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from decodax.algorithms.plain import Autoregressive
from decodax.core import drivers
from decodax.core.state import Status
from decodax.core.stops import StopTable
from decodax.core.types import Model, Params
from tests.laws.cases import ALGORITHMS, MASK, decode, model, prompts, start, texts
from tests.matrix import often

OFTEN = ["lookup", "llada"]      # a round of plain decoding is one without a draft
LETTERS = [bytes([97 + i]) for i in range(16)]


def script(alg, new=12):
    return texts(decode(alg, "llama", prompts(4), dict(temperature=1.0), new=new))


@pytest.mark.wide(but=("llada",))
@pytest.mark.parametrize("algorithm", often(OFTEN, ALGORITHMS))
def test_a_row_ends_with_its_first_end_of_sequence(algorithm):
    alg = ALGORITHMS[algorithm]
    free = script(alg)
    ends = [row[5] for row in free]
    s = decode(alg, "llama", prompts(4), dict(temperature=1.0), eos=np.array(ends)[:, None])
    for row, whole, end, status in zip(texts(s), free, ends, np.asarray(s.status), strict=True):
        assert row == whole[:whole.index(end) + 1]
        assert status == Status.EOS


@pytest.mark.parametrize("algorithm", often(OFTEN, ["autoregressive", "lookup", "llada"]))
def test_an_end_of_sequence_does_not_count_before_min_new(algorithm):
    alg = ALGORITHMS[algorithm]
    free = script(alg)
    end = free[0][2]
    for minimum in (2, 3):          # with 2 the first row may end with the token behind these two, with 3 it goes on
        s = decode(alg, "llama", prompts(4), dict(temperature=1.0), eos=[end], minimum=minimum)
        ends = [next((i for i, t in enumerate(row) if t == end and i >= minimum), len(row)) for row in free]
        assert texts(s) == [row[:i + 1] for row, i in zip(free, ends, strict=True)]
        assert (ends[0] == 2) == (minimum == 2)


@pytest.mark.parametrize("algorithm", often(OFTEN, ALGORITHMS))
def test_budgets_are_kept_row_by_row(algorithm):
    budgets = [0, 1, 5, 12]
    s = decode(ALGORITHMS[algorithm], "llama", prompts(4), dict(temperature=1.0), new=budgets)
    assert [len(t) for t in texts(s)] == budgets
    assert np.asarray(s.status).tolist() == [Status.LENGTH] * 4
    assert texts(s) == [row[:n] for row, n in zip(script(ALGORITHMS[algorithm]), budgets, strict=True)] \
        or algorithm.startswith("llada")           # a canvas is as long as its budget says, and sees all of itself


@pytest.mark.wide
@pytest.mark.parametrize("algorithm", often(["lookup"], ["autoregressive", "lookup", "lookup-rejection"]))
def test_a_full_buffer_is_a_status(algorithm):
    alg, ids = ALGORITHMS[algorithm], prompts(4, longest=20)
    roomy = script_of(alg, ids, 64)
    s = decode(alg, "llama", ids, dict(temperature=1.0), new=100, size=32)
    assert np.asarray(s.status).tolist() == [Status.CAPACITY] * 4
    assert np.asarray(s.length).tolist() == [32] * 4
    assert texts(s) == [row[:32 - len(p)] for row, p in zip(roomy, ids, strict=True)]


def script_of(alg, ids, size):
    return texts(decode(alg, "llama", ids, dict(temperature=1.0), new=36, size=size))


@pytest.mark.parametrize("algorithm", often(OFTEN, ["autoregressive", "lookup", "llada"]))
def test_a_stop_string_ends_a_row_across_token_borders(algorithm):
    alg = ALGORITHMS[algorithm]
    free = script(alg)
    word = b"".join(LETTERS[t] for t in free[0][3:6]).decode()
    network, params, chain, s = start(alg, "llama", prompts(4), dict(temperature=1.0))
    chain = chain.replace(stops=StopTable.build(LETTERS, [word]))
    s = s.replace(stop=chain.stops.start(4))
    s = drivers.advance(alg, network, params, chain, s, jnp.int32(100))
    for row, whole, status in zip(texts(s), free, np.asarray(s.status), strict=True):
        text = b"".join(LETTERS[t] for t in whole).decode()
        at = text.find(word)
        assert len(row) == (at + len(word) if at >= 0 else len(whole))
        assert status == (Status.STOP if at >= 0 else Status.LENGTH)


@dataclasses.dataclass(frozen=True)
class Broken(Model):
    """A model that gives NaN behind one token."""

    base: object
    token: int

    def init_cache(self, batch, capacity, *, params=None, inputs=None):
        return self.base.init_cache(batch, capacity)

    def apply(self, params, window, cache):
        out = self.base.apply(params, window, cache)
        bad = jnp.where(window.tokens == self.token, jnp.nan, 0.0)[..., None]
        return dataclasses.replace(out, hidden=out.hidden + bad)


SAMPLED = dict(temperature=1.0, top_p=0.9, repetition_penalty=1.2)


@pytest.mark.wide(but=("lookup-policy2",))
@pytest.mark.parametrize(("algorithm", "policy"), often(
    [("lookup", {}), ("lookup-rejection", SAMPLED)],
    itertools.product(("autoregressive", "lookup", "lookup-rejection"), ({}, SAMPLED))))
def test_a_nan_is_a_status_and_never_a_token(algorithm, policy):
    alg = ALGORITHMS[algorithm]
    ids = [[1, 2, 4], [4, 2], [9, 4, 9, 4]]
    free = texts(decode(alg, "llama", ids, policy))
    bad = free[0][4]
    ids = [[t if t != bad else (bad + 1) % 15 for t in row] for row in ids]
    free = texts(decode(alg, "llama", ids, policy))
    _, params, chain, s = start(alg, "llama", ids, policy)
    network = Broken(model("llama")[0], bad)
    s = drivers.advance(alg, network, params, chain, s, jnp.int32(100))
    for row, whole, status in zip(texts(s), free, np.asarray(s.status), strict=True):
        if bad in whole[:-1]:
            assert row == whole[:whole.index(bad) + 1] and status == Status.INVALID
        else:
            assert row == whole and status == Status.LENGTH


@pytest.mark.wide
def test_a_nan_in_the_prompt_is_a_status():
    network, weights = Broken(model("llama")[0], 5), Params(model("llama")[1])
    _, _, chain, s = start(Autoregressive(), "llama", [[1, 2, 3], [1, 5, 3]], {})
    fresh = drivers.begin(Autoregressive(), network, weights, chain, s.tokens[:, :8], s.prompt_length, size=64,
                          max_new=np.int32(4))
    s = drivers.prefill(Autoregressive(), network, weights, fresh, width=4)
    s = drivers.advance(Autoregressive(), network, weights, chain, s, jnp.int32(10))
    assert np.asarray(s.status).tolist() == [Status.LENGTH, Status.INVALID]
    assert len(texts(s)[1]) == 0


@pytest.mark.parametrize("algorithm", often(OFTEN, ALGORITHMS))
def test_a_policy_that_forbids_everything_is_a_status(algorithm):
    s = decode(ALGORITHMS[algorithm], "llama", prompts(3), dict(suppress_tokens=list(range(16)), temperature=1.0))
    assert np.asarray(s.status).tolist() == [Status.DEAD_END] * 3
    assert texts(s) == [[], [], []]


@pytest.mark.full      # test_diffusion.py says so of every sampler
def test_no_mask_reaches_the_text():
    for name in ("llada", "llada-quota", "llada-random-shifted"):
        assert not any(MASK in row for row in script(ALGORITHMS[name], new=16))
