"""Reflective verification: in one forward pass the target scores each draft twice, the second time after a question
about it ("Think Before You Accept: Semantic Reflective Verification for Faster Speculative Decoding", Wang et al.,
2025). The output is approximate."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafts.model.draft_model import DraftModel
from decodax.algorithms.speculative.fixed_trees import Chain
from decodax.algorithms.speculative.tree import Tree
from decodax.common.options import Count, Share, TokenId
from decodax.common.registry import ALGORITHMS
from decodax.core.algorithm import Traits
from decodax.core.state import State
from decodax.core.types import Decision, Out, Params
from decodax.core.window import Window
from decodax.io.appended import appended


@dataclasses.dataclass(frozen=True)
class Reflective(Speculative):
    """Speculative decoding whose verifier mixes two scores of each draft (Wang et al., 2025).

    After the draft, the window has a probe, such as "Is that right? Again: ", and the draft once more. The target's
    logits in the second copy, which attends to the complete draft and the probe, are the reflective logits `l'`. The
    mixture `(1 - alpha) l + alpha l'` with the usual logits `l` decides which drafts are accepted and which token
    follows. So drafts with the same meaning in other words are accepted more often, and the text is not that of plain
    decoding. The forward pass has about twice as many nodes. With `alpha = 0` it is plain speculative decoding.

    Attributes:
        probe: token ids of the probe.
        alpha: weight of the reflective logits, from 0 to 1.
    """

    probe: tuple[int, ...] = ()
    alpha: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.probe:
            raise ValueError("probe: got none, takes one token or more")
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha: got {self.alpha}, takes a number from 0 to 1")
        if self.shape is not None and not self.shape.is_chain:
            raise ValueError(f"shape: got {self.shape}, takes a chain, which is read again")
        if self.packed:
            raise ValueError("packed: takes False with a probe")

    @property
    def traits(self) -> Traits:
        own = super().traits
        return dataclasses.replace(own, needs=own.needs | {"trees"}, guarantee="approximate")

    @property
    def _no_chain(self) -> ValueError:
        return ValueError(f"draft: {type(self.draft).__name__} makes trees or has probes of its own; takes one that "
                          "makes chains")

    def check_fit(self, model: Any, cache: Any) -> None:
        super().check_fit(model, cache)
        if self.drafter.proposes & {"trees", "probes"}:
            raise self._no_chain

    def propose(self, params: Params, policy: Any, s: State) -> tuple[Window, Any]:
        w, (state, t) = super().propose(params, policy, s)
        if w.width != t.size or not isinstance(t.parents, np.ndarray) or (
                t.parents != np.arange(-1, t.size - 1)).any():
            raise self._no_chain
        if w.hints:
            w = w.replace(hints=())
        B, N, m = s.batch, t.size, len(self.probe)
        real = t.live[:, 1:].sum(1, dtype=jnp.int32)
        behind = s.length[:, None] + real[:, None]              # the position after the draft
        probe = jnp.broadcast_to(jnp.array(self.probe, jnp.int32), (B, m))
        more = jnp.arange(m + N - 1, dtype=jnp.int32)
        running = jnp.broadcast_to(s.running[:, None], (B, m))
        live = jnp.concatenate([w.live, running, w.live[:, 1:]], 1)
        # the second copy is a text that goes on: it sees all in front of it, and dead nodes are seen by none
        mask = jnp.tri(2 * N - 1 + m, dtype=bool)[None]
        mask = jnp.broadcast_to(mask, (w.mask.shape[0], *mask.shape[1:])).at[:, :N, :N].set(w.mask)
        return Window(tokens=jnp.concatenate([w.tokens, probe, w.tokens[:, 1:]], 1),
                      positions=jnp.concatenate([w.positions, behind + more], 1).astype(jnp.int32), mask=mask,
                      live=live), (state, t)

    def decide(self, params: Params, dist: Any, s: State, window: Window, out: Out, algo: Any) -> Decision:
        state, t = algo
        small = window.part(0, t.size)
        d = self.judge(dist.policy.over_logits(s, small, self._fused(dist, t)), s, small, out.first(t.size), t)
        slots = jnp.pad(d.slots, ((0, 0), (0, window.width - t.size)), constant_values=-1)
        return d.replace(algo=(self.drafter.observe(params, s, small, out.first(t.size), d, state), None), slots=slots)

    def _fused(self, dist: Any, t: Tree) -> Array:
        """Returns the mixed logits at each node of the draft, `f32[B, N + 1, V]`. The last token of the probe predicts
        the first draft again, and each draft of the second copy the next one."""
        logits = dist.logits()
        first, second = logits[:, :t.size], logits[:, t.size + len(self.probe) - 1:]
        return first if self.alpha == 0 else (1 - self.alpha) * first + self.alpha * second


@ALGORITHMS.register("reflective-verification",
                     "Think Before You Accept: Semantic Reflective Verification for Faster Speculative Decoding",
                     "Wang et al. 2025", family="speculative-linear", needs="a model and a draft model",
                     guarantee="approximate")
def reflective_verification(lm: Any, draft: Any, probe: str | tuple[TokenId, ...] = "\nIs that right? Again:\n",
                            alpha: Share = 0.3, length: Count = 4) -> Reflective:
    """Scores each draft a second time after a question about it, and accepts it by a mixture of both scores.

    Drafts with the same meaning in other words are accepted more often; the text is not that of plain decoding.

    Args:
        lm: the target.
        draft: the draft model.
        probe: the question, as a text or token ids.
        alpha: weight of the second score; 0 is plain speculative decoding.
        length: number of drafts in a round.
    """
    if isinstance(probe, str) and lm.tokenizer is None:
        raise ValueError("probe: got a text, and the model has no tokenizer")
    tokens = appended(lm.tokenizer, None, probe) if isinstance(probe, str) else probe
    return Reflective(DraftModel(draft), shape=Chain(length), probe=tuple(tokens), alpha=alpha)
