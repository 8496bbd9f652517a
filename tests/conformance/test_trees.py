"""Trees against the authors' code: the same nodes for the same draft distributions or acceptance rates.

Each file in `trees/` holds what one repository's code built, as numbers; see README.md.
"""

import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decodax.algorithms.speculative import trees
from decodax.algorithms.speculative.source import Answer, Grower, Level, Source
from decodax.common.struct import struct
from decodax.core.types import Params
from decodax.sampling import build
from tests.algorithms.speculative.drafting import Rows, paths, rows

FILES = {f.stem: json.loads(f.read_text()) for f in sorted((Path(__file__).parent / "trees").glob("*.json"))}


@dataclasses.dataclass(frozen=True)
class Table(Source):
    """A draft whose logits depend on a node's depth and token: `logits[depth, token]`."""

    seed: int
    spread: float
    vocabulary: int
    depth: int

    @functools.cached_property
    def logits(self) -> np.ndarray:
        shape = (self.depth, self.vocabulary, self.vocabulary)
        return (np.random.RandomState(self.seed).standard_normal(shape) * self.spread).astype(np.float32)

    def start(self, params: Params, s: Any, state: Any, room: int) -> tuple[Any, Answer]:
        return state, Answer(jnp.asarray(self.logits[0])[s.newest][:, None])

    def extend(self, params: Params, s: Any, state: Any, level: Level) -> tuple[Any, Answer]:
        return state, Answer(jnp.asarray(self.logits)[level.positions - s.length[:, None] + 1, level.tokens])


@struct
class Ends(Rows):
    """Rows with the state of a policy without one."""

    policy: tuple[Any, ...] = ((),)


def grown(data: dict[str, Any], group: dict[str, Any]) -> Any:
    """The proposal of a group's shape, a row for each of the newest tokens."""
    s = rows(*([5, token] for token in data["newest"]), size=8)
    s = Ends(**{f.name: getattr(s, f.name) for f in dataclasses.fields(s)})
    options = {k: tuple(map(tuple, v)) if isinstance(v, list) else v for k, v in group["options"].items()}
    return _grown(getattr(trees, data["shape"])(**options), Table(**group["table"]), s)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _grown(shape: Any, source: Table, s: Any) -> Any:
    return shape.grow(Grower(source, Params(None), build(s.batch), s, "ranked"), None)[0]


@pytest.mark.parametrize(("name", "group"), [
    pytest.param(name, group, id=f"{name}-{i}", marks=[pytest.mark.full] if i else [])
    for name, data in FILES.items() if "groups" in data for i, group in enumerate(data["groups"])])
def test_trees_of_drafts_are_the_authors(name: str, group: dict[str, Any]) -> None:
    proposal = grown(FILES[name], group)
    for row, wanted in enumerate(group["trees"]):
        assert set(paths(proposal, row)) == set(map(tuple, wanted))


@pytest.mark.parametrize("case", FILES["sequoia"]["cases"])
def test_trees_of_acceptance_rates_are_the_authors(case: dict[str, Any]) -> None:
    """Of trees that are equally good one is taken: paths of the same ranks in another order are worth the same."""
    o = case["options"]
    tree = trees.sequoia_for(o["acceptance"], {int(n): t for n, t in o["verify"]}, o["draft"], o["length"]) \
        if "verify" in o else trees.sequoia_tree(**o)
    ranks = lambda paths: sorted(tuple(sorted(path)) for path in paths)
    assert ranks(tree.paths) == ranks(case["paths"])
    worth = sum(math.prod(o["acceptance"][i] for i in path) for path in case["paths"])
    assert trees.expected(o["acceptance"], tree) == pytest.approx(1 + worth)
