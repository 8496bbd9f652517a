"""The scaling law of drafters, fitted to runs."""

import json
from pathlib import Path

import numpy as np
import pytest

from decodax.train.scaling import DrafterRun, ScalingLaw, fit_scaling


def test_the_law_that_made_the_runs_is_found(tmp_path: Path) -> None:
    true, noise = ScalingLaw(-4.0, 0.4, 0.6), np.random.default_rng(0)
    runs = [DrafterRun(tokens, size, true(tokens, size) + 0.01 * noise.normal())
            for tokens in (1e6, 1e7, 1e8) for size in (1e5, 1e6, 1e7)]
    found = fit_scaling(runs)
    assert found(1e9, 1e8) == pytest.approx(true(1e9, 1e8), abs=0.1)
    # 2.8 tokens in 3 seconds at 1e6 against 2.2 in 1.2 at 1e5: the small one is faster where drafting is dear
    assert found.best_size([1e5, 1e6], 1e8, lambda size: 1 + 2 * (size / 1e6)) == 1e5
    assert found.best_size([1e5, 1e6], 1e8, lambda size: 1 + 1e-3 * (size / 1e6)) == 1e6

    for i, run in enumerate(runs[::3]):     # of one size
        (tmp_path / str(i)).mkdir()
        facts = {"training": {"tokens": run.tokens, "parameters": run.parameters, "greedy": run.accepted}}
        (tmp_path / str(i) / "config.json").write_text(json.dumps(facts))
    by_tokens = fit_scaling([tmp_path / str(i) for i in range(3)])
    assert by_tokens.parameters == 0 and by_tokens.tokens == pytest.approx(0.4, abs=0.02)


def test_runs_that_say_too_little_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="runs: got 2, which differ too little"):
        fit_scaling([DrafterRun(1e6, 1e6, 2), DrafterRun(1e7, 1e7, 3)])
    with pytest.raises(ValueError, match="runs: got DrafterRun"):
        fit_scaling([DrafterRun(0, 1e6, 2)])
    with pytest.raises(ValueError, match="has no 'tokens' of a training"):
        fit_scaling([tmp_path])
