"""Keys and values of a text that were computed independently of a batch."""

from __future__ import annotations

import dataclasses

import numpy as np

from decodax.common.struct import short


@dataclasses.dataclass(frozen=True, eq=False)
class PrefixReuse:
    """Statistics of reused keys and values, which were computed in another text, for KVShare. They are taken in the
    layer where reused and new values were compared.

    Attributes:
        attention: `f32[T]`, attention that each token receives from all queries of the text, averaged over heads.
        change: `f32[T]`, sum of the absolute differences between the new value of each token and the reused one. 0: the
            token was not reused, or has been recomputed.
    """

    __repr__ = short

    attention: np.ndarray
    change: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Prefix:
    """A text of `T` tokens with its keys and values.

    Attributes:
        tokens: token ids.
        kv: `f[G, T, d + e]` for each layer, keys and then values; keys are rotated.
        begin: the position to which the first key is rotated; 0, except for a part of a longer text.
        reuse: statistics for KVShare, if `blended` joined the text with `score="kvshare"`. None for parts, edited texts
            and loaded files.
    """

    __repr__ = short

    tokens: tuple[int, ...]
    kv: tuple[np.ndarray, ...]
    begin: int = 0
    reuse: PrefixReuse | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, part: slice) -> Prefix:
        """Returns a part of the text, for `blended`. Its keys are not moved."""
        if not isinstance(part, slice) or part.step not in (None, 1):
            raise TypeError("prefix: takes a slice without steps")
        start, stop, _ = part.indices(len(self))
        stop = max(start, stop)
        return Prefix(self.tokens[start:stop], tuple(x[:, start:stop] for x in self.kv), self.begin + start)
