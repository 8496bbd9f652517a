"""The published tree of Medusa (Cai et al. 2024): found greedily from the accuracy of each head's i-th guess."""

from __future__ import annotations

from decodax.speculative.shapes.fixed import Fixed


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
"""`mc_sim_7b_63`, for Vicuna-7B: 63 drafts, 4 deep, the authors' default."""

EAGLE_25 = _tree(":4", "0:3 1:2 2:2 3:1", "00:3 01:2 02:2 10:1", "000:3", "0000:2")
"""The static tree of EAGLE (Li et al. 2024): 25 drafts, 5 deep."""
