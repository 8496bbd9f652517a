"""Decisions over trees of classes, evidence from elsewhere, edits, pass@k, and reports: against counting them out."""

import difflib
import itertools
import math
from pathlib import Path

import numpy as np
import pytest

import decodax as dx
from decodax import select
from decodax.select import Candidates, Hierarchy

pytestmark = pytest.mark.wide

TREE = Hierarchy((-1, 0, 0, 1, 1, 2, 2, 5, 5), ("all", "animal", "plant", "cat", "dog", "tree", "herb", "oak", "elm"))


def test_the_best_node_and_the_best_set_are_those_of_a_full_search() -> None:
    rng = np.random.default_rng(0)
    assert TREE.leaves.tolist() == [3, 4, 6, 7, 8]
    sets = np.array([[False, *x] for x in itertools.product([False, True], repeat=8)])
    for beta in (0.5, 1.0, 2.0):
        for chances in rng.dirichlet(np.full(5, 0.6), 20):
            expected = TREE.f_beta_of(sets, beta) @ chances
            found = TREE.best_set(chances, beta)
            assert np.isclose(TREE.f_beta_of(found[None], beta)[0] @ chances, expected.max())
            assert all(found[p] or p == 0 for i, p in enumerate(TREE.parents) if found[i])
            node = TREE.best_node(chances, beta)
            by_hand = []
            for h in range(9):
                total = 0.0
                for y, p in zip(TREE.leaves, chances, strict=True):
                    a, b = set(np.flatnonzero(TREE.above[h])), set(np.flatnonzero(TREE.above[y]))
                    hp, hr = len(a & b) / len(a) if a else 0, len(a & b) / len(b)
                    total += p * ((1 + beta ** 2) * hp * hr / (beta ** 2 * hp + hr) if hp + hr else 0)
                by_hand.append(total)
            assert np.isclose(by_hand[node], max(by_hand))
    assert TREE.best_node([.5, .5, 0, 0, 0], 0.5) == 1 and TREE.best_node([1, 0, 0, 0, 0]) == 3
    assert select.best_expected(TREE.accuracy(), [[.1, .6, .1, .1, .1]])[0].tolist() == [4]
    both = TREE.best_set(np.array([[.1, .6, .1, .1, .1], [1.0, 0, 0, 0, 0]]))
    assert both.shape == (2, 9) and np.flatnonzero(both[1]).tolist() == [1, 3]


def test_texts_are_classified_by_the_names_of_leaves(tiny_model: Path) -> None:
    lm = dx.load(tiny_model)
    # of labels that begin alike, each has its own share
    labels = {"1": 0.5, "10": 0.2, "100": 0.05, "2": 0.3, "11": 0.1}
    own = select.consensus.apart(np.log(list(labels.values())), [np.array(list(map(int, name))) for name in labels])
    np.testing.assert_allclose(np.exp(own), [0.2, 0.15, 0.05, 0.3, 0.1])
    names, chances = select.classify(lm, ["a b", "c"], TREE, ask=lambda text: f"{text}: ")
    sums = dx.score(lm, [("c: ", TREE.names[i]) for i in TREE.leaves]).sum      # type: ignore[index]
    np.testing.assert_allclose(chances[1], np.exp(sums) / np.exp(sums).sum(), rtol=1e-5)
    assert names == [TREE.names[i] for i in TREE.best_node(chances)]           # type: ignore[index]


def test_evidence_counts_and_is_not_chosen(tiny_model: Path) -> None:
    each = Candidates(["a b", "c d", "e"], "question")
    rule = select.make("x-mbr", evidence=lambda prompt: [f"c d {prompt}", "c d"], utility=select.token_f1)
    want = select.token_f1(each.texts, [*each.texts, "c d question", "c d"]).mean(1)
    np.testing.assert_allclose(rule.scores(each), want)
    assert rule.choose(each).index == 1
    lm = dx.load(tiny_model)
    sampled = select.Sampled(lm, 3, lambda prompt: [prompt, f"{prompt}!"], dict(max_new_tokens=4, temperature=1.0))
    assert len(sampled("x")) == 6 and sampled("x") == sampled("x")
    out = dx.select.choose(lm, ["a", "b"], dx.select.x_mbr(evidence=sampled), num_samples=4, temperature=1.0,
                           max_new_tokens=4)
    assert out.text[0] in out.candidates[0].texts


