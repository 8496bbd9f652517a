"""Search over texts: beams, candidates, and rows that go on from one another."""

from decodax.search.adadec import AdaDec
from decodax.search.beams import BeamSearch
from decodax.search.best_first import BestFirst
from decodax.search.cascade import Cascade, TargetLengths
from decodax.search.contrastive import ContrastiveSearch
from decodax.search.corpus import Corpus
from decodax.search.evidence import Evidence
from decodax.search.group import GroupThink
from decodax.search.lexical import DynamicBeams, GridBeams
from decodax.search.ngrams import NGrams
from decodax.search.phrases import Ordered, Unordered
from decodax.search.rejection import AWRS
from decodax.search.seal import CorpusBeams
from decodax.search.stochastic import StochasticBeams
from decodax.search.superposed import Superposed
from decodax.search.uid import UID
from decodax.search.vector_fsd import VectorFSD

__all__ = ["AWRS", "UID", "AdaDec", "BeamSearch", "BestFirst", "Cascade", "ContrastiveSearch", "Corpus",
           "CorpusBeams", "DynamicBeams", "Evidence", "GridBeams", "GroupThink", "NGrams", "Ordered",
           "StochasticBeams", "Superposed", "TargetLengths", "Unordered", "VectorFSD"]
