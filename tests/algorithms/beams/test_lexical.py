"""Searches for texts that have phrases: against enumeration, and against fairseq.

`lexical.json` has what its constraint states and search steps give for the model `small`, run at
facebookresearch/fairseq 038e491: texts with the states' banks and whether they are finished, and the texts of searches
with their scores, ended at `k` finished ones.
"""

import functools
import itertools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decodax as dx
from decodax.algorithms.beams import DynamicBeams, GridBeams, Ordered, Unordered
from decodax.algorithms.beams.phrases import PhraseProgress
from tests.algorithms.beams.small import PROMPTS, lm, log_probs, small
from tests.matrix import often

pytestmark = pytest.mark.wide

EXPECTED = json.loads((Path(__file__).parent / "lexical.json").read_text())
KINDS: dict[str, type[Any]] = {"ordered": Ordered, "unordered": Unordered}
Text = tuple[int, ...]


@pytest.mark.parametrize("kind", KINDS)
def test_progress_is_that_of_fairseq(kind: str) -> None:
    progress, cases = KINDS[kind]("fairseq"), [c for c in EXPECTED["states"] if c[0] == kind]

    def read(tables: Any, text: jax.Array) -> jax.Array:
        def visit(state: Any, token: jax.Array) -> tuple[Any, jax.Array]:
            state = progress.advance(tables, state, token)
            return state, jnp.stack([progress.bank(tables, state), progress.met(tables, state).astype(jnp.int32)])

        return jax.lax.scan(visit, progress.start(tables, ()), text)[1]

    by_size: dict[int, list[Any]] = {}
    for case in cases:
        by_size.setdefault(sum(map(len, case[1])), []).append(case)
    for some in by_size.values():
        tables = jax.tree.map(lambda *x: jnp.stack(x), *(progress.table(tuple(map(tuple, c[1]))) for c in some))
        found = jax.jit(jax.vmap(read))(tables, jnp.array([c[2] for c in some]))
        assert found.tolist() == [c[3] for c in some]
    assert any(case[3][-1][1] for case in cases) and not all(case[3][-1][1] for case in cases)


REQUESTS = list(dict.fromkeys((c[0], tuple(map(tuple, c[1]))) for c in EXPECTED["searches"]))


@pytest.mark.parametrize(("kind", "phrases"), often([("unordered", ((5, 4), (3,)))], REQUESTS))
def test_searches_are_those_of_fairseq(kind: str, phrases: tuple[Text, ...]) -> None:
    """Where the budget is long enough, the pool is fairseq's list of finished texts."""
    cases = [c for c in EXPECTED["searches"] if c[:2] == [kind, list(map(list, phrases))]]
    alg = DynamicBeams(3, returns=3, early_stopping=True, phrases=phrases, progress=KINDS[kind]("fairseq"))
    out = dx.generate(small(), [c[2] for c in cases], algorithm=alg, max_new_tokens=14)
    for i, case in enumerate(cases):
        wanted, rows = case[4], range(3 * i, 3 * i + 3)
        assert len(wanted) == 3
        assert [out.row(j).tolist() for j in rows] == [text for text, _ in wanted]
        np.testing.assert_allclose(out.findings["score"][rows], [score for _, score in wanted], atol=1e-4)


def has(text: Text, phrase: Text) -> bool:
    return any(text[i:i + len(phrase)] == phrase for i in range(len(text)))


def in_order(text: Text, phrases: tuple[Text, ...]) -> bool:
    end = 0
    for phrase in phrases:
        at = next((i for i in range(end, len(text)) if text[i:i + len(phrase)] == phrase), None)
        if at is None:
            return False
        end = at + len(phrase)
    return True


PAIR: tuple[Text, ...] = ((5, 0), (3,))
THREE: tuple[Text, ...] = ((1,), (0,), (5,))
# dynamic beams are wide enough where twice as many candidates as beams are all 6^4 texts
SEARCHES: dict[str, Any] = {
    "unordered": functools.partial(DynamicBeams, 648),
    "ordered": functools.partial(DynamicBeams, 648, progress=Ordered()),
    "grid": functools.partial(GridBeams, beams=60)}


