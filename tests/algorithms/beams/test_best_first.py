"""Best-first beam search against beam search: the same texts and scores, with fewer texts read."""

import dataclasses
import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.algorithms.beams import BeamSearch, BestFirst
from tests.algorithms.beams.small import NEW, PROMPTS, lm, small
from tests.matrix import often

pytestmark = pytest.mark.wide


def same(ours: Any, beams: Any) -> None:
    assert ours.tokens.tolist() == beams.tokens.tolist() and ours.status == beams.status
    for name in ("score", "log_prob"):
        np.testing.assert_allclose(ours.findings[name], beams.findings[name], atol=1e-5)
    if ours.logprobs is not None:
        for name in ("raw", "processed", "top"):
            np.testing.assert_allclose(getattr(ours.logprobs, name), getattr(beams.logprobs, name), atol=1e-5)


@pytest.mark.parametrize(("width", "at_once", "ends"), often(
    [(3, 2, 2)], itertools.product((1, 2, 3, 5), (1, 2), (1, 2))))
def test_best_first_search_finds_what_beams_find(width: int, at_once: int, ends: int) -> None:
    """Ragged prompts, penalties and a record; length penalties are traced."""
    read: list[tuple[int, int]] = []
    for penalty in (0.0, 0.7, 1.6):
        given: dict[str, Any] = dict(max_new_tokens=NEW, eos_token_id=[4, 13][:ends], num_samples=(width + 1) // 2,
                                     logprobs=1, repetition_penalty=1.2)
        beams = dx.generate(lm(), PROMPTS, algorithm=BeamSearch(width, length_penalty=penalty, early_stopping="never"),
                            **given)
        found = dx.generate(lm(), PROMPTS, algorithm=BestFirst(width, longest=NEW, length_penalty=penalty,
                                                               at_once=at_once), **given)
        same(found, beams)
        expansions = found.findings["expansions"].reshape(3, -1)[:, 0]
        rounds = np.asarray(beams.stats.rounds).reshape(3, -1)[:, 0]
        assert (expansions <= 1 + width * (NEW - 1)).all()
        read.append((int(expansions.sum()), int((1 + width * (rounds - 1)).sum())))
    # where texts seldom end, nothing is decided early
    assert read[0][0] < read[0][1] or (read[0][0] == read[0][1] and 1 in (width, ends))


@pytest.mark.full
def test_one_at_a_time_reads_nothing_that_scores_less_than_what_it_returns() -> None:
    """By definition: of the texts that beams keep, those with a score above the worst one returned."""
    prompt, width, new = [1, 3, 4], 2, 5
    given: dict[str, Any] = dict(max_new_tokens=new, num_samples=width)
    found = dx.generate(small(), [prompt], algorithm=BestFirst(width, longest=new), **given)
    same(found, dx.generate(small(), [prompt], algorithm=BeamSearch(width, length_penalty=0.0, early_stopping="never"),
                            **given))
    live, read = [((), 0.0)], 0
    worst = float(found.findings["score"].min())
    for _ in range(new):
        read += sum(score > worst for _, score in live)
        texts = [(*text, t) for text, _ in live for t in range(6)]
        scored = dx.score(small(), [prompt + list(text) for text in texts])
        total = [(text, float(np.sum(p[-len(text):]))) for text, p in zip(texts, scored.logprobs, strict=True)]
        live = sorted((x for x in total if x[0][-1] != 2), key=lambda x: -x[1])[:width]
    assert int(found.findings["expansions"][0]) == read


@pytest.mark.full
def test_prompts_know_nothing_of_one_another_and_short_budgets_are_kept() -> None:
    given: dict[str, Any] = dict(algorithm=BestFirst(2, returns=2, longest=NEW), max_new_tokens=[3, 7, 5])
    whole = dx.generate(lm(), PROMPTS, **given)
    for i, budget in enumerate((3, 7, 5)):
        alone = dx.generate(lm(), PROMPTS[i], **{**given, "max_new_tokens": budget})
        assert [alone.row(j).tolist() for j in range(2)] == [whole.row(2 * i + j).tolist() for j in range(2)]


@pytest.mark.full
def test_texts_that_are_not_there_and_broken_logits_say_so() -> None:
    out = dx.generate(small(), [[1, 3]], max_new_tokens=1, algorithm=BestFirst(8, returns=8, longest=1))
    assert sorted(out.row(i).tolist() for i in range(6)) == [[t] for t in range(6)]
    assert out.status[6:] == [dx.Status.DEAD_END] * 2
    head = small().params["head"].at[0, 0].set(jnp.nan)
    broken = dataclasses.replace(small(), params=dict(small().params, head=head))
    out = dx.generate(broken, [[1, 3], [4]], max_new_tokens=1, algorithm=BestFirst(8, returns=2, longest=1))
    assert out.status == [dx.Status.INVALID] * 4


@pytest.mark.parametrize(("make", "message"), [
    (lambda: BestFirst(0), "width: got 0"), (lambda: BestFirst(2, returns=3), "returns: got 3 for a width of 2"),
    (lambda: BestFirst(2, length_penalty=-1.0), "length_penalty: got -1.0, takes a number from 0"),
    (lambda: dx.generate(small(), [[1]], algorithm=BestFirst(2, longest=3), max_new_tokens=4),
     "max_new_tokens: got 4 for a search with longest=3")])
def test_bad_arguments_are_refused_by_name(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
