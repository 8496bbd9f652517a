"""Policies that ask a draft model what the answer will look for."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.caches import make
from decodax.caches.evict.drafted import decoded, read
from decodax.engine.batch import Job
from decodax.engine.request import Request
from tests.caches.evict.pairs import LARGE, SMALLER
from tests.caches.evict.pressed import TEXTS, keeps
from tests.caches.small import GUESSES, PROMPTS


@pytest.mark.wide
@pytest.mark.parametrize("reduce", ["max", "mean"])
def test_the_tokens_of_the_authors_are_kept(reduce: Any) -> None:
    """Of SpecKV, by the tokens that a draft model writes; the texts are rows of one batch."""
    wanted = json.loads((Path(__file__).parents[1] / "expected" / "speckv.json").read_text())["cases"][reduce]
    drafted = dx.generate(SMALLER, [[*text, 7] for text in TEXTS], max_new_tokens=6)
    assert drafted.tokens.tolist() == [row["drafted"] for row in wanted]
    kind = make("speckv", draft=SMALLER, budget=64, lookahead_tokens=6, window_size=8, pooling="mean",
                reduction_type=reduce)
    cache = Job.begin(Request.read(LARGE, [[*text, 7] for text in TEXTS], cache=kind, max_new_tokens=1)).state.cache
    keeps(cache, [row["kept"] for row in wanted])


def test_a_draft_model_writes_what_it_would_write_alone() -> None:
    """Greedily, in rows of different lengths, up to the end of a text."""
    wanted = dx.generate(GUESSES, PROMPTS, max_new_tokens=5).tokens
    tokens = np.zeros((3, 48), np.int32)
    for row, prompt in enumerate(PROMPTS):
        tokens[row, :len(prompt)] = prompt
    length = jnp.array([len(prompt) - 1 for prompt in PROMPTS])
    newest = jnp.array([prompt[-1] for prompt in PROMPTS])
    end = int(wanted[0, 2])

    @jax.jit
    def run(params: Any) -> Any:
        cache = read(GUESSES.model, params, jnp.asarray(tokens), length, 5)
        return decoded(GUESSES.model, params, cache, newest, 5, (end,))[1:]

    found, live = run(GUESSES.params)
    for row in range(3):
        ends = np.flatnonzero(wanted[row] == end)
        number = int(ends[0]) + 1 if len(ends) else 5
        assert live[row].tolist() == [i < number for i in range(5)]
        assert found[row, :number].tolist() == wanted[row, :number].tolist()
