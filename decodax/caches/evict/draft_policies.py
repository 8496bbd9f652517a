"""Published ways to read a prompt that ask a smaller model. They move to `decodax.caches.prefill`."""

from __future__ import annotations

from typing import Any, Literal

from decodax.caches.evict.drafted import Drafted
from decodax.caches.prefill.kv_prediction import FromAuxiliary, KVMaps, KVPrediction
from decodax.caches.prefill.shortened import DraftAttention
from decodax.caches.shapes import layers_of
from decodax.common.registry import CACHES
from decodax.core.cache import CacheConfig
from decodax.core.loaded import Loaded


@CACHES.register("specpc", "Draft-based Approximate Inference for LLMs", "Galim et al. 2025",
                 "the tokens of a prompt that a draft model attends to, and their neighbours; the model reads no "
                 "others")
def _specpc(draft: Any = None, budget: int = 1024, tokens: int = 1, window: int = 64, kernel: int = 64,
            pool: Literal["mean", "max"] = "max", neighbours: int | None = None,
            reduce: Literal["mean", "max"] = "max", first: int = 8, weighted: bool = True) -> CacheConfig:
    kind = DraftAttention(budget, tokens, window, kernel, pool, kernel if neighbours is None else neighbours, reduce,
                          first, weighted)
    return Drafted.checked(kind, draft, "specpc")


@CACHES.register("kv-prediction", "KV Prediction for Improved Time to First Token", "Horton et al. 2024",
                 "everything; of a prompt what measured maps make of a smaller model's keys and values "
                 "(fit_kv_prediction), so that the model reads the newest token alone")
def _kv_prediction(auxiliary: Any = None, maps: KVMaps | None = None) -> CacheConfig:
    if not isinstance(auxiliary, Loaded):
        raise ValueError(f"auxiliary: got {'none' if auxiliary is None else type(auxiliary).__name__}, takes a smaller "
                         "model with the same tokenizer, as decodax.load gives it")
    if not isinstance(maps, KVMaps):
        raise ValueError(f"maps: got {'none' if maps is None else type(maps).__name__}, takes what "
                         "decodax.train.kv_prediction measures on both models")
    return FromAuxiliary(KVPrediction(tuple(layers_of(auxiliary.model))), auxiliary, "kv-prediction", maps)
