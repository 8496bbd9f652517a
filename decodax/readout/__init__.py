"""Models whose next token is read off in another way: layers or networks against one another.

Each is a model that wraps a model, so every decoding method takes it: `dx.generate(dx.readout.dola(lm), ...)`.
"""

from decodax.readout.autodeco import AutoDeco, Heads, autodeco
from decodax.readout.base import Readout
from decodax.readout.contrastive import Contrastive, contrast
from decodax.readout.dola import DoLa, dola

__all__ = ["AutoDeco", "Contrastive", "DoLa", "Heads", "Readout", "autodeco", "contrast", "dola"]
