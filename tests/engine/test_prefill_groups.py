"""Prompts that are prefilled in groups of rows, by methods that read them."""

from typing import Any

import numpy as np
import pytest

import decodax as dx
from decodax.algorithms.speculative import NOTHING, Adaptive, Automatic, Speculative
from decodax.algorithms.speculative.heads import drafting_source
from decodax.algorithms.speculative.trees import Chain
from decodax.core import drivers
from tests.drafters.fresh import fresh
from tests.laws import cases


def _method(name: str) -> tuple[Any, Any]:
    lm = cases.lm("llama")
    if name == "draft-model":
        small = cases.lm("sliding")
        method = Speculative(dx.drafts.DraftModel(small), shape=Chain(3))
        return method.bare(), method.weights
    source: Any = drafting_source(lm, fresh("eagle-3", lm))
    arm = Speculative(source, shape=Chain(3))
    method = arm if name == "eagle-3" else Adaptive((NOTHING, arm), Automatic((1.0, 1.6)))
    return method.bare(), method.weights


@pytest.mark.parametrize("name", ["eagle-3", "automatic", "draft-model"])
def test_rows_that_are_prefilled_in_groups_are_drafted_for_as_if_together(name: str,
                                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    method, weights = _method(name)
    options: Any = dict(new=20, size=64, width=8, draft=weights)
    groups: list[int] = []
    rows_of = drivers._together
    monkeypatch.setattr(drivers, "_together", lambda s, held: groups.append(rows_of(s, held)) or groups[-1])
    apart = cases.decode(method, "llama", cases.prompts(8), {}, **options)
    monkeypatch.setattr(drivers, "_together", lambda s, held: s.batch)
    together = cases.decode(method, "llama", cases.prompts(8), {}, **options)
    assert groups == [4]
    assert cases.texts(apart) == cases.texts(together)
    for one, other in (
            (apart.stats.drafted, together.stats.drafted), (apart.stats.accepted, together.stats.accepted)):
        assert np.array_equal(one, other)
    assert np.asarray(apart.stats.drafted).sum() > 0
