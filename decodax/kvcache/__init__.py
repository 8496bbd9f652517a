"""What a cache keeps: published cache policies by name, and the parts that they are made of.

The table is `POLICIES`; `decodax.kv` makes a kind of cache by name, which `decodax.generate(..., cache=...)` takes.

>>> from decodax.kvcache import kv
>>> kv("snapkv", budget=512).name
'snapkv'
"""

from decodax.kvcache import policies as _policies  # noqa: F401
from decodax.kvcache.evicting import Evicting, Eviction
from decodax.kvcache.fit import Probe, fit_heads, fit_layers
from decodax.kvcache.held import HeldLayer
from decodax.kvcache.scores import TokenScore
from decodax.kvcache.selection import Selection
from decodax.kvcache.table import POLICIES, CachePolicy, cache_policy, find, kv, read

__all__ = ["POLICIES", "CachePolicy", "Evicting", "Eviction", "HeldLayer", "Probe", "Selection", "TokenScore",
           "cache_policy", "find", "fit_heads", "fit_layers", "kv", "read"]
