"""Speculative decoding: one algorithm that combines a source of drafts, the shape of a draft tree, and a verifier."""

from decodax.algorithms.speculative import drafts, ems_sd, trees, verify  # noqa: F401
from decodax.algorithms.speculative.adaptive.arms import NOTHING, Adaptive
from decodax.algorithms.speculative.adaptive.automatic import Automatic
from decodax.algorithms.speculative.adaptive.banditspec import Bandit
from decodax.algorithms.speculative.adaptive.bass import Bass
from decodax.algorithms.speculative.adaptive.fit_lengths import fit_lengths
from decodax.algorithms.speculative.adaptive.fit_trees import fit_tree
from decodax.algorithms.speculative.adaptive.lengths import Lengths
from decodax.algorithms.speculative.adaptive.measure import automatic, measure
from decodax.algorithms.speculative.adaptive.predictor import DraftClassifier, fit_predictor
from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafts.self.self_speculative import Skips, fit_skipped_layers
from decodax.algorithms.speculative.halves import apart
from decodax.algorithms.speculative.reflective import Reflective
from decodax.algorithms.speculative.source import Draft, Shape, Source
from decodax.algorithms.speculative.tree import Probes, Proposal, Tree, chain
from decodax.algorithms.speculative.trees import disco  # noqa: F401
from decodax.algorithms.speculative.verify import (
    BlockVerification,
    Cut,
    Distance,
    Greedy,
    KSeq,
    LongestBranch,
    MultiRound,
    Rejection,
    SeedExact,
    SpecVerification,
    TopKAcceptance,
    TypicalAcceptance,
    Verifier,
)

__all__ = [
    "NOTHING",
    "Adaptive",
    "Automatic",
    "Bandit",
    "Bass",
    "BlockVerification",
    "Cut",
    "Distance",
    "Draft",
    "DraftClassifier",
    "Greedy",
    "KSeq",
    "Lengths",
    "LongestBranch",
    "MultiRound",
    "Probes",
    "Proposal",
    "Reflective",
    "Rejection",
    "SeedExact",
    "Shape",
    "Skips",
    "Source",
    "SpecVerification",
    "Speculative",
    "TopKAcceptance",
    "Tree",
    "TypicalAcceptance",
    "Verifier",
    "apart",
    "automatic",
    "chain",
    "drafts",
    "fit_lengths",
    "fit_predictor",
    "fit_skipped_layers",
    "fit_tree",
    "measure",
    "trees",
    "verify",
]
