"""Rules that say which drafts hold, each with the guarantee it keeps."""

from decodax.speculative.verify.base import Guarantee, Verifier
from decodax.speculative.verify.block import Block
from decodax.speculative.verify.branch import LongestBranch
from decodax.speculative.verify.cut import Cut
from decodax.speculative.verify.kseq import KSeq
from decodax.speculative.verify.multiround import MultiRound
from decodax.speculative.verify.pointwise import (
           Distance,
           Greedy,
           SeedExact,
           SpecVerification,
           TopKAcceptance,
           TypicalAcceptance,
)
from decodax.speculative.verify.rejection import Rejection

__all__ = ["Block", "Cut", "Distance", "Greedy", "Guarantee", "KSeq", "LongestBranch", "MultiRound", "Rejection",
           "SeedExact", "SpecVerification", "TopKAcceptance", "TypicalAcceptance", "Verifier"]
