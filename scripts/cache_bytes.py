"""Bytes that caches hold, for `evaluate_caches.py`."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from decodax.cache import Wrapper
from decodax.caches.bounded.sublinear import Sublinear
from decodax.caches.evict.evicting import Evicting
from decodax.caches.prefill.quick_prefill import QuickPrefillCache
from decodax.caches.quantize.bounded import BoundedCodes
from decodax.caches.quantize.coded import Coded
from decodax.caches.quantize.graded import Graded
from decodax.caches.quantize.merging import MergedLayers
from decodax.caches.sparse.shadowkv import ShadowKVCache


def held(cache: Any) -> float:
    """Bytes of what a cache holds, without the room that is left in its arrays."""
    size = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))
    if isinstance(cache, Evicting):         # a key, a value and a position for each token of each head
        return sum(float(np.sum(count)) * (kv.shape[-1] * kv.dtype.itemsize + 4)
                   for kv, count in zip(cache.kv, cache.count, strict=True))
    if isinstance(cache, Coded):
        rows = cache.length.shape[0]
        each = size(cache.codes) / rows / cache.slots, size(cache.rest) / rows / cache.rest[0].shape[2]
        whole = np.asarray(cache.whole, float)
        return float((each[0] * (np.asarray(cache.held) - whole) + each[1] * whole).sum())
    if isinstance(cache, Graded):
        rows, coded = cache.length.shape[0], np.asarray(cache.coded, float)
        room = sum(grade.keys.shape[2] for grade in cache.grades[0])
        each = size(cache.grades) / rows / room, size(cache.rest) / rows / cache.rest[0].shape[2]
        return float((each[0] * coded + each[1] * (np.asarray(cache.length) - coded)).sum())
    if isinstance(cache, Wrapper):
        return held(cache.base)
    if isinstance(cache, ShadowKVCache):
        rows, before, kept = cache.length.shape[0], np.asarray(cache.began, float), np.asarray(cache.kept, float)
        after = kept + np.asarray(cache.length, float) - before
        return float(size(cache.shadows) * before.sum() / cache.size
                     + sum(kv.nbytes / kv.shape[2] for kv in cache.kv) * after.sum()) / rows
    if isinstance(cache, BoundedCodes):
        rows, before = cache.length.shape[0], np.asarray(cache.began, float).sum()
        after = np.asarray(cache.length, float).sum() - before
        return (size(cache.pools) * before / cache.size + size(cache.rest) * after / cache.rest[0].shape[2]) / rows
    if isinstance(cache, MergedLayers):
        before, rows = np.asarray(cache.prompt_length, float).sum(), cache.length.shape[0]
        after = np.asarray(cache.length, float).sum() - before
        return (size((cache.prompt, cache.pairs)) * before / cache.size
                + size(cache.kv) * after / cache.kv[0].shape[2]) / rows
    slots, counted = cache.kv[0].shape[2], cache.count if isinstance(cache, QuickPrefillCache) else cache.length
    tokens = np.asarray(counted, float)
    used = np.minimum(tokens, slots).mean() / slots
    # what lies beside keys and values grows with the text as they do, but for sketches of a size of their own
    beside = size((cache.sketches,)) if isinstance(cache, Sublinear) else (size(cache) - size(cache.kv)) * used
    return size(cache.kv) * used + beside
