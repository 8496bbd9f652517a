"""Options of the recurrent blocks that layers of a decoder may have in place of attention."""

from __future__ import annotations

import dataclasses


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
        rank: of Kimi Delta Attention: each channel of a key has a decay of its own. Decays and output gate come from
            two matrices each, with this number of channels between them, and the gate is a sigmoid. 0: each head has
            one decay, and decays and gate come from one matrix each.
        chunk: number of prompt nodes that are computed at a time; None: 64, with `rank` 16.
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

    def __post_init__(self) -> None:
        if self.chunk is None:
            # Products with a decay of each channel take memory for each pair of nodes and channel.
            object.__setattr__(self, "chunk", 16 if self.rank else 64)
        if self.rank < 0:
            raise ValueError(f"rank: got {self.rank}, takes 0 or more")
        for name in ("key_heads", "value_heads", "key_dim", "value_dim", "conv", "chunk"):
            if (getattr(self, name) or 0) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, takes 1 or more")
        if self.value_heads % self.key_heads:
            raise ValueError(f"value_heads: got {self.value_heads}, takes a multiple of key_heads = {self.key_heads}")
        if not 0 < self.rate <= 2:
            raise ValueError(f"rate: got {self.rate}, takes a number above 0 and at most 2")

    @property
    def channels(self) -> int:
        """Number of channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def state(self) -> tuple[int, int, int]:
        """Shape of the state of a row."""
        return self.value_heads, self.key_dim, self.value_dim


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
        for name in ("channels", "conv"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, takes 1 or more")

    @property
    def state(self) -> None:
        """None: beside the latest inputs of the convolution there is no state."""
        return None


RecurrentBlocks = RgLru | GatedDelta | ShortConv
"""Options of any of the blocks."""
