"""`explore`: searches over texts that grow step by step."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from decodax.common.arguments import options_of
from decodax.common.registry import SEARCHES
from decodax.core.checks import instance
from decodax.engine.methods import model
from decodax.engine.request import without
from decodax.io.load import LM
from decodax.search.canvases import Canvases
from decodax.search.explorer import CanvasExplorer, Explored, Explorer, Ranked
from decodax.search.forks import Forks

NOT_HERE = {**dict.fromkeys(("num_samples", "num_return_sequences"), "the search says how many rows it takes"),
            "max_time": "max_new_tokens bounds the texts of a search, and its options their number",
            "batch_size": "all prompts are searched side by side; give fewer"}


def explore(lm: LM | str | os.PathLike[str], prompts: Any, by: str | Explorer | CanvasExplorer, *,
            until: str | Sequence[str] | None = None, step_tokens: int | None = None,
            options: dict[str, Any] | None = None, **sampling: Any) -> Explored:
    """Answers each prompt by a search over steps, on forks of one compiled state.

    >>> import decodax as dx
    >>> dx.explore("pycode", "def area(", "particle-filter", options={"reward": judge},
    ...            until="\\n", temperature=0.8).text                                     # doctest: +SKIP

    Args:
        lm, prompts: as of `generate`.
        by: a search, or the name of one (`decodax.search.names()`).
        until: strings with which a step ends. step_tokens: tokens of a step at most. Without either, a step is the
            whole text. Searches over canvases take neither: their steps are those of the sampler.
        options: of the search, where it is given by name: `options={"reward": judge, "n": 16}`.
        sampling: arguments of `generate`: `temperature`, `max_new_tokens`, `algorithm`, `cache`, `stop`, ... With
            `algorithm` any system that writes from left to right writes the steps; for searches over canvases any
            sampler of masked diffusion.

    Raises:
        ValueError: an unknown search or option, or one that is missing; or as `generate`.
        TypeError: as `generate`.
    """
    lm, options = model(lm), options_of(options)
    chosen = SEARCHES.make(by, **options) if isinstance(by, str) else by
    if not isinstance(chosen, (Explorer, CanvasExplorer)):
        raise TypeError(f"by: got {type(chosen).__name__}, takes a search or the name of one")
    if not isinstance(by, str) and options:
        raise ValueError("options: got some beside a search that is made already")
    sampling = without("explore", sampling, NOT_HERE)
    if (limit := (lm.generation_config or {}).get("max_time")) is not None:
        warnings.warn(f"generation config of {lm.name!r}: max_time: got {limit}, which ends no search", stacklevel=2)
    forks: Forks | Canvases
    if isinstance(chosen, CanvasExplorer):
        if until is not None or step_tokens is not None:
            raise ValueError("until, step_tokens: a canvas is denoised step by step by its sampler; takes neither")
        forks = Canvases.begin(lm, prompts, chosen.rows, **sampling)
        found = chosen.search(forks, asked(prompts, forks.prompts))
    else:
        forks = chosen.begin(lm, prompts, until=until, step_tokens=step_tokens, **sampling)
        found = chosen.search(forks, asked(prompts, forks.prompts))
    instance(f"{type(chosen).__name__}.search", found, Ranked, "a Ranked")
    texts = forks.texts() if found.texts is None else found.texts
    index = found.scores.argmax(1) if found.index is None else np.asarray(found.index)
    return Explored(text=[row[int(i)] for row, i in zip(texts, index, strict=True)], index=index, texts=texts,
                    scores=found.scores, weights=found.weights, log_evidence=found.log_evidence, tokens=forks.spent,
                    fed=forks.fed, result=forks.result(), details=found.details)


def asked(prompts: Any, ids: Sequence[list[int]]) -> list[Any]:
    """The prompts as they were given, one by one; as ids where that is not plain."""
    given = [prompts] if isinstance(prompts, str) else prompts
    same = isinstance(given, (list, tuple)) and len(given) == len(ids) and not all(isinstance(x, int) for x in given)
    return list(given) if same else list(ids)
