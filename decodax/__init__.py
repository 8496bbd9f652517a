"""decodax: decoding for JAX. Sampling, speculative decoding, masked diffusion, beams, constraints and KV caches for
language models, on one compiled loop.

>>> import decodax as dx
>>> lm = dx.load("pycode")                                                        # doctest: +SKIP
>>> dx.generate(lm, "def fib(n):", max_new_tokens=64).text                        # doctest: +SKIP
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from decodax import (
        algorithms,
        bench,
        caches,
        constraints,
        contrib,
        jobs,
        models,
        sampling,
        search,
        select,
        sharding,
        train,
    )
    from decodax.algorithms.diffusion import MaskedDiffusion
    from decodax.algorithms.plain import Autoregressive
    from decodax.algorithms.speculative import Speculative, drafts, trees, verify
    from decodax.core.algorithm import Algorithm, Traits
    from decodax.core.cache import Cache
    from decodax.core.round import run, step
    from decodax.core.state import State, Status
    from decodax.core.types import Decision, Model, Out, Params
    from decodax.core.window import Window
    from decodax.engine.bound import bind
    from decodax.engine.compilation import cache_programs
    from decodax.engine.result import LogProbs, Result, Statistics
    from decodax.front.generate import Stream, generate, stream
    from decodax.front.infill import infill, watch
    from decodax.front.options import Sampling, SamplingOptions
    from decodax.front.score import score
    from decodax.front.serve import serve
    from decodax.front.watermarks import detect_watermark
    from decodax.io.drafters import load_drafter
    from decodax.io.load import LM, load, zoo
    from decodax.io.quantize import quantize, save
    from decodax.models import adapters

__version__ = "0.1.0"

# Names are imported when they are first asked for, so that `decodax --help` does not wait for JAX.
_HOMES = {
    "decodax": ["algorithms", "bench", "caches", "constraints", "contrib", "jobs", "models", "sampling", "search",
                "select", "sharding", "train"],
    "decodax.models": ["adapters"],
    "decodax.algorithms.plain": ["Autoregressive"],
    "decodax.algorithms.diffusion": ["MaskedDiffusion"],
    "decodax.algorithms.speculative": ["Speculative", "drafts", "trees", "verify"],
    "decodax.core.cache": ["Cache"],
    "decodax.core.round": ["run", "step"],
    "decodax.core.state": ["State", "Status"],
    "decodax.core.algorithm": ["Algorithm", "Traits"],
    "decodax.core.types": ["Decision", "Model", "Out", "Params"],
    "decodax.core.window": ["Window"],
    "decodax.engine.bound": ["bind"],
    "decodax.engine.compilation": ["cache_programs"],
    "decodax.engine.result": ["LogProbs", "Result", "Statistics"],
    "decodax.front.generate": ["Stream", "generate", "stream"],
    "decodax.front.infill": ["infill", "watch"],
    "decodax.front.options": ["Sampling", "SamplingOptions"],
    "decodax.front.score": ["score"],
    "decodax.front.serve": ["serve"],
    "decodax.front.watermarks": ["detect_watermark"],
    "decodax.io.drafters": ["load_drafter"],
    "decodax.io.load": ["LM", "load", "zoo"],
    "decodax.io.quantize": ["quantize", "save"],
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "LM", "Algorithm", "Autoregressive", "Cache", "Decision", "LogProbs", "MaskedDiffusion", "Model", "Out", "Params",
    "Result", "Sampling", "SamplingOptions", "Speculative", "State", "Statistics", "Status", "Stream",
    "Traits", "Window", "adapters", "algorithms", "bench", "bind", "cache_programs", "caches", "constraints", "contrib",
    "detect_watermark", "drafts", "generate", "infill", "jobs", "load", "load_drafter", "models", "quantize", "run",
    "sampling", "save", "score", "search", "select", "serve", "sharding", "step", "stream", "train", "trees", "verify",
    "watch", "zoo",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'decodax' has no attribute {name!r}")
    if home == "decodax":
        value: Any = importlib.import_module(f"decodax.{name}")
    else:
        found = importlib.import_module(home)
        value = getattr(found, name, None) or importlib.import_module(f"{home}.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
