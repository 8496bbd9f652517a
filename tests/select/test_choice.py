"""Rules that choose among candidates: against a library of them, counting by hand, and on samples of a model."""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import decodax as dx
from decodax import select
from decodax.common.registry import SELECTS
from decodax.core.state import Status
from decodax.io.load import LM
from decodax.select import Candidates

MBRS = json.loads((Path(__file__).parent / "mbrs.json").read_text())


@pytest.mark.parametrize("case", MBRS["cases"], ids=lambda case: str(len(case["texts"])))
def test_expected_utilities_are_mbrs(case: dict[str, Any]) -> None:
    each = Candidates(case["texts"], log_probs=np.array(case["log_probs"]))
    assert len(set(case["texts"])) == len(case["texts"])
    rules: dict[str, select.SelectionRule] = {
        "mbr": select.MBR(), "weighted": select.MBR(weighted=True), "aggregate": select.AggregateMBR(),
        "aggregate_weighted": select.AggregateMBR(weighted=True)}
    for name, rule in rules.items():
        np.testing.assert_allclose(rule.scores(each), case[name], atol=2e-3)
        assert rule.choose(each).index == int(np.argmax(case[name]))


def test_the_factors_are_mbrs() -> None:
    given = {name: np.array(x) for name, x in MBRS["als"].items()}

    class Fixed:
        """What the library drew."""

        turn = 0

        def random(self, shape: tuple[int, int]) -> np.ndarray:
            self.turn += 1
            return np.zeros(shape) if self.turn == 1 else given["right"] / (9 * 4) ** -0.5

    left, right = select.LowRankMBR(rank=4).factors(given["matrix"], given["known"], Fixed())  # type: ignore[arg-type]
    np.testing.assert_allclose(left @ right.T, given["found"], atol=2e-3)


def test_estimators_that_see_everything_are_exact() -> None:
    each = Candidates(MBRS["cases"][2]["texts"])
    wanted = select.MBR().scores(each)
    whole = select.LowRankMBR(reduction=1, rank=20, ridge=1e-6, rounds=50).scores(each)
    np.testing.assert_allclose(whole, wanted, atol=1e-2)
    pruned = select.PruningMBR(alpha=1.0).scores(each)      # who never wins is dropped all the same
    assert np.isfinite(pruned[wanted.argmax()])
    np.testing.assert_allclose(pruned[np.isfinite(pruned)], wanted[np.isfinite(pruned)], atol=1e-9)
    early = select.PruningMBR(schedule=(8, 20)).scores(each)
    assert np.isfinite(early).sum() < len(each) and early.argmax() == wanted.argmax()


def test_a_candidate_is_not_its_own_reference_if_that_is_said() -> None:
    each = Candidates(["a", "b", "b"])
    assert select.MBR(select.exact).scores(each).tolist() == pytest.approx([1 / 3, 2 / 3, 2 / 3])
    assert select.MBR(select.exact, itself=False).scores(each).tolist() == pytest.approx([0, 0.5, 0.5])
    # each text once, by its probability
    each = Candidates(["a", "b", "b"], log_probs=np.log([.6, .2, .2]))
    weighted = select.MBR(select.exact, weighted=True).scores(each)
    assert weighted.tolist() == pytest.approx([0.75, 0.25, 0.25])


def test_similarities_of_texts() -> None:
    assert select.chrf(["", "abc"], ["", "abc"]).tolist() == [[0, 0], [0, pytest.approx(100)]]
    assert select.token_f1(["A b", ""], ["b a", ""]).tolist() == [[1, 0], [0, 1]]
    with pytest.raises(ValueError, match=r"utility: got shape \(1,\) for 2 hypotheses and 2 references, takes \(2, 2"):
        select.MBR(lambda a, b: np.zeros(1)).scores(Candidates(["a", "b"]))


