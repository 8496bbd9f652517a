"""Masked diffusion: samplers that fill a canvas in any order.

There is one algorithm, `MaskedDiffusion`, made of policies; a published sampler is a choice of them, in a file named
after its paper (`samplers`, `caching`). To add a sampler, write its new rules as frozen dataclasses that inherit from a
base class of `policies`, and register a function that returns the `MaskedDiffusion`, in a file of their own. The
docstrings of `policies` say what each policy gets and returns. In short, with `R` rows and a window of `W` positions
that begins at `view.start`:

    Shaper    (view, logits, memory) -> f32[R, W, V]        the model's logits, annealed or mixed with earlier steps'
    Windows   active(view, seen, memory) -> bool[R, W]      which open positions may be unmasked now
              finished(view, memory) -> i32[R]              number of positions from `start` on that are final
              last(start, end) -> i32[B]                    end of the last window, if it is as wide as the others
    Score     (view, seen, memory) -> f32[R, W]             larger scores are unmasked sooner
    Unmask    (view, seen, score, memory) -> bool[R, W]     positions that are unmasked; the best one if there are none
    Remask    (before, seen, after, memory) -> View         other `tokens`, or reopened positions (`open`)
              busy(before, after, memory) -> bool[R]        nothing is open, but the window is not final yet
    Stop      early_stop(view, seen, memory) -> bool[R]     unmask all open positions now
              end(before, seen, after, memory) -> i32[R]    end of the text, if it ends early
    Caching   needs_refresh(view, memory) -> bool[B]        rows that need a forward pass over the whole text
              nodes(view, left, memory) -> Nodes            positions that the other forward passes compute
              writes(view, positions, final, valid, memory) -> bool[B, n]
    Verify    scores several canvases of a row in one forward pass, and returns which of them are accepted
    Adapter   mask, shift, attention (`Full`, `BlockCausal`, `PromptBlocks`, `CausalPrefix`), canvas (`Masks`,
              `Template`, `Noise`)

`view` has the tokens, masks of open and editable positions, the round and the confidence with which each position was
decided, and numbers of steps and rounds. `seen` has the candidates and the statistics of their distributions. A rule
with a memory creates it in `init` and updates it in `learn`. Random numbers come from `view.uniforms(purpose)`; they
depend on row, position and round, not on the index in the batch. A rule never mixes rows, stores no array as wide as
the vocabulary, and has no attributes that users change from call to call: those belong to the policy.
"""

