"""Drafts from text against the authors' code: the same proposals for the same histories.

Each file in `drafts/` holds what one repository's code proposed, as numbers; see README.md.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decodax.speculative import drafts
from tests.speculative.drafting import chains, paths, propose, rows

FILES = sorted((Path(__file__).parent / "drafts").glob("*.json"))


def wanted(group: dict[str, Any]) -> list[Any]:
    """What the authors' code proposed for each history: a chain, or the paths of a tree."""
    if "drafts" in group:
        return group["drafts"]
    if "guesses" in group:
        return [{tuple(g[:n]) for g in each for n in range(1, len(g) + 1)} for each in group["guesses"]]
    trees = []
    for tokens, parents in zip(group["tokens"], group["parents"], strict=True):
        found: list[tuple[int, ...]] = []
        for token, above in zip(tokens, parents, strict=True):
            found.append((*(found[above] if above >= 0 else ()), token))
        trees.append(set(found))
    return trees


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_proposals_are_the_authors(file: Path) -> None:
    data: dict[str, Any] = json.loads(file.read_text())
    histories = data["histories"]
    s = rows(*histories, size=64)
    for group in data["groups"]:
        made = propose(getattr(drafts, data["draft"])(**group["options"]), s)
        ours = chains(made) if "drafts" in group else [set(paths(made, i)) for i in range(len(histories))]
        differ = [i for i, (a, b) in enumerate(zip(ours, wanted(group), strict=True)) if a != b]
        assert differ == group.get("differs", []), (histories[differ[0]], ours[differ[0]], wanted(group)[differ[0]])
        if "match" in group:
            assert np.asarray(made.match).tolist() == group["match"]
