"""Trained drafters: heads that read the target's hidden states. One file for each paper; their networks are in
`decodax.models.drafters`."""

from decodax.algorithms.speculative.heads import eagle, eagle3, hydra, medusa, mlp_speculator, mtp  # noqa: F401
from decodax.algorithms.speculative.heads.source import HeadWeights, TrainedHead, trained

__all__ = ["HeadWeights", "TrainedHead", "trained"]
