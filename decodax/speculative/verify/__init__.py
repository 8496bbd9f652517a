"""Rules that say which drafts hold, each with the guarantee it keeps."""

from decodax.speculative.verify.base import Guarantee, Verifier
from decodax.speculative.verify.multiround import MultiRound
from decodax.speculative.verify.pointwise import SeedExact
from decodax.speculative.verify.rejection import Rejection

__all__ = ["Guarantee", "MultiRound", "Rejection", "SeedExact", "Verifier"]
