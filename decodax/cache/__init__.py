"""Kinds of caches: dense, paged, recurrent, hybrid, and with a prefix that rows share."""

from decodax.cache.dense import Dense, dense
from decodax.cache.entry import AskedEntry, KVEntry, own_entry
from decodax.cache.hybrid import PerLayer
from decodax.cache.key_values import KeyValues, KVLayer, cache_of, empty_kv
from decodax.cache.latest import Latest
from decodax.cache.linear import LinearRule, LinearStates, LinearTerms, linear_states
from decodax.cache.recurrence import ConvInputs, Factors, LinearRecurrent
from decodax.cache.recurrent import Recurrent
from decodax.cache.slotted import Slotted, empty_slots
from decodax.cache.tree_buffer import AttentionView, TreeBuffer
from decodax.cache.wrapper import Wrapper

__all__ = ["AskedEntry", "AttentionView", "ConvInputs", "Dense", "Factors", "KVEntry", "KVLayer", "KeyValues",
           "Latest", "LinearRecurrent", "LinearRule", "LinearStates", "LinearTerms", "PerLayer", "Recurrent", "Slotted",
           "TreeBuffer", "Wrapper", "cache_of", "dense", "empty_kv", "empty_slots", "linear_states", "own_entry"]
