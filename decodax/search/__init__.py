"""Search over texts: beams, candidates, and rows that go on from one another."""

from decodax.search.beams import BeamSearch
from decodax.search.best_first import BestFirst
from decodax.search.contrastive import ContrastiveSearch
from decodax.search.lexical import DynamicBeams, GridBeams
from decodax.search.phrases import Ordered, Unordered
from decodax.search.rejection import AWRS
from decodax.search.stochastic import StochasticBeams
from decodax.search.uid import UID

__all__ = ["AWRS", "UID", "BeamSearch", "BestFirst", "ContrastiveSearch", "DynamicBeams", "GridBeams", "Ordered",
           "StochasticBeams", "Unordered"]
