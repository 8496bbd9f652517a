"""Search over texts: beams, and rows that go on from one another."""

from decodax.search.beams import BeamSearch
from decodax.search.uid import UID

__all__ = ["UID", "BeamSearch"]
