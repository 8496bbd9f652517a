"""Choosing one of several answers: votes, rewards, minimum Bayes risk, comparisons."""

from decodax.choice.best import BestOfN, Likelihood, QualityAware, allocate
from decodax.choice.candidates import Candidates, Choice, Rule
from decodax.choice.consensus import Asked, Corrected, EquilibriumRanking, equilibrium
from decodax.choice.finish import first_finish
from decodax.choice.front import Chosen, choose
from decodax.choice.mbr import MBR, AggregateMBR, LowRankMBR, PruningMBR
from decodax.choice.pairs import PairRanker
from decodax.choice.report import Alignment, alignment
from decodax.choice.table import RULES, rule
from decodax.choice.utilities import chrf, exact, token_f1
from decodax.choice.vote import SelfConsistency

__all__ = ["MBR", "RULES", "AggregateMBR", "Alignment", "Asked", "BestOfN", "Candidates", "Choice", "Chosen",
           "Corrected", "EquilibriumRanking", "Likelihood", "LowRankMBR", "PairRanker", "PruningMBR", "QualityAware",
           "Rule", "SelfConsistency", "alignment", "allocate", "choose", "chrf", "equilibrium", "exact",
           "first_finish", "rule", "token_f1"]