from decodax.algorithms.diffusion.adapter import (
    Adapter,
    BlockCausal,
    CausalPrefix,
    FillsCanvas,
    Full,
    Masks,
    Noise,
    PromptBlocks,
    Template,
)
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.caching.blocks import BlockCache, FusedCache, NoCache
from decodax.algorithms.diffusion.caching.dkv_cache import DelayedTokens, DKVCacheGreedy
from decodax.algorithms.diffusion.caching.dllm_cache import Similarity
from decodax.algorithms.diffusion.caching.elastic_cache import Drift, Leading
from decodax.algorithms.diffusion.caching.flashdlm import Frozen, GuidedDiffusion
from decodax.algorithms.diffusion.caching.recap import FullStepOrder, Targets, Turns
from decodax.algorithms.diffusion.canvas import Canvas
from decodax.algorithms.diffusion.policies import (
    Caching,
    DiffusionRule,
    Remask,
    Score,
    Shaper,
    Stop,
    Unmask,
    Verify,
    Windows,
)
from decodax.algorithms.diffusion.rules.defaults import AsIs, Keep, Sequential
from decodax.algorithms.diffusion.rules.judged import Agreed
from decodax.algorithms.diffusion.rules.scores import Confidence, Margin, NegEntropy, Noisy, Position, Random
from decodax.algorithms.diffusion.rules.stops import EndOfText, FirstEnd, Steps
from decodax.algorithms.diffusion.rules.unmasking import All, Anchored, AtLeast, BlockQuota, Quota, Threshold
from decodax.algorithms.diffusion.rules.windows import Blocks, Sliding, Whole, WholeBlocks
from decodax.algorithms.diffusion.samplers.adablock import Delimited, OwnBlock
from decodax.algorithms.diffusion.samplers.apd import LimitedLookahead, Product, Trailing
from decodax.algorithms.diffusion.samplers.assd import AnySubset
from decodax.algorithms.diffusion.samplers.ccd import Agreeing, Average
from decodax.algorithms.diffusion.samplers.d2f import BlockPipeline, Pipelined
from decodax.algorithms.diffusion.samplers.d3llm import Delayed, InTurn, WithBest
from decodax.algorithms.diffusion.samplers.diffusion_gemma import Anneal, Renoise, Stable
from decodax.algorithms.diffusion.samplers.dimple import Confident
from decodax.algorithms.diffusion.samplers.dinfer import Credit, Segments, Vicinity
from decodax.algorithms.diffusion.samplers.entropy_bounded import EntropyBound
from decodax.algorithms.diffusion.samplers.fast_dllm import DualCache, Factor, PrefixCache
from decodax.algorithms.diffusion.samplers.fast_dllm_v2 import AnchorCache, SubBlockCache, SubBlocks
from decodax.algorithms.diffusion.samplers.freedave import BranchExact, BranchLater
from decodax.algorithms.diffusion.samplers.learn2pd import ClosingToken, Filter, Learned, PredictedEnd
from decodax.algorithms.diffusion.samplers.llada import Edit
from decodax.algorithms.diffusion.samplers.localleap import LocalLeap
from decodax.algorithms.diffusion.samplers.maskgit import MaskBottom
from decodax.algorithms.diffusion.samplers.mdlm import Ancestral
from decodax.algorithms.diffusion.samplers.prophet import Gap
from decodax.algorithms.diffusion.samplers.remdm import Coins, ReMDM
from decodax.algorithms.diffusion.samplers.sdlm import ConfidentPrefix
from decodax.algorithms.diffusion.samplers.ssd import BranchTree
from decodax.algorithms.diffusion.stats import DistributionStats, statistics
from decodax.algorithms.diffusion.view import Seen, View

__all__ = ["Adapter", "Agreed", "Agreeing", "All", "Ancestral", "AnchorCache", "Anchored", "Anneal", "AnySubset",
           "AsIs", "AtLeast", "Average", "BlockCache", "BlockCausal", "BlockPipeline", "BlockQuota", "Blocks",
           "BranchExact", "BranchLater", "BranchTree", "Caching", "Canvas", "CausalPrefix", "ClosingToken", "Coins",
           "Confidence", "Confident", "ConfidentPrefix", "Credit", "DKVCacheGreedy", "Delayed", "DelayedTokens",
           "Delimited", "DiffusionRule", "DistributionStats", "Drift", "DualCache", "Edit", "EndOfText", "EntropyBound",
           "Factor", "FillsCanvas", "Filter", "FirstEnd", "Frozen", "Full", "FullStepOrder", "FusedCache", "Gap",
           "GuidedDiffusion", "InTurn", "Keep", "Leading", "Learned", "LimitedLookahead", "LocalLeap", "Margin",
           "MaskBottom", "MaskedDiffusion", "Masks", "NegEntropy", "NoCache", "Noise", "Noisy", "OwnBlock", "Pipelined",
           "Position", "PredictedEnd", "PrefixCache", "Product", "PromptBlocks", "Quota", "Random", "ReMDM", "Remask",
           "Renoise", "Score", "Seen", "Segments", "Sequential", "Shaper", "Similarity", "Sliding", "Stable", "Steps",
           "Stop", "SubBlockCache", "SubBlocks", "Targets", "Template", "Threshold", "Trailing", "Turns", "Unmask",
           "Verify", "Vicinity", "View", "Whole", "WholeBlocks", "Windows", "WithBest", "statistics"]
