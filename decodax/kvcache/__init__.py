"""What a cache keeps: published cache policies by name, and the parts that they are made of.

The table is `POLICIES`; `decodax.kv` makes a kind of cache by name, which `decodax.generate(..., cache=...)` takes.

>>> from decodax.kvcache import kv
>>> kv("snapkv", budget=512).name
'snapkv'
"""

from decodax.kvcache import policies as _policies  # noqa: F401
from decodax.kvcache.evicting import Evicting, Eviction
from decodax.kvcache.held import Held
from decodax.kvcache.scores import Score
from decodax.kvcache.selection import Selection
from decodax.kvcache.table import POLICIES, Policy, find, kv, policy, read

__all__ = ["POLICIES", "Evicting", "Eviction", "Held", "Policy", "Score", "Selection", "find", "kv", "policy", "read"]
