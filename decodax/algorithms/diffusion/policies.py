"""The base classes of the nine policies of masked diffusion, with their defaults.

A round works on one *window* of each row: the `W = windows.width` positions of the text from `start` on. For samplers
that fill the text block by block it is the block; for others it is the whole text, a sliding window or several blocks.
Policies get the window as a `View` and the model's predictions at its positions as `Seen`
(`decodax.algorithms.diffusion.view`). A policy never mixes rows.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, Self

import jax.numpy as jnp
from jax import Array

from decodax.algorithms.diffusion.adapter import Nodes
from decodax.algorithms.diffusion.view import Seen, View, span
from decodax.core.composed import Composed

Memory = Any


class DiffusionRule:
    """Base of the policies. A policy is a frozen dataclass, static under jit. It has a memory only if it overrides
    `init`.

    Attributes:
        of: "policy" if the rule needs `Seen.policy`, else "model".
        reads: number of likeliest tokens that the rule needs in `Seen.likeliest`, `k`.
    """

    of: str = "model"
    reads: int = 0

    @property
    def longest(self) -> int:
        """Maximum number of steps of a window for which the rule is made; 0 if it has no such number."""
        return 0

    def fit(self, budget: int) -> Self:
        """Returns the rule for texts of `budget` new tokens. Sizes that are None are set."""
        return self

    def init(self, view: View) -> Memory:
        """Returns the rule's memory before the first step: a pytree whose leaves have a leading axis `B` and an
        explicit dtype, none as wide as the vocabulary. `view` is the first window."""
        return None

    def learn(self, before: View, seen: Seen, after: View, memory: Memory) -> Memory:
        """Returns the rule's memory after a step. The window may have moved: then `after.start > before.start` and
        `after.step == 0`."""
        return memory


class Stepped:
    """Base of rules with an attribute `steps`, the number of steps of a window."""

    steps: int | None

    @property
    def longest(self) -> int:
        return self.steps or 0


class BudgetSized:
    """Base of rules with an attribute `size`, the maximum number of new tokens of a text; None until `fit` sets it."""

    size: int | None

    def fit(self, budget: int) -> Self:
        """Returns the rule with a size for texts of `budget` new tokens: a power of two, so that different budgets
        share compiled programs."""
        if self.size is not None:
            return self
        return dataclasses.replace(self, size=max(1 << max(budget - 1, 0).bit_length(), 8))     # type: ignore[type-var]

    @property
    def known_size(self) -> int:
        """The size.

        Raises:
            ValueError: the size is None.
        """
        if self.size is None:
            raise ValueError("size: got None; give the most new tokens of a text, or call `fit` with it")
        return self.size


class Shaper(DiffusionRule, abc.ABC):
    """Changes the model's distributions before candidates and statistics are taken from them."""

    @abc.abstractmethod
    def __call__(self, view: View, logits: Array, memory: Memory) -> Array:
        """Returns the new logits `f32[R, W, V]`, computed from `logits`, those of the model."""


class Windows(DiffusionRule, abc.ABC):
    """Determines the positions that a round works on, and when they are final. By default all positions of the window
    are active, and they are final once none of them is open."""

    @property
    def align(self) -> int | None:
        """The first window starts at a multiple of this number, at or before the prompt's end. None: at the prompt's
        end."""
        return None

    @property
    @abc.abstractmethod
    def width(self) -> int:
        """Number of positions of a window, `W`, and maximum number of tokens that a round emits."""

    @property
    def least(self) -> int:
        """Minimum number of positions by which a window moves, except for the last window."""
        return self.width

    def active(self, view: View, seen: Seen, memory: Memory) -> Array:
        """Returns the open positions of the window that may be unmasked in this step, `bool[R, W]`: by default all that
        are before the end of the text. A derived class may allow fewer, such as those of one sub-block.

        `view` is the window before the step, `seen` the model's predictions in it, `memory` the rule's memory.
        """
        return view.masked

    def finished(self, view: View, memory: Memory) -> Array:
        """Returns the number of positions from `start` on that are final after a step, `i32[R]`. The next window starts
        after them."""
        left = jnp.maximum(jnp.minimum(view.start + view.positions.shape[1], view.end) - view.start, 0)
        return jnp.where(view.masked.any(1), 0, left)

    def last(self, start: Array, end: Array) -> Array:
        """Returns the end of the last window if all windows have the same width, `i32[B]`: less than one width after
        the end of the text. Used for models whose windows overhang the text.

        Args:
            start: `i32[B]`, start of the first window.
            end: `i32[B]`, end of the text.
        """
        return end


class Score(DiffusionRule, abc.ABC):
    """Scores the candidates; those with the largest scores are unmasked first."""

    @abc.abstractmethod
    def __call__(self, view: View, seen: Seen, memory: Memory) -> Array:
        """Returns the scores of the candidates, `f32[R, W]`."""


class Unmask(DiffusionRule, abc.ABC):
    """Chooses the candidates that are unmasked in a step."""

    @property
    def patient(self) -> bool:
        """True if a step may unmask nothing. Such a rule must unmask all positions after a bounded number of steps."""
        return False

    @abc.abstractmethod
    def __call__(self, view: View, seen: Seen, score: Array, memory: Memory) -> Array:
        """Returns the chosen positions, `bool[R, W]`; only those in `view.active` count. If there are none, the
        candidate with the best score is unmasked, so that every step makes progress, unless the rule is `patient`."""


