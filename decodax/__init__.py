"""decodax: decoding for JAX. One compiled round, and every method a few lines plugged into it.

>>> import decodax as dx
>>> lm = dx.load("pycode")                                                        # doctest: +SKIP
>>> dx.generate(lm, "def fib(n):", max_new_tokens=64).text                        # doctest: +SKIP
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from decodax import arc, choice, diffusion, jobs, kvcache, policy, readout, steps, systems
    from decodax.api import Stream, generate, stream
    from decodax.autoregressive import Autoregressive
    from decodax.cache import Cache, Window
    from decodax.canvas import Frame, Infilled, Watch, infill, watch
    from decodax.choice.front import Chosen, choose
    from decodax.core.round import python_loop, run, step
    from decodax.core.start import init_state
    from decodax.core.state import State, Status
    from decodax.core.types import Algorithm, Decision, Model, Out, Params
    from decodax.diffusion import MaskedDiffusion
    from decodax.io.load import LM, load, zoo
    from decodax.io.quantize import quantize, save
    from decodax.io.twice import read_twice
    from decodax.jobs.serve import Served, serve
    from decodax.kvcache.table import kv
    from decodax.models import adapters
    from decodax.policy import Policy
    from decodax.programs import cache_programs
    from decodax.result import LogProbs, Result, Statistics
    from decodax.scoring import Scores, score
    from decodax.sharding import apart, lanes, weave
    from decodax.speculative import (
        Adaptive,
        Block,
        KSeq,
        MultiRound,
        Rejection,
        SeedExact,
        Speculative,
        TypicalAcceptance,
        automatic,
        drafts,
        fit_layers,
        fit_lengths,
        fit_predictor,
        fit_tree,
        shapes,
    )
    from decodax.steps.front import explore
    from decodax.systems import entry, system
    from decodax.watermarks import detect_watermark

__version__ = "0.1.0"

# Names are imported when they are first asked for, so that `decodax --help` does not wait for JAX.
_HOMES = {
    "decodax": ["arc", "choice", "diffusion", "jobs", "kvcache", "policy", "readout", "steps", "systems"],
    "decodax.models": ["adapters"],
    "decodax.api": ["Stream", "generate", "stream"],
    "decodax.autoregressive": ["Autoregressive"],
    "decodax.cache": ["Cache", "Window"],
    "decodax.canvas": ["Frame", "Infilled", "Watch", "infill", "watch"],
    "decodax.choice.front": ["Chosen", "choose"],
    "decodax.core.round": ["python_loop", "run", "step"],
    "decodax.core.start": ["init_state"],
    "decodax.core.state": ["State", "Status"],
    "decodax.core.types": ["Algorithm", "Decision", "Model", "Out", "Params"],
    "decodax.diffusion": ["MaskedDiffusion"],
    "decodax.io.load": ["LM", "load", "zoo"],
    "decodax.io.quantize": ["quantize", "save"],
    "decodax.io.twice": ["read_twice"],
    "decodax.jobs.serve": ["Served", "serve"],
    "decodax.kvcache": ["kv"],
    "decodax.policy": ["Policy"],
    "decodax.programs": ["cache_programs"],
    "decodax.result": ["LogProbs", "Result", "Statistics"],
    "decodax.scoring": ["Scores", "score"],
    "decodax.sharding": ["apart", "lanes", "weave"],
    "decodax.speculative": ["Adaptive", "Block", "KSeq", "MultiRound", "Rejection", "SeedExact", "Speculative",
                            "TypicalAcceptance", "automatic", "drafts", "fit_layers", "fit_lengths", "fit_predictor",
                            "fit_tree", "shapes"],
    "decodax.steps": ["explore"],
    "decodax.systems": ["entry", "system"],
    "decodax.watermarks": ["detect_watermark"],
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "LM", "Adaptive", "Algorithm", "Autoregressive", "Block", "Cache", "Chosen", "Decision", "Frame", "Infilled",
    "KSeq", "LogProbs", "MaskedDiffusion", "Model", "MultiRound", "Out", "Params", "Policy", "Rejection", "Result",
    "Scores", "SeedExact", "Served", "Speculative", "State", "Statistics", "Status", "Stream", "TypicalAcceptance",
    "Watch", "Window", "adapters", "apart", "arc", "automatic", "cache_programs", "choice", "choose",
    "detect_watermark", "diffusion", "drafts", "entry", "explore", "fit_layers", "fit_lengths", "fit_predictor",
    "fit_tree", "generate", "infill", "init_state", "jobs", "kv", "kvcache", "lanes", "load", "policy",
    "python_loop", "quantize", "read_twice", "readout", "run", "save", "score", "serve", "shapes", "step", "steps",
    "stream", "system", "systems", "watch", "weave", "zoo",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'decodax' has no attribute {name!r}")
    if home == "decodax" or name == "adapters":
        value = importlib.import_module(f"{home}.{name}")
    else:
        value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
