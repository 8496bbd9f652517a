"""Masked diffusion: samplers that fill a canvas in any order."""

from decodax.diffusion.algorithm import Adapter, Confidence, MaskedDiffusion, RandomOrder

__all__ = ["Adapter", "Confidence", "MaskedDiffusion", "RandomOrder"]
