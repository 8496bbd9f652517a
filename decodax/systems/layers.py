"""Drafts of the target itself with layers left out."""

from __future__ import annotations

from typing import Any

from decodax.speculative import SeedExact, Speculative, drafts, shapes
from decodax.systems.registry import SELF, TARGET, entry


@entry("self-speculative", "Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative Decoding",
       "Zhang et al. 2023", SELF, "the target without a fixed set of layers", TARGET)
def _self(lm: Any, skip: tuple[int, ...] | None = None, length: int = 4, shape: Any = None) -> Any:
    layers = len(lm.model.config.layers)
    left_out = tuple(range(1, layers - 1, 2)) if skip is None else skip
    return Speculative(drafts.LayerSkip(lm, left_out), SeedExact(), shape or shapes.Chain(length))


@entry("layerskip", "LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding", "Elhoushi et al. 2024",
       SELF, "the target's first layers and its head", TARGET)
def _layerskip(lm: Any, layer: int | None = None, length: int = 4) -> Any:
    layers = len(lm.model.config.layers)
    return Speculative(drafts.LayerSkip.exit(lm, layer or max(layers // 2, 1)), SeedExact(), shapes.Chain(length))


@entry("clasp", "CLaSp: In-Context Layer Skip for Self-Speculative Decoding", "Chen et al. 2025", SELF,
       "layers left out by dynamic programming over the last token's states", TARGET)
def _clasp(lm: Any, skips: int | None = None, every: int = 4, length: int = 4) -> Any:
    layers = len(lm.model.config.layers)
    return Speculative(drafts.CLaSp(lm, skips or max(layers // 2, 1), every), SeedExact(), shapes.Chain(length))


@entry("del", "DEL: Context-Aware Dynamic Exit Layer for Efficient Self-Speculative Decoding",
       "Entezari Zarch et al. 2025", SELF, "exit layer and length that promise most tokens a layer", TARGET)
def _del(lm: Any, most: int = 6) -> Any:
    return Speculative(drafts.DynamicExit(lm, most))


@entry("knn-ssd", "KNN-SSD: Enabling Dynamic Self-Speculative Decoding via Nearest Neighbor Layer Set Optimization",
       "Song et al. 2025", SELF, "the skipped layers of the nearest of some sampled domains", "samples")
def _knn(lm: Any, domains: Any = None, length: int = 4) -> Any:
    if domains is None:
        raise ValueError("system: 'knn-ssd' needs domains=, for each domain a list of samples as token ids")
    anchors = drafts.fit_anchors(lm, domains)
    return Speculative(drafts.KNNSkip(lm, anchors), SeedExact(), shapes.Chain(length))
