"""Beginnings that several prompts have in common: read once, for all that wait (BatchLLM: Zheng et al., 2024).

A few-shot header, a system prompt or one long document in front of many questions is found by comparing the prompts
themselves. Those with the same beginning run together.
"""

from __future__ import annotations

from collections.abc import Sequence

from decodax.engine.reading import SHARED, common


def mates(prompts: Sequence[Sequence[int]], least: int = SHARED,
          known: Sequence[Sequence[int]] = ()) -> tuple[int, list[int]]:
    """The beginning of the first prompt that saves the most tokens if all that have it read it once.

    >>> mates([[1, 2, 3, 4], [1, 2, 3, 9], [1, 2, 7], [1, 2, 8], [5]], least=1)
    (2, [0, 1, 2, 3])
    >>> mates([[1, 2], [3, 4]], least=1)
    (0, [])

    Args:
        least: tokens of a beginning that is worth it. known: beginnings that have been read already.

    Returns:
        How long it is, less than any of the prompts that have it, and which have it; 0 and none if no other one has a
        beginning of that length in common with the first.
    """
    # each prompt has a token left to read behind the beginning
    shared = [min(common(prompts[0], p), len(p) - 1, len(prompts[0]) - 1) for p in prompts]
    first = tuple(prompts[0])
    read = {len(k) for k in known if least <= len(k) < len(prompts[0]) and tuple(k) == first[:len(k)]}
    saved = {n: n * (sum(s >= n for s in shared) - (n not in read)) for n in {*shared[1:], *read} if n >= least}
    if not saved or max(saved.values()) <= 0:
        return 0, []
    best = max(saved, key=lambda n: (saved[n], n))
    return best, [i for i, n in enumerate(shared) if n >= best]
