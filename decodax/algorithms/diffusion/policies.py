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
    """Base class of the rules (policies) of masked diffusion: frozen dataclasses, static under jit. A rule that
    overrides `init` has a memory, a pytree that is carried from step to step.

    Attributes:
        of: "policy" if the rule needs `Seen.policy`, the statistics after the sampling policy; else "model".
        reads: number `k` of the likeliest tokens of each position that the rule needs in `Seen.likeliest`.
    """

    of: str = "model"
    reads: int = 0

    @property
    def longest(self) -> int:
        """Largest number of denoising steps that the rule plans for a window; 0 if it plans no number."""
        return 0

    def with_length(self, budget: int) -> Self:
        """Returns the rule for texts of at most `budget` new tokens: sizes that were left None are set from it."""
        return self

    @property
    def remembers(self) -> bool:
        """True if the rule has a memory; by default, if its class defines `init`."""
        return type(self).init is not DiffusionRule.init

    def init(self, view: View) -> Memory:
        """Returns the rule's memory before the first step, for the first window `view`: a pytree whose leaves have a
        leading axis `B`, an explicit dtype and no vocabulary axis. None: the rule has no memory."""
        return None

    def learn(self, before: View, seen: Seen, after: View, memory: Memory) -> Memory:
        """Returns the rule's memory after a denoising step.

        Args:
            before: the window before the step.
            seen: the predictions that the step used.
            after: the window after it; if it has moved, `after.start > before.start` and `after.step == 0`.
            memory: the rule's memory before the step.
        """
        return memory


class Stepped:
    """Base class of rules with an attribute `steps`, the number of denoising steps in which a window is filled; None:
    one position per step."""

    steps: int | None

    @property
    def longest(self) -> int:
        return self.steps or 0


class BudgetSized:
    """Base class of rules with an attribute `size`, the maximum number of new tokens of a text. If it is None,
    `with_length` sets it."""

    size: int | None

    def with_length(self, budget: int) -> Self:
        """Returns the rule with its `size` set, if it was None, to the smallest power of two that is at least `budget`
        and 8, so that different budgets share compiled programs."""
        if self.size is not None:
            return self
        return dataclasses.replace(self, size=max(1 << max(budget - 1, 0).bit_length(), 8))     # type: ignore[type-var]

    @property
    def known_size(self) -> int:
        """The attribute `size`, the maximum number of new tokens of a text.

        Raises:
            ValueError: the size is still None.
        """
        if self.size is None:
            raise ValueError("size: got None; give the most new tokens of a text, or call `with_length` with it")
        return self.size


class Shaper(DiffusionRule, abc.ABC):
    """Base class of rules that change the model's logits before candidates are drawn and statistics are computed from
    them."""

    @abc.abstractmethod
    def __call__(self, view: View, logits: Array, memory: Memory) -> Array:
        """Returns the new logits `f32[R, W, V]`, computed from `logits`, those of the model."""


class Windows(DiffusionRule, abc.ABC):
    """Base class of rules that choose the window of each row, the positions that a round works on, and decide when its
    positions are final. By default all open positions of the window may be unmasked, and the window is final once none
    is open."""

    @property
    def align(self) -> int | None:
        """Number that divides the start of the first window, which is the largest such position up to the prompt's end.
        None: the first window starts at the prompt's end."""
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
        """Returns the number of positions at the window's beginning that are final after a step, `i32[R]`; 0 if its
        first position is not. The window then moves on by this number."""
        left = jnp.maximum(jnp.minimum(view.start + view.positions.shape[1], view.end) - view.start, 0)
        return jnp.where(view.masked.any(1), 0, left)

    def last(self, start: Array, end: Array) -> Array:
        """Returns the position after the last window, `i32[B]`, for models that were trained on whole windows: windows
        of equal width from `start` on cover the text, so it is less than one width after `end`. By default `end`
        itself.

        Args:
            start: `i32[B]`, start of the first window.
            end: `i32[B]`, end of the text.
        """
        return end


class Score(DiffusionRule, abc.ABC):
    """Base class of rules that score the candidate of each open position; positions with the largest scores are
    unmasked first."""

    @abc.abstractmethod
    def __call__(self, view: View, seen: Seen, memory: Memory) -> Array:
        """Returns the scores of the candidates, `f32[R, W]`."""


