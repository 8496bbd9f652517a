"""TriForce: the target drafts with chunks of its cache, and a draft model guesses tokens for it ("TriForce: Lossless
Acceleration of Long Sequence Generation with Hierarchical Speculative Decoding", Sun et al., 2024)."""

from __future__ import annotations

import dataclasses
from typing import Any

from decodax import caches
from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafts.model.draft_model import DraftModel
from decodax.algorithms.speculative.drafts.model.staged import Staged
from decodax.algorithms.speculative.drafts.self.own_cache import OwnCache
from decodax.caches.evict.evicting import Eviction
from decodax.caches.evict.selection import Top
from decodax.caches.evict.triforce import ChunkMeans
from decodax.common.options import Count, Whole
from decodax.common.registry import ALGORITHMS


@ALGORITHMS.register("triforce", "TriForce: Lossless Acceleration of Long Sequence Generation with Hierarchical "
                     "Speculative Decoding", "Sun et al. 2024", family="speculative-self",
                     needs="a draft model", guarantee="seed-exact")
def triforce(draft: Any, budget: Count = 4096, chunk: Count = 8, length: Count = 6, guesses: Count = 1,
             sinks: Whole = 16, recent: Count = 496) -> Speculative:
    """Drafts with the target and chunks of its cache that the newest query has selected, with guesses of a draft model.

    For prompts of many thousand tokens, for which the caches of both models are slow to read.

    Args:
        draft: the draft model.
        budget: number of tokens to which the target's drafts attend.
        chunk: number of tokens that are selected together.
        length: number of drafts in a round.
        guesses: number of tokens that the draft model guesses in each step of the target's drafts.
        sinks: number of first tokens that the draft model's cache keeps.
        recent: number of latest tokens that it keeps.
    """
    ring = caches.make("streaming-llm", start_size=sinks, recent_size=recent)
    small = dataclasses.replace(draft, model=draft.model.with_cache(ring))
    middle = OwnCache(Eviction(Top(ChunkMeans(chunk)), budget, name="triforce"))
    return Speculative(Staged(middle, DraftModel(small), length, guesses=guesses))
