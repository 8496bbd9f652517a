"""The guide to the low level runs as it stands."""

import re
from pathlib import Path

import numpy as np

from decodax.systems import SYSTEMS

GUIDE = Path(__file__).parents[1] / "docs" / "low_level.md"


def test_the_guide_to_the_low_level_runs():
    names = {"__name__": __name__}
    for block in re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL):
        exec(compile(block, str(GUIDE), "exec", dont_inherit=True), names)
    del SYSTEMS["careful"]
    assert np.asarray(names["s"].stats.rounds).tolist() == [3, 3]
    assert names["out"].status[0].name in ("DEAD_END", "LENGTH", "EOS")
