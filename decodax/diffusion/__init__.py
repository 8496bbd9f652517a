"""Masked diffusion: samplers that fill a canvas in any order.

One algorithm, `MaskedDiffusion`, made of policies; a published sampler is a choice of them (`systems`). To add one,
write what is new of it as a frozen dataclass that inherits `Rule`, in a file of its own, and a maker with `@entry`.
What each policy sees and gives back is stated in `policies`; in short, with `R` rows and a region of `W`
positions that begins at `view.start`:

    Shaper    (view, logits, memory) -> f32[R, W, V]        what the model said, annealed or joined with earlier steps
    Windows   active(view, seen, memory) -> bool[R, W]      which open positions may be unmasked now
              finished(view, memory) -> i32[R]              how many positions from `start` on are final
              last(start, end) -> i32[B]                    where the last region ends, if it is as wide as the others
    Score     (view, seen, memory) -> f32[R, W]             the larger, the sooner
    Unmask    (view, seen, score, memory) -> bool[R, W]     one a row is forced if it names none, unless `patient`
    Remask    (before, seen, after, memory) -> View         other `tokens`, or reopened positions (`open`)
              busy(before, after, memory) -> bool[R]        a full region that is not final yet
    Stop      early_stop(view, seen, memory) -> bool[R]     unmask all that is open now
              end(before, seen, after, memory) -> i32[R]    where the text ends, if it ends early
    Caching   stale(view, memory) -> bool[B]                rows that need a forward over the whole text
              nodes(view, left, memory) -> Nodes            what the other forwards score
              writes(view, positions, final, valid, memory) -> bool[B, n]
    Verify    several canvases of a row in one forward, and which of their steps are true
    Adapter   mask, shift, attention (`Full`, `BlockCausal`, `PromptBlocks`, `CausalPrefix`), canvas (`Masks`,
              `Template`, `Noise`)

`view` holds tokens, open, editable, when and with what confidence each position was decided, the step and the round;
`seen` the candidates and what the model (or the policy) says of them. A rule that remembers gives its memory in `init`
and renews it in `learn`. Draws are `view.uniforms(purpose)`: addressed by row, position and round, never by the batch.
A rule never mixes rows, keeps nothing of the vocabulary's size, and holds no numbers that a user changes from call to
call: those belong to the policy.
"""

from decodax.diffusion.adapter import Adapter, BlockCausal, CausalPrefix, Full, Masks, Noise, PromptBlocks, Template
from decodax.diffusion.algorithm import MaskedDiffusion
from decodax.diffusion.caching.blocks import (
    AnchorCache,
    BlockCache,
    DualCache,
    FusedCache,
    NoCache,
    PrefixCache,
    SubBlockCache,
)
from decodax.diffusion.caching.drift import Drift, Leading
from decodax.diffusion.caching.features import Similarity
from decodax.diffusion.caching.refreshes import DelayedTokens, DKVCacheGreedy, Frozen, OwnBlock, Vicinity
from decodax.diffusion.caching.reuse import FullStepOrder, Targets, Turns
from decodax.diffusion.canvas import Canvas
from decodax.diffusion.parallel.branches import BranchExact, BranchLater, BranchTree, Sequential
from decodax.diffusion.parallel.pipeline import Delayed, InTurn, Pipeline, Pipelined, WithBest
from decodax.diffusion.parallel.product import Agreed, GuidedDiffusion, LimitedLookahead, Product, Trailing
from decodax.diffusion.policies import Caching, Remask, Rule, Score, Seen, Shaper, Stop, Unmask, Verify, View, Windows
from decodax.diffusion.rules.coherence import Agreeing
from decodax.diffusion.rules.confident import Confident
from decodax.diffusion.rules.learned import ClosingToken, Filter, Learned, PredictedEnd
from decodax.diffusion.rules.remasking import Edit, Keep, MaskBottom, ReMDM, Renoise
from decodax.diffusion.rules.scores import Confidence, Margin, NegEntropy, Noisy, Position, Random
from decodax.diffusion.rules.shapers import Anneal, AsIs, Average, Credit
from decodax.diffusion.rules.stops import EndOfText, FirstEnd, Gap, Stable, Steps
from decodax.diffusion.rules.unmasking import (
    All,
    Ancestral,
    Anchored,
    AtLeast,
    BlockQuota,
    Coins,
    ConfidentPrefix,
    EntropyBound,
    Factor,
    LocalLeap,
    Quota,
    Segments,
    Threshold,
)
from decodax.diffusion.rules.windows import Blocks, Delimited, Sliding, SubBlocks, Whole, WholeBlocks
from decodax.diffusion.stats import DistributionStats, statistics

__all__ = ["Adapter", "Agreed", "Agreeing", "All", "Ancestral", "AnchorCache", "Anchored", "Anneal", "AsIs", "AtLeast",
           "Average", "BlockCache", "BlockCausal", "BlockQuota", "Blocks", "BranchExact", "BranchLater", "BranchTree",
           "Caching", "Canvas", "CausalPrefix", "ClosingToken", "Coins", "Confidence", "Confident", "ConfidentPrefix",
           "Credit", "DKVCacheGreedy", "Delayed", "DelayedTokens", "Delimited", "DistributionStats", "Drift",
           "DualCache", "Edit", "EndOfText", "EntropyBound", "Factor", "Filter", "FirstEnd", "Frozen", "Full",
           "FullStepOrder", "FusedCache", "Gap", "GuidedDiffusion", "InTurn", "Keep", "Leading", "Learned",
           "LimitedLookahead", "LocalLeap", "Margin", "MaskBottom", "MaskedDiffusion", "Masks", "NegEntropy", "NoCache",
           "Noise", "Noisy", "OwnBlock", "Pipeline", "Pipelined", "Position", "PredictedEnd", "PrefixCache", "Product",
           "PromptBlocks", "Quota", "Random", "ReMDM", "Remask", "Renoise", "Rule", "Score", "Seen", "Segments",
           "Sequential", "Shaper", "Similarity", "Sliding", "Stable", "Steps", "Stop", "SubBlockCache", "SubBlocks",
           "Targets", "Template", "Threshold", "Trailing", "Turns", "Unmask", "Verify", "Vicinity", "View", "Whole",
           "WholeBlocks", "Windows", "WithBest", "statistics"]
