"""Simple decoding with vectors against the authors' penalty; and the roster of the guide.

`vector_fsd.json` has the tokens that follow from `HiddenSoftNGram` of LHRYANG/FSD (46df7d5, `ngram_model/fsd_vec.py`),
with the states behind the final norm, for the weights of `net` without token 4: prompt,
alpha, k, n, stop words of weight 0.2, tokens.
"""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import decodax as dx
from decodax.algorithms.contrastive.vector_fsd import VectorFSD
from decodax.engine.request import Request
from tests.matrix import often
from tests.small_models import PROMPTS, net

pytestmark = pytest.mark.wide

EXPECTED = json.loads((Path(__file__).parent / "vector_fsd.json").read_text())
GUIDE = (Path(__file__).parents[3] / "docs" / "usage" / "sampling.md").read_text()


@pytest.mark.parametrize(("k", "n"), often([(6, 3)], [(3, 2), (6, 3)]))
def test_tokens_follow_from_the_penalty_of_the_authors(k: int, n: int) -> None:
    for alpha in (0.03, 0.1, 0.45):
        for words in ([], [5, 7, 15]):
            cases = [c for c in EXPECTED if c[1:5] == [alpha, k, n, words]]
            out = dx.generate(net(), [c[0] for c in cases], algorithm=VectorFSD(16, alpha, k, n, tuple(words), 0.2),
                              suppress_tokens=[4], max_new_tokens=16)
            assert [out.row(i).tolist() for i in range(len(cases))] == [c[5] for c in cases]


def test_without_a_penalty_it_is_greedy_decoding_and_says_what_it_takes() -> None:
    greedy = dx.generate(net(), PROMPTS, max_new_tokens=8)
    assert np.array_equal(dx.generate(net(), PROMPTS, algorithm=VectorFSD(16, 0.0), max_new_tokens=8).tokens,
                          greedy.tokens)
    for given, message in ((dict(alpha=2.0), "alpha: got 2"), (dict(n=1), "k and n: got 3 and 1"),
                           (dict(stop_weight=-1.0), "stop_weight: got -1")):
        with pytest.raises(ValueError, match=message):
            VectorFSD(16, **given)      # type: ignore[arg-type]


def roster() -> dict[str, str]:
    table = GUIDE.split("## Methods at a glance")[1].split("\n## ")[0]
    return dict(re.findall(r"^\| ([^|]+?) \| `([^`]+)`[^|]*\|$", table, re.MULTILINE))


def given(name: str, small: dx.LM) -> dict[str, Any]:
    """The arguments of `generate` that the guide has for a method; `lm` is the model."""
    return {"lm": net(), **eval(f"dict({roster()[name]})", {"dx": dx, "lm": net(), "small": small})}


def test_the_roster_is_whole() -> None:
    names = [name.split(",")[0].split(" (")[0] for name in roster()]
    assert names == ["greedy", "temperature sampling", "top-k", "top-p", "locally typical", "eta", "mirostat",
                     "beam search", "diverse beam search", "contrastive search", "contrastive decoding", "FSD", "FSD-d",
                     "DoLa"]
    for name in roster():
        arguments = given(name, net())
        Request.read(arguments.pop("lm"), PROMPTS, **arguments)


@pytest.mark.full
@pytest.mark.parametrize("name", list(roster()))
def test_the_roster_runs(name: str) -> None:
    out = dx.generate(prompts=PROMPTS, max_new_tokens=4, **given(name, net(1, 3)))
    assert len(out) == 3 and (out.lengths > 0).all()
