"""Verifiers: rules that accept or reject drafts. Each states its guarantee about the output."""

from decodax.algorithms.speculative.verifier import Guarantee, SeedExact, Verifier
from decodax.algorithms.speculative.verify.block_verification import BlockVerification
from decodax.algorithms.speculative.verify.blockwise import Distance, Greedy, TopKAcceptance
from decodax.algorithms.speculative.verify.cut import Cut
from decodax.algorithms.speculative.verify.longest_branch import LongestBranch
from decodax.algorithms.speculative.verify.mcsd import MultiRound
from decodax.algorithms.speculative.verify.minimum_block import MinimumBlock
from decodax.algorithms.speculative.verify.rejection import Rejection
from decodax.algorithms.speculative.verify.spec_verification import SpecVerification
from decodax.algorithms.speculative.verify.spectr import KSeq
from decodax.algorithms.speculative.verify.typical import TypicalAcceptance
from decodax.common.names import directory

__all__ = ["BlockVerification", "Cut", "Distance", "Greedy", "Guarantee", "KSeq", "LongestBranch", "MinimumBlock",
           "MultiRound", "Rejection", "SeedExact", "SpecVerification", "TopKAcceptance", "TypicalAcceptance",
           "Verifier"]

__dir__ = directory(__all__)
