"""Searches over texts that grow step by step. A step is a piece of text that ends at a delimiter or after a number of
tokens.

A search holds the texts as rows of one compiled batch (`Forks`) and uses a few operations: `Forks.extend` generates one
more step in chosen rows, `Forks.fork` lets rows continue the texts of other rows, `Forks.feed` appends given text to
rows, and `Forks.ahead` returns a copy that is generated further, as a lookahead. `explore` runs a search.
"""

from typing import Any

from decodax.common.names import directory
from decodax.common.registry import SEARCHES
from decodax.search.apar_data import Tuning, from_apar, outline, to_apar
from decodax.search.beam import AStar, StepBeams, mean_shortfall
from decodax.search.branches import APAR, Thread
from decodax.search.canvases import Canvases
from decodax.search.desel import desel, separated
from decodax.search.diffusion_tree import DTS, DTSStar
from decodax.search.drafting import atts, lookahead_reasoning, same_words
from decodax.search.explorer import CanvasExplorer, Explored, Explorer, Ranked, explore, resample
from decodax.search.forks import Forks
from decodax.search.healing import Healed, covered, heal
from decodax.search.integrative import Integrated, Together, integrate
from decodax.search.lag import lag_decode
from decodax.search.lattice import lattice_decode
from decodax.search.monitors import TrimR, WithTools
from decodax.search.particles import SMC, ParticleFilter, Steering
from decodax.search.phi import PhiDecoding, k_means, tf_idf
from decodax.search.prompting import batch_prompt, pedal, sketch_guided
from decodax.search.recombination import TextLattice
from decodax.search.retrieval import CoRAG
from decodax.search.self_infilling import Phases, SelfInfilled, self_infill
from decodax.search.tree import TreePO

__all__ = [
    "APAR",
    "DTS",
    "SMC",
    "AStar",
    "CanvasExplorer",
    "Canvases",
    "CoRAG",
    "DTSStar",
    "Explored",
    "Explorer",
    "Forks",
    "Healed",
    "Integrated",
    "ParticleFilter",
    "Phases",
    "PhiDecoding",
    "Ranked",
    "SelfInfilled",
    "Steering",
    "StepBeams",
    "TextLattice",
    "Thread",
    "Together",
    "TreePO",
    "TrimR",
    "Tuning",
    "WithTools",
    "atts",
    "batch_prompt",
    "covered",
    "desel",
    "explore",
    "find",
    "from_apar",
    "heal",
    "integrate",
    "k_means",
    "lag_decode",
    "lattice_decode",
    "lookahead_reasoning",
    "make",
    "mean_shortfall",
    "names",
    "outline",
    "parse",
    "pedal",
    "register",
    "resample",
    "same_words",
    "self_infill",
    "separated",
    "sketch_guided",
    "tf_idf",
    "to_apar",
]

find, make, names, parse, register = SEARCHES.find, SEARCHES.make, SEARCHES.names, SEARCHES.parse, SEARCHES.register


def __getattr__(name: str) -> Any:
    return SEARCHES.attribute(name)


__dir__ = directory(__all__, SEARCHES.identifiers)