def test_a_calibrated_reward_is_a_quantile() -> None:
    size = lambda prompt, texts: [float(len(t)) for t in texts]
    references = lambda prompt: ["x" * i for i in (1, 2, 2, 5)]
    each = Candidates(["", "xx", "xxx", "x" * 9], "p")
    got = select.calibrated(size, references)("p", each.texts)
    assert np.asarray(got).tolist() == [0, 0.75, 0.75, 1]
    for t in (2.0, -2.0):
        rule = select.make("infalign-ctrl", reward=size, references=references, t=t)
        np.testing.assert_allclose(rule.scores(each), (np.exp(t * np.asarray(got)) - 1) / t)
        assert rule.choose(each).index == 3
    with pytest.raises(ValueError, match="references: got none"):
        select.calibrated(size, lambda prompt: [])("p", ["x"])


def test_edits_make_the_program_that_was_taken_apart() -> None:
    rng = np.random.default_rng(1)
    whole = [f"line {i}" for i in range(12)]
    for context in (0, 2):
        left, states = list(range(12)), []
        while left:                                     # from the whole program back to nothing
            states.append([whole[i] for i in left])
            gone = set(rng.choice(left, min(len(left), int(rng.integers(1, 5))), replace=False).tolist())
            left = [i for i in left if i not in gone]
        states = [[], *states[::-1]]
        edits = ["\n".join(list(difflib.unified_diff(a, b, n=context, lineterm=""))[2:])
                 for a, b in itertools.pairwise(states)]
        text = select.edits.EDIT.join(edits)
        assert select.resolve_edits(text) == "\n".join(whole)
        assert select.resolve_edits(text + select.edits.EDIT + "@@ -99,0 +") == "\n".join(whole)
    with pytest.raises(ValueError, match=r"edit 1 of 2: .*only insert lines"):
        select.resolve_edits("@@ -1 +1 @@\n-a\n+b" + select.edits.EDIT + "@@ -1,0 +2 @@\n+x", program="a")
    with pytest.raises(ValueError, match="which the program does not have"):
        select.insert("a", "@@ -1 +1,2 @@\n b\n+c")


def test_pass_at_k_is_unbiased() -> None:
    n, c, k = 7, 3, 4
    drawn = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert np.isclose(select.pass_at_k(n, c, k), np.mean([any(x) for x in drawn]))
    assert np.isclose(select.pass_at_k(200, 5, 50), 1 - math.comb(195, 50) / math.comb(200, 50))
    assert select.coverage([[True] * 2 + [False] * 8, [False] * 10], (1, 5, 20)) == pytest.approx(
        {1: 0.1, 5: (1 - math.comb(8, 5) / math.comb(10, 5)) / 2})
    with pytest.raises(ValueError, match="k: got 8 with 7 samples"):
        select.pass_at_k(7, 3, 8)


def test_rationales_are_cut_short(tiny_model: Path) -> None:
    lm = dx.load(tiny_model)
    problems = [("q ", "one two three four", ["a", "b", "c"]), ("r ", "five six", ["d", "e"])]
    found = select.faithfulness(lm, problems, (0.0, 0.5, 1.0), join=" so ")
    want = dx.score(lm, [("q  so ", "a"), ("q one two so ", "a"), ("q one two three four so ", "a")]).sum
    np.testing.assert_allclose(found.each[0], want, rtol=1e-5)
    np.testing.assert_allclose(found.log_probs, found.each.mean(0))
    assert found.same[-1] == 1 and 0 <= found.area <= 1 and "50%" in str(found)
    alone = select.faithfulness(lm, [("q ", "one two", ["a"])])
    assert np.isnan(alone.same).all()
    with pytest.raises(ValueError, match="shares: got"):
        select.faithfulness(lm, problems, (0.5,))
