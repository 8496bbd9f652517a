"""Drafts of the target itself on a smaller cache."""

from __future__ import annotations

from typing import Any, Literal

from decodax.io.quantize import quantize
from decodax.kvcache import kv
from decodax.kvcache.codecs import Nibbles
from decodax.kvcache.coded import Coding
from decodax.speculative import SeedExact, Speculative, drafts, shapes
from decodax.systems.shared import SELF, TARGET, entry


@entry("magicdec", "MagicDec: Breaking the Latency-Throughput Tradeoff for Long Context Generation with Speculative "
       "Decoding", "Sadhukhan et al. 2024", SELF,
       "the target on what SnapKV, or sinks and a window, keep of the prompt", TARGET)
def _magicdec(lm: Any, budget: int = 512, keep: Literal["snapkv", "sink-window"] = "snapkv", length: int = 4) -> Any:
    chosen: dict[str, dict[str, Any]] = {
        "snapkv": dict(budget=budget, window=min(32, max(budget // 4, 1))),
        "sink-window": dict(budget=budget, every=None)}
    if keep not in chosen:
        raise ValueError(f"keep: got {keep!r}, takes one of {', '.join(chosen)}")
    return Speculative(drafts.OwnCache(lm, kv(keep, **chosen[keep])), SeedExact(), shapes.Chain(length))


@entry("quantspec", "QuantSpec: Self-Speculative Decoding with Hierarchical Quantized KV Cache", "Tiwari et al. 2025",
       SELF, "the target with weights of 4 bits, on 4 bits of a cache of 8; equals plain decoding on that cache",
       TARGET, "approximate")
def _quantspec(lm: Any, group: int = 128, length: int = 4, weights: str | None = "int4") -> Any:
    cache = Coding(Nibbles(group), group, "quantspec")
    packed = None if weights is None else quantize(lm, weights)
    return Speculative(drafts.OwnCache(lm, cache, True, packed), SeedExact(), shapes.Chain(length))
