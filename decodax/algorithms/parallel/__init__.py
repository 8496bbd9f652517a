"""Methods that write several positions or several texts at once."""

from decodax.algorithms.parallel.cascade import Cascade, TargetLengths
from decodax.algorithms.parallel.group import GroupThink
from decodax.algorithms.parallel.superposed import Superposed

__all__ = ["Cascade", "GroupThink", "Superposed", "TargetLengths"]
