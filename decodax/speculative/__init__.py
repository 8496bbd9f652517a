"""Speculative decoding: sources of drafts, shapes of trees, and rules that verify them, behind one algorithm."""

from decodax.speculative import drafts, shapes
from decodax.speculative.adaptive import NOTHING, Adaptive
from decodax.speculative.algorithm import Speculative
from decodax.speculative.controllers import Automatic, Bandit, Bass
from decodax.speculative.fit import fit_tree
from decodax.speculative.fit_lengths import fit_lengths
from decodax.speculative.layer_search import Skips, fit_layers
from decodax.speculative.lengths import Lengths
from decodax.speculative.measure import automatic, measure
from decodax.speculative.predictor import Logistic, fit_predictor
from decodax.speculative.reflective import Reflective
from decodax.speculative.source import Draft, Shape, Source
from decodax.speculative.tree import Probes, Proposal, Tree, chain
from decodax.speculative.verify import (
    Block,
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

__all__ = ["NOTHING", "Adaptive", "Automatic", "Bandit", "Bass", "Block", "Cut", "Distance", "Draft", "Greedy",
           "KSeq", "Lengths", "Logistic", "LongestBranch", "MultiRound", "Probes", "Proposal", "Reflective",
           "Rejection", "SeedExact", "Shape", "Skips", "Source", "SpecVerification", "Speculative", "TopKAcceptance",
           "Tree", "TypicalAcceptance", "Verifier", "automatic", "chain", "drafts", "fit_layers", "fit_lengths",
           "fit_predictor", "fit_tree", "measure", "shapes"]