class Remask(DiffusionRule, abc.ABC):
    """Masks or overwrites tokens again after unmasking.

    Attributes:
        noisy: True if open positions keep the tokens that the rule gave them; else they get the mask token.
        most: maximum number of steps that the rule may spend on a window without open positions.
    """

    noisy: bool = False
    most: int = 0

    @abc.abstractmethod
    def __call__(self, before: View, seen: Seen, after: View, memory: Memory) -> View:
        """Returns `after` with other `tokens` or reopened positions (`open`). Only `editable` positions change."""

    def busy(self, before: View, after: View, memory: Memory) -> Array:
        """Returns rows whose window has no open position left but is not final yet, `bool[R]`."""
        return jnp.zeros(after.start.shape, bool)


class Stop(DiffusionRule):
    """Ends a row before all of its canvas is decided (early stop); by default never.

    Attributes:
        filled: True if the model attends to the positions after the end, with copies of the last token; otherwise they
            are left out.
        likeliest: True if rows that the rule stops early get the policy's likeliest tokens in place of the candidates.
            It may read `Seen.best` and, of `Seen.model`, what does not depend on the candidates.
    """

    filled: bool = False
    likeliest: bool = False

    def early_stop(self, view: View, seen: Seen, memory: Memory) -> Array:
        """Returns rows whose open positions are all unmasked in this step, without remasking, `bool[R]`."""
        return jnp.zeros(view.start.shape, bool)

    def end(self, before: View, seen: Seen, after: View, memory: Memory) -> Array:
        """Returns the end of the text after a step, `i32[R]`; at most `after.end`."""
        return after.end


class Caching(DiffusionRule):
    """Determines the positions that a forward pass recomputes; it attends to the cache for all others. By default no
    row needs a refresh and nothing persists.

    Rounds are wide (they compute the whole text) or narrow (they compute `nodes`). A row takes part in wide rounds
    while `needs_refresh` is True for it, and in narrow ones otherwise. So its results never depend on the other rows of
    the batch.

    Attributes:
        wide: True if there are wide rounds.
        narrow: True if there are narrow rounds; without them nothing is cached.
        persists: True if tokens are emitted only after a forward pass has written their final entries.
        fused: with `persists`, True if that forward pass also works on the next window. False: it does nothing else (a
            commit forward).
        approximate: True if entries of tokens are written before the tokens are emitted.
        beyond: True if entries after the text's new end are still attended to when a stop rule has cut the text.
        sizes: numbers of nodes of the kinds of narrow rounds, ascending. None, which comes last, stands for all nodes
            that `nodes` returns, dead ones included. A round has the first size that fits its rows' live nodes.
        phases: for rules with more kinds of rounds than one wide and one narrow: True for each kind that is wide.
            Otherwise ().
    """

    wide: bool = True
    narrow: bool = True
    persists: bool = False
    fused: bool = False
    approximate: bool = False
    beyond: bool = False
    sizes: tuple[int | None, ...] = (None,)
    phases: tuple[bool, ...] = ()

    def phase(self, view: View, memory: Memory) -> Array:
        """Returns the phase of each row's next round, `i32[B]`. For rules with phases this replaces `needs_refresh`."""
        return (~self.needs_refresh(view, memory)).astype(jnp.int32)

    def wrap_model(self, model: Any, phase: int) -> Any:
        """Returns the model for the rounds of a phase, which also makes the cache; for rules with phases."""
        return model

    def hint(self, view: View, positions: Array, phase: int) -> Any:
        """Returns a struct for the model of `wrap_model`, which gets it in `Window.hints`, or None; for rules with
        phases."""
        return None

    def needs_refresh(self, view: View, memory: Memory) -> Array:
        """Returns the rows that need a wide round, `bool[B]`."""
        return jnp.zeros(view.start.shape, bool)

    def nodes(self, view: View, left: int, memory: Memory) -> Nodes:
        """Returns the nodes of a narrow round: the window, the `left` positions before it (where a shifted model
        predicts its first token), and any others that the rule recomputes. Nodes that are `own` must have different
        positions."""
        return span(view, left, view.positions.shape[1])

    def writes(self, view: View, positions: Array, final: Array, valid: Array, memory: Memory) -> Array:
        """Returns the nodes whose entries are written to the cache, `bool[B, n]`.

        Args:
            view: the windows, with the whole text.
            positions: `i32[B, n]`, positions of the nodes.
            final: `i32[B]`; tokens before this position are final.
            valid: `bool[B, n]`, positions that have an entry already; all False in a wide round, which begins with an
                empty cache.
            memory: the rule's memory.
        """
        return jnp.zeros(positions.shape, bool)


class Verify(DiffusionRule, Composed, abc.ABC):
    """Chooses among several canvases of a row that one forward pass scored.

    Attributes:
        assists: True if a second model judges the candidates (`decodax.algorithms.diffusion.rules.judged`).
    """

    assists: bool = False

    @property
    @abc.abstractmethod
    def taken(self) -> tuple[tuple[int, ...], ...]:
        """For each canvas of a forward pass, the steps that it has taken in advance, counted from 0. The first one,
        `()`, is the canvas itself. The others are drafts, ordered by their number of steps."""

    @abc.abstractmethod
    def path(self, drafts: View, results: View) -> Array:
        """Returns which drafts are accepted, `bool[B, K]`; decoding continues with the result of the last accepted one.

        Args:
            drafts: the `K` canvases of each row that one forward pass scored, with axes `[B, K, ...]`. Draft 0 is the
                current canvas and is always accepted.
            results: each draft after one more denoising step, with the same axes.
        """
