"""Draft lengths by measured cost, with a trained drafter."""

from pathlib import Path

import numpy as np
import pytest

import decodax as dx
from decodax.algorithms.speculative.adaptive.measure import automatic_entry
from decodax.io.drafters import save_drafter
from decodax.io.load import LM
from tests.drafters.fresh import fresh


@pytest.mark.wide
def test_automatic_takes_a_trained_drafter_and_no_longer_chains_than_it_drafts(lm: LM, tmp_path: Path) -> None:
    drafter = fresh("medusa", lm)
    save_drafter(tmp_path, drafter)
    made = automatic_entry(lm, drafter, lengths=(2, 7))
    assert [arm.drafter.length for arm in made.arms[1:]] == [2, drafter.head.longest]
    options = dict(max_new_tokens=12, temperature=[0.0, 0.9], seed=1, eos_token_id=[])
    plain, out = (dx.generate(lm, ["def f(self):", "a"], **options, **more) for more in (
        {}, dict(algorithm=dx.algorithms.automatic(lengths=(2,)), draft=str(tmp_path))))
    assert np.array_equal(out.tokens, plain.tokens)
