"""How draft trees grow, one file each."""

from decodax.speculative.shapes.acceptance import from_acceptance
from decodax.speculative.shapes.cape import CaPE
from decodax.speculative.shapes.dyspec import DySpec
from decodax.speculative.shapes.eagle2 import ConfidenceTree
from decodax.speculative.shapes.fixed import Chain, Fixed
from decodax.speculative.shapes.opt_tree import OptTree
from decodax.speculative.shapes.published import EAGLE_25, MEDUSA_63, RECYCLING_80
from decodax.speculative.shapes.sequoia import expected, sequoia, sequoia_for
from decodax.speculative.shapes.sliced import Sliced
from decodax.speculative.shapes.stochastic_beam import StochasticBeam
from decodax.speculative.shapes.tetris import Tetris
from decodax.speculative.shapes.threshold import ConfidenceChain, RiskThreshold, probability

__all__ = ["EAGLE_25", "MEDUSA_63", "RECYCLING_80", "CaPE", "Chain", "ConfidenceChain", "ConfidenceTree", "DySpec",
           "Fixed", "OptTree", "RiskThreshold", "Sliced", "StochasticBeam", "Tetris", "expected", "from_acceptance",
           "probability", "sequoia", "sequoia_for"]
