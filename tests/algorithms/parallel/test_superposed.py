"""Superposed decoding: the texts and scores of the authors' code.

`superposed.json` has what RAIVNLab/SuperposedDecoding (33d283e, `superposed/llama/superpose.py`) finds with the weights
of `sharp` and n-grams of its corpus: drafts that are alive in the end, and texts that have ended.
"""

import collections
import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.algorithms.beams import NGrams
from decodax.algorithms.parallel.superposed import Superposed, Superposition
from tests.algorithms.contrastive.followers import sharp
from tests.matrix import often
from tests.small_models import PROMPTS

pytestmark = pytest.mark.wide

EXPECTED = json.loads((Path(__file__).parent / "superposed.json").read_text())
SETTINGS = [(3, 9, 0.06, 0.54), (3, 9, 0.5, 0.54), (2, 6, 1.0, 0.3), (4, 9, 1.0, 0.0), (3, 9, 0.3, 0.8)]


@functools.cache
def table() -> NGrams:
    return NGrams.build(EXPECTED["corpus"])


@pytest.mark.parametrize(("k", "candidates"), often([(3, 9)], [(3, 9), (2, 6), (4, 9)]))
def test_texts_and_scores_are_those_of_the_authors(k: int, candidates: int) -> None:
    for temperature, alpha in [x[2:] for x in SETTINGS if x[:2] == (k, candidates)]:
        cases = [c for c in EXPECTED["cases"] if (c["k"], c["candidates"], c["temperature"], c["alpha"]) == (
            k, candidates, temperature, alpha)]
        alg = Superposed(k, table() if cases[0]["table"] else None, alpha, candidates, temperature)
        out = dx.generate(sharp(), [c["prompt"] for c in cases], algorithm=alg, max_new_tokens=10)
        assert len(cases) == 3 and out.stats.forwards == 10
        for i, case in enumerate(cases):
            texts = sorted(case["finished"] + case["alive"], key=lambda x: -x[1] / len(x[0]))[:k]
            rows = range(i * k, i * k + k)
            assert [out.row(j).tolist() for j in rows] == [t for t, _ in texts]
            np.testing.assert_allclose(out.findings["score"][rows], [x for _, x in texts], rtol=1e-4, atol=1e-4)


def test_rows_of_a_prompt_take_one_forward() -> None:
    """The network sees one row for each prompt."""
    seen: list[tuple[int, int]] = []

    @dataclasses.dataclass(frozen=True)
    class Watched(Superposition):
        def apply(self, params: Any, window: Any, cache: Any) -> Any:
            if not window.hints:                    # what its own `apply` asks of the network
                seen.append((window.tokens.shape[0], cache.length.shape[0]))
            return self.base.apply(params, window, cache)

    class Alg(Superposed):
        def wrap_model(self, model: Any) -> Any:
            return Superposition(Watched(model, self.k), self.k)

    out = dx.generate(sharp(), PROMPTS, algorithm=Alg(2), max_new_tokens=2)
    assert len(out) == 6 and seen and all(rows == held and rows < 6 for rows, held in seen)


def test_one_draft_is_greedy_decoding() -> None:
    greedy = dx.generate(sharp(), PROMPTS, max_new_tokens=10, eos_token_id=[])
    assert np.array_equal(dx.generate(sharp(), PROMPTS, algorithm=Superposed(1), max_new_tokens=10,
                                      eos_token_id=[]).tokens, greedy.tokens)
    dead = dx.generate(sharp(), PROMPTS, algorithm=Superposed(1), max_new_tokens=10, allowed_token_ids=[3],
                       suppress_tokens=[3], eos_token_id=[])
    assert set(dead.status) == {dx.Status.DEAD_END} and not dead.lengths.any()


def test_counts_of_ngrams() -> None:
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 4, n).tolist() for n in (30, 2, 1, 7)]
    counts = NGrams.build(texts, 4)
    seen = collections.Counter(tuple(t[i:i + n]) for t in texts for n in (2, 3, 4) for i in range(len(t) - n + 1))
    before = rng.integers(-1, 5, (60, 3)).astype(np.int32)
    weights = np.array([0.2, 0.3, 0.5], np.float32)
    got = np.asarray(counts.probability(jnp.asarray(before), jnp.tile(jnp.arange(5), (60, 1)), jnp.asarray(weights)))
    for row, ps in zip(before.tolist(), got, strict=True):
        want = np.zeros(5)
        for n, w in zip((2, 3, 4), weights, strict=True):
            each = np.array([seen[(*row[3 - (n - 1):], t)] for t in range(5)])
            want += w * each / max(each.sum(), 1)
        np.testing.assert_allclose(ps, want, atol=1e-6)


def test_bad_arguments_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="alpha: got 1"):
        Superposed(alpha=1.0)
    with pytest.raises(ValueError, match="most: got 1"):
        NGrams.build([[1, 2]], 1)
    with pytest.raises(ValueError, match="texts: got none with two tokens"):
        NGrams.build([[1]])
