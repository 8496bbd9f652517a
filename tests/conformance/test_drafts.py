"""Drafts from text against the authors' code: the same proposals for the same histories.

Each file in `drafts/` holds what one repository's code proposed, as numbers; see README.md.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decodax.algorithms.speculative import drafts
from tests.algorithms.speculative.drafting import chains, first, observe, paths, propose, rows

FOLDER = Path(__file__).parent / "drafts"
FILES = sorted(f for f in FOLDER.glob("*.json") if f.stem != "aggressive-decoding")


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


@pytest.mark.wide(but=("prompt-lookup", "prompt-lookup-transformers", "sam-decoding", "sam-decoding-hybrid"))
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


def test_copies_of_the_input_resume_where_the_authors_do() -> None:
    """At each forward: how many tokens of the output there are, and where in the input the copy begins, -1 nowhere."""
    data: dict[str, Any] = json.loads((FOLDER / "aggressive-decoding.json").read_text())
    draft = getattr(drafts, data["draft"])(length=32, **data["options"])
    for source, output, copies in zip(data["sources"], data["outputs"], data["copies"], strict=True):
        s, made, found = rows(source, size=64), 0, []
        state = first(draft, s)
        while made < len(output):
            at = int(state.at[0])
            found.append([made, at if at < len(source) else -1])
            drafted = chains(propose(draft, s, state))[0]
            assert drafted == (source[at:] if at >= 0 else [])
            held = next((n for n, (a, b) in enumerate(zip(drafted, output[made:], strict=False)) if a != b), None)
            held = min(len(drafted), len(output) - made) if held is None else held
            decided = output[made:made + held + 1]
            state, made = observe(draft, s, state, decided, most=33), made + len(decided)
        assert found == copies, (source, output)