def test_votes_are_counts_then_probabilities_then_the_first_place() -> None:
    """Counts first, then the sum of probabilities, then the place; in the chosen answer the most probable text."""
    last = select.SelfConsistency(lambda text: text.split()[-1] if text.split() else None)
    texts = ["x 1", "y 2", "z 1", "w 2", "", "v 3"]
    for log_p, wanted in ((None, 0), ([.1, .2, .2, .3, .1, .1], 3), ([.3, .1, .4, .1, .1, 0.0], 2)):
        known = None if log_p is None else np.log(np.maximum(log_p, 1e-9))
        assert last.choose(Candidates(texts, log_probs=known)).index == wanted
    assert last.share(Candidates(texts)) == pytest.approx(2 / 5)
    weighted = select.SelfConsistency(last.answer, "probability")
    assert weighted.choose(Candidates(texts, log_probs=np.log([.1, .1, .1, .1, .1, .5]))).index == 5
    lengths = np.array([1, 1, 1, 1, 1, 10])
    normal = select.SelfConsistency(last.answer, "normalized")
    for own, wanted in ((-40.0, 0), (-10.0, 5)):
        known = np.array([-3, -3, -3, -3.1, -3, own])
        assert normal.choose(Candidates(texts, log_probs=known, lengths=lengths)).index == wanted
    assert last.choose(Candidates(["", " "])).index == 0        # nobody votes
    with pytest.raises(ValueError, match="log_probs: got None, but the rule weighs candidates by how probable"):
        weighted.choose(Candidates(texts))


def test_rewards_and_comparisons() -> None:
    each = Candidates(["bb", "a", "cccc", "ddd"], prompt="p", log_probs=np.array([-4, -1, -4, -9.0]),
                      lengths=np.array([2, 1, 4, 3]))
    longest = lambda prompt, texts: [len(text) * (prompt == "p") for text in texts]
    assert select.BestOfN(longest).choose(each).index == 2
    assert select.Likelihood().choose(each).index == 1 and select.Likelihood(0).choose(each).index == 1
    assert select.Likelihood().scores(each).tolist() == [-2, -1, -1, -3]
    two = select.QualityAware(longest, select.Likelihood(), keep=2)
    assert two.choose(each).index == 2 and np.isneginf(two.scores(each)[:2]).all()
    asked = []

    def longer(prompt: Any, a: str, b: str) -> float:
        asked.append((a, b))
        return len(a) - len(b) + 0.5        # who likes the first of two

    for way, pairs in (("all", 6), ("wins", 6), ("bubble", 3)):
        asked.clear()
        assert select.PairRanker(longer, way).choose(each).index == 2      # type: ignore[arg-type]
        assert len(asked) == 2 * pairs
    with pytest.raises(ValueError, match="the score of candidate 1 is a NaN"):
        select.BestOfN(lambda prompt, texts: [0, np.nan]).choose(Candidates(["a", "b"]))


def test_samples_go_where_they_gain_most() -> None:
    """Against all allotments."""
    chances = [0.05, 0.4, 0.9, 0.0]
    hits = lambda given: sum(1 - (1 - p) ** n for p, n in zip(chances, given, strict=True))
    for budget in (4, 7, 10):
        best = max((g for g in itertools.product(range(1, budget), repeat=4) if sum(g) <= budget), key=hits)
        assert hits(select.allocate(chances, budget)) == pytest.approx(hits(best))
    assert select.allocate([0.5, 0.5], 10, most=3) == [3, 3]
    with pytest.raises(ValueError, match="budget: got 1, but 2 prompts with 1 each take 2"):
        select.allocate([0.5, 0.5], 1)


PROMPTS = ["def area(", "x ="]


