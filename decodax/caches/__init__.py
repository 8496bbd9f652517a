"""What a cache keeps: published cache policies by name, and the parts that they are made of.

The table is `POLICIES`; `decodax.kv` makes a kind of cache by name, which `decodax.generate(..., cache=...)` takes.

>>> from decodax.caches import kv
>>> kv("snapkv", budget=512).name
'snapkv'
"""

from decodax.caches.bounded import sketch_policies as _sketch_policies  # noqa: F401
from decodax.caches.bounded.less import LessKernels
from decodax.caches.constant import Constant
from decodax.caches.evict import draft_policies as _draft_policies  # noqa: F401
from decodax.caches.evict import policies as _policies  # noqa: F401
from decodax.caches.evict import text_policies as _text_policies  # noqa: F401
from decodax.caches.evict.evicting import Evicting, Eviction
from decodax.caches.evict.held import HeldLayer
from decodax.caches.evict.scores import TokenScore
from decodax.caches.evict.selection import Selection
from decodax.caches.prefill.kv_prediction import KVMaps
from decodax.caches.prefix.cachegen import load_prefix, save_prefix
from decodax.caches.prefix.prefix import Prefix, blended, edited, matched, read_prefix
from decodax.caches.prefix.repairing import HighDeviation
from decodax.caches.quantize import codec_policies as _codec_policies  # noqa: F401
from decodax.caches.quantize.coupled import Codebooks
from decodax.caches.quantize.predicted import Predictors
from decodax.caches.quantize.shrunk import KVFeatures
from decodax.caches.sparse import reading_policies as _reading_policies  # noqa: F401
from decodax.caches.sparse.attention_predictor import AttentionNet
from decodax.caches.sparse.query_aware import KeyBooks
from decodax.caches.sparse.token_butler import Butler
from decodax.caches.table import POLICIES, CachePolicy, cache_policy, find, kv, read

__all__ = ["POLICIES", "AttentionNet", "Butler", "CachePolicy", "Codebooks", "Constant", "Evicting", "Eviction",
           "HeldLayer", "HighDeviation", "KVFeatures", "KVMaps", "KeyBooks", "LessKernels", "Predictors", "Prefix",
           "Selection", "TokenScore", "blended", "cache_policy", "edited", "find", "kv", "load_prefix", "matched",
           "read", "read_prefix", "save_prefix"]
