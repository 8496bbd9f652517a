"""Speculative decoding: sources of drafts and rules that verify them, behind one algorithm."""

from decodax.speculative import drafts
from decodax.speculative.algorithm import Draft, Proposal, Speculative
from decodax.speculative.verify import Rejection, SeedExact, Verifier

__all__ = ["Draft", "Proposal", "Rejection", "SeedExact", "Speculative", "Verifier", "drafts"]
