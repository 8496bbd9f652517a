"""Few programs: which calls share what is compiled, counted in the drivers' own caches."""

import jax
import numpy as np
import pytest

import decodax as dx
from decodax.algorithms.plain import Autoregressive
from decodax.algorithms.speculative import Rejection, Speculative
from decodax.algorithms.speculative.drafts import PromptLookup, TokenRecycling
from decodax.algorithms.speculative.trees import Fixed
from decodax.core import drivers
from decodax.core.types import Params
from decodax.io.load import LM
from decodax.models.config import llama
from decodax.models.transformer import Transformer
from decodax.sampling import build

VOCABULARY = 32
NETWORK = Transformer(llama(vocab=VOCABULARY, width=16, layers=1, heads=2, kv_heads=1, mlp=24, context=4096))
WEIGHTS = NETWORK.init_params(jax.random.key(0))
DRIVERS = {"begin": drivers.begin, "prefill": drivers.commit_prompts, "fan_out": drivers._fan_out,
           "refill": drivers._refill, "advance": drivers.advance}


class compiles:
    """How many programs of each driver are compiled inside."""

    def __enter__(self):
        jax.clear_caches()
        return self

    def __exit__(self, *error):
        self.count = {name: driver._cache_size() for name, driver in DRIVERS.items()}
        self.total = sum(self.count.values())


def prefilled(alg, **policy):
    chain = build(2, vocab_size=VOCABULARY, **policy)
    s = drivers.begin(alg, NETWORK, Params(WEIGHTS), chain, np.ones((2, 8), np.int32), np.array([8, 5], np.int32),
                      size=64, max_new=np.int32(9))
    return drivers.prefill(alg, NETWORK, Params(WEIGHTS), s, width=8)


def test_algorithms_and_policies_share_one_prefill():
    with compiles() as all_of_them:
        prefilled(Autoregressive())
        prefilled(Autoregressive(), temperature=0.7, top_p=0.9)
        prefilled(Speculative(PromptLookup(length=4), Rejection()), repetition_penalty=1.2)
    assert all_of_them.count["prefill"] == 1


@pytest.mark.wide
def test_a_draft_that_reads_prompts_has_a_prefill_of_its_own_for_all_verifiers():
    recycling = TokenRecycling(Fixed.balanced(2, 2), k=2, rows=VOCABULARY)
    with compiles() as all_of_them:
        prefilled(Autoregressive())
        s = prefilled(Speculative(recycling))
        prefilled(Speculative(recycling, Rejection()), temperature=0.7)
    assert all_of_them.count["prefill"] == 2
    assert (np.asarray(s.algo[0]) >= 0).any()       # it has learnt


LM1 = LM(model=NETWORK, params=WEIGHTS, vocab_size=VOCABULARY)


def prompt(length):
    return [3 + i % 11 for i in range(length)]


@pytest.mark.wide
def test_single_prompts_of_3_to_400_tokens_compile_at_most_8_programs():
    with compiles() as all_of_them:
        for length in np.linspace(3, 400, 25).astype(int):
            dx.generate(LM1, [prompt(length)], max_new_tokens=4)
    assert all_of_them.total <= 8, all_of_them.count


@pytest.mark.wide
def test_200_prompts_in_batches_of_16_compile_at_most_6_programs():
    """The last batch has 8 prompts."""
    ids = [prompt(3 + 2 * i) for i in range(200)]
    with compiles() as all_of_them:
        out = dx.generate(LM1, ids, max_new_tokens=4, batch_size=16)
    assert all_of_them.total <= 6, all_of_them.count
    assert len(out) == 200 and (out.lengths == 4).all()


@pytest.mark.wide
def test_batches_of_2_to_8_share_their_programs():
    with compiles() as all_of_them:
        for rows in range(2, 9):
            dx.generate(LM1, [prompt(5 + i) for i in range(rows)], max_new_tokens=4)
    assert all_of_them.count == {"begin": 1, "prefill": 1, "fan_out": 0, "refill": 0, "advance": 1}


@pytest.mark.wide
def test_bounded_runs_are_one_program_with_committed_weights():
    """As `dx.load` gives them, and as streams and servers run; an uncommitted state would be a second program."""
    params, policy = Params(jax.device_put(WEIGHTS, jax.devices()[0])), build(2, vocab_size=VOCABULARY)
    with compiles() as all_of_them:
        s = drivers.begin(Autoregressive(), NETWORK, params, policy, np.ones((2, 8), np.int32),
                          np.array([8, 5], np.int32), size=64, max_new=np.int32(9))
        s = drivers.prefill(Autoregressive(), NETWORK, params, s, width=8)
        for _ in range(3):
            s = drivers.advance(Autoregressive(), NETWORK, params, policy, s, np.int32(2))
    assert all_of_them.count["advance"] == all_of_them.count["begin"] == 1
    assert np.asarray(s.length).tolist() == [14, 11]


def test_numbers_of_samples_share_their_programs():
    with compiles() as all_of_them:
        for samples in range(2, 9):
            dx.generate(LM1, [prompt(5)], max_new_tokens=4, num_samples=samples, temperature=1.0)
    assert all_of_them.count == {"begin": 1, "prefill": 1, "fan_out": 1, "refill": 0, "advance": 1}


@pytest.mark.wide
@pytest.mark.parametrize("options", [
    {}, {"num_samples": 3}, {"batch_size": 4}, {"guidance_scale": 1.5},
    pytest.param({"algorithm": Speculative(PromptLookup(length=4))}, marks=pytest.mark.full)])
def test_rows_that_fill_up_a_batch_show_nowhere(options):
    """Alone, in a batch of 5 that runs as 8 rows, and in batches whose last one is ragged."""
    ids, n = [prompt(5 + 3 * i) for i in range(5)], options.get("num_samples", 1)
    each = dict(max_new_tokens=[3, 9, 4, 8, 5], temperature=1.0, seed=4, logprobs=1) | options
    whole = dx.generate(LM1, ids, **each)
    assert len(whole) == len(whole.stats.rounds) == len(whole.logprobs.raw) == 5 * n
    alone = {k: v for k, v in each.items() if k not in ("max_new_tokens", "batch_size")}
    for i, new in enumerate(each["max_new_tokens"]):
        one = dx.generate(LM1, [ids[i]], max_new_tokens=new, request_ids=[i], **alone)
        for k in range(n):
            row = i * n + k
            assert whole.row(row).tolist() == one.row(k).tolist()
            assert whole.stats.rounds[row] == one.stats.rounds[k] and whole.status[row] == one.status[k]
    if "batch_size" not in options:
        assert whole.stats.forwards == whole.stats.rounds.max()


@pytest.mark.wide
def test_counts_of_log_probabilities_share_their_programs():
    with compiles() as all_of_them:
        counts = [dx.generate(LM1, [prompt(5)], max_new_tokens=4, logprobs=n).logprobs.top.shape[-1] for n in (5, 6, 8)]
    assert counts == [5, 6, 8]
    assert all_of_them.count["advance"] == all_of_them.count["begin"] == 1
