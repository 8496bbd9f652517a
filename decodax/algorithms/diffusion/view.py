"""The arguments of all policies: the window of each row (`View`) and the model's predictions at its positions (`Seen`).

The leading axis `R` of both has `B` rows, or `B * K` if a verifier scores `K` canvases of each row.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from decodax.algorithms.diffusion.adapter import Nodes
from decodax.algorithms.diffusion.stats import DistributionStats
from decodax.common.struct import Struct, struct
from decodax.core import keys
from decodax.core.keys import Purpose


@struct
class WholeText(Struct):
    """The whole text of each row, indexed by absolute position.

    Attributes:
        open: `bool[B, N]`, positions whose token is not decided.
        when: `i32[B, N]`, the step of the row in which the token was decided; -1 if it is open, given or frozen.
        cache: the model's cache.
    """

    open: Array
    when: Array
    cache: Any


@struct
class View(Struct):
    """The window of each row before or after a step.

    Attributes:
        positions: `i32[R, W]`, absolute positions from `start` on.
        tokens: `i32[R, W]`; an open position has the mask token, or noise.
        open: `bool[R, W]`, positions whose token is not decided.
        editable: `bool[R, W]`, positions that decoding may write; False for prompt and frozen tokens.
        active: `bool[R, W]`, open positions that may be unmasked in this round (`Windows.active`); False before it was
            called.
        when: `i32[R, W]`, the `round` in which the token was decided; -1 if it is open, given or frozen.
        confidence: `f32[R, W]`, the model's log-probability of the token when it was decided.
        start: `i32[R]`, first position of the window; all positions before it are final.
        end: `i32[R]`, end of the row's text. It decreases when a stop rule ends the text early.
        step: `i32[R]`, number of steps since the window moved to `start`.
        round: `i32[R]`, number of steps of the row.
        opened: `i32[R]`, number of positions that were open when the window moved to `start`.
        full: `i32[R]`, number of steps since the last open position was unmasked.
        kept: `i32[R]`; the cache has the final entries of all positions before this one (caches with `persists`).
        refreshed: `i32[R]`, the `round` of the row's last wide forward pass, -1 before the first.
        prompt_length: `i32[R]`, number of prompt tokens.
        min_new: `i32[R]`, minimum number of new tokens.
        key: `key[R]`, random key of the row.
        eos: `i32[R, E]`, tokens that end a text, padded with -1.
        text: the text around the window; None for all policies but `Caching`.
    """

    positions: Array
    tokens: Array
    open: Array
    editable: Array
    active: Array
    when: Array
    confidence: Array
    start: Array
    end: Array
    step: Array
    round: Array
    opened: Array
    full: Array
    kept: Array
    refreshed: Array
    prompt_length: Array
    min_new: Array
    key: Array
    eos: Array
    text: WholeText | None = None

    @property
    def inside(self) -> Array:
        """Positions of the window that are before the end of the text, `bool[R, W]`."""
        return self.positions < self.end[:, None]

    @property
    def masked(self) -> Array:
        """Positions of the window that are before the end of the text and whose token is not decided, `bool[R, W]`."""
        return self.open & self.inside

    @property
    def unmasked(self) -> Array:
        """Positions of the window that are before the end of the text and whose token decoding has decided, `bool[R,
        W]`; it may still change. Prompt and frozen tokens are not among them."""
        return ~self.open & self.editable & self.inside

    def uniforms(self, purpose: Purpose) -> Array:
        """Returns two uniform random numbers in [0, 1) for each position of the window, `f32[R, W, 2]`. They depend on
        the row's key, the position, the number of the row's step and `purpose`."""
        return keys.uniforms(self.key, self.positions, purpose, salt=self.round)

    def addresses(self, purpose: Purpose) -> Array:
        """Returns a seed for one random draw of a token at each position of the window, `u32[R, W, 2]`. It depends on
        the row's key, the position, the number of the row's step and `purpose`."""
        return keys.addresses(self.key, self.positions, purpose, salt=self.round)


@struct
class Seen(Struct):
    """The model's predictions at each position of the window.

    The mask token is removed from the distributions: its probability is 0.

    Attributes:
        token: `i32[R, W]`, the candidate, drawn from the policy; negative if the logits are invalid.
        reached: `bool[R, W]`, positions that the round's forward pass scored. The values at all others are undefined.
        model: statistics of the model's own distribution after the shaper.
        policy: statistics of the policy's distribution, in which a greedy row has temperature 1; None unless a rule
            needs it.
        likeliest: `i32[R, W, k]` and `f32[R, W, k]`, the model's likeliest tokens, before the shaper, and their
            log-probabilities; None unless a rule asks for them.
        best: `i32[R, W]`, the policy's likeliest token; None unless a stop rule asks for it.
        agreed: `bool[R, W]`, True if a second model agrees with the candidate; None without a second model.
    """

    token: Array
    reached: Array
    model: DistributionStats
    policy: DistributionStats | None
    likeliest: tuple[Array, Array] | None = None
    agreed: Array | None = None
    best: Array | None = None

    def of(self, name: str) -> DistributionStats:
        """Returns the statistics of the policy's distributions if `name` is "policy", and those of the model's own
        distributions otherwise."""
        stats = self.policy if name == "policy" else self.model
        assert stats is not None
        return stats


def span(view: View, before: int, width: int) -> Nodes:
    """Returns the `before + width` consecutive positions from `view.start - before` on as nodes of a forward pass, `[B,
    before + width]`. Those outside the text are marked as not live."""
    positions = view.start[:, None] - before + jnp.arange(before + width, dtype=jnp.int32)
    return Nodes(positions=positions, live=(positions >= 0) & (positions < view.end[:, None]),
                 own=jnp.ones(positions.shape, bool))
