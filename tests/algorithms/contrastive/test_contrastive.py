"""Searches and transforms against degeneration, against transformers and the authors' code.

`expected.json` has their tokens, for models with random weights that `net` makes.
"""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.algorithms.contrastive import DoLa, contrast, dola
from decodax.core.window import causal
from decodax.engine.names import by_name
from tests.matrix import often
from tests.small_models import PROMPTS, net

EXPECTED = json.loads((Path(__file__).parent / "expected.json").read_text())


@pytest.mark.wide
@pytest.mark.parametrize(("k", "penalty"), often([(4, 1.0), (2, 1.5)], [(k, r) for k in (2, 4, 7) for r in (1.0, 1.5)]))
def test_contrastive_search_is_that_of_transformers(k: int, penalty: float) -> None:
    for alpha in (0.3, 0.6, 0.9):
        cases = [c for c in EXPECTED["contrastive-search"]["cases"] if c[1:4] == [alpha, k, penalty]]
        out = dx.generate(net(), [c[0] for c in cases], algorithm=dx.algorithms.contrastive_search(alpha, k),
                          repetition_penalty=penalty,
                          max_new_tokens=14)
        assert [out.row(i).tolist() for i in range(len(cases))] == [c[4] for c in cases]


@pytest.mark.wide
def test_a_token_of_contrastive_search_takes_one_forward() -> None:
    out = dx.generate(net(), PROMPTS[0], algorithm=dx.algorithms.contrastive_search(0.6), max_new_tokens=8,
                      min_new_tokens=8)
    assert out.stats.forwards == 9              # the first round looks behind the prompt alone


@pytest.mark.wide
def test_contrastive_search_obeys_the_policy() -> None:
    free = dx.generate(net(), PROMPTS, algorithm=dx.algorithms.contrastive_search(0.9, 24), max_new_tokens=12)
    taken = {int(t) for i in range(3) for t in free.row(i)} - {4}
    banned = sorted(taken)[:6]
    held = dx.generate(net(), PROMPTS, algorithm=dx.algorithms.contrastive_search(0.9, 24), max_new_tokens=12,
                       suppress_tokens=banned)
    assert not {int(t) for i in range(3) for t in held.row(i)} & set(banned)
    dead = dx.generate(net(), PROMPTS, algorithm=dx.algorithms.contrastive_search(0.9), max_new_tokens=4,
                       allowed_token_ids=[3], suppress_tokens=[3])
    assert set(dead.status) == {dx.Status.DEAD_END}


@pytest.mark.full
@pytest.mark.parametrize("tied", often([False], [False, True]))
def test_dola_is_that_of_transformers(tied: bool) -> None:
    lm = net(6, 3 if tied else 2, tied)
    for layers in ("low", "high", [1], [2, 5], [1, 2, 3, 4]):
        cases = [c for c in EXPECTED["dola"]["cases"] if c[0] == tied and c[2] == layers]
        for case in cases[:1]:
            out = dx.generate(lm, case[1], named=dict(dola_layers=layers), repetition_penalty=1.2, max_new_tokens=14)
            assert out.row(0).tolist() == case[3]


@pytest.mark.wide
def test_dola_goes_with_every_method() -> None:
    lm = dola(net(6, 2), "low", distance="jensen-shannon")
    assert isinstance(lm.model, DoLa) and lm.model.layers == (0, 2)
    options: dict[str, Any] = dict(max_new_tokens=12, temperature=[0.0, 1.0, 1.0])
    plain = dx.generate(lm, PROMPTS, **options)
    drafted = dx.generate(lm, PROMPTS, algorithm="prompt-lookup:length=4", **options)
    assert np.array_equal(plain.tokens, drafted.tokens)


@pytest.mark.full
@pytest.mark.parametrize("beta", often([None], [None, 0.5]))
def test_contrastive_decoding_by_its_definition(beta: float | None) -> None:
    expert, amateur = net(6, 2), net()
    lm = contrast(expert, amateur, alpha=0.2, beta=beta, temperature=0.7)
    new = 6
    out = dx.generate(lm, PROMPTS, max_new_tokens=new, eos_token_id=[])

    @functools.partial(jax.jit, static_argnums=0)
    def apply(network: Any, params: Any, tokens: Any) -> Any:
        return network.apply(params, causal(tokens, jnp.zeros(1, jnp.int32)), network.init_cache(1, 32)).logits()[0]

    def logits(which: dx.LM, text: list[int]) -> np.ndarray:
        padded = np.zeros((1, 16), np.int32)
        padded[0, :len(text)] = text
        return np.asarray(apply(which.model, which.params, padded))[len(text) - 1]

    for i, prompt in enumerate(PROMPTS):
        text = list(prompt)
        for _ in range(new):
            e, a = logits(expert, text).astype(float), logits(amateur, text).astype(float)
            norm = lambda x: x - np.log(np.exp(x).sum())
            score = norm(e) - norm(a / 0.7) if beta is None else (1 + beta) * e - beta * a
            text.append(int(np.where(np.exp(e - e.max()) >= 0.2, score, -np.inf).argmax()))
        assert out.row(i).tolist() == text[len(prompt):]
    drafted = dx.generate(lm, PROMPTS, max_new_tokens=new, eos_token_id=[], algorithm="prompt-lookup:length=4")
    assert np.array_equal(out.tokens, drafted.tokens)


@pytest.mark.wide
@pytest.mark.parametrize(("k", "n"), often([(3, 3)], [(k, n) for k in (3, 6) for n in (2, 3, 4)]))
def test_simple_decoding_is_that_of_its_authors(k: int, n: int) -> None:
    for alpha in (0.3, 0.5, 0.7):
        for words in ([], [5, 7]):
            cases = [c for c in EXPECTED["fsd"]["cases"] if c[1:5] == [alpha, k, n, words]]
            given = dict(fsd_stop_words=words, fsd_stop_weight=0.2) if words else {}
            for alg in ("autoregressive", "prompt-lookup:length=3"):
                out = dx.generate(net(), [c[0] for c in cases], fsd_alpha=alpha, fsd_k=k, fsd_n=n, suppress_tokens=[4],
                                  max_new_tokens=16, algorithm=alg, **given)
                assert [out.row(i).tolist() for i in range(len(cases))] == [c[5] for c in cases]


@pytest.mark.parametrize(("given", "message"), [
    (dict(penalty_alpha=0.6, temperature=1.0), "penalty_alpha: got 0.6 with a temperature"),
    (dict(penalty_alpha=1.5), "penalty_alpha: got 1.5"), (dict(penalty_alpha="x"), "penalty_alpha: got 'x'"),
    (dict(penalty_alpha=0.6, num_beams=2), "penalty_alpha: got 0.6 with num_beams=2"),
    (dict(dola_layers="middle"), "dola_layers: got 'middle'"), (dict(dola_layers=[9]), r"dola_layers: got \[9\]"),
    (dict(fsd_alpha=0.5, temperature=1.0), "fsd_alpha: got 0.5 with a temperature"),
    (dict(fsd_k=5), "fsd_k: got 5 without fsd_alpha"),
    (dict(arithmetic_sampling=True, algorithm=dx.algorithms.beam_search(2)), "arithmetic_sampling: BeamSearch"),
    (dict(bregman_lambda=0.1), "bregman_lambda: got 0.1 without temperature")])
def test_bad_arguments_are_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        dx.generate(net(), PROMPTS, **by_name(given))
