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
from tests.speculative.drafting import chains, propose, rows

FILES = sorted((Path(__file__).parent / "drafts").glob("*.json"))


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_proposals_are_the_authors(file: Path) -> None:
    data: dict[str, Any] = json.loads(file.read_text())
    histories = data["histories"]
    s = rows(*histories, size=64)
    for group in data["groups"]:
        draft = getattr(drafts, data["draft"])(**group["options"])
        made = propose(draft, s)
        wanted = group["drafts"]
        differ = [i for i, (a, b) in enumerate(zip(chains(made), wanted, strict=True)) if a != b]
        assert not differ, (histories[differ[0]], chains(made)[differ[0]], wanted[differ[0]])
        if "match" in group:
            assert np.asarray(made.match).tolist() == group["match"]
