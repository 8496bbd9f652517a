"""Caches for `decodax.generate(..., cache=...)`: published methods by name, and their parts.

Every method is a function or class whose arguments are its options. A string is short for a call: `"snapkv:budget=512"`
means `snapkv(budget=512)`. `names()` lists the methods. Each folder has a theme, and one file for each paper.

>>> from decodax import caches
>>> caches.snapkv(budget=512) == caches.make("snapkv", budget=512)
True
"""

import importlib
import pkgutil
from typing import Any

from decodax.cache.prefix import Prefix
from decodax.caches import bounded, context, evict, prefill, quantize, sparse
from decodax.caches.bounded.less import LessKernels
from decodax.caches.constant import Constant
from decodax.caches.evict.evicting import Evicting, Eviction
from decodax.caches.evict.scores import HeldLayer, TokenScore
from decodax.caches.evict.selection import Selection
from decodax.caches.prefill.kv_prediction import KVMaps
from decodax.caches.prefix.cacheblend import blended, matched
from decodax.caches.prefix.cachegen import load_prefix, save_prefix
from decodax.caches.prefix.kvshare import KVShareConfig
from decodax.caches.prefix.pie import edited
from decodax.caches.prefix.prefix import read_prefix
from decodax.caches.quantize.aqua_kv import Predictors
from decodax.caches.quantize.cq import Codebooks
from decodax.caches.quantize.cskv import KVFeatures
from decodax.caches.sparse.a2ats import KeyBooks
from decodax.caches.sparse.attention_net import AttentionNet
from decodax.caches.sparse.token_butler import Butler
from decodax.common.names import directory
from decodax.common.registry import CACHES

__all__ = [
    "AttentionNet", "Butler", "Codebooks", "Constant", "Evicting", "Eviction", "HeldLayer", "KVFeatures", "KVMaps",
    "KVShareConfig", "KeyBooks", "LessKernels", "Predictors", "Prefix", "Selection", "TokenScore", "blended", "edited",
    "find", "load_prefix", "make", "matched", "names", "parse", "read_prefix", "register", "save_prefix",
]

for _shelf in (evict, bounded, quantize, context, sparse, prefill):      # every module of a shelf registers its names
    for _module in pkgutil.walk_packages(_shelf.__path__, f"{_shelf.__name__}."):
        importlib.import_module(_module.name)
for _kind in ("paged", "shared_prefix"):
    importlib.import_module(f"decodax.cache.{_kind}")

find, make, names, parse, register = CACHES.find, CACHES.make, CACHES.names, CACHES.parse, CACHES.register


def __getattr__(name: str) -> Any:
    return CACHES.attribute(name)


__dir__ = directory(__all__, CACHES.identifiers)
