"""Methods that choose the next token not by probability alone: by contrast with other layers, with another model or
with the text so far, or with trained heads.

DoLa, contrastive decoding, AutoDeco and NMST return a model that wraps a model, so they can be combined with every
decoding method: `dx.generate(dx.algorithms.contrastive.dola(lm), ...)`.
"""

from decodax.algorithms.contrastive.adadec import AdaDec
from decodax.algorithms.contrastive.autodeco import AutoDeco, Heads, autodeco
from decodax.algorithms.contrastive.awrs import AWRS
from decodax.algorithms.contrastive.contrastive_decoding import Contrastive, contrast
from decodax.algorithms.contrastive.contrastive_search import ContrastiveSearch
from decodax.algorithms.contrastive.dola import DoLa, dola
from decodax.algorithms.contrastive.nmst import SelfTerminating, nmst
from decodax.algorithms.contrastive.vector_fsd import VectorFSD

__all__ = [
           "AWRS",
           "AdaDec",
           "AutoDeco",
           "Contrastive",
           "ContrastiveSearch",
           "DoLa",
           "Heads",
           "SelfTerminating",
           "VectorFSD",
           "autodeco",
           "contrast",
           "dola",
           "nmst",
]
