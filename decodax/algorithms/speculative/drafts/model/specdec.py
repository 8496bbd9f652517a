"""SpecDec: drafts a block with a non-autoregressive encoder-decoder, and accepts it by a relaxed test ("Speculative
Decoding: Exploiting Speculative Execution for Accelerating Seq2seq Generation", Xia et al., 2023). The drafter is also
that of generalized aggressive decoding (GAD, "Lossless Acceleration for Seq2seq Generation with Aggressive Decoding",
Ge et al., 2022).

In a round the drafter reads all of the text, followed by `K` mask tokens, and predicts the `i`-th token after the text
at the `i`-th mask. Its encoder reads the target's source once.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafts.model.pard import MaskedDrafts, mask_of
from decodax.algorithms.speculative.fixed_trees import Chain
from decodax.algorithms.speculative.source import Answer, Level
from decodax.algorithms.speculative.verifier import Verifier
from decodax.algorithms.speculative.verify.spec_verification import SpecVerification
from decodax.common.options import Count, NonNegative, Whole
from decodax.common.registry import ALGORITHMS
from decodax.common.struct import Struct, short, struct
from decodax.core.cache import Cache
from decodax.core.checks import draft_weights
from decodax.core.state import State
from decodax.core.types import Decision, Out, Params
from decodax.core.window import Window, take
from decodax.models.drafters.mask_predictor import MaskPredictor, masked_block
from decodax.models.encoder_decoder.network import EncoderDecoder, EncoderMemory


@struct
class Predicted(Struct):
    """State of `NonAutoregressive`.

    Attributes:
        cache: a cache without entries of the text, which stores the output of the drafter's encoder if it has one.
        logits: within a round, `f32[B, K, V]`, the drafter's logits at its `K` mask tokens; None between rounds.
    """

    cache: Cache
    logits: Array | None = None


@dataclasses.dataclass(frozen=True)
class NonAutoregressive(MaskedDrafts):
    """Drafts with one pass of a network that reads the text and masks after it in both directions.

    It has no cache of the text. The network is an encoder-decoder, whose target then has an encoder, too, or a decoder.

    Attributes:
        drafts: number of drafts `K`, the largest number on a path; 25 in the papers.
        mask: the mask token's id.

    The others are those of `DraftModel`; `chunk` is not used.

    Raises:
        ValueError: as in `MaskedDrafts`; or, while it is traced, the drafter has an encoder and the target has none.
    """

    __repr__ = short

    drafts: int = 25

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.model, EncoderDecoder):
            object.__setattr__(self, "model", MaskPredictor.of(self.model))

    def check_fit(self, model: Any, cache: Any) -> None:
        """Takes any cache: the drafter itself has none."""

    def init(self, params: Params, s: State) -> Any:
        draft_weights(params.draft, self)
        source = None
        if isinstance(self.model, EncoderDecoder):
            memory = s.cache.inputs
            source = memory.source if isinstance(memory, EncoderMemory) else None
            if source is None:
                raise ValueError("draft: the drafter has an encoder, so it takes a target with one, whose text it "
                                 "reads")
        return Predicted(cache=self.model.init_cache(s.batch, 0, params=params.draft, inputs=source))

    def start(self, params: Params, s: State, state: Any, room: int) -> tuple[Any, Answer]:
        window = masked_block(s.tokens, s.length, self.drafts, self.mask)
        out = self.fitted.apply(params.draft, window, state.cache)
        logits = out.logits(s.length[:, None] + jnp.arange(self.drafts, dtype=jnp.int32))
        return Predicted(cache=state.cache, logits=logits), Answer(logits[:, :1])

    def extend(self, params: Params, s: State, state: Any, level: Level) -> tuple[Any, Answer]:
        depth = level.positions - s.length[:, None] + 1
        return state, Answer(take(state.logits, jnp.minimum(depth, self.drafts - 1)))

    def observe(self, params: Params, s: State, window: Window, out: Out, decision: Decision | None,
                state: Any) -> Any:
        return Predicted(cache=state.cache)


@ALGORITHMS.register("specdec", "Speculative Decoding: Exploiting Speculative Execution for Accelerating Seq2seq "
                     "Generation", "Xia et al. 2023", family="speculative-linear", needs="a tuned draft model",
                     guarantee="approximate")
def specdec(draft: Any, length: Count = 25, mask: Whole | None = None, beta: Count = 3,
            tau: NonNegative = 1.0, verify: Verifier | None = None) -> Speculative:
    """Drafts a block in one pass of a non-autoregressive drafter, and accepts drafts that are among the most likely
    tokens.

    For encoder-decoders, such as translation models; `scripts/train.py drafter --system specdec` trains a drafter from
    pairs of texts. With `beta=1` the output is that of greedy decoding.

    Args:
        draft: the drafter, a result of `decodax.load`.
        length: number of drafts in a round.
        mask: id of the mask token; None: `mask_token_id` in the drafter's `config.json`.
        beta: largest rank of an accepted draft.
        tau: largest distance of a draft's log-probability from that of the most likely token.
        verify: the rule that accepts drafts, in place of the one with `beta` and `tau`.
    """
    drafts = NonAutoregressive(draft, drafts=length, mask=mask_of(draft, mask, "mask_token_id"))
    return Speculative(drafts, verify or SpecVerification(beta, tau), Chain(length))
