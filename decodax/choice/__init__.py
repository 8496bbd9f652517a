"""Choosing one of several answers: votes, rewards, minimum Bayes risk, comparisons."""

from decodax.choice.best import BestOfN, Likelihood, QualityAware, allocate
from decodax.choice.candidates import Candidates, Choice, Rule
from decodax.choice.consensus import Asked, Corrected, EquilibriumRanking, equilibrium
from decodax.choice.edits import coverage, insert, pass_at_k, resolve_edits
from decodax.choice.evidence import XMBR, CalibratedBestOfN, Sampled, calibrated
from decodax.choice.finish import first_finish
from decodax.choice.front import Chosen, choose
from decodax.choice.hierarchy import Hierarchy, best_expected, classify
from decodax.choice.mbr import MBR, AggregateMBR, LowRankMBR, PruningMBR
from decodax.choice.pairs import PairRanker
from decodax.choice.report import Alignment, Faithfulness, alignment, faithfulness
from decodax.choice.table import RULES, rule
from decodax.choice.utilities import chrf, exact, token_f1
from decodax.choice.vote import SelfConsistency

__all__ = ["MBR", "RULES", "XMBR", "AggregateMBR", "Alignment", "Asked", "BestOfN", "CalibratedBestOfN", "Candidates",
           "Choice", "Chosen", "Corrected", "EquilibriumRanking", "Faithfulness", "Hierarchy", "Likelihood",
           "LowRankMBR", "PairRanker", "PruningMBR", "QualityAware", "Rule", "Sampled", "SelfConsistency", "alignment",
           "allocate", "best_expected", "calibrated", "choose", "chrf", "classify", "coverage", "equilibrium", "exact",
           "faithfulness", "first_finish", "insert", "pass_at_k", "resolve_edits", "rule", "token_f1"]
