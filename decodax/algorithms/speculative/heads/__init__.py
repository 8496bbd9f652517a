"""Trained drafters: heads that read the target's hidden states. One file for each paper; their networks are in
`decodax.models.drafters`."""

from decodax.algorithms.speculative.heads import (  # noqa: F401
    adaeagle,
    block_draft_refinement,
    blockwise_parallel,
    chimera,
    clover,
    dflash,
    dflash2,
    domino,
    dspark,
    eagle,
    eagle3,
    falcon,
    glide,
    hydra,
    jetspec,
    longspec,
    medusa,
    mixture_of_attentions,
    mlp_speculator,
    mtp,
    mumo,
    p_eagle,
    prompted,
    xpress,
)
from decodax.algorithms.speculative.heads.drafting import drafting_source
from decodax.algorithms.speculative.heads.source import HeadWeights, TrainedHead, trained

__all__ = ["HeadWeights", "TrainedHead", "drafting_source", "trained"]
