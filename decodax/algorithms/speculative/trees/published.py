"""Draft trees that papers have published with their code."""

from __future__ import annotations

from decodax.algorithms.speculative.fixed_trees import Chain, Fixed
from decodax.algorithms.speculative.source import Shape


def _tree(*levels: str) -> Fixed:
    """Parses a tree from levels. Each word of a level is the path of a parent and, after a colon, its number of
    children."""
    out: list[tuple[int, ...]] = []
    for level in levels:
        for word in level.split():
            above, count = word.split(":")
            out += [(*map(int, above), i) for i in range(int(count))]
    return Fixed(tuple(out))


MEDUSA_63 = _tree(":10", "0:10 1:7 2:3 3:2 4:1 5:1 6:1 7:1 8:1 9:1",
                  "00:10 01:3 02:2 03:1 04:1 05:1 06:1 07:1 10:2 20:1", "000:2")
"""The tree of Medusa (Cai et al. 2024), `mc_sim_7b_63`, the authors' default for Vicuna-7B: 63 drafts in 4 layers,
found greedily from the accuracy of each head's i-th guess."""

EAGLE_25 = _tree(":4", "0:3 1:2 2:2 3:1", "00:3 01:2 02:2 10:1", "000:3", "0000:2")
"""The static tree of EAGLE (Li et al. 2024): 25 drafts in 5 layers."""

RECYCLING_80 = _tree(":8", "0:8 1:4 2:3 3:2 4:1 5:1 6:1 7:1",
                     "00:8 01:3 02:2 03:1 04:1 05:1 06:1 07:1 10:2 11:1 20:1 30:1 40:1 50:1",
                     "000:5 001:2 002:1 003:1 004:1 010:1 020:1 100:1 200:1 300:1",
                     "0000:3 0001:1 0002:1 0010:1 0100:1 1000:1", "00000:2 00010:1")
"""The tree of Token Recycling (Luo et al. 2024), template 2.2.2, the authors' default for Vicuna-7B: 80 drafts in 6
layers, 8 candidates for a token (`tree_template_.py` of Luowaterbi/TokenRecycling at 1b4c05c, and of Spec-Bench)."""

FALCON_75 = _tree(":20", "0:11 1:4 2:4", "00:7 01:10 02:1 03:1 10:1 20:1",
                  "000:10 010:1 020:1 030:1 100:1 200:1")
"""The tree of Falcon (Gao et al. 2024) for blocks of two tokens and two passes: 75 drafts in 4 layers
(`kmask2_4layer_tree` of Bestpay-inc/Falcon at 367030e)."""


def within(tree: Fixed, longest: int | None) -> Shape:
    """Returns the tree `tree` if its depth is at most `longest`, otherwise a chain of `longest` drafts. `longest` is
    the largest number of tokens that a drafter predicts; None: no limit."""
    return tree if longest is None or tree.length <= longest else Chain(longest)
