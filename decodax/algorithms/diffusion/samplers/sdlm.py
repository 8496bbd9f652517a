"""SDLM: predicts a few masks after a causal prefix, and keeps the longest confident run of them ("Sequential Diffusion
Language Models", Liu et al., 2025).

In the self-speculative mode the model itself verifies the run. Each candidate is followed by masks of its own in the
next forward pass, and is accepted if the block before it predicts it as its first token. So the text is that of one
token a forward pass, in fewer passes. The forward pass that verifies also computes the entries of the accepted tokens,
which see only the text before them, and the blocks after each candidate, of which one gives the next candidates.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.algorithms.diffusion.adapter import Adapter
from decodax.algorithms.diffusion.algorithm import MaskedDiffusion
from decodax.algorithms.diffusion.caching.blocks import FusedCache, NoCache
from decodax.algorithms.diffusion.policies import Memory, Unmask
from decodax.algorithms.diffusion.rules.scores import Of, Position
from decodax.algorithms.diffusion.rules.unmasking import Measure, reaches
from decodax.algorithms.diffusion.rules.windows import Sliding
from decodax.algorithms.diffusion.view import Seen, View
from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.fixed_trees import Chain
from decodax.algorithms.speculative.heads.prompted.source import Prompted, PromptTokens
from decodax.algorithms.speculative.heads.source import HeadWeights
from decodax.algorithms.speculative.tree import Probes, Proposal, tree
from decodax.common.options import Count, NonNegative
from decodax.common.registry import ALGORITHMS
from decodax.common.struct import short
from decodax.core.around import Readout
from decodax.core.cache import Cache
from decodax.core.state import State
from decodax.core.types import Decision, Out, Params, embeddings
from decodax.core.window import Window
from decodax.models.drafters.prompt_tokens import PromptTokensHead


@dataclasses.dataclass(frozen=True)
class ConfidentPrefix(Unmask):
    """Unmasks the candidates before the first one that is not confident enough. With `Position` as the score, the first
    open position is always unmasked.

    Attributes:
        value: the threshold.
        measure: what is compared with it: "confidence" (probability of the candidate), "margin" (of the two largest
            probabilities) or "entropy" (in nats, which must be below it).
        of: "model" or "policy": the distribution that is measured, before or after the sampling policy.
        strict: True if a measure equal to the threshold is not enough.
    """

    value: float = 0.9
    measure: Measure = "confidence"
    of: Of = "model"
    strict: bool = False

    def __call__(self, view: View, seen: Seen, score: Array, memory: Memory) -> Array:
        sure = reaches(seen, self.of, self.measure, self.value, self.strict) | ~view.active
        return jnp.cumprod(sure, 1).astype(bool)


@dataclasses.dataclass(frozen=True)
class FirstOfBlock(Readout):
    """A model whose tokens predict as the blocks after them do: in windows of `MaskBlocks` the hidden state of a token
    is that of its copy in its block. The mask token has probability 0.

    Attributes:
        base: the model.
        adapter: describes how the model processes masks.
        size: number of nodes of a block.
    """

    adapter: Adapter
    size: int

    def apply(self, params: Any, window: Window, cache: Cache) -> Out:
        out = self.base.apply(params, window, cache)
        if window.embedded is None:     # a part of the prompt
            return out
        count = window.width // (1 + self.size)
        hidden = jnp.concatenate([out.hidden[:, count::self.size], out.hidden[:, count:]], 1)
        return dataclasses.replace(out, hidden=hidden, head=self.adapter.clean(out.head))


@dataclasses.dataclass(frozen=True)
class MaskBlocks(PromptTokens):
    """Drafts with the target's predictions at masks that stand after each draft, in a block that begins with a copy of
    the draft. The nodes of a block attend to the text before it and to one another (`CausalPrefix`).

    Attributes:
        adapter: describes how the target processes masks.
    """

    __repr__ = short

    adapter: Adapter = dataclasses.field(kw_only=True)

    @property
    def size(self) -> int:
        """Number of window positions for the drafts after one token: a copy of the token, and the masks after it."""
        return self.head.heads + 1

    def wrap_model(self, model: Any) -> Any:
        return FirstOfBlock(model, self.adapter, self.size)

    def probes(self, params: Params, s: State, state: Prompted, proposal: Proposal) -> Probes:
        t = tree(s.newest, proposal, self.head.heads)
        node, index = np.divmod(np.arange(t.size * self.size), self.size)
        inside = node[:, None] == node
        if self.adapter.attention.ordered:      # type: ignore[attr-defined]
            inside &= index <= index[:, None]
        before = jnp.asarray(t.sees)[:, node] & (np.arange(t.size) != node[:, None])
        sees = jnp.concatenate([before, jnp.broadcast_to(inside, (before.shape[0], *inside.shape))], 2)
        tokens = jnp.where(index == 0, t.tokens[:, node], jnp.int32(self.adapter.blank))
        return Probes(tokens=tokens, sees=sees, offset=jnp.asarray(t.depth)[:, node] + index.astype(np.int32),
                      embeddings=embeddings(self.model, params.target, tokens))

    def observe(self, params: Params, s: State, window: Window, out: Out, decision: Decision | None,
                state: Prompted) -> Prompted:
        if decision is not None and window.embedded is not None:
            # the masks alone, with the copies left out, are the probes of the base class
            count = window.width // (1 + self.size)
            blocks = np.arange(count * self.size).reshape(count, self.size)[:, 1:].reshape(-1)
            out = dataclasses.replace(out, hidden=jnp.concatenate(
                [out.hidden[:, :count], out.hidden[:, count + blocks]], 1))
        return super().observe(params, s, window, out, decision, state)

    def _logits(self, params: Params, hidden: Array) -> Array:
        return super()._logits(params, hidden).at[..., self.adapter.mask].set(-jnp.inf)


@ALGORITHMS.register("sdlm", "Sequential Diffusion Language Models", "Liu et al. 2025", family="blockwise-parallel",
                     needs="a diffusion model")
def sdlm(lm: Any, size: Count | None = None, threshold: NonNegative = 0.9,
         measure: Literal["confidence", "entropy"] = "confidence", self_speculative: bool = False
         ) -> MaskedDiffusion | Speculative:
    """Predicts a few masks after a causal prefix and keeps the longest confident run of them.

    For models with causal-prefix attention. This makes one of an autoregressive model, such as `pycode`:

        python scripts/train.py tune --objective sdlm --target pycode --data pairs.jsonl --output runs/sdlm

    Args:
        size: number of positions predicted at once, from the last token and `size - 1` masks. None: the model's block,
            or 4.
        threshold: tokens are kept with a probability above this, or with an entropy below this in nats, where the
            authors' code takes `1 - entropy / log(vocabulary)`.
        measure: "confidence" (probability) or "entropy".
        self_speculative: True: the self-speculative mode. Tokens are kept if the model predicts them again, one after
            the other. The output is that of one token a forward pass; `threshold` and `measure` have no effect. Forward
            passes are wide: they have `size` tokens, and `size` more after each of them.
    """
    adapter = Adapter.of(lm)
    size = size or lm.diffusion.block or 4
    if self_speculative:
        return Speculative(mask_blocks(lm, adapter, size), shape=Chain(size - 1))
    return MaskedDiffusion(adapter, Sliding(size), Position(), ConfidentPrefix(threshold, measure, strict=True),
                           caching=FusedCache() if adapter.attention.causal else NoCache())


def mask_blocks(lm: Any, adapter: Adapter, size: int) -> MaskBlocks:
    """Returns the drafts of the self-speculative mode, with blocks of `size` nodes.

    Raises:
        ValueError: another attention, or blocks without masks.
    """
    if not adapter.attention.causal or not adapter.shift:
        raise ValueError(f"self_speculative: got True for {adapter.attention}{' with shift' * adapter.shift}, takes it "
                         "with causal-prefix attention and shift")
    if size < 2:
        raise ValueError(f"size: got {size}, takes 2 or more with self_speculative=True")
    head = PromptTokensHead((), lm.vocab_size, width=0, heads=size - 1)
    return MaskBlocks(head, HeadWeights({}), adapter=adapter)     # masks are tokens: nothing is trained apart
