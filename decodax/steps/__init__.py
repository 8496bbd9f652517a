"""Search over texts that grow step by step, on forks of one compiled state: see `explore`.

The vocabulary is small. `Forks.extend` lets rows write a step, a search weighs what they have written, `Forks.fork`
says which row goes on from which, `Forks.feed` puts text behind rows, and `Forks.ahead` looks how rows would go on.
"""

from decodax.steps.apar import APAR, Thread
from decodax.steps.apar_data import Tuning, from_apar, outline, to_apar
from decodax.steps.beam import AStar, StepBeams, mean_shortfall
from decodax.steps.canvases import Canvases
from decodax.steps.desel import desel, separated
from decodax.steps.diffusion_tree import DTS, DTSStar
from decodax.steps.drafting import atts, lookahead_reasoning, same_words
from decodax.steps.explorer import CanvasExplorer, Explored, Explorer, Ranked, resample
from decodax.steps.forks import Forks
from decodax.steps.front import explore
from decodax.steps.healing import Healed, covered, heal
from decodax.steps.integrative import Integrated, Together, integrate
from decodax.steps.lag import lag_decode
from decodax.steps.lattice import lattice_decode
from decodax.steps.monitors import TrimR, WithTools
from decodax.steps.particles import SMC, ParticleFilter, Steering
from decodax.steps.phi import PhiDecoding, k_means, tf_idf
from decodax.steps.prompting import batch_prompt, pedal, sketch_guided
from decodax.steps.recombination import TextLattice
from decodax.steps.retrieval import CoRAG
from decodax.steps.self_infilling import Phases, SelfInfilled, self_infill
from decodax.steps.table import EXPLORERS, explorer
from decodax.steps.tree import TreePO

__all__ = ["APAR", "DTS", "EXPLORERS", "SMC", "AStar", "CanvasExplorer", "Canvases", "CoRAG", "DTSStar", "Explored",
           "Explorer", "Forks", "Healed", "Integrated", "ParticleFilter", "Phases", "PhiDecoding", "Ranked",
           "SelfInfilled", "Steering", "StepBeams", "TextLattice", "Thread", "Together", "TreePO", "TrimR", "Tuning",
           "WithTools", "atts", "batch_prompt", "covered", "desel", "explore", "explorer", "from_apar", "heal",
           "integrate", "k_means", "lag_decode", "lattice_decode", "lookahead_reasoning", "mean_shortfall", "outline",
           "pedal", "resample", "same_words", "self_infill", "separated", "sketch_guided", "tf_idf", "to_apar"]
