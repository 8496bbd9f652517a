"""What a cache keeps: published cache policies by name, and the parts that they are made of.

The table is `POLICIES`; `decodax.kv` makes a kind of cache by name, which `decodax.generate(..., cache=...)` takes.

>>> from decodax.kvcache import kv
>>> kv("snapkv", budget=512).name
'snapkv'
"""

from decodax.kvcache import codec_policies as _codec_policies  # noqa: F401
from decodax.kvcache import draft_policies as _draft_policies  # noqa: F401
from decodax.kvcache import policies as _policies  # noqa: F401
from decodax.kvcache import reading_policies as _reading_policies  # noqa: F401
from decodax.kvcache import sketch_policies as _sketch_policies  # noqa: F401
from decodax.kvcache import text_policies as _text_policies  # noqa: F401
from decodax.kvcache.attention_predictor import AttentionNet
from decodax.kvcache.cachegen import load_prefix, save_prefix
from decodax.kvcache.constant import Constant
from decodax.kvcache.coupled import Codebooks
from decodax.kvcache.evicting import Evicting, Eviction
from decodax.kvcache.fewer_heads import fit_kv_heads, mean_kv_heads
from decodax.kvcache.fit import Probe, fit_heads, fit_layers
from decodax.kvcache.fit_attention_predictor import fit_attention_predictor
from decodax.kvcache.fit_channels import fit_channels
from decodax.kvcache.fit_codecs import fit_codebooks, fit_features, fit_order
from decodax.kvcache.fit_echo_att import attention_similarity, echo_groups, fit_echo_att
from decodax.kvcache.fit_kv_prediction import fit_kv_prediction, train_kv_prediction
from decodax.kvcache.fit_less import fit_less
from decodax.kvcache.fit_predicted import fit_predictors
from decodax.kvcache.fit_query_aware import fit_key_books
from decodax.kvcache.fit_token_butler import fit_token_butler
from decodax.kvcache.held import HeldLayer
from decodax.kvcache.kv_prediction import KVMaps
from decodax.kvcache.less import LessKernels
from decodax.kvcache.predicted import Predictors
from decodax.kvcache.prefix import Prefix, blended, edited, matched, read_prefix
from decodax.kvcache.query_aware import KeyBooks
from decodax.kvcache.repairing import HighDeviation
from decodax.kvcache.scores import TokenScore
from decodax.kvcache.selection import Selection
from decodax.kvcache.shrunk import KVFeatures
from decodax.kvcache.table import POLICIES, CachePolicy, cache_policy, find, kv, read
from decodax.kvcache.token_butler import Butler

__all__ = ["POLICIES", "AttentionNet", "Butler", "CachePolicy", "Codebooks", "Constant", "Evicting", "Eviction",
           "HeldLayer", "HighDeviation", "KVFeatures", "KVMaps", "KeyBooks", "LessKernels", "Predictors", "Prefix",
           "Probe", "Selection", "TokenScore", "attention_similarity", "blended", "cache_policy", "echo_groups",
           "edited", "find", "fit_attention_predictor", "fit_channels", "fit_codebooks", "fit_echo_att", "fit_features",
           "fit_heads", "fit_key_books", "fit_kv_heads", "fit_kv_prediction", "fit_layers", "fit_less", "fit_order",
           "fit_predictors", "fit_token_butler", "kv", "load_prefix", "matched", "mean_kv_heads", "read", "read_prefix",
           "save_prefix", "train_kv_prediction"]
