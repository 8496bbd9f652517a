"""Learning to Parallel: Accelerating Diffusion Large Language Models via Adaptive Parallel Decoding (Bao et al.
2025)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from decodax.algorithms.diffusion.adapter import Adapter
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.defaults import FILLING, MASKED
from decodax.algorithms.diffusion.rules.learned import ClosingToken, Filter, Learned, PredictedEnd
from decodax.algorithms.diffusion.rules.remasking import Keep
from decodax.algorithms.diffusion.rules.stops import EndOfText
from decodax.algorithms.diffusion.rules.windows import WholeBlocks
from decodax.common.registry import ALGORITHMS


@ALGORITHMS.register("learn2pd", "Learning to Parallel: Accelerating Diffusion Large Language Models via Adaptive "
                     "Parallel Decoding", "Bao et al. 2025", "a filter on a block's confidences, and the canvas cut "
                     "at the predicted end of text; filters come with the shipped models, `scripts/train.py diffusion "
                     "--stage filter` trains others", family=MASKED, needs=FILLING, guarantee="approximate")
def learn2pd(lm: Any, filter: Filter | str | None = None, threshold: float = 0.96, steps: int | None = None,
             end_of_text: bool = True, size: int | None = None) -> MaskedDiffusion:
    """`filter`: its weights, or their file; None: the `filter.safetensors` in the model's directory, which the shipped
    models have. For another model of text, of any attention,

        python scripts/train.py diffusion --preset pycode-diffusion --stage filter --init DIR --output runs/filter

    writes `runs/filter/model/filter.safetensors`. Its width is the block. `steps`: of a block.

    Raises:
        ValueError: no filter given, and none in the model's directory.
    """
    own = filter if isinstance(filter, Filter) else Filter.load(filter or _beside(lm))
    learned = Learned(own, threshold, steps)
    return MaskedDiffusion(Adapter.of(lm), WholeBlocks(size, own.block), unmask=learned,
                           remask=ClosingToken() if end_of_text else Keep(),
                           stops=(PredictedEnd(learned) if end_of_text else EndOfText(),))


def _beside(lm: Any) -> Path:
    """The filter in a model's directory."""
    directory = lm.directory
    if directory is None or not (directory / "filter.safetensors").is_file():
        where = directory or "a directory of the model"
        raise ValueError(f"filter: got None, and no filter.safetensors lies in {where}; train one with "
                         "scripts/train.py diffusion --stage filter --init DIR, or give a Filter or its file's path")
    return Path(directory) / "filter.safetensors"
