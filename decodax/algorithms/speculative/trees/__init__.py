"""Shapes of draft trees, one file for each."""

from decodax.algorithms.speculative.fixed_trees import Chain, Fixed
from decodax.algorithms.speculative.trees.acceptance import from_acceptance
from decodax.algorithms.speculative.trees.cape import CaPE
from decodax.algorithms.speculative.trees.confidence_threshold import ConfidenceChain
from decodax.algorithms.speculative.trees.dyspec import DySpec
from decodax.algorithms.speculative.trees.eagle2 import ConfidenceTree
from decodax.algorithms.speculative.trees.opt_tree import OptTree
from decodax.algorithms.speculative.trees.published import EAGLE_25, MEDUSA_63, RECYCLING_80
from decodax.algorithms.speculative.trees.rsd import StochasticBeam
from decodax.algorithms.speculative.trees.sequoia import expected, sequoia_for, sequoia_tree
from decodax.algorithms.speculative.trees.sliced import Sliced
from decodax.algorithms.speculative.trees.sparse_trees import SparseTree, SparseTrees, sparse_trees
from decodax.algorithms.speculative.trees.specdec import RiskThreshold
from decodax.algorithms.speculative.trees.tetris import Tetris
from decodax.algorithms.speculative.trees.threshold import probability
from decodax.common.names import directory

__all__ = ["EAGLE_25", "MEDUSA_63", "RECYCLING_80", "CaPE", "Chain", "ConfidenceChain", "ConfidenceTree", "DySpec",
           "Fixed", "OptTree", "RiskThreshold", "Sliced", "SparseTree", "SparseTrees", "StochasticBeam", "Tetris",
           "expected", "from_acceptance", "probability", "sequoia_for", "sequoia_tree", "sparse_trees"]

__dir__ = directory(__all__)
