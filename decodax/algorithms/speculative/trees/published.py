"""Trees that papers publish with their code, as data."""

from __future__ import annotations

from decodax.algorithms.speculative.fixed_trees import Fixed


def _tree(*levels: str) -> Fixed:
    """Levels as words, one a parent: the path to it and, after a colon, how many children it has."""
    out: list[tuple[int, ...]] = []
    for level in levels:
        for word in level.split():
            above, count = word.split(":")
            out += [(*map(int, above), i) for i in range(int(count))]
    return Fixed(tuple(out))


MEDUSA_63 = _tree(":10", "0:10 1:7 2:3 3:2 4:1 5:1 6:1 7:1 8:1 9:1",
                  "00:10 01:3 02:2 03:1 04:1 05:1 06:1 07:1 10:2 20:1", "000:2")
"""Medusa's (Cai et al. 2024) `mc_sim_7b_63`, for Vicuna-7B: 63 drafts, 4 deep, the authors' default; found greedily
from the accuracy of each head's i-th guess."""

EAGLE_25 = _tree(":4", "0:3 1:2 2:2 3:1", "00:3 01:2 02:2 10:1", "000:3", "0000:2")
"""The static tree of EAGLE (Li et al. 2024): 25 drafts, 5 deep."""

RECYCLING_80 = _tree(":8", "0:8 1:4 2:3 3:2 4:1 5:1 6:1 7:1",
                     "00:8 01:3 02:2 03:1 04:1 05:1 06:1 07:1 10:2 11:1 20:1 30:1 40:1 50:1",
                     "000:5 001:2 002:1 003:1 004:1 010:1 020:1 100:1 200:1 300:1",
                     "0000:3 0001:1 0002:1 0010:1 0100:1 1000:1", "00000:2 00010:1")
"""Token Recycling's (Luo et al. 2024) template 2.2.2, for Vicuna-7B: 80 drafts, 6 deep, 8 candidates a token, the
authors' default (`tree_template_.py` of Luowaterbi/TokenRecycling at 1b4c05c, and of Spec-Bench)."""
