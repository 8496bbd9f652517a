"""Texts as queues: extended autoregressive decoding."""

import numpy as np
import pytest

import decodax as dx
from decodax import search
from tests.algorithms.contrastive.followers import following, sharp

pytestmark = pytest.mark.wide


def test_a_string_is_a_queue() -> None:
    """Against the definition, step by step with whole forwards."""
    lm, window, most, ends = sharp(), 4, 3, (13, 15)
    strings = [[1, 2, 3, 4, 5, 6], [9, 3, 7, 7], [8, 1, 2, 5, 5]]
    run = search.lag_decode(lm, strings, window=window, steps=6, most=most, end=ends, system=[6, 6],
                           halt=lambda queue: queue[0] == 7)
    for i, start in enumerate(strings):
        queue, written, taken = list(start), [], 0
        while taken < 6 and len(queue) >= window and queue[0] != 7:
            new: list[int] = []
            while len(new) < most:
                token = int(following(lm, [[6, 6, *queue[:window], *new]])[0].argmax())
                if token in ends:
                    break
                new.append(token)
            queue, taken = queue[1:] + new, taken + 1
            written += new
        assert (run.queue[i], run.written[i], run.steps[i]) == (queue, written, taken)
        assert run.halted[i] == (len(queue) < window or queue[0] == 7)
    assert max(run.steps) == 6 and min(run.steps) < 6 and any(run.written)


def test_draws_differ_from_step_to_step_and_not_by_mates() -> None:
    options = dict(window=2, steps=4, most=2, temperature=3.0, seed=5, end=[])
    both = search.lag_decode(sharp(), [[1, 1, 1, 1, 1, 1], [1, 1, 2]], **options)
    alone = search.lag_decode(sharp(), [[1, 1, 1, 1, 1, 1], [3, 3]], **options)
    assert both.written[0] == alone.written[0] and len(both.written[0]) == 8
    # the window is the same in the first steps
    assert len({tuple(both.written[0][i:i + 2]) for i in (0, 2, 4, 6)}) > 1
    with pytest.raises(ValueError, match="strings: got one of 2 tokens, takes at least the window's 4"):
        search.lag_decode(sharp(), [[1, 2]], window=4)
    with pytest.raises(ValueError, match="advance: got 3 with a window of 2"):
        search.lag_decode(sharp(), [[1, 2]], window=2, advance=3)


def test_without_a_step_strings_stay_as_they_are() -> None:
    run = dx.search.lag_decode(sharp(), np.array([[1, 2, 3]]), window=1, steps=0)
    assert run.queue == [[1, 2, 3]] and run.steps == [0] and run.written == [[]] and run.halted == [False]
