"""Speculative decoding: sources of drafts, shapes of trees, and rules that verify them, behind one algorithm."""

from decodax.speculative import drafts, shapes
from decodax.speculative.algorithm import Speculative
from decodax.speculative.source import Draft, Shape, Source
from decodax.speculative.tree import Proposal, Tree, chain
from decodax.speculative.verify import MultiRound, Rejection, SeedExact, Verifier

__all__ = ["Draft", "MultiRound", "Proposal", "Rejection", "SeedExact", "Shape", "Source", "Speculative", "Tree",
           "Verifier", "chain", "drafts", "shapes"]
