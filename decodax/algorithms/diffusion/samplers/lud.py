"""Lexical unit decoding, LUD: several tokens after an autoregressive text are predicted at once, and the sure ones are
kept ("Decoding at the Speed of Thought: Harnessing Parallel Decoding of Lexical Units for LLMs", Sun et al., 2024).

The model is an ordinary one that was tuned to predict the tokens of a unit, a run of tokens that it was sure of anyway,
at placeholders. Attention is causal throughout. The last token and the placeholders after it predict the next tokens in
one forward pass, which also computes the entries of the tokens that the last one has kept. So it is SDLM's loop with
another attention and another training. Training: `decodax.train.tuning.LexicalUnitLoss`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from decodax.algorithms.diffusion.adapter import Adapter, CausalPrefix
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.caching.blocks import FusedCache
from decodax.algorithms.diffusion.rules.scores import Position
from decodax.algorithms.diffusion.rules.windows import Sliding
from decodax.algorithms.diffusion.samplers.sdlm import ConfidentPrefix
from decodax.common.options import Count, Share, Whole
from decodax.common.registry import ALGORITHMS


@dataclasses.dataclass(frozen=True)
class Placeholders(Adapter):
    """Adapter of an autoregressive model that predicts tokens at placeholders: undecided positions have the ordinary
    token `mask`. Unlike a mask token it may occur in the text, and often it also ends texts, so its logit is kept."""

    shift: bool = True
    attention: CausalPrefix = CausalPrefix(ordered=True)
    autoregressive: ClassVar[bool] = True

    def clean(self, head: Any) -> Any:
        return head


@ALGORITHMS.register("lud", "Decoding at the Speed of Thought: Harnessing Parallel Decoding of Lexical Units for LLMs",
                     "Sun et al. 2024", family="blockwise-parallel", needs="a model", guarantee="approximate")
def lud(lm: Any, length: Count = 5, threshold: Share = 0.9, placeholder: Whole | None = None) -> MaskedDiffusion:
    """Predicts several tokens at placeholders at once and keeps the first ones that are sure.

    For models that were tuned for it (`scripts/train.py tune --objective lud`); others are rarely sure at placeholders.
    Nothing is verified, so the text may differ from that of plain decoding; with a threshold of 1 it is greedily the
    same. The paper also controls repetition, by a rule that was not at hand.

    Args:
        lm: the model.
        length: number of placeholders; a forward pass decides one token more at most, and at least one.
        threshold: tokens are kept up to the first whose probability is not above this, and at least one.
        placeholder: id of their token; None: the model's padding token.
    """
    token = lm.pad if placeholder is None else placeholder
    if token >= lm.vocab_size:
        raise ValueError(f"placeholder: got {token}, takes an id below {lm.vocab_size}")
    return MaskedDiffusion(Placeholders(token), Sliding(length + 1), Position(),
                           ConfidentPrefix(threshold, strict=True), caching=FusedCache())