@pytest.mark.parametrize(("name", "phrases"), often([("grid", PAIR)], itertools.product(SEARCHES, (PAIR, THREE))))
def test_wide_enough_they_find_the_best_of_all_texts_with_the_phrases(name: str, phrases: tuple[Text, ...]) -> None:
    """Phrases without a token twice, so that a text in which they stand is one that has them."""
    new, prompts = 4, [(1, 3, 4), (5,)]
    out = dx.generate(small(), [list(p) for p in prompts], max_new_tokens=new, num_samples=10, algorithm=SEARCHES[name](
        phrases=phrases, early_stopping="never"))
    for i, prompt in enumerate(prompts):
        held = in_order if name == "ordered" else lambda text, phrases: all(has(text, p) for p in phrases)
        score = {t: p.sum() / len(t) for t, p in log_probs(prompt, new).items() if held(t, phrases)}
        best = sorted(score, key=score.__getitem__, reverse=True)[:10]
        rows = range(10 * i, 10 * i + len(best))
        assert [tuple(out.row(j).tolist()) for j in rows] == best
        np.testing.assert_allclose(out.findings["score"][rows], [score[text] for text in best], rtol=1e-4)
        assert len(best) == 10 or out.status[10 * i + len(best)] == dx.Status.DEAD_END


def test_a_lost_phrase_may_begin_again() -> None:
    progress: PhraseProgress
    for progress, wanted in ((Unordered(), True), (Unordered("fairseq"), False), (Ordered(), True),
                             (Ordered("fairseq"), False)):
        tables = progress.table(((3,), (5, 4)))
        state = progress.start(tables, ())
        for token in (3, 5, 5, 4):
            state = progress.advance(tables, state, jnp.array(token))
        assert bool(progress.met(tables, state)) == wanted, progress


@pytest.mark.full
@pytest.mark.parametrize("name", ["dynamic", "grid"])
def test_texts_of_any_policy_contain_the_phrases(name: str) -> None:
    phrases = ((7, 11), (3,))
    alg = {"dynamic": DynamicBeams(3, phrases=phrases), "grid": GridBeams(phrases=phrases, beams=2)}[name]
    given: dict[str, Any] = dict(max_new_tokens=9, repetition_penalty=1.2, bad_words_ids=[[12]], temperature=1.0)
    whole = dx.generate(lm(), PROMPTS, algorithm=alg, **given)
    for i in range(len(PROMPTS)):
        text = tuple(whole.row(i).tolist())
        assert all(has(text, p) for p in phrases) and 12 not in text
    alone = dx.generate(lm(), PROMPTS[1], algorithm=alg, request_ids=[1], **given)
    assert alone.row(0).tolist() == whole.row(1).tolist()
    assert dx.generate(lm(), PROMPTS, algorithm=alg, seed=1, **given).tokens.tolist() != whole.tokens.tolist()


@pytest.mark.full
def test_a_budget_too_short_for_the_phrases_is_a_dead_end() -> None:
    out = dx.generate(small(), [[1, 3]], max_new_tokens=2, algorithm=DynamicBeams(3, phrases=((5, 0), (3,))))
    assert out.status == [dx.Status.DEAD_END] and out.lengths.tolist() == [0]


@pytest.mark.parametrize(("make", "message"), [
    (lambda: DynamicBeams(2), r"phrases: got \(\)"), (lambda: GridBeams(phrases=((),)), "takes a list of one phrase"),
    (lambda: DynamicBeams(2, phrases=["x"]), "each a list of token ids"),
    (lambda: DynamicBeams(2, phrases=((1,),), groups=2), "groups: got 2 with phrases"),
    (lambda: GridBeams(phrases=((1,),), beams=2, returns=3), "returns: got 3 for 2 beams"),
    (lambda: Unordered("sockeye"), "rule: got 'sockeye'"),      # type: ignore[arg-type]
    (lambda: dx.algorithms.make("dynamic-beam-allocation", lm()), "needs phrases=")])
def test_bad_arguments_are_refused_by_name(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_lexical_searches_by_name_read_phrases_of_ids_and_of_text() -> None:
    alg = dx.algorithms.make("dynamic-beam-allocation", lm(), phrases=[[3], [5, 7]], ordered=True, width=3)
    assert alg == DynamicBeams(3, phrases=((3,), (5, 7)), progress=Ordered())
    assert dx.algorithms.make("grid-beam-search", lm(), phrases=[[3]], beams=2) == GridBeams(phrases=((3,),), beams=2)
    code = dx.load("pycode")
    named = dx.algorithms.make("dynamic-beam-allocation", code, phrases=["return x"])
    assert code.tokenizer is not None and code.tokenizer.decode(list(named.phrases[0])) == "return x"
