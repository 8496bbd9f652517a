"""Common prefixes of prompts, which are prefilled once for all waiting prompts (BatchLLM: Zheng et al., 2024).

A few-shot header, a system prompt or one long document before many questions is found by comparing the prompts. Prompts
with the same prefix run together.
"""

from __future__ import annotations

from collections.abc import Sequence

from decodax.engine.reading import SHARED, common


def mates(prompts: Sequence[Sequence[int]], least: int = SHARED,
          known: Sequence[Sequence[int]] = ()) -> tuple[int, list[int]]:
    """Returns the prefix of the first prompt that saves the most tokens if it is prefilled once for all prompts that
    have it.

    >>> mates([[1, 2, 3, 4], [1, 2, 3, 9], [1, 2, 7], [1, 2, 8], [5]], least=1)
    (2, [0, 1, 2, 3])
    >>> mates([[1, 2], [3, 4]], least=1)
    (0, [])

    Args:
        prompts: token ids of the prompts.
        least: minimum number of tokens of a prefix.
        known: prefixes whose caches exist already.

    Returns:
        The length of the prefix, less than that of each prompt that has it, and the indices of these prompts; 0 and []
        if no other prompt or known prefix shares enough tokens with the first prompt.
    """
    # each prompt has a token left to read after the beginning
    shared = [min(common(prompts[0], p), len(p) - 1, len(prompts[0]) - 1) for p in prompts]
    first = tuple(prompts[0])
    read = {len(k) for k in known if least <= len(k) < len(prompts[0]) and tuple(k) == first[:len(k)]}
    saved = {n: n * (sum(s >= n for s in shared) - (n not in read)) for n in {*shared[1:], *read} if n >= least}
    if not saved or max(saved.values()) <= 0:
        return 0, []
    best = max(saved, key=lambda n: (saved[n], n))
    return best, [i for i, n in enumerate(shared) if n >= best]
