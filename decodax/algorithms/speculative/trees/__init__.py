"""How draft trees grow, one file each."""

from decodax.algorithms.speculative.trees.acceptance import from_acceptance
from decodax.algorithms.speculative.trees.cape import CaPE
from decodax.algorithms.speculative.trees.dyspec import DySpec
from decodax.algorithms.speculative.trees.eagle2 import ConfidenceTree
from decodax.algorithms.speculative.fixed_trees import Chain, Fixed
from decodax.algorithms.speculative.trees.opt_tree import OptTree
from decodax.algorithms.speculative.trees.published import EAGLE_25, MEDUSA_63, RECYCLING_80
from decodax.algorithms.speculative.trees.sequoia import expected, sequoia, sequoia_for
from decodax.algorithms.speculative.trees.sliced import Sliced
from decodax.algorithms.speculative.trees.rsd import StochasticBeam
from decodax.algorithms.speculative.trees.tetris import Tetris
from decodax.algorithms.speculative.trees.threshold import ConfidenceChain, RiskThreshold, probability

__all__ = ["EAGLE_25", "MEDUSA_63", "RECYCLING_80", "CaPE", "Chain", "ConfidenceChain", "ConfidenceTree", "DySpec",
           "Fixed", "OptTree", "RiskThreshold", "Sliced", "StochasticBeam", "Tetris", "expected", "from_acceptance",
           "probability", "sequoia", "sequoia_for"]
