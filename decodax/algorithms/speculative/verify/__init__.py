"""Rules that say which drafts hold, each with the guarantee it keeps."""

from decodax.algorithms.speculative.verify.base import Guarantee, Verifier
from decodax.algorithms.speculative.verify.block import Block
from decodax.algorithms.speculative.verify.branch import LongestBranch
from decodax.algorithms.speculative.verify.cut import Cut
from decodax.algorithms.speculative.verify.kseq import KSeq
from decodax.algorithms.speculative.verify.multiround import MultiRound
from decodax.algorithms.speculative.verify.pointwise import (
    Distance,
    Greedy,
    SeedExact,
    SpecVerification,
    TopKAcceptance,
    TypicalAcceptance,
)
from decodax.algorithms.speculative.verify.rejection import Rejection

__all__ = ["Block", "Cut", "Distance", "Greedy", "Guarantee", "KSeq", "LongestBranch", "MultiRound", "Rejection",
           "SeedExact", "SpecVerification", "TopKAcceptance", "TypicalAcceptance", "Verifier"]
