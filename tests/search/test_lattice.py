"""Lattice decoding against the authors' code, and the laws of lattices.

`lattice.json` has what jiacheng-xu/lattice-generation (bc2d198, `src/recom_search/model`) finds with the weights of
`sharp`, with the lines corrected that `lattice_decode` names: prompt, merge, calls, k, suffix, gap, length penalty,
new tokens; texts in order, their log-probabilities, calls, nodes, edges, the sum of the edges' scores, merges.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import decodax as dx
from decodax import search
from tests.algorithms.contrastive.followers import following, sharp
from tests.matrix import often
from tests.small_models import PROMPTS

pytestmark = pytest.mark.wide

EXPECTED = json.loads((Path(__file__).parent / "lattice.json").read_text())
SHORT: dict[str, Any] = dict(calls=40, k=5, suffix=2, gap=3, length_penalty=0.5, max_new_tokens=10)


@pytest.mark.parametrize(("merge", "group"), often([("rcb", 0), ("zip", 0)],
                                                   [(m, g) for m in ("rcb", "zip") for g in range(4)]))
def test_lattices_are_those_of_the_authors(merge: str, group: int) -> None:
    """Three prompts side by side; texts, their order and scores, model calls, and the graph."""
    cases = [c for c in EXPECTED if c[1] == merge][group::4]
    _, _, calls, k, suffix, gap, penalty, new = cases[0][:8]
    found = search.lattice_decode(sharp(), [c[0] for c in cases], calls=calls, k=k, merge=merge, suffix=suffix, gap=gap,
                                 length_penalty=penalty, max_new_tokens=new)
    assert len(cases) == 3
    for one, case in zip(found, cases, strict=True):
        texts, log_probs, calls, nodes, edges, total, merges = case[8:]
        assert one.ids == texts and one.calls == calls and one.merges == merges
        np.testing.assert_allclose(one.log_probs, log_probs, atol=1e-3)
        assert (len(one), int((one.parents >= 0).sum())) == (nodes, edges)
        np.testing.assert_allclose(one.scores.sum(), total, rtol=1e-4)


@pytest.mark.parametrize("merge", ["rcb", "zip"])
def test_paths_are_texts_that_were_found_and_what_merges_add(merge: str) -> None:
    one, *_ = search.lattice_decode(sharp(), PROMPTS, merge=merge, **SHORT)
    assert one.why == "calls" and one.calls >= 40 and one.merges > 0
    assert (one.parents < np.arange(len(one))[:, None]).all()                   # parents first: no loops
    assert (one.parents[1:, 0] >= 0).all() and (one.parents[0] == -1).all()
    paths = list(one.paths())
    assert len(paths) == one.count > len(one.ids)
    assert {tuple(ids) for ids in one.ids} <= {tuple(ids) for ids, _ in paths}
    # a text that was read as it stands has the log-probability that it has under the model
    for ids, log_prob in list(zip(one.ids, one.log_probs, strict=True))[:3]:
        law = following(sharp(), [PROMPTS[0] + ids[:i] for i in range(len(ids))])
        np.testing.assert_allclose(log_prob, sum(law[i, t] for i, t in enumerate(ids)), atol=1e-3)


@pytest.mark.full
def test_rows_steps_and_neighbours_change_nothing_but_what_is_read() -> None:
    both = search.lattice_decode(sharp(), PROMPTS[:2], step_tokens=1, **SHORT)
    alone, = search.lattice_decode(sharp(), PROMPTS[:1], rows=1, step_tokens=8, **SHORT)
    assert alone.ids == both[0].ids and alone.calls == both[0].calls and alone.read > both[0].read
    for name in ("tokens", "parents", "ends"):
        assert getattr(alone, name).tolist() == getattr(both[0], name).tolist()
    assert both[1].ids != both[0].ids


@pytest.mark.full
def test_without_merges_all_texts_are_found() -> None:
    """By enumeration: with every token looked at, and calls enough, the queue runs empty and the texts sum to 1."""
    one, = search.lattice_decode(sharp(), [[9, 3]], calls=10 ** 6, k=24, suffix=9, max_new_tokens=2, rows=2)
    assert one.why == "queue" and one.merges == 0
    assert len({tuple(ids) for ids in one.ids}) == len(one.ids) == 1 + 23 * 24 == one.count
    np.testing.assert_allclose(np.exp(one.log_probs).sum(), 1, atol=1e-5)


@pytest.mark.full
def test_siblings_that_read_alike_are_queued_once() -> None:
    one, = search.lattice_decode(sharp(), [[9, 3]], calls=1, k=24, max_new_tokens=1, reads=lambda t: t // 2)
    assert len(one.ids) == 12 and {ids[0] // 2 for ids in one.ids} == set(range(12))


def test_bad_arguments_say_so() -> None:
    cases: Any = (("merge", "both", "merge: got 'both', takes 'zip' or 'rcb'"), ("suffix", 1, "suffix: got 1"),
                  ("k", 25, "k: got 25"), ("calls", 0, "calls: got 0"), ("gap", 0, "gap: got 0"),
                  ("length_penalty", -1.0, "length_penalty: got -1.0"))
    for name, value, match in cases:
        with pytest.raises(ValueError, match=match):
            search.lattice_decode(sharp(), [[9, 3]], **{name: value})


@pytest.mark.full
def test_a_cache_must_be_one_that_can_be_cut_back() -> None:
    with pytest.raises(ValueError, match="takes one that supports truncation"):
        search.lattice_decode(sharp(), [[9, 3]], cache="streaming-llm")


@pytest.mark.full
def test_texts_are_text_where_there_is_a_tokenizer() -> None:
    one, = search.lattice_decode(dx.load("pycode"), "def area(", calls=12, max_new_tokens=6)
    assert all(isinstance(text, str) for text in one.texts) and len(one.texts) == len(one.ids) > 1
