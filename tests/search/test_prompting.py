"""Several ways to ask, rows that write together, and rules that ask a model about the candidates."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax import search, select
from decodax.core.window import causal
from decodax.io.text import Tokenizer
from decodax.select import Candidates
from tests.laws.cases import lm as worded
from tests.small_tokenizers import of_words

SHORT: dict[str, Any] = dict(max_new_tokens=8, min_new_tokens=8)


@pytest.mark.wide
def test_rows_write_by_the_mean_of_their_logits() -> None:
    lm = worded("llama")
    template = lambda prompt, answer: prompt + answer
    short = dict(max_new_tokens=4, min_new_tokens=4)
    out = search.integrate(lm, ["abcd", "h"], 3, template=template, seed=5, **short)
    assert [len(set(row)) > 1 for row in out.samples] == [True, True]
    apply = jax.jit(lambda params, ids: lm.model.apply(
        params, causal(ids, jnp.zeros(1, jnp.int32)), lm.model.init_cache(1, 32)).logits()[0])
    assert lm.tokenizer is not None
    for p, prompt in enumerate(("abcd", "h")):
        texts = [lm.tokenizer.encode(template(prompt, a)) for a in out.samples[p]]
        made: list[int] = []
        for _ in range(4):
            logits = []
            for ids in texts:
                padded = np.zeros((1, 32), np.int32)
                padded[0, :len(ids) + len(made)] = ids + made
                logits.append(np.asarray(apply(lm.params, padded))[len(ids) + len(made) - 1])
            mean = np.mean(logits, 0)
            mean[list(lm.eos)] = -np.inf
            made.append(int(mean.argmax()))
        assert out.text[p] == lm.tokenizer.continuation(texts[0], made)
    again = search.integrate(lm, ["h"], 3, template=template, samples=[out.samples[1]], **short)
    assert again.text == out.text[1:]
    with pytest.raises(ValueError, match="samples: takes 2 for each of the 1 prompts"):
        search.integrate(lm, ["h"], 2, samples=[["a"]], **SHORT)


@pytest.mark.wide
def test_exemplars_differ_and_answers_are_summed_up() -> None:
    lm, seen = worded("llama"), []

    def join(shots: Any, prompt: Any) -> str:
        seen.append(tuple(shots))
        return "".join([*shots, prompt])

    out = search.pedal(lm, ["abcd", "h"], ["ab", "cd", "ef", "gh"], n=3, shots=2, join=join,
                      aggregate=lambda prompt, answers: prompt + "".join(answers), **SHORT)
    assert len(seen) == 6 and all(len(set(s)) == 2 for s in seen) and len(set(seen)) > 2
    for p, prompt in enumerate(("abcd", "h")):
        first = [dx.generate(lm, join(s, prompt), **SHORT).text[0] for s in seen[p * 3:p * 3 + 3]]    # type: ignore[index]
        assert out.answers[p] == first
        assert out.text[p] == dx.generate(lm, prompt + "".join(first), **SHORT).text[0]    # type: ignore[index]
    with pytest.raises(ValueError, match="shots: got 5"):
        search.pedal(lm, ["a"], ["ab"], shots=5)


@pytest.mark.wide
def test_items_are_asked_in_other_orders_until_they_are_sure() -> None:
    lm, asked = worded("llama"), []

    def ask(items: Any) -> str:
        asked.append(tuple(items))
        return "".join(items)

    def read(text: str, count: int) -> list[tuple[Any, bool]]:
        items = asked[read.at]          # type: ignore[attr-defined]
        read.at += 1                    # type: ignore[attr-defined]
        return [(x == "a" and len(asked) % 2, x != "a") if x != "d" else (None, True) for x in items]

    read.at = 0                         # type: ignore[attr-defined]
    out = search.batch_prompt(lm, ["a", "b", "c", "d", "e"], ask, read, size=3, rounds=4, max_new_tokens=2)
    times = {x: sum(x in prompt for prompt in asked) for x in "abcde"}
    assert times == dict(a=4, b=2, c=2, d=4, e=2) and out.prompts == len(asked)
    assert out.answers[3] is None and out.answers[1] is False and out.votes[1] == (2, 2)


@pytest.mark.wide
def test_a_sketch_is_part_of_the_prompt() -> None:
    lm = worded("llama")
    out = search.sketch_guided(lm, ["ab", "cd"], lambda prompt: prompt[::-1], ask=lambda p, s: p + s,
                              constraint=dx.constraints.regex("(ab|h){2}"), max_new_tokens=8)
    assert out.sketches == ["ba", "dc"] and set(out.text) <= {"abab", "abh", "hab", "hh"}
    plain = dx.generate(lm, ["abba", "cddc"], constraint=dx.constraints.regex("(ab|h){2}"), max_new_tokens=8)
    assert out.text == plain.text


def test_the_consensus_game_comes_to_an_equilibrium() -> None:
    rng = np.random.default_rng(0)
    g, d = rng.normal(size=(2, 5)), rng.normal(size=(5, 2))
    G, D = select.equilibrium(g, d, rounds=4000, rate=1.0, regularization=0.5)
    np.testing.assert_allclose(G.sum(1), 1)
    np.testing.assert_allclose(D.sum(1), 1)
    # no player gains by another strategy: each is the softmax of its value and of what it thought first
    soft = lambda x, axis: np.exp(x - x.max(axis, keepdims=True)) / np.exp(x - x.max(axis, keepdims=True)).sum(
        axis, keepdims=True)
    first_g, first_d = np.log(soft(g, 1)), np.log(soft(d, 1))
    np.testing.assert_allclose(G, soft(D.T / 2 / 0.5 + first_g, 1), atol=0.01)
    np.testing.assert_allclose(D, soft(G.T / 2 / 0.5 + first_d, 1), atol=0.01)
    agree = np.array([[2.0, 0, 0, 0, 0], [0, 1.0, 1, 1, 1]])
    assert select.equilibrium(agree, agree.T)[1][:, 0].argmax() == 0


def test_rules_that_ask() -> None:
    lm = dx.load("pycode")
    candidates = Candidates(["ab", "cd", "ab", "h"], prompt="ef")
    rule = select.EquilibriumRanking(lm, generator=lambda p, v: p + v[0], discriminator=lambda p, t: p + t, rounds=200)
    scores = rule.scores(candidates)
    assert scores[0] == scores[2] and len(set(scores)) == 3 and (0 < scores).all() and (scores < 1).all()
    made = dx.score(lm, [("ef" + v[0], t) for v in ("correct", "incorrect") for t in ("ab", "cd", "h")]).sum
    told = dx.score(lm, [("ef" + t, v) for t in ("ab", "cd", "h") for v in ("correct", "incorrect")]).sum
    want = select.equilibrium(made.reshape(2, 3), told.reshape(3, 2), 200)
    np.testing.assert_allclose(scores, want[1][[0, 1, 0, 2], 0])
    asked = select.Asked(lm, lambda p, texts: p + "".join(texts))
    np.testing.assert_allclose(asked.scores(candidates), dx.score(lm, [("efabcdabh", str(i)) for i in range(1, 5)]).sum)


def test_a_judge_scores_the_numbers_that_its_prompt_lists() -> None:
    """"1" and "10" begin alike: each number has its own share, and together they have that of their first digits."""
    lm = dataclasses.replace(worded("toy"), tokenizer=Tokenizer(of_words("0 1 2 3 4 5 6 7 8 9 a b c d e f")))
    for n in (4, 10, 13):
        scores = select.Asked(lm, lambda p, texts: p + "".join(texts)).scores(Candidates(["a"] * n, "b"))
        read = dx.score(lm, [("b" + "a" * n, str(i)) for i in range(1, n + 1)])
        assert {len(row) for row in read.tokens} == ({1} if n == 4 else {1, 2})
        np.testing.assert_allclose(np.delete(scores, 0), np.delete(read.sum, 0), rtol=1e-6)
        np.testing.assert_allclose(np.exp(scores).sum(), np.exp(read.sum[:9]).sum(), rtol=1e-5)
        assert (scores[0] < read.sum[0] - 1e-4) == (n >= 10)
        listed = select.consensus.ask_which("b", ["a"] * n)
        assert re.findall(r"Answer (\S+):", listed) == [str(i) for i in range(1, n + 1)]


@pytest.mark.wide
def test_draws_among_candidates_are_the_prompts_own() -> None:
    """Each prompt of a call has random numbers of its own, whoever stands beside it."""
    lm, count = worded("toy"), 40
    options: dict[str, Any] = dict(temperature=1.0, top_k=3, max_new_tokens=2, eos_token_id=[])
    shares = dict(log_weights=np.log([0.5, 0.5]), texts=["x", "y"])
    places = [select.Corrected().choose(Candidates(address=(0, 0, i), **shares)).index for i in range(400)]
    assert abs(sum(places) - 200) < 80          # false alarms: 1 in 10^15
    named = [select.Corrected().choose(Candidates(prompt=f"p{i}", **shares)).index for i in range(400)]
    assert abs(sum(named) - 200) < 80
    together = dx.select.choose(lm, ["ab"] * count, "local-normalization", num_samples=2, **options)
    addresses = [each.address for each in together.candidates]
    assert len(set(addresses)) == count
    alone = dx.select.choose(lm, ["ab"], "local-normalization", num_samples=2, request_ids=[7], **options)
    assert alone.candidates[0].address == addresses[7] and alone.index == together.index[7:8]
    other = dx.select.choose(lm, ["ab"], "local-normalization:greedy=true", num_samples=2, request_ids=[7], seed=1,
                             **options)
    assert other.candidates[0].address not in addresses


def test_draws_corrected_for_truncation_are_the_models() -> None:
    lm = worded("toy")
    count, new = 4000, 2
    out = dx.generate(lm, ["ab"], num_samples=count, temperature=1.0, top_k=3, max_new_tokens=new, logprobs=0,
                      eos_token_id=[])
    weights = np.exp(out.log_weights)
    rows = [tuple(out.row(i).tolist()) for i in range(count)]
    # the law of the model, held to the texts that top-k allows
    assert lm.tokenizer is not None
    texts = sorted(set(rows))
    p = dict(zip(texts, np.exp(dx.score(lm, [(lm.tokenizer.encode("ab"), list(t)) for t in texts]).sum), strict=True))
    total = sum(p.values())
    got = {t: sum(w for w, r in zip(weights, rows, strict=True) if r == t) / weights.sum() for t in p}
    plain = {t: rows.count(t) / count for t in p}
    far = lambda q: sum(abs(q[t] - p[t] / total) for t in p) / 2
    assert far(got) < 0.03 and far(got) < far(plain)
    candidates = Candidates(["x", "y"], log_weights=np.log([0.9, 0.1]))
    chosen = [select.Corrected(seed).choose(candidates).index for seed in range(300)]
    assert 0.82 < chosen.count(0) / 300 < 0.97


def test_likelihood_and_utility_are_compared_prompt_by_prompt() -> None:
    from scipy.stats import spearmanr
    rng = np.random.default_rng(0)
    log_p, worth = rng.normal(size=(3, 6)), rng.normal(size=(3, 6)).round(1)
    each = [Candidates([str(i) for i in range(6)], prompt=p, log_probs=log_p[p]) for p in range(3)]
    found = select.alignment(each, lambda prompt, texts: worth[prompt])
    assert np.isclose(found.pearson, np.mean([np.corrcoef(a, b)[0, 1] for a, b in zip(log_p, worth, strict=True)]))
    assert np.isclose(found.spearman, np.mean([spearmanr(a, b)[0] for a, b in zip(log_p, worth, strict=True)]))
    assert np.isclose(found.best, worth.max(1).mean()) and found.prompts == 3 and "Spearman" in str(found)
    assert np.isnan(select.alignment(each, lambda prompt, texts: [1] * 6).pearson)
    with pytest.raises(ValueError, match="lengths: got None"):
        select.alignment(each, lambda prompt, texts: [1] * 6, per_token=True)
