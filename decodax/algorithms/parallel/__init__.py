"""Methods that decode several positions or several texts at once: cascaded decoding, Group Think, superposed decoding,
HAMburger."""

from decodax.algorithms.parallel.cascade import Cascade, TargetLengths
from decodax.algorithms.parallel.group_think import GroupThink
from decodax.algorithms.parallel.hamburger import Hamburger
from decodax.algorithms.parallel.superposed import Superposed

__all__ = ["Cascade", "GroupThink", "Hamburger", "Superposed", "TargetLengths"]
