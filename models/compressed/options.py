"""The options of attention with one head of shared keys and values, and of the pooled keys beside it."""

from __future__ import annotations

import dataclasses

from decodax.common.arguments import check_counts


@dataclasses.dataclass(frozen=True)
class SharedKey:
    """Options of attention with one key head, whose keys are the values, too. See
    `decodax.models.compressed.attention`.

    Attributes:
        query_rank: number of channels of the latent from which queries are computed.
        groups: number of groups of heads, whose outputs are narrowed separately.
        out_rank: number of channels to which the outputs of a group are narrowed.
        eps: added to the mean square in the norms.
    """

    query_rank: int
    groups: int
    out_rank: int
    eps: float = 1e-6

    def __post_init__(self) -> None:
        check_counts(self, "query_rank", "groups", "out_rank")


@dataclasses.dataclass(frozen=True)
class PoolIndex:
    """Options of the choice of pooled keys: a query attends to the `top` ones with the highest index scores.

    Attributes:
        heads: number of index queries of a token.
        width: number of channels of an index key.
        top: number of pooled keys that a query attends to.
    """

    heads: int
    width: int
    top: int

    def __post_init__(self) -> None:
        check_counts(self, "heads", "width", "top")


@dataclasses.dataclass(frozen=True)
class Pooling:
    """Options of pooled keys: each group of `every` tokens has one key in addition to those of its tokens, a mean of
    projections of these tokens with weights of each channel. See `decodax.models.compressed.pooling`.

    Attributes:
        every: number of tokens `m` of a group.
        width: number of channels `d` of a pooled key.
        overlap: True: the mean also has a second projection of the tokens of the group before, so groups overlap.
        index: the choice of the pooled keys that a query attends to; None: all.
        scored: False: all tokens of a group weigh the same, and there are no projections for weights.
    """

    every: int
    width: int
    overlap: bool = False
    index: PoolIndex | None = None
    scored: bool = True

    def __post_init__(self) -> None:
        check_counts(self, "every", "width")
        if not self.scored and (self.overlap or self.index is not None):
            raise ValueError("scored: got False with overlap or an index, takes neither")

    @property
    def conv(self) -> int:
        """Number of tokens of a mean, of which the cache keeps the projections of all but the last one."""
        return self.every * (2 if self.overlap else 1)

    @property
    def widths(self) -> tuple[int, ...]:
        """Number of channels of each key that a group has: the pooled key, and the index key if there is one."""
        return (self.width,) if self.index is None else (self.width, self.index.width)

    @property
    def made(self) -> int:
        """Number of channels of all keys that a group has."""
        return sum(self.widths)

    @property
    def inputs(self) -> tuple[int, ...]:
        """Number of channels of each of a token's projections: for each of `widths` the values, and their scores if
        there are any."""
        return tuple(width * self.conv // self.every for width in self.widths for _ in range(1 + self.scored))

    @property
    def rings(self) -> tuple[tuple[int], ...]:
        """Shape of a token's projections, which the cache keeps for the last `conv - 1` tokens: one array,
        `(channels,)`."""
        return (sum(self.inputs),),

    @property
    def state_shape(self) -> None:
        """None: there is no state except for the projections of the last tokens."""
        return None
