"""Rows that go on by steps: as if they had been written at once, whoever stands beside them."""

from typing import Any

import numpy as np
import pytest

import decodax as dx
from decodax.core.state import Status
from decodax.search import Forks
from tests.laws.cases import lm as worded
from tests.small_models import PROMPTS, net

OPTIONS: dict[str, Any] = dict(max_new_tokens=12, temperature=1.0)


def rows(forks: Forks) -> list[list[int]]:
    return [forks.tokens(p, i) for p in range(len(forks)) for i in range(forks.n)]


@pytest.mark.wide
@pytest.mark.parametrize("algorithm", ["autoregressive", "prompt-lookup:length=3"])
def test_steps_make_the_text_that_is_made_at_once(algorithm: str) -> None:
    whole = dx.generate(net(), PROMPTS, num_samples=2, algorithm=algorithm, logprobs=0, **OPTIONS)
    forks = Forks.begin(net(), PROMPTS, 2, step_tokens=3, algorithm=algorithm, **OPTIONS)
    count = 0
    while forks.live.any():
        forks.extend()
        count += 1
    assert rows(forks) == [whole.row(i).tolist() for i in range(6)]
    assert forks.status.reshape(-1).tolist() == whole.status and count == 4
    assert whole.logprobs is not None
    np.testing.assert_allclose(forks.log_probs().reshape(-1), whole.logprobs.raw.sum(1), rtol=1e-5)
    assert forks.spent == whole.lengths.sum()
    assert np.array_equal(forks.result().tokens, whole.tokens)


@pytest.mark.wide
def test_steps_end_at_delimiters_and_texts_at_stop_strings() -> None:
    lm = worded("llama")
    prompts = ["abcd", "hgh"]
    whole = dx.generate(lm, prompts, num_samples=2, seed=3, stop="g", max_new_tokens=16, temperature=1.0)
    forks = Forks.begin(lm, prompts, 2, until=["b", "c"], seed=3, stop="g", max_new_tokens=16, temperature=1.0)
    ends = []
    while forks.live.any():
        wrote = forks.extend()
        ends += [t for p, row in enumerate(forks.texts(wrote & forks.live)) for t in row if t]
    assert ends and all(set(t[-2:]) & set("bc") for t in ends)
    assert [t for row in forks.texts() for t in row] == whole.text
    assert forks.status.reshape(-1).tolist() == whole.status
    whole_again = Forks.begin(lm, prompts, 2, until=["b", "c"], seed=3, stop="g", max_new_tokens=16, temperature=1.0)
    whole_again.extend(whole=True)
    assert rows(whole_again) == rows(forks)


@pytest.mark.wide
@pytest.mark.parametrize("cache", [None, "paged"])
def test_a_copy_goes_on_from_where_its_parent_was_and_draws_for_itself(cache: str | None) -> None:
    forks = Forks.begin(net(), PROMPTS, 4, step_tokens=4, cache=cache, **{**OPTIONS, "min_new_tokens": 12})
    forks.extend()
    before = rows(forks)
    parents = np.tile([1, 1, 2, 1], (3, 1))
    forks.fork(parents)
    now = rows(forks)
    assert now == [before[p * 4 + parents[p, i]] for p in range(3) for i in range(4)]
    forks.extend()
    after = rows(forks)
    assert [x[:4] for x in after] == now
    for p in range(3):
        mine = [tuple(after[p * 4 + i]) for i in (0, 1, 3)]
        assert len(set(mine)) > 1
    # the row that stayed is what it would have been without the others
    alone = dx.generate(net(), PROMPTS, num_samples=4, **{**OPTIONS, "min_new_tokens": 12})
    assert [after[p * 4 + 1][:8] for p in range(3)] == [alone.row(p * 4 + 1)[:8].tolist() for p in range(3)]
    # log-probabilities go along, and are those of the texts
    scores = dx.score(net(), [(PROMPTS[p], after[p * 4 + i]) for p in range(3) for i in range(4)])
    np.testing.assert_allclose(forks.log_probs().reshape(-1), [x.sum() for x in scores.logprobs], rtol=1e-4)


