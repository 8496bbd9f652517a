"""The contract of selection rules: what every entry of the registry does with the candidates of a prompt."""

from typing import Any

import numpy as np
import pytest

import decodax as dx
from decodax import select
from decodax.common.registry import SELECTS
from decodax.io.load import LM
from decodax.select import Candidates

PROMPTS = ["def area(", "x =", "for"]


def reward(prompt: Any, texts: Any) -> list[float]:
    """A number that differs from text to text, and by what they answer."""
    return [(sum(map(ord, text)) * 31 + 7 * len(str(prompt))) % 101 / 101 for text in texts]


OPTIONS: dict[str, dict[str, Any]] = {
    "best-of-n": dict(reward=reward), "quality-aware": dict(quality=reward, rule=select.Likelihood(), keep=2),
    "x-mbr": dict(evidence=lambda prompt: ["def area(x)", "x = 1"]),
    "infalign-ctrl": dict(reward=reward, references=lambda prompt: ["a", "bc", "def"]),
    "pair-reranker": dict(compare=lambda prompt, a, b: reward(prompt, [a])[0] - reward(prompt, [b])[0])}
"""What these cannot do without."""
BY_PLACE = ("local-normalization", "low-rank-mbr", "pruning-mbr", "universal-self-consistency")
"""Rules that draw random numbers for the places of candidates, or ask for the number of a place."""
WATCHES = ("first-finish",)
"""A rule that looks on while samples are written, and so has nothing to say of candidates that are there."""
GIVEN = Candidates(["ab c", "ab d", "x", "ab c", "abc d e"], "ab", np.array([-3.0, -4.0, -2.0, -3.0, -6.0]),
                   np.array([3, 3, 1, 3, 5]), np.array([0.1, -0.3, 0.2, 0.1, 0.0]), (1, 2))


@pytest.mark.parametrize("name", [name for name in SELECTS if name not in WATCHES])
def test_scores_are_one_for_each_candidate_and_the_largest_is_chosen(name: str, lm: LM) -> None:
    rule = SELECTS.make(name, lm, **OPTIONS.get(name, {}))
    choice, again = rule.choose(GIVEN), rule.choose(GIVEN)
    assert choice.scores.shape == (len(GIVEN),) and choice.index == again.index
    assert choice.index == choice.scores.argmax() or name == "local-normalization"      # which draws by its scores
    np.testing.assert_array_equal(choice.scores, again.scores)
    assert rule.choose(GIVEN.select([2])).index == 0


@pytest.mark.parametrize("name", [name for name in SELECTS if name not in (*WATCHES, *BY_PLACE)])
def test_the_order_of_candidates_does_not_change_their_scores(name: str, lm: LM) -> None:
    rule, order = SELECTS.make(name, lm, **OPTIONS.get(name, {})), [4, 2, 0, 1, 3]
    found = rule.choose(GIVEN.select(order))
    np.testing.assert_allclose(found.scores, rule.choose(GIVEN).scores[order], rtol=1e-6)


@pytest.mark.wide(but=("likelihood", "self-consistency"))
@pytest.mark.parametrize("name", SELECTS)
def test_the_choice_for_a_prompt_does_not_depend_on_the_other_prompts(name: str, lm: LM) -> None:
    rule = SELECTS.make(name, lm, **OPTIONS.get(name, {}))
    choose = lambda rows: select.choose(lm, [PROMPTS[i] for i in rows], rule, num_samples=3, request_ids=rows, seed=3,
                                        temperature=1.0, max_new_tokens=6)
    whole, back, alone = choose([0, 1, 2]), choose([2, 1, 0]), choose([1])
    assert back.text == whole.text[::-1] and alone.text == whole.text[1:2]
    assert back.index == whole.index[::-1] and alone.index == whole.index[1:2]
    answers = dx.generate(lm, [PROMPTS[1]], select=rule, num_samples=3, request_ids=[1], seed=3,
                          temperature=1.0, max_new_tokens=6)
    assert answers.text == alone.text
