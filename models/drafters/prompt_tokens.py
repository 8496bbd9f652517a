"""Nodes by which the target itself predicts several tokens at once: trained prompt tokens (PPD, Chen et al., 2024),
look-ahead embeddings (PaSS, Monea et al., 2023; S3D, Zhong and Bharadwaj, 2024), and pseudo hidden states that begin at
a middle layer (hidden transfer, Wu et al., 2024).

The target does not change. Such nodes, *probes*, stand after a token of the text; the target's hidden state at the
`j`-th of them predicts the token `j + 2` places after that token.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array

from decodax.models.drafters.head import Depth, Weights
from decodax.models.drafters.hidden_transfer import Transfer
from decodax.models.drafters.stack import IndependentHeads
from decodax.models.layers import weight


class ProbesHead(IndependentHeads):
    """Base class of drafters that use the target itself: extra nodes ("probes") follow a token in its forward pass, and
    the target's hidden states there predict the tokens to come. There is no network of their own.

    Attributes:
        width: width `D` of the target.
        heads: number of tokens `K` that probes after a token predict, the largest number of drafts on a path.
        ensemble: number of probes for each of them, whose logits are averaged. Each sees only probes with its own
            number in the ensembles before it.
    """

    ensemble = 1

    @property
    def own_head(self) -> bool:
        """False: the vocabulary matrix is the target's."""
        return False

    @abc.abstractmethod
    def inputs(self, weights: Weights, sources: Array) -> tuple[Array | None, Transfer | None]:
        """Returns what the target reads at the probes, as a pair of which one is None: embeddings `f[K * ensemble, D]`,
        one ensemble after the other, or a `Transfer`, which makes them from hidden states at a layer. `sources`, `i32[B
        or 1, A]`, are the indices of the nodes that probes follow."""

    def logits(self, weights: Weights, hidden: Array, depth: Depth, head: Callable[[Array], Array]) -> Array:
        return head(hidden)


@dataclasses.dataclass(frozen=True)
class PromptTokensHead(ProbesHead):
    """A drafter of trained prompt tokens (PPD): embeddings that follow a token in the target's forward pass, and whose
    hidden states predict the tokens after the next one.

    Attributes:
        taps: empty: the hidden state after the final norm.
        vocab: number of logits.
        width: width `D` of the target.
        heads: number of prompt tokens `K`, the largest number of drafts on a path.
        ensemble: number of embeddings of a prompt token, see `ProbesHead`.
    """

    width: int = dataclasses.field(kw_only=True)
    heads: int = dataclasses.field(default=3, kw_only=True)
    ensemble: int = dataclasses.field(default=1, kw_only=True)

    def module(self, rngs: nnx.Rngs) -> nnx.Module:
        module: Any = nnx.Module()
        module.prompts = weight(rngs, (self.heads * self.ensemble, self.width), (None, "embed"), 0.02)
        return module

    def inputs(self, weights: Weights, sources: Array) -> tuple[Array | None, Transfer | None]:
        return weights["prompts"], None


def middle(layers: int) -> tuple[int, ...]:
    """Returns the middle half of a network's layers, counted from 0, without the first and the last ones.

    >>> middle(32) == tuple(range(8, 24)), middle(4), middle(2)
    (True, (1, 2), ())
    """
    return tuple(range(max(layers // 4, 1), layers - max(layers // 4, 1)))


@dataclasses.dataclass(frozen=True)
class LookAheadHead(PromptTokensHead):
    """Embeddings after the newest token alone, which the target reads together with it before it drafts (PaSS, Monea et
    al., 2023; without its middle layers S3D, Zhong and Bharadwaj, 2024). The newest token gives the first draft.

    Attributes:
        skip: layers that this pass leaves out, counted from 0.

    The others are those of `PromptTokensHead`.
    """

    skip: tuple[int, ...] = dataclasses.field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        if self.ensemble != 1:
            raise ValueError(f"ensemble: got {self.ensemble}, look-ahead embeddings take 1")

    @property
    def longest(self) -> int:
        return 1 + self.heads

    def kept(self, layers: int) -> tuple[tuple[bool, bool], ...] | None:
        """Returns for each layer of a target whether its attention and its MLP run in the drafting pass, as
        `LayeredModel.apply` takes it; None: all run.

        Raises:
            ValueError: `skip` names a layer that a target with `layers` layers does not have.
        """
        if self.skip and not 0 <= min(self.skip) <= max(self.skip) < layers:
            raise ValueError(f"skip: got {self.skip}, takes layers from 0 to {layers - 1}")
        return tuple((i not in self.skip,) * 2 for i in range(layers)) if self.skip else None


@dataclasses.dataclass(frozen=True)
class HiddenTransferHead(ProbesHead):
    """Linear maps from the hidden state of a token at a middle layer to pseudo hidden states of the tokens after it
    (Wu et al., 2024). They run through the layers above, where they see the text and the pseudo states before them.

    Attributes:
        taps: the layer, counted from 0, of whose output each map makes its state, ascending; more maps than layers take
            the last one.
        vocab: number of logits.
        width: width `D` of the target.
        heads: number of maps `K`, the largest number of drafts on a path.
    """

    width: int = dataclasses.field(kw_only=True)
    heads: int = dataclasses.field(default=3, kw_only=True)

    def __post_init__(self) -> None:
        if not self.taps or sorted(self.taps) != list(self.taps):
            raise ValueError(f"taps: got {self.taps}, takes at least one layer, in ascending order, since a state sees "
                             "those before it")

    def module(self, rngs: nnx.Rngs) -> nnx.Module:
        module: Any = nnx.Module()
        # The paper's first values were not at hand: a state begins as that of the token.
        start = jnp.broadcast_to(jnp.eye(self.width), (self.heads, self.width, self.width))
        module.maps = nnx.Param(start + weight(rngs, start.shape, (None, None, None), 0.02)[...], axes=(
            None, "embed", None))
        return module

    @property
    def begin(self) -> tuple[int, ...]:
        """The layer after which each of the `K` states begins, counted from 0."""
        return (*self.taps, *self.taps[-1:] * self.heads)[:self.heads]

    def inputs(self, weights: Weights, sources: Array) -> tuple[Array | None, Transfer | None]:
        return None, Transfer(maps=weights["maps"], sources=sources, layers=self.begin)


__all__ = ["HiddenTransferHead", "LookAheadHead", "ProbesHead", "PromptTokensHead", "middle"]