@pytest.mark.wide
def test_a_prompt_forks_alike_beside_others() -> None:
    def forked(which: list[int]) -> list[list[int]]:
        forks = Forks.begin(net(), [PROMPTS[i] for i in which], 2, step_tokens=3, request_ids=which, **OPTIONS)
        forks.extend()
        forks.fork(np.tile([1, 1], (len(which), 1)))
        forks.extend()
        return rows(forks)

    together = forked([0, 1, 2])
    assert forked([1]) == together[2:4] and forked([2, 0]) == together[4:6] + together[:2]


@pytest.mark.wide
def test_tokens_that_are_fed_count_as_text() -> None:
    greedy = dict(max_new_tokens=16, min_new_tokens=16)
    forks = Forks.begin(net(), PROMPTS, 1, step_tokens=4, **greedy)
    forks.extend()
    begun = rows(forks)
    forks.feed([[[7, 8, 9]], [None], [[1]]])
    fed = [[*begun[0], 7, 8, 9], begun[1], [*begun[2], 1]]
    assert rows(forks) == fed and forks.fed == 4
    forks.extend()
    wanted = dx.generate(net(), [p + f for p, f in zip(PROMPTS, fed, strict=True)], max_new_tokens=4, min_new_tokens=4)
    assert rows(forks) == [f + wanted.row(i).tolist() for i, f in enumerate(fed)]
    forks.feed([[[3] * 9], [None], [None]])         # no room for it
    assert forks.status[0, 0] == Status.LENGTH and forks.live[1, 0]
    held = Forks.begin(net(), PROMPTS, 1, step_tokens=4, temperature=1.0, mirostat_tau=2.0)
    with pytest.raises(ValueError, match="feed: takes a policy without transforms"):
        held.feed([[[1]], [None], [None]])


def test_a_look_ahead_leaves_no_trace() -> None:
    forks = Forks.begin(net(), PROMPTS, 2, step_tokens=3, **OPTIONS)
    plain = Forks.begin(net(), PROMPTS, 2, step_tokens=3, **OPTIONS)
    forks.extend(), plain.extend()
    seen = forks.ahead()
    assert not seen.live.any() and rows(forks) == rows(plain)
    forks.extend(), plain.extend()
    assert rows(forks) == rows(plain)
    assert all(a[:len(b)] == b for a, b in zip(rows(seen), rows(forks), strict=True))
    assert forks.spent > plain.spent


@pytest.mark.wide
def test_rows_go_back() -> None:
    forks = Forks.begin(net(), PROMPTS, 2, step_tokens=3, max_new_tokens=12, min_new_tokens=12)
    first = [forks.extend() is not None and rows(forks) for _ in range(3)]
    forks.rewind(np.array([[3, -1]] * 3))
    assert [x[:3] for x in first[2][::2]] == rows(forks)[::2] and rows(forks)[1::2] == first[2][1::2]
    forks.extend(np.array([[True, False]] * 3))
    assert rows(forks)[::2] == first[1][::2]            # greedy: the same again


@pytest.mark.parametrize(("options", "message"), [
    (dict(step_tokens=0), "step_tokens: got 0"), (dict(until="a", stop="a"), "until and stop: got 'a'"),
    (dict(until=""), "until: got an empty string"), (dict(algorithm=dx.algorithms.beam_search(3)),
                                                     "algorithm: BeamSearch|num_samples")])
def test_bad_arguments_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        Forks.begin(worded("llama"), "abc", 2, **options)


def test_a_prompt_draws_new_numbers_each_time_whatever_the_other_prompts_draw() -> None:
    together, alone = (Forks.begin(net(), PROMPTS[:n], 2, step_tokens=3, **OPTIONS) for n in (2, 1))
    together.rng(1)
    first, second = (together.rng(0).random() for _ in range(2))
    assert first != second and [alone.rng(0).random() for _ in range(2)] == [first, second]