def test_choose_samples_and_chooses(lm: LM) -> None:
    options: dict[str, Any] = dict(temperature=0.9, max_new_tokens=6, seed=3)
    found = dx.select.choose(lm, PROMPTS, "likelihood", num_samples=4, **options)
    drawn = dx.generate(lm, PROMPTS, num_samples=4, logprobs=0, **options)
    assert drawn.text is not None and drawn.logprobs is not None
    means = drawn.logprobs.raw.sum(1).reshape(2, 4) / drawn.lengths.reshape(2, 4)
    assert found.index == means.argmax(1).tolist()
    assert found.text == [drawn.text[i * 4 + j] for i, j in enumerate(found.index)]
    hedged = dx.select.choose(lm, PROMPTS, dx.select.likelihood(length_penalty=0, greedy=True), num_samples=4,
                              **options)
    assert hedged.candidates[1].texts[0] == dx.generate(lm, PROMPTS[1], max_new_tokens=6).text[0]      # type: ignore[index]
    asked = []
    rewarded = dx.select.choose(lm, PROMPTS, dx.select.best_of_n(
        reward=lambda prompt, texts: asked.append(prompt) or [0, 1]), num_samples=2, **options)
    assert asked == PROMPTS and rewarded.index == [1, 1]
    assert len(dx.select.choose(lm, PROMPTS[0], select.MBR(greedy=True), num_samples=1, **options)) == 1
    for call, message in (
            (lambda: dx.select.choose(lm, PROMPTS, "mrb"), "select: unknown name 'mrb'; near ones: mbr"),
            (lambda: dx.select.choose(lm, PROMPTS, dx.select.make("mbr", utilty=3)),
             "takes no option 'utilty'; takes utility"),
            (lambda: dx.select.choose(lm, PROMPTS, "best-of-n"), "'best-of-n' needs reward="),
            (lambda: dx.select.choose(lm, PROMPTS, num_samples=0), "num_samples: got 0")):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="num_return_sequences: choose takes no such argument; give num_s"):
        dx.select.choose(lm, PROMPTS, num_return_sequences=3)


@pytest.mark.wide
def test_the_first_that_ends_is_taken(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    """By rounds, whatever the number of rounds between two looks; the others are ended soon after."""
    options: dict[str, Any] = dict(temperature=1.0, seed=1, max_new_tokens=120, stop="a")
    whole = dx.generate(lm, PROMPTS, num_samples=5, **options)
    ends = np.where([s in (Status.EOS, Status.STOP) for s in whole.status], whole.stats.rounds, 10 ** 6).reshape(2, 5)
    assert (ends.min(1) < 60).all() and (ends.max(1) > 2 * ends.min(1)).all()
    for burst in (1, 32):
        monkeypatch.setattr("decodax.select.finish.BURST", burst)
        found = dx.select.choose(lm, PROMPTS, "first-finish", num_samples=5, **options)
        assert found.index == ends.argmin(1).tolist()
        assert whole.text is not None
        assert found.text == [whole.text[i * 5 + j] for i, j in enumerate(found.index)]
    found = dx.select.choose(lm, PROMPTS, "first-finish", num_samples=5,
                             **{**options, "max_new_tokens": 1, "stop": None})
    assert found.index == [0, 0]        # nobody ends
    # the time is out at the first look
    found = dx.select.choose(lm, PROMPTS, "first-finish", num_samples=5,
                             **{**options, "stop": None, "eos_token_id": []},
                             max_time=1e-9)
    assert all(each.lengths is not None and (each.lengths <= 32).all() for each in found.candidates)
    with pytest.raises(TypeError, match="batch_size: first-finish takes no such argument"):
        dx.select.choose(lm, PROMPTS, "first-finish", batch_size=1)


def test_candidates_are_checked() -> None:
    with pytest.raises(ValueError, match="texts: got none"):
        Candidates([])
    with pytest.raises(ValueError, match=r"log_probs: got shape \(1,\), takes \(2,\)"):
        Candidates(["a", "b"], log_probs=np.zeros(1))
    assert set(select.names()) >= {"mbr", "best-of-n", "self-consistency"}
    for entry in SELECTS.values():
        assert dataclasses.is_dataclass(entry.make) and entry.summary


def test_the_guide_has_every_rule() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "choose" / "best_of_n.md").read_text()
    assert all(f"| `{name}` |" in guide for name in (*select.names(), "first-finish"))
