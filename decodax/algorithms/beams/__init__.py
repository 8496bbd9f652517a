"""Beam searches: several texts of a prompt are extended side by side, one token in each round, and the best are
kept."""

from decodax.algorithms.beams import variants  # noqa: F401
from decodax.algorithms.beams.algorithm import BeamSearch
from decodax.algorithms.beams.best_first import BestFirst
from decodax.algorithms.beams.corpus import Corpus
from decodax.algorithms.beams.evidence import Evidence
from decodax.algorithms.beams.lexical import DynamicBeams, GridBeams
from decodax.algorithms.beams.ngrams import NGrams
from decodax.algorithms.beams.phrases import Ordered, Unordered
from decodax.algorithms.beams.seal import CorpusBeams
from decodax.algorithms.beams.stochastic import StochasticBeams
from decodax.algorithms.beams.uid import UID

__all__ = ["UID", "BeamSearch", "BestFirst", "Corpus", "CorpusBeams", "DynamicBeams", "Evidence", "GridBeams", "NGrams",
           "Ordered", "StochasticBeams", "Unordered"]
