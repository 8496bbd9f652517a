"""PARD: a draft model that was tuned to predict all drafts of a round in one pass, at mask tokens after the text
("PARD: Accelerating LLM Inference with Low-Cost Parallel Draft Model Adaptation", An et al., 2025).

In a round the draft model reads the tokens of the last round, followed by `K - 1` masks. Its output at the `i`-th mask
predicts the token `i + 1` places after the newest one. It does not depend on the other drafts. Masks never enter its
cache.
It is an ordinary language model, so one serves all targets with its tokenizer. Training:
`decodax.train.drafting.masked.TunedDraftModel`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import Array

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.by_depth import answer_by_depth, spread
from decodax.algorithms.speculative.drafts.model.draft_model import DraftModel, catch_up
from decodax.algorithms.speculative.fixed_trees import Chain
from decodax.algorithms.speculative.source import Answer, Level, Shape
from decodax.algorithms.speculative.verifier import SeedExact, Verifier
from decodax.common.options import Count, Whole
from decodax.common.registry import ALGORITHMS
from decodax.common.struct import Struct, short, struct
from decodax.core.cache import Cache
from decodax.core.capabilities import check_draft_cache
from decodax.core.loaded import Loaded
from decodax.core.state import State
from decodax.core.types import Decision, Model, Out, Params, logits_of
from decodax.core.window import Window, causal
from decodax.io.files import read_json


@struct
class Masked(Struct):
    """State of `MaskedDrafts`.

    Attributes:
        cache: the draft model's cache of verified tokens.
        hidden: within a round, `f[B, K, D]`, the draft model's hidden states at the newest token and at the `K - 1`
            mask tokens after it; None between rounds.
    """

    cache: Cache
    hidden: Array | None = None


@dataclasses.dataclass(frozen=True)
class MaskedDrafts(DraftModel):
    """Drafts with one pass of a draft model over mask tokens (An et al., 2025).

    Attributes:
        drafts: largest number of drafts `K` on a path. The published models were trained with 8. A shorter chain takes
            fewer masks.
        mask: the mask token's id.

    The others are those of `DraftModel`.

    Raises:
        ValueError: `drafts` or `chunk` is below 1, or the mask is no token of the draft model.
    """

    __repr__ = short

    drafts: int = 8
    mask: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.drafts < 1:
            raise ValueError(f"drafts: got {self.drafts}, takes at least 1")
        if self.mask < 0 or (self.reads is not None and self.mask >= self.reads):
            raise ValueError(f"mask: got {self.mask}, takes the id of a token of the draft model, which has "
                             f"{self.reads}")

    @property
    def longest(self) -> int:
        return self.drafts

    def check_fit(self, model: Any, cache: Any) -> None:
        check_draft_cache(self.model, cache.capacity, drafts=False)

    def init(self, params: Params, s: State) -> Any:
        return Masked(cache=super().init(params, s).cache)

    def start(self, params: Params, s: State, state: Any, room: int) -> tuple[Any, Answer]:
        K = min(self.drafts, room + 1)
        newest = K + 1          # as many tokens as a round of this length may have made
        cache = catch_up(self.fitted, params.draft, s, state.cache, self.chunk, newest)
        positions = s.length[:, None] - newest + jnp.arange(newest + K - 1, dtype=jnp.int32)
        text = jnp.take_along_axis(s.tokens, jnp.clip(positions, 0, s.tokens.shape[1] - 1), 1)
        behind = jnp.arange(newest + K - 1) >= newest
        live = ((positions >= cache.length[:, None]) & (positions >= 0) | behind) & s.running[:, None]
        window = causal(jnp.where(behind, self.mask, text), s.length - newest, live)
        out = self.fitted.apply(params.draft, window, cache)
        # the slots must depend on the forward, or XLA on CPU copies the cache to protect its readers
        kept = live & ~behind & jnp.isfinite(out.hidden).all(-1)
        cache = cache.commit(out.entries, jnp.where(kept, positions, -1))
        hidden = out.hidden[:, newest - 1:]
        return Masked(cache=cache, hidden=hidden), Answer(self._logits(params, hidden[:, :1]), hidden[:, :1])

    def extend(self, params: Params, s: State, state: Any, level: Level) -> tuple[Any, Answer]:
        return state, answer_by_depth(state.hidden, s, level, functools.partial(self._logits, params))

    def place(self, state: Any, slots: Array) -> Any:
        return state

    def observe(self, params: Params, s: State, window: Window, out: Out, decision: Decision | None,
                state: Any) -> Any:
        return Masked(cache=state.cache)

    def _logits(self, params: Params, hidden: Array) -> Array:
        return spread(logits_of(self.model, params.draft, hidden), None, self.vocab_size)


def config_of(draft: Any) -> dict[str, Any]:
    """Returns the contents of a draft model's `config.json`; empty if there is none."""
    folder = draft.directory if isinstance(draft, Loaded) else None
    return read_json(folder / "config.json") if folder and (folder / "config.json").is_file() else {}


def mask_of(draft: Any, mask: int | None, entry: str) -> int:
    """Returns the id of a draft model's mask token: `mask`, or that of an entry of its `config.json`.

    Raises:
        ValueError: neither is given, or the draft model is none.
    """
    if not isinstance(draft, (Loaded, Model)):
        raise ValueError(f"draft: got a {type(draft).__name__}, takes a language model, from decodax.load")
    if mask is None:
        mask = config_of(draft).get(entry)
        if mask is None:
            raise ValueError(f"mask: the draft model's config.json has no {entry}, so the option takes the id of the "
                             "token at which it was tuned to predict")
    return mask


@ALGORITHMS.register("pard",
                     "PARD: Accelerating LLM Inference with Low-Cost Parallel Draft Model Adaptation",
                     "An et al. 2025", family="speculative-linear", needs="a tuned draft model", guarantee="seed-exact")
def pard(draft: Any, length: Count = 8, mask: Whole | None = None, shape: Shape | None = None,
         verify: Verifier | None = None) -> Speculative:
    """Drafts a chain in one pass of a draft model that was tuned to predict several tokens, at mask tokens.

    The draft model is an ordinary one that `decodax.load` loads, such as those that the authors published; it serves
    all targets with its tokenizer. A model that was not tuned drafts badly.

    Args:
        draft: the draft model.
        length: number of drafts in a round; the published models were tuned for 8.
        mask: id of the mask token; None: `pard_token` in the model's `config.json`.
        shape: shape of the draft tree; None: a chain.
        verify: the rule that accepts drafts; None: seed-exact.
    """
    drafts = MaskedDrafts(draft, drafts=length, mask=mask_of(draft, mask, "pard_token"))
    return Speculative(drafts, verify or SeedExact(), shape or Chain(length))
