"""Blocks that stand for others."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from decodax.caches.evict.h2o import Accumulated
from decodax.caches.evict.kvcrush import BlockRepresentatives

pytestmark = pytest.mark.wide

CASES = json.loads((Path(__file__).parents[1] / "expected" / "kvcrush.json").read_text())["cases"]


@pytest.mark.parametrize("case", CASES)
def test_the_representatives_are_those_of_the_authors(case: str) -> None:
    """With blocks behind them that are not there."""
    given = CASES[case]
    shape = given["blocks"], given["block"]
    worth = np.random.RandomState(int(case)).random_sample(shape[0] * shape[1]).astype(np.float32).reshape(shape)
    top = set(np.argsort(worth.sum(1))[-given["kept"]:].tolist())
    within = jnp.arange(shape[0] + 3) < shape[0]
    for anchor, wanted in given["found"].items():
        rule = BlockRepresentatives(Accumulated(4, sinks=2, over="heads"), given["block"], given["crush"], anchor)
        found = rule.blocks(jnp.pad(jnp.asarray(worth), ((0, 3), (0, 0)), constant_values=9), within,
                            jnp.int32(given["kept"]))
        assert set(np.flatnonzero(found).tolist()) == top | set(wanted)
