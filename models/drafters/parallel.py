"""A recurrent head that predicts several tokens in one pass: P-EAGLE (Hui et al., 2026).

The network is EAGLE-3's with more layers. After the newest pair come pairs of a mask token and a learned feature, in
place of the tokens and features that are not known yet; each predicts one more token.
"""

from __future__ import annotations

import dataclasses

from flax import nnx
from jax import Array

from decodax.models.drafters.head import Weights
from decodax.models.drafters.recurrent import RecurrentHead, RecurrentHeadNetwork
from decodax.models.layers import weight


@dataclasses.dataclass(frozen=True)
class ParallelHead(RecurrentHead):
    """A recurrent head that predicts all drafts of a round in one forward pass (P-EAGLE): the inputs after the newest
    token are mask tokens with a learned feature.

    Attributes:
        mask: the token of pairs whose token is not known.
        drafts: largest number of drafts on a path.
    """

    mask: int = dataclasses.field(kw_only=True)
    drafts: int = dataclasses.field(default=8, kw_only=True)

    @property
    def longest(self) -> int:
        return self.drafts

    @property
    def parallel(self) -> bool:
        return True

    def module(self, rngs: nnx.Rngs) -> ParallelNetwork:
        return ParallelNetwork(self, rngs)

    def unknown(self, weights: Weights) -> Array:
        """Returns the head's state `f[1, 1, d]` for a mask token: it is computed from a learned vector that stands for
        the target's unknown feature."""
        network = self.network(weights)
        return network.enter(network.mask_feature[...][None, None])


class ParallelNetwork(RecurrentHeadNetwork):
    """The module with the weights of a `ParallelHead`: that of a `RecurrentHead` with a learned vector for features not
    yet known."""

    def __init__(self, h: ParallelHead, rngs: nnx.Rngs):
        super().__init__(h, rngs)
        wide = max(len(h.taps), 1) * (h.feature_width or h.config.width)
        self.mask_feature = weight(rngs, (wide,), (None,), 1.0)


__all__ = ["ParallelHead", "ParallelNetwork"]
