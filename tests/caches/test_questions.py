"""Questions behind a context that the cache has settled on."""

from typing import Any

import numpy as np
import pytest

import decodax as dx
from decodax import caches
from decodax.engine.batch import Job
from decodax.engine.request import Request
from tests.caches.small import DEEP, LOOKUP, PROMPTS
from tests.matrix import often

QUESTIONS = [[3, 1, 4, 1], [5, 9], [2, 6, 5, 3, 5, 8, 9]]
SAMPLED: dict[str, Any] = dict(max_new_tokens=16, temperature=[0.0, 0.9, 0.0], seed=5)
MAGIC = dx.algorithms.make("magicdec", DEEP, budget=14)


@pytest.mark.wide
@pytest.mark.parametrize("cache", often([None], [None, "hydragen", "quest:budget=512", "snapkv:budget=200"]))
@pytest.mark.parametrize("context", often([PROMPTS[0]], [PROMPTS[0], PROMPTS]))
def test_where_nothing_is_forgotten_it_is_one_prompt(cache: Any, context: Any) -> None:
    each = context if context is PROMPTS else [context] * 3
    whole = dx.generate(DEEP, [a + b for a, b in zip(each, QUESTIONS, strict=True)], **SAMPLED)
    apart = dx.generate(DEEP, QUESTIONS, context=context, cache=cache, **SAMPLED)
    assert apart.tokens.tolist() == whole.tokens.tolist()


@pytest.mark.wide
@pytest.mark.parametrize("cache", often(["snapkv:budget=14,window_size=4"], [
    "snapkv:budget=14,window_size=4", "h2o:budget=14,every=3", "kivi:group_size=4,residual_length=8",
    "streaming-llm:start_size=2,recent_size=8",
    "louiskv:budget=8,tau=0.1,cluster_size=4,sinks=2,buffer=6"]))
def test_questions_do_not_change_what_is_kept(cache: str) -> None:
    """So that a question by itself gives what it gives among others, with drafts too."""
    together = dx.generate(DEEP, QUESTIONS, context=PROMPTS[0], cache=cache, **SAMPLED)
    drafted = dx.generate(DEEP, QUESTIONS, context=PROMPTS[0], cache=cache, algorithm=LOOKUP, **SAMPLED)
    alone = dx.generate(DEEP, QUESTIONS[1:2], context=PROMPTS[0], cache=cache, request_ids=[1], seed=5, temperature=0.9,
                        max_new_tokens=16)
    whole = dx.generate(DEEP, [PROMPTS[0] + question for question in QUESTIONS], cache=cache, **SAMPLED)
    assert together.tokens.tolist() == drafted.tokens.tolist()
    assert together.tokens[1:2].tolist() == alone.tokens.tolist()
    if cache.startswith(("snapkv", "h2o")):
        assert together.tokens.tolist() != whole.tokens.tolist()


@pytest.mark.full
def test_drafts_on_another_cache_see_the_context_alone_as_well() -> None:
    plain, drafted = (dx.generate(DEEP, QUESTIONS, context=PROMPTS[0], algorithm=algorithm, **SAMPLED)
                      for algorithm in (None, MAGIC))
    assert drafted.tokens.tolist() == plain.tokens.tolist() and drafted.stats.accepted.sum() > 0


@pytest.mark.full
def test_a_context_that_is_the_same_is_read_once() -> None:
    cache = caches.make("snapkv", budget=14, window_size=4)
    job = Job.begin(Request.read(DEEP, QUESTIONS, context=PROMPTS[0], cache=cache))
    cache = job.state.cache
    kept = [np.asarray(x)[:3, :, :14] for x in cache.positions]
    assert all((x[0] == x[1]).all() and (x[0] == x[2]).all() for x in kept)
    assert cache.length[:3].tolist() == [len(PROMPTS[0]) + len(question) - 1 for question in QUESTIONS]


def test_a_context_is_refused_with_methods_that_learn_from_whole_prompts() -> None:
    with pytest.raises(ValueError, match=r"^context: .* learns from whole prompts"):
        dx.generate(DEEP, QUESTIONS, context=PROMPTS[0], algorithm="token-recycling", max_new_tokens=2)
    with pytest.raises(ValueError, match=r"^context: got 2 for 3 prompts, takes one, or one for each"):
        dx.generate(DEEP, QUESTIONS, context=PROMPTS[:2], max_new_tokens=2)