class Unmask(DiffusionRule, abc.ABC):
    """Base class of rules that choose the open positions which are unmasked in a step, that is, get their candidate as
    token."""

    @property
    def patient(self) -> bool:
        """True if a step may unmask no position. False: if the rule chooses none, the position with the best score is
        unmasked. A patient rule must unmask all positions after a bounded number of steps."""
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
        """Returns rows whose window the rule still changes although no position is open, `bool[R]`: they take more
        steps before the window is final. `before` and `after` are the windows before and after the step."""
        return jnp.zeros(after.start.shape, bool)


class Stop(DiffusionRule):
    """Base class of rules that end a row early: by unmasking all positions at once (`early_stop`), or by cutting the
    text (`end`). By default neither happens.

    Attributes:
        filled: True if the model still attends to the positions after the new end, which get copies of the last token;
            otherwise they are left out.
        likeliest: True if rows that the rule stops early get the policy's likeliest tokens in place of the candidates.
            It may read `Seen.best` and, of `Seen.model`, what does not depend on the candidates.
    """

    filled: bool = False
    likeliest: bool = False

    def early_stop(self, view: View, seen: Seen, memory: Memory) -> Array:
        """Returns rows in which this step unmasks all open positions of the window and remasks none, `bool[R]`. `seen`
        has the predictions for the window `view`."""
        return jnp.zeros(view.start.shape, bool)

    def end(self, before: View, seen: Seen, after: View, memory: Memory) -> Array:
        """Returns the end of each row's text after a step, `i32[R]`: the absolute position after the last token. By
        default `after.end`, the end so far; a smaller one cuts the text.

        Args:
            before: the window before the step.
            seen: the predictions that the step used.
            after: the window after it.
            memory: the rule's memory.
        """
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
        """Returns the phase of each row's next round, `i32[B]`, an index of `phases`. Only used by rules with `phases`,
        for which it replaces `needs_refresh`."""
        return (~self.needs_refresh(view, memory)).astype(jnp.int32)

    def wrap_model(self, model: Any, phase: int) -> Any:
        """Returns the model that computes the rounds of kind `phase` (an index of `phases`), such as a wrapper of
        `model`; it also makes the cache. Only used by rules with `phases`."""
        return model

    def hint(self, view: View, positions: Array, phase: int) -> Any:
        """Returns a struct that the model from `wrap_model` gets in `Window.hints`, or None. `positions` (`i32[B, n]`)
        are those that the forward pass computes. Only used by rules with `phases`."""
        return None

    def needs_refresh(self, view: View, memory: Memory) -> Array:
        """Returns the rows whose next forward pass must be wide, that is, compute the whole text instead of some
        positions: `bool[B]`."""
        return jnp.zeros(view.start.shape, bool)

    def nodes(self, view: View, left: int, memory: Memory) -> Nodes:
        """Returns the positions that a narrow forward pass computes: the window, the `left` positions before it (whose
        logits predict its first token, if logits predict the next position), and others that the rule recomputes. No
        position may occur twice among nodes that are `own`."""
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
    """Base class of rules that score several versions of a row's canvas in one forward pass, and accept some of them.

    Attributes:
        assists: True if a second model judges the candidates (`decodax.algorithms.diffusion.rules.judged`).
    """

    assists: bool = False

    @property
    @abc.abstractmethod
    def taken(self) -> tuple[tuple[int, ...], ...]:
        """One tuple for each of the `K` canvases that a forward pass scores: the numbers of the next steps (0 is the
        very next) that this canvas has taken in advance. The first is `()`, the current canvas; the others, the drafts,
        are ordered by length."""

    @abc.abstractmethod
    def path(self, drafts: View, results: View) -> Array:
        """Returns which drafts are accepted, `bool[B, K]`; decoding continues with the result of the last accepted one.

        Args:
            drafts: the `K` canvases of each row that one forward pass scored, with axes `[B, K, ...]`. Draft 0 is the
                current canvas and is always accepted.
            results: each draft after one more denoising step, with the same axes.
        """
