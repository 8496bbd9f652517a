"""Methods that choose the next token by more than its probability: by contrast with other layers, other models or the
text so far, or by heads of their own.

DoLa, contrastive decoding and AutoDeco are models around a model, so every decoding method takes them:
`dx.generate(dx.algorithms.contrastive.dola(lm), ...)`.
"""

from decodax.algorithms.contrastive.adadec import AdaDec
from decodax.algorithms.contrastive.autodeco import AutoDeco, Heads, autodeco
from decodax.algorithms.contrastive.awrs import AWRS
from decodax.algorithms.contrastive.contrastive_decoding import Contrastive, contrast
from decodax.algorithms.contrastive.contrastive_search import ContrastiveSearch
from decodax.algorithms.contrastive.dola import DoLa, dola
from decodax.algorithms.contrastive.vector_fsd import VectorFSD

__all__ = [
           "AWRS",
           "AdaDec",
           "AutoDeco",
           "Contrastive",
           "ContrastiveSearch",
           "DoLa",
           "Heads",
           "VectorFSD",
           "autodeco",
           "contrast",
           "dola",
]
