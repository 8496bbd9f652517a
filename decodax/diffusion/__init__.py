"""Masked diffusion: samplers that fill a canvas in any order."""

from decodax.diffusion.adapter import Adapter, BlockCausal, CausalPrefix, Full, Masks, Noise, Template
from decodax.diffusion.algorithm import MaskedDiffusion
from decodax.diffusion.caching import BlockCache, CacheRule, Dual, FusedCache, NoCache, Prefix
from decodax.diffusion.canvas import Canvas
from decodax.diffusion.commits import All, AtLeast, Bernoulli, EntropyBound, Factor, Quota, Threshold
from decodax.diffusion.commits import Prefix as ConfidentPrefix
from decodax.diffusion.policies import Rule, Seen, View
from decodax.diffusion.revisions import Edit, Keep, MaskBottom, ReMDM, Renoise
from decodax.diffusion.scores import Confidence, Margin, NegEntropy, Noisy, Position, Random
from decodax.diffusion.stats import Stats, statistics
from decodax.diffusion.stops import EndOfText, Stable, Steps, StopRule
from decodax.diffusion.verifies import BranchExact, Sequential
from decodax.diffusion.windows import Fixed, Sliding, SubBlocks, Whole

__all__ = ["Adapter", "All", "AtLeast", "Bernoulli", "BlockCache", "BlockCausal", "BranchExact", "CacheRule", "Canvas",
           "CausalPrefix", "Confidence", "ConfidentPrefix", "Dual", "Edit", "EndOfText", "EntropyBound", "Factor",
           "Fixed", "Full", "FusedCache", "Keep", "Margin", "MaskBottom", "MaskedDiffusion", "Masks", "NegEntropy",
           "NoCache", "Noise", "Noisy", "Position", "Prefix", "Quota", "Random", "ReMDM", "Renoise", "Rule", "Seen",
           "Sequential", "Sliding", "Stable", "Stats", "Steps", "StopRule", "SubBlocks", "Template", "Threshold",
           "View", "Whole", "statistics"]
