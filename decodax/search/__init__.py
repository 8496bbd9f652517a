"""Search over texts: beams, candidates, and rows that go on from one another."""

from decodax.search.beams import BeamSearch
from decodax.search.contrastive import ContrastiveSearch
from decodax.search.uid import UID

__all__ = ["UID", "BeamSearch", "ContrastiveSearch"]
