"""Options of the parts of a decoder that change the residual stream beside attention and MLP."""

from __future__ import annotations

import dataclasses
from typing import Literal

from decodax.common.arguments import check_counts


@dataclasses.dataclass(frozen=True)
class Streams:
    """Options of several residual streams. See `decodax.models.residual.streams`.

    Attributes:
        count: number of streams `n`.
        active: index of the stream that goes through attention and MLP.
        scaled: True multiplies the active stream by a learned scale before a layer's input is taken from it.
        rank: number of inner channels of a learned path beside attention.
    """

    count: int
    active: int = 0
    scaled: bool = True
    rank: int = 64

    def __post_init__(self) -> None:
        if self.count < 2 or not 0 <= self.active < self.count or self.rank < 1:
            raise ValueError(f"count: got {self.count} streams with the active one {self.active} and a path of rank "
                             f"{self.rank}, takes 2 or more, one of them, and 1 or more")


@dataclasses.dataclass(frozen=True)
class HyperConnections:
    """Options of residual streams that all go through each layer. See `decodax.models.residual.hyper_connections`.

    Attributes:
        count: number of streams `n`.
        iterations: number of Sinkhorn steps, each of which divides the columns of a mixture by their sums, all but the
            first after the rows. None: no mixture, each stream stays itself.
        eps: added to shares and sums.
        norm_eps: added to the mean square of all streams, by whose root they are divided before shares are computed.
        magnitude: upper bound of the shares of a half's output that are added to streams, without `eps`.
        joined: the streams after the last layer are added with learned shares ("shares"), or their mean is taken
            ("mean", GLM-5.3 Flash).
    """

    count: int
    iterations: int | None = 20
    eps: float = 1e-6
    norm_eps: float = 1e-6
    magnitude: float = 2.0
    joined: Literal["shares", "mean"] = "shares"

    def __post_init__(self) -> None:
        check_counts(self, "count", "iterations")


@dataclasses.dataclass(frozen=True)
class LayerInputs:
    """Options of per-layer embeddings. See `decodax.models.residual.layer_inputs`.

    Attributes:
        width: number of channels `d` of a layer's embedding of a token.
        rows: number of tokens that the table has. Tokens from there on have the embedding of token 0.
    """

    width: int
    rows: int

    def __post_init__(self) -> None:
        check_counts(self, "width", "rows")
