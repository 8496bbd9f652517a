"""Every system with a trained drafter beside what else a call may ask for: caches that evict, and constraints."""

import functools
from typing import Any

import pytest

import decodax as dx
from decodax.caches import make
from decodax.common.registry import ALGORITHMS
from decodax.io.load import LM
from tests.caches.small import DEEP, OPTIONS, PROMPTS
from tests.constraints.schemas import CALL, PERSON
from tests.drafters.fresh import NAMES, fresh, length_network
from tests.matrix import often

EXACT = [name for name in NAMES if ALGORITHMS[name].guarantee == "seed-exact" and not ALGORITHMS[name].alias_of]
CACHES = ("streaming-llm", "h2o", "snapkv", "adakv")
"""A ring, and caches that choose by attention: while decoding, after the prompt, and by head."""
DENSE = {"mixture-of-attentions"}
"""Systems that read the target's whole cache, and refuse one that drops entries."""
SHOWN = {"eagle-3", "longspec"}


@functools.cache
def system(name: str) -> Any:
    return of(name, DEEP)


def of(name: str, lm: LM) -> Any:
    """The method of a name with a drafter of random weights."""
    given = {"network": length_network(lm)} if name == "adaeagle" else {}
    return dx.algorithms.make(name, lm, fresh(name, lm), **given)


@functools.cache
def evicting(cache: str, algorithm: Any = None) -> Any:
    return dx.generate(DEEP, PROMPTS, algorithm=algorithm, cache=make(cache, **OPTIONS[cache]), seed=5, chunk=16,
                       temperature=[0.0, 0.9, 0.0], max_new_tokens=20)


@pytest.mark.wide
@pytest.mark.parametrize(("name", "cache"), often(
    [("eagle-3", "h2o"), ("medusa", "adakv"), ("dflash", "streaming-llm"), ("longspec", "snapkv")],
    [(name, cache) for name in EXACT for cache in CACHES]))
def test_drafts_under_a_cache_that_evicts_change_no_token(name: str, cache: str) -> None:
    made = system(name)
    if name in DENSE:
        with pytest.raises(ValueError, match="cache"):
            evicting(cache, made)
        return
    drafted = evicting(cache, made)
    assert [drafted.row(b).tolist() for b in range(3)] == [evicting(cache).row(b).tolist() for b in range(3)]
    assert drafted.stats.drafted.sum() > 0


@pytest.mark.wide
@pytest.mark.parametrize("name", often([name for name in EXACT if name in SHOWN], EXACT))
def test_drafts_under_constraints_change_no_token(lm: LM, name: str) -> None:
    """A schema, a regular expression, choices and a row without any, in one batch; greedy and sampled rows."""
    c = dx.constraints
    given: dict[str, Any] = dict(
        constraint=[c.json_schema(PERSON), c.regex(CALL), c.choices(["yes", "no way"]), None], max_new_tokens=48,
        temperature=[0.0, 0.9, 0.9, 0.9], seed=3)
    prompts = ['{"name": "x", "n": 3}', "one", "one", "def f("]
    plain = dx.generate(lm, prompts, **given)
    drafted = dx.generate(lm, prompts, algorithm=of(name, lm), **given)
    assert drafted.tokens.tolist() == plain.tokens.tolist() and drafted.status == plain.status
