"""Caches and windows: what has been verified, and what is being scored."""

from decodax.cache.base import ALL, Cache, CacheConfig, Draftable, Entries, Feature, ReadPrompt, require
from decodax.cache.dense import Dense, dense
from decodax.cache.key_values import KeyValues, KVLayer, empty_kv
from decodax.cache.linear import LinearRule, LinearStates, LinearTerms, linear_states
from decodax.cache.per_layer import PerLayer
from decodax.cache.recurrence import Factors, LinearRecurrent
from decodax.cache.recurrent import Recurrent
from decodax.cache.scratch import AttentionView, Scratch
from decodax.cache.slotted import Slotted, empty_slots
from decodax.cache.window import Window, bidirectional, block_causal, causal, causal_prefix, parents, take
from decodax.cache.wrapper import Wrapper

__all__ = [
           "ALL",
           "AttentionView",
           "Cache",
           "CacheConfig",
           "Dense",
           "Draftable",
           "Entries",
           "Factors",
           "Feature",
           "KVLayer",
           "KeyValues",
           "LinearRecurrent",
           "LinearRule",
           "LinearStates",
           "LinearTerms",
           "PerLayer",
           "ReadPrompt",
           "Recurrent",
           "Scratch",
           "Slotted",
           "Window",
           "Wrapper",
           "bidirectional",
           "block_causal",
           "causal",
           "causal_prefix",
           "dense",
           "empty_kv",
           "empty_slots",
           "linear_states",
           "parents",
           "require",
           "take",
]
