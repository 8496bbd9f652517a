"""Drafts of the target itself with layers left out."""

from __future__ import annotations

from typing import Any

from decodax.algorithms.entries.shared import (
    SELF,
    TARGET,
)
from decodax.algorithms.speculative import SeedExact, Speculative, drafts, fit_skipped_layers, trees
from decodax.common.registry import ALGORITHMS


@ALGORITHMS.register("self-speculative",
                     "Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative Decoding",
                     "Zhang et al. 2023", "the target without the halves of layers that a search leaves out, until a "
                     "draft is in doubt by a threshold that follows the acceptance", family=SELF, needs="samples",
                     guarantee="seed-exact")
def _self(lm: Any, samples: Any = None, skip: tuple[int, ...] = (), skip_attention: tuple[int, ...] = (),
          skip_mlp: tuple[int, ...] = (), trials: int = 100, length: int = 8, gamma: float = 0.8, alpha: float = 0.9,
          epsilon: float = 0.01, beta1: float = 0.5, beta2: float = 0.9) -> Any:
    if (samples is None) != bool(skip or skip_attention or skip_mlp):
        raise ValueError("system: 'self-speculative' needs samples=, prompts as token ids to search the layers with, "
                         "or skip=, skip_attention=, skip_mlp=, what fit_skipped_layers found; takes one of the two")
    if samples is not None:
        found = fit_skipped_layers(lm, samples, trials=trials, length=length)
        skip_attention, skip_mlp = found.attention, found.mlp
    source = drafts.LayerSkip(lm, skip, skip_attention, skip_mlp)
    return Speculative(drafts.DraftExit(source, length, gamma, alpha, epsilon, beta1, beta2))


@ALGORITHMS.register("layerskip", "LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding",
                     "Elhoushi et al. 2024", "the target's first layers and its head", family=SELF, needs=TARGET,
                     guarantee="seed-exact")
def _layerskip(lm: Any, layer: int | None = None, length: int = 4) -> Any:
    layers = len(lm.model.config.layers)
    return Speculative(drafts.LayerSkip.exit(lm, layer or max(layers // 2, 1)), SeedExact(), trees.Chain(length))


@ALGORITHMS.register("clasp", "CLaSp: In-Context Layer Skip for Self-Speculative Decoding", "Chen et al. 2025",
                     "layers left out by dynamic programming over the last token's states", family=SELF, needs=TARGET,
                     guarantee="seed-exact")
def _clasp(lm: Any, skips: int | None = None, every: int = 4, length: int = 4) -> Any:
    layers = len(lm.model.config.layers)
    return Speculative(drafts.CLaSp(lm, skips or max(layers // 2, 1), every), SeedExact(), trees.Chain(length))


@ALGORITHMS.register("del", "DEL: Context-Aware Dynamic Exit Layer for Efficient Self-Speculative Decoding",
                     "Entezari Zarch et al. 2025", "exit layer and length that promise most tokens a layer",
                     family=SELF, needs=TARGET, guarantee="seed-exact")
def _del(lm: Any, most: int = 6) -> Any:
    return Speculative(drafts.DynamicExit(lm, most))


@ALGORITHMS.register("knn-ssd",
                     "KNN-SSD: Enabling Dynamic Self-Speculative Decoding via Nearest Neighbor Layer Set Optimization",
                     "Song et al. 2025", "the skipped layers of the nearest of some sampled domains", family=SELF,
                     needs="samples", guarantee="seed-exact")
def _knn(lm: Any, domains: Any = None, length: int = 4) -> Any:
    if domains is None:
        raise ValueError("system: 'knn-ssd' needs domains=, for each domain a list of samples as token ids")
    anchors = drafts.fit_anchors(lm, domains)
    return Speculative(drafts.KNNSkip(lm, anchors), SeedExact(), trees.Chain(length))
