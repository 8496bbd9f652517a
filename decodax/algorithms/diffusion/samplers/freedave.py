"""FreeDave and FreeDave++: several steps of a sampler in one forward pass ("Free Draft-and-Verification: Toward
Lossless Parallel Decoding for Diffusion Large Language Models", Wu and Zhang, 2025).

A draft is the canvas after some further steps, under the assumption that the current candidates do not change. One
forward pass scores the canvas and all of its drafts. A draft that equals the result of an accepted canvas is accepted,
too, so its own result is the sampler's next state. A round therefore takes the number of steps that the candidates
predicted correctly, and at least one.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.algorithms.diffusion.adapter import Adapter, Full
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.caching.blocks import blocks
from decodax.algorithms.diffusion.policies import Unmask, Verify
from decodax.algorithms.diffusion.rules.unmasking import Anchored, Quota, Threshold
from decodax.algorithms.diffusion.samplers.fast_dllm import DualCache, PrefixCache
from decodax.algorithms.diffusion.view import View
from decodax.common.options import Count, Share
from decodax.common.registry import ALGORITHMS
from decodax.core.window import take

PAPER = "Free Draft-and-Verification: Toward Lossless Parallel Decoding for Diffusion Large Language Models"

Cache = Literal["none", "prefix", "dual"]


def walk(agree: Array) -> Array:
    """Returns the drafts that a walk from draft 0 visits, `bool[B, K]`.

    From each draft it goes to the last one that agrees with that draft's result. `agree[b, i, j]` is True if draft `j`
    may follow the result of draft `i`; only for `j > i`.

    >>> walk(jnp.array([[[0, 1, 0], [0, 0, 0], [0, 0, 0]]], bool)).tolist()
    [[True, True, False]]
    """
    number = jnp.arange(agree.shape[1], dtype=jnp.int32)
    at = jnp.zeros(agree.shape[0], jnp.int32)
    passed = jnp.broadcast_to(number == 0, agree.shape[:2])
    for _ in number[1:]:
        at = jnp.maximum(at, jnp.where(take(agree, at), number, 0).max(1))
        passed = passed | (number == at[:, None])
    return passed


def compare(drafts: View, results: View, loose: bool) -> Array:
    """Compares the `K` drafts of a row with the results of one step from each of them. Returns `bool[B, K, K]`: entry
    `[b, i, j]` is True if draft `j` equals the result of draft `i`, and that result has undecided positions.

    With `loose`, draft `j` may have further undecided positions where the result has tokens.
    """
    pair = lambda a, b: (a[:, None] == b[:, :, None])
    tokens, open = pair(drafts.tokens, results.tokens), pair(drafts.open, results.open)
    same = (tokens & open) | drafts.open[:, None] if loose else tokens & open
    left = (results.open & (results.positions < results.end[..., None])).any(-1)
    return same.all(-1) & pair(drafts.end, results.end) & left[:, :, None]


def exact_path(steps: tuple[tuple[int, ...], ...], drafts: View, results: View) -> Array:
    """Returns which drafts are accepted, `bool[B, K]`: draft 0, and each draft that equals the result of an accepted
    one and has taken exactly one step more.

    Args:
        steps: the steps that each draft has taken in advance, `Verify.taken`.
        drafts: the `K` canvases of each row, with axes `[B, K, ...]`.
        results: each of them after one more denoising step.
    """
    taken = np.array([len(own) for own in steps])
    return walk(compare(drafts, results, loose=False) & (taken == taken[:, None] + 1))


@dataclasses.dataclass(frozen=True)
class BranchExact(Verify):
    """FreeDave with the rule "exact match": the drafts are the canvas after 1 .. K - 1 more steps.

    The output equals that of one step per forward pass, token for token, in no more forward passes, for every unmasking
    rule. The exception is a cache that is refreshed every few steps: a forward pass that takes several steps may skip a
    refresh.

    Attributes:
        branches: number of canvases in a forward pass, `K`.
    """

    branches: int = 4

    def __post_init__(self) -> None:
        if self.branches < 1:
            raise ValueError(f"branches: got {self.branches}, takes 1 or more")

    @property
    def taken(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(range(k)) for k in range(self.branches))

    def path(self, drafts: View, results: View) -> Array:
        return exact_path(self.taken, drafts, results)


@dataclasses.dataclass(frozen=True)
class BranchLater(BranchExact):
    """FreeDave++, as in the authors' code: of all later drafts that may follow a result, the last one is accepted, even
    if it is several steps further.

    By the rule "exact match" it must equal the result; by the rule "subset" it may lack some of the result's tokens.
    With one token per step, both rules are `BranchExact`. With an unmasking rule that decides several tokens at once
    (`Threshold`), a result may equal a draft two steps further. By "exact match" the output of a greedy row is still
    that of one step per forward pass. A sampled row may differ, since draws depend on the number of the step. By
    "subset", a row may continue from a draft that lacks some of a result's tokens, so its output and its number of
    forward passes may differ from those of the sampler alone.

    Attributes:
        branches: number of canvases in a forward pass, `K`.
        match: "exact" or "subset".
    """

    match: Literal["exact", "subset"] = "subset"

    def path(self, drafts: View, results: View) -> Array:
        later = np.triu(np.ones((self.branches, self.branches), bool), 1)
        # where nothing was left to take, a draft is the one before it, and no step further
        fresh = jnp.pad((drafts.open[:, 1:] != drafts.open[:, :-1]).any(-1), ((0, 0), (1, 0)))
        return walk(compare(drafts, results, loose=self.match == "subset") & later & fresh[:, None])


def verified(lm: Any, verify: Verify, unmask: Unmask, block_length: int | None, cache: Cache = "none",
             suffix: int = 256) -> MaskedDiffusion:
    """Returns a block sampler with a verifier.

    Args:
        lm: loaded diffusion model.
        verify: the verifier.
        unmask: the unmasking rule.
        block_length: number of positions of a block. None: the model's, or 32.
        cache: Fast-dLLM's cache, for models that attend to the whole text; with it the blocks of a shifted model are
            `Anchored`.
        suffix: number of positions that the prefix cache recomputes; see `PrefixCache`.

    Raises:
        ValueError: a cache for a model with another attention.
    """
    adapter = Adapter.of(lm)
    windows, caching = blocks(adapter, block_length)
    if cache != "none":
        if not isinstance(adapter.attention, Full):
            raise ValueError(f"cache: got {cache!r}, takes 'none' for {adapter.attention}, whose blocks have an exact "
                             "cache")
        shift = adapter.shift
        caching = DualCache(anchored=shift) if cache == "dual" else PrefixCache(anchored=shift, suffix=suffix)
        unmask = Anchored(unmask) if shift else unmask
    return MaskedDiffusion(adapter, windows, unmask=unmask, caching=caching, verify=verify)


@ALGORITHMS.register("freedave", PAPER, "Wu and Zhang 2025", family="masked-diffusion", guarantee="seed-exact",
                     needs="a diffusion model")
def freedave(lm: Any, draft_steps: Count = 4, block_length: Count | None = None, steps: Count | None = None,
             cache: Cache = "none", suffix: Count = 256) -> MaskedDiffusion:
    """Takes several steps of LLaDA's sampler in one forward pass, with the same output token for token.

    The authors always use a cache. Their eager mode, which drafts into the next block, is not included.

    Args:
        draft_steps: number of canvases that a forward pass scores.
        block_length: number of positions of a block. None: the model's, or 32.
        steps: number of steps of a block. None: one position per step, as published.
        cache: Fast-dLLM's "prefix" or "dual" cache, for models with full attention, or "none".
        suffix: number of positions that the prefix cache recomputes, from the block's start on.
    """
    return verified(lm, BranchExact(draft_steps), Quota(steps), block_length, cache, suffix)


@ALGORITHMS.register("freedave++", PAPER, "Wu and Zhang 2025", family="masked-diffusion", needs="a diffusion model")
def freedave_plus_plus(lm: Any, draft_steps: Count = 4, threshold: Share | None = 0.9,
                       match: Literal["exact", "subset"] | None = None, block_length: Count | None = None,
                       cache: Cache = "none", suffix: Count = 256) -> MaskedDiffusion:
    """Takes several steps of threshold decoding in one forward pass; a draft may lack some of a step's tokens.

    With a cache and shifted logits, the authors draft a block's first canvases token by token; here they are drafted by
    the threshold, as all others.

    Args:
        draft_steps: number of canvases that a forward pass scores.
        threshold: minimum probability of a candidate that is unmasked. None: one token per step, which makes it
            FreeDave.
        match: "exact": a draft must equal a step's result. "subset": it may lack some of its tokens. None: the authors'
            choice, "exact" for block-causal models and "subset" for those with full attention.
        block_length: number of positions of a block. None: the model's, or 32.
        cache: Fast-dLLM's "prefix" or "dual" cache, for models with full attention, or "none".
        suffix: number of positions that the prefix cache recomputes, from the block's start on.
    """
    match = match or ("subset" if isinstance(Adapter.of(lm).attention, Full) else "exact")
    unmask: Unmask = Quota() if threshold is None else Threshold(threshold)
    return verified(lm, BranchLater(draft_steps, match), unmask, block_length, cache, suffix)
