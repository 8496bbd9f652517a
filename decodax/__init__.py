"""decodax: decoding for JAX. One compiled round, and every method a few lines plugged into it.

>>> import decodax as dx
>>> lm = dx.load("pycode")                                                        # doctest: +SKIP
>>> dx.generate(lm, "def fib(n):", max_new_tokens=64).text                        # doctest: +SKIP
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from decodax import algorithms, caches, jobs, sampling, search, select
    from decodax.algorithms import contrastive, diffusion
    from decodax.algorithms.autoregressive import Autoregressive
    from decodax.algorithms.diffusion import MaskedDiffusion
    from decodax.algorithms.speculative import (
        Adaptive,
        BlockVerification,
        KSeq,
        MultiRound,
        Rejection,
        SeedExact,
        Speculative,
        TypicalAcceptance,
        apart,
        automatic,
        drafts,
        fit_layers,
        fit_lengths,
        fit_predictor,
        fit_tree,
        trees,
    )
    from decodax.contrib import arc
    from decodax.core.cache import Cache
    from decodax.core.round import python_loop, run, step
    from decodax.core.start import init_state
    from decodax.core.state import State, Status
    from decodax.core.types import Algorithm, Decision, Model, Out, Params
    from decodax.core.window import Window
    from decodax.engine.compilation import cache_programs
    from decodax.engine.result import LogProbs, Result, Statistics
    from decodax.front.generate import Stream, generate, stream
    from decodax.front.infill import Frame, Infilled, Watch, infill, watch
    from decodax.front.options import Sampling, SamplingOptions
    from decodax.front.read_twice import read_twice
    from decodax.front.score import Scores, score
    from decodax.front.serve import Served, serve
    from decodax.front.watermarks import detect_watermark
    from decodax.io.load import LM, load, zoo
    from decodax.io.quantize import quantize, save
    from decodax.models import adapters
    from decodax.sampling import Policy
    from decodax.sharding import lanes, weave

__version__ = "0.1.0"

# Names are imported when they are first asked for, so that `decodax --help` does not wait for JAX.
_HOMES = {
    "decodax": ["algorithms", "caches", "constraints", "jobs", "sampling", "search", "select"],
    "decodax.algorithms": ["contrastive", "diffusion"],
    "decodax.contrib": ["arc"],
    "decodax.models": ["adapters"],
    "decodax.front.options": ["Sampling", "SamplingOptions"],
    "decodax.front.generate": ["Stream", "generate", "stream"],
    "decodax.algorithms.autoregressive": ["Autoregressive"],
    "decodax.core.cache": ["Cache"],
    "decodax.core.window": ["Window"],
    "decodax.front.infill": ["Frame", "Infilled", "Watch", "infill", "watch"],
    "decodax.core.round": ["python_loop", "run", "step"],
    "decodax.core.start": ["init_state"],
    "decodax.core.state": ["State", "Status"],
    "decodax.core.types": ["Algorithm", "Decision", "Model", "Out", "Params"],
    "decodax.algorithms.diffusion": ["MaskedDiffusion"],
    "decodax.io.load": ["LM", "load", "zoo"],
    "decodax.io.quantize": ["quantize", "save"],
    "decodax.front.read_twice": ["read_twice"],
    "decodax.front.serve": ["Served", "serve"],
    "decodax.sampling": ["Policy"],
    "decodax.engine.compilation": ["cache_programs"],
    "decodax.engine.result": ["LogProbs", "Result", "Statistics"],
    "decodax.front.score": ["Scores", "score"],
    "decodax.sharding": ["lanes", "weave"],
    "decodax.algorithms.speculative": [
        "Adaptive", "BlockVerification", "KSeq", "MultiRound", "Rejection", "SeedExact", "Speculative",
        "TypicalAcceptance", "apart", "automatic", "drafts", "fit_layers", "fit_lengths", "fit_predictor", "fit_tree",
        "trees"],
    "decodax.front.watermarks": ["detect_watermark"],
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "LM", "Adaptive", "Algorithm", "Autoregressive", "BlockVerification", "Cache", "Decision", "Frame", "Infilled",
    "KSeq", "LogProbs", "MaskedDiffusion", "Model", "MultiRound", "Out", "Params", "Policy", "Rejection", "Result",
    "Sampling", "SamplingOptions", "Scores", "SeedExact", "Served", "Speculative", "State", "Statistics", "Status",
    "Stream", "TypicalAcceptance", "Watch", "Window", "adapters", "algorithms", "apart", "arc", "automatic",
    "cache_programs", "caches", "constraints", "contrastive", "detect_watermark", "diffusion", "drafts",
    "fit_layers", "fit_lengths", "fit_predictor", "fit_tree", "generate", "infill", "init_state", "jobs", "lanes",
    "load", "python_loop", "quantize", "read_twice", "run", "sampling", "save", "score", "search", "select",
    "serve", "step", "stream", "trees", "watch", "weave", "zoo",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'decodax' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name, None) if home != "decodax" else None
    if value is None:       # a module of the package
        value = importlib.import_module(f"{home}.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
