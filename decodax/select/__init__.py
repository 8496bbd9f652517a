"""Rules that choose one of several answers: votes, rewards, minimum Bayes risk, comparisons of pairs."""

from typing import Any

from decodax.common.names import directory
from decodax.common.registry import SELECTS
from decodax.select.bayes_risk import MBR, AggregateMBR, LowRankMBR, PruningMBR
from decodax.select.best import BestOfN, Likelihood, QualityAware, allocate
from decodax.select.candidates import Candidates, Choice, Chosen, ModelRule, SelectionRule, choose
from decodax.select.consensus import Asked, Corrected, EquilibriumRanking, equilibrium
from decodax.select.edits import coverage, insert, pass_at_k, resolve_edits
from decodax.select.evidence import XMBR, CalibratedBestOfN, Sampled, calibrated
from decodax.select.finish import FirstFinish
from decodax.select.hierarchy import Hierarchy, best_expected, classify
from decodax.select.pairs import PairRanker
from decodax.select.report import Alignment, Faithfulness, alignment, faithfulness
from decodax.select.utilities import chrf, exact, token_f1
from decodax.select.vote import SelfConsistency

__all__ = [
    "MBR",
    "XMBR",
    "AggregateMBR",
    "Alignment",
    "Asked",
    "BestOfN",
    "CalibratedBestOfN",
    "Candidates",
    "Choice",
    "Chosen",
    "Corrected",
    "EquilibriumRanking",
    "Faithfulness",
    "FirstFinish",
    "Hierarchy",
    "Likelihood",
    "LowRankMBR",
    "ModelRule",
    "PairRanker",
    "PruningMBR",
    "QualityAware",
    "Sampled",
    "SelectionRule",
    "SelfConsistency",
    "alignment",
    "allocate",
    "best_expected",
    "calibrated",
    "choose",
    "chrf",
    "classify",
    "coverage",
    "equilibrium",
    "exact",
    "faithfulness",
    "find",
    "insert",
    "make",
    "names",
    "parse",
    "pass_at_k",
    "register",
    "resolve_edits",
    "token_f1",
]

find, make, names, parse, register = SELECTS.find, SELECTS.make, SELECTS.names, SELECTS.parse, SELECTS.register


def __getattr__(name: str) -> Any:
    return SELECTS.attribute(name)


__dir__ = directory(__all__, SELECTS.identifiers)
