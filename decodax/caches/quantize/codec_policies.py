"""Published ways to write what a cache keeps, each as what its paper puts together; see
`decodax.caches.evict.policies`."""

from __future__ import annotations

from typing import Any, Literal

from decodax.caches.constant import Constant
from decodax.caches.quantize.bounded import Bounded
from decodax.caches.quantize.coded import Coding
from decodax.caches.quantize.coupled import Codebooks, Coupled
from decodax.caches.quantize.graded import Grading
from decodax.caches.quantize.lean import FewChannels
from decodax.caches.quantize.predicted import Predicted, Predictors
from decodax.caches.quantize.rotated import Rotated
from decodax.caches.quantize.shrunk import KVFeatures, Shrunk
from decodax.caches.quantize.squat import SubspaceOrthogonal
from decodax.common.registry import CACHES
from decodax.core.cache import CacheConfig


def measured(name: str, given: Any, kind: type, how: str) -> Any:
    """An option that has to be measured, or ValueError."""
    if not isinstance(given, kind):
        raise ValueError(f"{name}: got {'none' if given is None else type(given).__name__}, takes what "
                         f"decodax.caches.{how} measures on a model")
    return given


@CACHES.register("zipcache", "ZipCache: Accurate and Efficient KV Cache Quantization with Salient Token Identification",
                 "He et al. 2024", "everything, in 4 bits what receives attention and in 2 the rest, by a tenth of a "
                 "prompt's queries; the latest tokens whole")
def _zipcache(bits: tuple[int, int] = (4, 2), ordinary: float = 0.4, probes: float = 0.1,
              gap: int = 100) -> CacheConfig:
    return Grading(bits, ordinary, probes, gap)


@CACHES.register("qaq", "QAQ: Quality Adaptive Quantization for LLM KV Cache", "Dong et al. 2024",
                 "everything, a prompt's tokens in as many bits as a bound of each one's error takes; what follows "
                 "whole")
def _qaq(bits: tuple[int, int] = (1, 4), most: float = 3.0, error: tuple[float, float] = (3.0, 3.0),
         norm: float = 300.0, last: int = 5, outliers: float = 0.01) -> CacheConfig:
    return Bounded(bits, most, error, norm, last, outliers)


@CACHES.register("squat", "SQuat: Subspace-orthogonal KV Cache Quantization", "Wang et al. 2025",
                 "everything, in 2 bits but for the latest tokens, with errors of keys across what the prompt's "
                 "queries look at")
def _squat(bits: int = 2, group: int = 32, residual: int = 32, channels: int = 64, rank: int = 20,
           strength: float = 0.001, keys: Literal["before", "after"] = "before") -> CacheConfig:
    return Coding(SubspaceOrthogonal(bits, bits, group, channels, rank, strength, keys), residual, "squat")


@CACHES.register("cq",
                 "KV Cache is 1 Bit Per Channel: Efficient Large Language Model Inference with Coupled Quantization",
                 "Zhang et al. 2024", "everything, as the nearest of measured centroids of channels that are coupled "
                 "(fit_codebooks), and the latest tokens whole")
def _cq(codebooks: Codebooks | None = None, residual: int = 32) -> CacheConfig:
    return Coding(Coupled(measured("codebooks", codebooks, Codebooks, "fit_codebooks")), residual, "cq")


@CACHES.register("rotatekv", "RotateKV: Accurate and Robust 2-Bit KV Cache Quantization for LLMs via Outlier-Aware "
                 "Adaptive Rotations", "Su et al. 2025", "everything, in 2 bits behind a rotation of channels in a "
                 "measured order (fit_order); tokens of massive activations and the latest ones whole")
def _rotatekv(order: Constant | None = None, bits: int = 2, group: int = 128, clip: float | None = None, heads: int = 4,
              sinks: int = 20, residual: int = 32) -> CacheConfig:
    order = measured("order", order, Constant, "fit_order")
    clip = (0.8 if bits == 2 else 1.0) if clip is None else clip
    return Coding(Rotated(order, bits, group, clip, heads, sinks), residual, "rotatekv")


@CACHES.register("cskv", "CSKV: Training-Efficient Channel Shrinking for KV Cache in Long-Context Scenarios",
                 "Wang et al. 2024", "everything, as a few measured features of a layer's heads together "
                 "(fit_features), and the latest tokens whole")
def _cskv(features: KVFeatures | None = None, bits: int | None = None, group: int = 32,
          residual: int = 32) -> CacheConfig:
    return Coding(Shrunk(measured("features", features, KVFeatures, "fit_features"), bits, group), residual, "cskv")


@CACHES.register("aqua-kv", "Cache Me If You Must: Adaptive Key-Value Quantization for Large Language Models",
                 "Shutova et al. 2025", "everything, as what measured maps from the layer before do not say of it "
                 "(fit_predictors), in 2 bits; the first tokens and the latest whole")
def _aqua_kv(predictors: Predictors | None = None, group: int = 1024, sinks: int = 4,
             residual: int = 128) -> CacheConfig:
    predictors = measured("predictors", predictors, Predictors, "fit_predictors")
    return Coding(Predicted(predictors, group, sinks), residual, "aqua-kv")


@CACHES.register("leank", "LeanK: Learnable K Cache Channel Pruning for Efficient Decoding", "Zhang et al. 2025",
                 "everything, keys in the channels that a model was found to need (fit_channels); the first tokens "
                 "and the latest whole")
def _leank(channels: Constant | None = None, sinks: int = 128, recent: int = 768, every: int = 128) -> CacheConfig:
    channels = measured("channels", channels, Constant, "fit_channels")
    return Coding(FewChannels(channels, sinks), every, "leank", recent)
