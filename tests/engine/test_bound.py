"""`decodax.bind`: pure functions of weights and rows give the tokens that `generate` gives."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

import decodax as dx
from tests.caches.small import SMALL

PROMPTS = [[1, 2, 3, 1, 2, 3, 1], [4, 5], [7, 7, 2, 7, 7]]
LENGTHS = np.array([len(p) for p in PROMPTS], np.int32)
TOKENS = np.array([p + [0] * (7 - len(p)) for p in PROMPTS], np.int32)
LM = dataclasses.replace(SMALL, name="small")


def rows_of(bound: Any, s: Any) -> list[list[int]]:
    """Returns the new tokens of each row."""
    s = bound.outcome(s)
    return [row[a:b].tolist() for row, a, b in zip(np.asarray(s.tokens), s.prompt_length, s.length, strict=True)]


@pytest.mark.parametrize(("algorithm", "cache", "sampling"), [
    (None, None, {}),
    ("prompt-lookup:length=3", None, dict(temperature=0.9, top_p=0.9)),
    pytest.param("contrastive-search:alpha=0.5,k=3", None, {}, marks=pytest.mark.wide),
    pytest.param(dx.algorithms.beam_search(3), None, {}, marks=pytest.mark.wide),
    pytest.param("prompt-lookup:length=3", "snapkv:budget=6,window_size=2", {}, marks=pytest.mark.wide),
])
def test_steps_by_hand_give_the_tokens_of_generate(algorithm: Any, cache: Any, sampling: dict[str, Any]) -> None:
    bound = dx.bind(LM, algorithm, cache=cache, capacity=64, max_new_tokens=16)
    params = bound.params(LM.params)
    first = bound.init(params, TOKENS, LENGTHS, seed=3, max_new_tokens=12, **sampling)
    step, rows, counted = jax.jit(bound.step), first, 0
    while bool(rows.running.any()):
        rows, info = step(params, rows)
        counted = counted + np.asarray(info.count)
    made = np.asarray(rows.lengths - rows.state.prompt_length)
    assert counted.tolist() == made.tolist() or "beam" in repr(algorithm).lower()
    out = dx.generate(LM, PROMPTS, algorithm=algorithm, cache=cache, seed=3, max_new_tokens=12, **sampling)
    answers = [row for i, row in enumerate(rows_of(bound, rows))
               if i % (bound.algorithm.traits.samples or 1) < (bound.algorithm.traits.answers or 1)]
    assert answers == [out.tokens[i, :n].tolist() for i, n in enumerate(out.lengths)]
    again = bound.init(params, TOKENS, LENGTHS, seed=3, max_new_tokens=12, **sampling)
    assert rows_of(bound, jax.jit(bound.run)(params, again)) == rows_of(bound, rows)


def test_weights_of_a_draft_model_are_an_argument() -> None:
    bound = dx.bind(LM, "speculative-decoding:length=3", draft=LM, capacity=64, max_new_tokens=16)
    params = bound.params(LM.params)
    rows = bound.init(params, TOKENS, LENGTHS, max_new_tokens=12)
    rows = bound.run(params, rows)
    assert np.asarray(rows.state.stats.accepted).sum() == np.asarray(rows.state.stats.drafted).sum() > 0
    with pytest.raises(ValueError, match=r"^params: .* takes bound.params\(weights\)"):
        bound.init(LM.params, TOKENS, LENGTHS)


def test_parts_without_weights_bring_none() -> None:
    bound = dx.bind(LM, "ucbspec", capacity=64, max_new_tokens=16)
    assert jax.tree.leaves(bound.weights) == [] and bound.init(LM.params, TOKENS, LENGTHS).running.all()


def test_no_row_makes_more_tokens_than_its_cache_was_made_for() -> None:
    bound = dx.bind(LM, capacity=64, max_new_tokens=5)
    rows = bound.run(LM.params, bound.init(LM.params, TOKENS, LENGTHS, max_new_tokens=40, eos_token_id=[]))
    assert np.asarray(rows.lengths - rows.state.prompt_length).tolist() == [5, 5, 5]


def test_newer_weights_take_part_from_the_next_round_on_without_a_new_program() -> None:
    bound = dx.bind(LM, capacity=64)
    rows, step = bound.init(LM.params, TOKENS, LENGTHS), jax.jit(bound.step)
    rows, _ = step(LM.params, rows)
    rows, info = step(jax.tree.map(lambda x: x * 0.9, LM.params), rows)
    assert np.asarray(info.count).tolist() == [1, 1, 1] and step._cache_size() == 1


def test_bad_arguments_are_refused_by_name() -> None:
    for message, call in (
            ("max_new_tokens: got 500 for a capacity of 256", lambda: dx.bind(LM, capacity=64, max_new_tokens=500)),
            ("capacity: got 0", lambda: dx.bind(LM, capacity=0)),
            ("cache: got 'knorm:budget=8' with MaskedDiffusion, which keeps none", lambda: dx.bind(
                "tasks-diffusion", cache="knorm:budget=8")),
            ("top_p: got one beside a policy", lambda: dx.bind(LM).init(
                LM.params, TOKENS, LENGTHS, policy=dx.sampling.build(3), top_p=0.5)),
            ("tokens: got prompts of up to 300 tokens for a capacity of 256", lambda: dx.bind(LM, capacity=64).init(
                LM.params, np.zeros((1, 300), np.int32), [300]))):
        with pytest.raises(ValueError, match=message):
            call()
