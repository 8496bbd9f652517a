"""Options of the recurrent blocks that layers of a decoder may have in place of attention."""

from __future__ import annotations

import dataclasses
from typing import Literal

from decodax.common.arguments import check_counts
from decodax.models.compressed.options import Pooling


@dataclasses.dataclass(frozen=True)
class RgLru:
    """Options of the recurrent block of Griffin and RecurrentGemma. See `decodax.models.recurrent.rg_lru`.

    Attributes:
        width: number of channels `C`.
        blocks: number of blocks of the gates' matrices, a divisor of `width`.
        conv: width `K` of the convolution.
    """

    width: int
    blocks: int
    conv: int = 4

    def __post_init__(self) -> None:
        if self.conv < 1 or self.blocks < 1 or self.width % self.blocks:
            raise ValueError(f"blocks: got {self.blocks} with a conv of {self.conv}, takes a divisor of the width, "
                             f"{self.width}, and 1 or more")


@dataclasses.dataclass(frozen=True)
class GatedDelta:
    """Options of the gated delta rule of Qwen3-Next and others. See `decodax.models.recurrent.gated_delta`.

    Attributes:
        key_heads: number of heads `G` of queries and keys.
        value_heads: number of heads `H` of values, a multiple of `key_heads`.
        key_dim: number of channels `N` of a query or key.
        value_dim: number of channels `P` of a value.
        conv: width `K` of the convolution.
        rate: upper bound of the rate at which a value replaces the one stored for its key. Above 1, up to 2, the state
            may change its sign ("negative eigenvalues").
        eps: added to the variance in the norm of the outputs.
        by_channel: True is Kimi Delta Attention: each channel of a key has a decay of its own. False: each head has one
            decay.
        rank: decays and output gate come from two matrices each, with this number of channels between them, and
            `by_channel` is True; 0: from one matrix each.
        gate: activation of the output gate; None: "silu", with `by_channel` "sigmoid".
        floor: lower bound, below 0, of a decay's logarithm, which is this times a sigmoid; 0: none.
        chunk: number of prompt nodes that are computed at a time; None: 64, with `by_channel` 16.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: int = 4
    rate: float = 1.0
    eps: float = 1e-6
    rank: int = 0
    chunk: int | None = None
    by_channel: bool = False
    floor: float = 0.0
    gate: Literal["silu", "sigmoid"] | None = None

    def __post_init__(self) -> None:
        if self.rank:
            object.__setattr__(self, "by_channel", True)
        if self.gate is None:
            object.__setattr__(self, "gate", "sigmoid" if self.by_channel else "silu")
        if self.chunk is None:
            # Products with a decay of each channel take memory for each pair of nodes and channel.
            object.__setattr__(self, "chunk", 16 if self.by_channel else 64)
        if self.gate not in ("silu", "sigmoid"):
            raise ValueError(f"gate: got {self.gate!r}, takes 'silu' or 'sigmoid'")
        if self.floor > 0:
            raise ValueError(f"floor: got {self.floor}, takes a number below 0, or 0")
        if self.rank < 0:
            raise ValueError(f"rank: got {self.rank}, takes 0 or more")
        check_counts(self, "key_heads", "value_heads", "key_dim", "value_dim", "conv", "chunk")
        if self.value_heads % self.key_heads:
            raise ValueError(f"value_heads: got {self.value_heads}, takes a multiple of key_heads = {self.key_heads}")
        if not 0 < self.rate <= 2:
            raise ValueError(f"rate: got {self.rate}, takes a number above 0 and at most 2")

    @property
    def channels(self) -> int:
        """Number of channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Shape of the state of a row: a matrix of keys and values for each head, `(value_heads, key_dim, value_dim)`.
        """
        return self.value_heads, self.key_dim, self.value_dim

    @property
    def rings(self) -> tuple[tuple[int, int], ...]:
        """Shape of a token's inputs of the convolution, which the cache keeps for the last `conv - 1` tokens: one array
        of queries, keys and values, `(key_heads, channels // key_heads)`."""
        return (self.key_heads, self.channels // self.key_heads),


@dataclasses.dataclass(frozen=True)
class ShortConv:
    """Options of the gated short convolution of LFM2. See `decodax.models.recurrent.short_conv`.

    Attributes:
        channels: number of channels `C`.
        conv: width `K` of the convolution.
        bias: True adds biases to the projections and to the convolution.
    """

    channels: int
    conv: int = 3
    bias: bool = False

    def __post_init__(self) -> None:
        check_counts(self, "channels", "conv")

    @property
    def state_shape(self) -> None:
        """None: there is no state except for the last inputs of the convolution."""
        return None

    @property
    def rings(self) -> tuple[tuple[int], ...]:
        """Shape of a token's inputs of the convolution, which the cache keeps for the last `conv - 1` tokens: one
        array, `(channels,)`."""
        return (self.channels,),


@dataclasses.dataclass(frozen=True)
class SsdShape:
    """Options of a state-space block of Mamba-2, in any network. See `decodax.models.recurrent.ssd`.

    Attributes:
        heads: number of heads `H`.
        head_dim: number of channels `P` of a head.
        groups: number of groups `G`, a divisor of `heads`.
        state: number of states `N`.
        conv: width `K` of the convolution.
        chunk: number of prompt nodes that are computed at a time.
        eps: added to the variance in the norm of the outputs.
        bias: True adds biases to the projections.
        conv_bias: True adds a bias to the convolution.
        steps: minimum and maximum of the time step `dt`.
    """

    heads: int
    head_dim: int = 64
    groups: int = 1
    state: int = 128
    conv: int = 4
    chunk: int = 256
    eps: float = 1e-5
    bias: bool = False
    conv_bias: bool = True
    steps: tuple[float, float] = (0.0, float("inf"))

    def __post_init__(self) -> None:
        check_counts(self, "heads", "head_dim", "groups", "state", "conv", "chunk")
        if self.heads % self.groups:
            raise ValueError(f"groups: got {self.groups}, takes a divisor of heads = {self.heads}")
        if not 0 <= self.steps[0] <= self.steps[1]:
            raise ValueError(f"steps: got {self.steps}, takes two numbers from 0, the smaller one first")

    @property
    def inner(self) -> int:
        """Number of channels of all heads."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Number of channels of the convolution: `x`, `B` and `C`."""
        return self.inner + 2 * self.groups * self.state

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Shape of the state of a row, `(heads, state, head_dim)`."""
        return self.heads, self.state, self.head_dim


@dataclasses.dataclass(frozen=True)
class Ssd(SsdShape):
    """Options of the state-space block of Mamba-2 in a decoder.

    Attributes:
        norm: the norm of the outputs comes after the gate ("gate first") or before it ("norm first"); None: no norm.
        factors: factors of the parts of the first projection: gate, `x`, `B`, `C` and `dt`.
        out_factor: factor of the block's outputs.
    """

    norm: Literal["gate first", "norm first"] | None = "gate first"
    factors: tuple[float, ...] = (1.0,) * 5
    out_factor: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.factors) != 5:
            raise ValueError(f"factors: got {self.factors}, takes five numbers")

    @property
    def rings(self) -> tuple[tuple[int, int], ...]:
        """Shapes of a token's inputs of the convolution, which the cache keeps for the last `conv - 1` tokens: `x`,
        `(heads, head_dim)`, then `B` and `C`, `(groups, state)` each."""
        return (self.heads, self.head_dim), *((self.groups, self.state),) * 2


@dataclasses.dataclass(frozen=True)
class SelectiveScan:
    """Options of the selective scan of Mamba's first version. See `decodax.models.recurrent.selective_scan`.

    Attributes:
        inner: number of channels.
        rank: rank of the projection of time steps.
        state: number of states `N` of a channel.
        conv: width `K` of the convolution.
        bias: True adds biases to the first and the last projection.
        conv_bias: True adds a bias to the convolution.
        eps: added to the variance in norms of `dt`, `B` and `C`; None: no norms.
    """

    inner: int
    rank: int
    state: int = 16
    conv: int = 4
    bias: bool = False
    conv_bias: bool = True
    eps: float | None = None

    def __post_init__(self) -> None:
        check_counts(self, "inner", "rank", "state", "conv")


RecurrentBlocks = RgLru | GatedDelta | ShortConv | Ssd | SelectiveScan | Pooling
"""Options of any of the blocks."""
