"""Masked diffusion decoding: a canvas of masks is filled over several rounds, in any order.

LLaDA (Nie et al. 2025): blocks from left to right; in each round the model sees the whole sequence in both directions,
every masked position of the block gets a candidate, and the quota of the round is committed: the most confident ones
(`Confidence`), or random ones (`RandomOrder`). A finished block joins the verified text, where stops are looked for.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import Array

from decodax.cache import Window, bidirectional
from decodax.core import keys
from decodax.core.keys import Purpose
from decodax.core.record import empty_record, record
from decodax.core.state import State
from decodax.core.types import Decision, Out, Params
from decodax.struct import Struct, struct


@dataclasses.dataclass(frozen=True)
class Adapter:
    """How a model speaks of a canvas.

    Attributes:
        mask: the id of the mask token. It never reaches the text: its logit is removed.
        shift: whether logits at a position predict the next one (models made from autoregressive ones, such as
            Dream), and not the position itself (LLaDA).
    """

    mask: int
    shift: bool = False


class Score(Protocol):
    """Ranks candidates: which positions are committed first."""

    def __call__(self, s: State, positions: Array, logits: Array, candidates: Array) -> Array:
        """`f32[B, n]` from positions `i32[B, n]`, raw logits `f32[B, n, V]` and candidates `i32[B, n]`."""


@dataclasses.dataclass(frozen=True)
class Confidence:
    """The model's probability of the candidate, without noise, temperature or policy ("low-confidence remasking")."""

    def __call__(self, s: State, positions: Array, logits: Array, candidates: Array) -> Array:
        chosen = jnp.take_along_axis(logits, jnp.maximum(candidates, 0)[..., None], -1)[..., 0]
        return chosen - jax.nn.logsumexp(logits, -1)


@dataclasses.dataclass(frozen=True)
class RandomOrder:
    """A uniform number: positions in random order."""

    def __call__(self, s: State, positions: Array, logits: Array, candidates: Array) -> Array:
        return keys.uniforms(s.key, positions, Purpose.ORDER, salt=s.stats.rounds)[..., 0]


@struct
class Canvas(Struct):
    """Tokens not yet verified.

    Attributes:
        tokens: `i32[B, block]` the block that starts at the row's length. step: `i32[B]` rounds spent on it.
        record: log-probabilities of its tokens as they were committed, or None.
    """

    tokens: Array
    step: Array
    record: Any


@dataclasses.dataclass(frozen=True)
class MaskedDiffusion:
    """LLaDA's sampler. The text is made of whole blocks; a row's last block may run beyond its budget and is cut.

    Attributes:
        adapter: how the model speaks.
        block: positions of a block; as long as the text for pure diffusion.
        steps: rounds a block, from 1 to `block`; None: one for each position. Round `i` commits `block // steps`
            positions, and one more while `i < block % steps`.
        score: what is committed first.
    """

    adapter: Adapter
    block: int = 32
    steps: int | None = None
    score: Score = Confidence()
    caches = False

    def __post_init__(self) -> None:
        if self.block < 1:
            raise ValueError(f"block: got {self.block}, takes at least 1")
        if self.steps is not None and not 1 <= self.steps <= self.block:
            raise ValueError(f"steps: got {self.steps}, takes 1 to the block of {self.block}")

    @property
    def emits(self) -> int:
        return self.block

    def init(self, params: Params, s: State) -> Canvas:
        blank = jnp.full((s.batch, self.block), self.adapter.mask, jnp.int32)
        noted = None if s.record is None else empty_record(blank.shape, s.record.count)
        return Canvas(tokens=blank, step=jnp.zeros(s.batch, jnp.int32), record=noted)

    def propose(self, params: Params, policy: Any, s: State) -> tuple[Window, Canvas]:
        canvas: Canvas = s.algo
        position = jnp.arange(s.tokens.shape[1], dtype=jnp.int32)

        def row(tokens: Array, length: Array, block: Array) -> Array:
            text = jnp.where(position < length, tokens, self.adapter.mask)
            return jax.lax.dynamic_update_slice(text, block, (length,))

        blocks = (s.max_length - s.prompt_length + self.block - 1) // self.block
        end = (s.prompt_length + blocks * self.block)[:, None]
        tokens = jax.vmap(row)(s.tokens, s.length, canvas.tokens)
        live = (position < end) & s.running[:, None]
        return bidirectional(tokens, jnp.zeros(s.batch, jnp.int32), live), canvas

    def decide(self, policy: Any, s: State, window: Window, out: Out, algo: Canvas) -> Decision:
        mask, n = self.adapter.mask, self.block
        offset = jnp.arange(n, dtype=jnp.int32)
        positions = s.length[:, None] + offset
        nodes = positions - int(self.adapter.shift)
        masked = algo.tokens == mask

        clean_head = dataclasses.replace(out, head=_without(out.head, mask))
        lifted = policy.on_canvas(clean_head, window.live & (window.tokens != mask),
                                  window.positions + int(self.adapter.shift))
        candidates = lifted.draw(nodes, Purpose.CANVAS, salt=s.stats.rounds)
        logits = out.logits(nodes)
        score = jnp.where(masked, self.score(s, positions, logits, candidates), -jnp.inf)

        steps = self.steps or n
        quota = n // steps + (algo.step < n % steps)
        ahead = (score[:, None, :] > score[:, :, None]) | ((score[:, None, :] == score[:, :, None])
                                                           & (offset[None, :] < offset[:, None]))
        commit = masked & (ahead.sum(-1) < quota[:, None])
        tokens = jnp.where(commit, candidates, algo.tokens)
        broken = jnp.where(masked, jnp.minimum(candidates, 0), 0).min(1)       # INVALID or DEAD_END ends the row
        clean = ~(tokens == mask).any(1)

        noted = algo.record
        if noted is not None:
            fresh = record(logits, lifted.log_probs(nodes), candidates, noted.count)
            spread = lambda x: commit.reshape(*commit.shape, *[1] * (x.ndim - 2))
            noted = jax.tree.map(lambda new, old: jnp.where(spread(new), new, old), fresh, noted)
        again = Canvas(tokens=jnp.where(clean[:, None], mask, tokens), record=noted,
                       step=jnp.where(clean, 0, algo.step + 1))
        return Decision(
            tokens=jnp.where((broken < 0)[:, None], broken[:, None], tokens),
            count=jnp.where(broken < 0, 1, jnp.where(clean, n, 0)).astype(jnp.int32),
            slots=jnp.full(window.tokens.shape, -1, jnp.int32), source=jnp.zeros((s.batch, n), jnp.int32),
            algo=again, record=noted)

    def observe(self, s: State, window: Window, out: Out, algo: Any) -> Any:
        return algo


def _without(head: Any, token: int) -> Any:
    """A head that never gives `token`."""
    return lambda hidden: head(hidden).at[..., token].set(-jnp.inf)
