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
    """Base of the policies: a frozen dataclass, static under jit. It has a memory only if it overrides `init`.

    Attributes:
        of: "policy" makes the algorithm compute `Seen.policy`.
        reads: `k`, number of likeliest tokens that the rule needs in `Seen.likeliest`.
    """

    of: str = "model"
    reads: int = 0

    @property
    def longest(self) -> int:
        """Largest number of steps of a window that the rule is made for; 0 if it has no such number."""
        return 0

    def fit(self, budget: int) -> Self:
        """Returns the rule for texts of `budget` new tokens, with every size filled in that was None."""
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
    """Base of rules with an attribute `size`, the most new tokens of a text; None until `fit`."""

    size: int | None

    def fit(self, budget: int) -> Self:
        """Returns the rule with a size for texts of `budget` new tokens: a power of two, so that few programs serve
        all budgets."""
        if self.size is not None:
            return self
        return dataclasses.replace(self, size=max(1 << max(budget - 1, 0).bit_length(), 8))     # type: ignore[type-var]

    @property
    def known_size(self) -> int:
        """The size.

        Raises:
            ValueError: it is None.
        """
        if self.size is None:
            raise ValueError("size: got None; give the most new tokens of a text, or call `fit` with it")
        return self.size


class Shaper(DiffusionRule, abc.ABC):
    """Changes the model's distributions before candidates and statistics are taken from them."""

    @abc.abstractmethod
    def __call__(self, view: View, logits: Array, memory: Memory) -> Array:
        """Returns the new logits `f32[R, W, V]`, from the model's."""


class Windows(DiffusionRule, abc.ABC):
    """Says which positions are worked on, and when they are final. By default all positions of the window are active,
    and they are final once none of them is open."""

    @property
    def align(self) -> int | None:
        """Multiple at which the first window starts, at or before the prompt's end. None: at the prompt's end."""
        return None

    @property
    @abc.abstractmethod
    def width(self) -> int:
        """`W`, number of positions of a window, and the most tokens that a round can emit."""

    @property
    def least(self) -> int:
        """Fewest positions that a window moves by, except for the last one."""
        return self.width

    def active(self, view: View, seen: Seen, memory: Memory) -> Array:
        """Returns `bool[R, W]`: the part of the window in which open positions may be unmasked."""
        return view.masked

    def finished(self, view: View, memory: Memory) -> Array:
        """Returns `i32[R]`: number of positions from `start` on that are final after a step. The next window starts
        after them."""
        left = jnp.maximum(jnp.minimum(view.start + view.positions.shape[1], view.end) - view.start, 0)
        return jnp.where(view.masked.any(1), 0, left)

    def last(self, start: Array, end: Array) -> Array:
        """Returns `i32[B]`: the end of the last window if all windows are equally wide, given the start of the first
        one and the end of the text. It lies less than one width after the end of the text. For models whose windows
        overhang the text."""
        return end


class Score(DiffusionRule, abc.ABC):
    """Ranks the candidates; the best are unmasked first."""

    @abc.abstractmethod
    def __call__(self, view: View, seen: Seen, memory: Memory) -> Array:
        """Returns `f32[R, W]`: candidates with larger scores are unmasked sooner."""


class Unmask(DiffusionRule, abc.ABC):
    """Chooses the candidates that are unmasked in a step."""

    @property
    def patient(self) -> bool:
        """True if a step may unmask nothing. Such a rule must end by its own clock."""
        return False

    @abc.abstractmethod
    def __call__(self, view: View, seen: Seen, score: Array, memory: Memory) -> Array:
        """Returns `bool[R, W]`: the chosen positions; only those in `view.active` count. If there are none, the best
        one by score is unmasked, so that every step makes progress; a `patient` rule is exempt."""


class Remask(DiffusionRule, abc.ABC):
    """Masks or overwrites tokens again after unmasking.

    Attributes:
        noisy: open positions keep the tokens that the rule gave them.
        most: most steps that the rule may spend on a window without open positions.
    """

    noisy: bool = False
    most: int = 0

    @abc.abstractmethod
    def __call__(self, before: View, seen: Seen, after: View, memory: Memory) -> View:
        """Returns `after` with other `tokens` or reopened positions (`open`). Positions that it leaves open get the
        mask token back, unless `noisy`. Only `editable` positions change."""

    def busy(self, before: View, after: View, memory: Memory) -> Array:
        """Returns `bool[R]`: rows whose window has no open position left but must not be final yet."""
        return jnp.zeros(after.start.shape, bool)


class Stop(DiffusionRule):
    """Ends a row before all of its canvas is decided (early stop); by default never.

    Attributes:
        filled: the model reads the positions after the end as copies of the last token; otherwise they are left out.
    """

    filled: bool = False

    def early_stop(self, view: View, seen: Seen, memory: Memory) -> Array:
        """Returns `bool[R]`: rows whose open positions are all unmasked in this step, without remasking."""
        return jnp.zeros(view.start.shape, bool)

    def end(self, before: View, seen: Seen, after: View, memory: Memory) -> Array:
        """Returns `i32[R]`: the end of the text after a step; at most `after.end`."""
        return after.end


class Caching(DiffusionRule):
    """Says what a forward recomputes and what it reads from the cache. By default no row needs a refresh and nothing
    persists.

    Rounds are wide (the whole text) or narrow (`nodes`). A row takes part in wide rounds while it `needs_refresh` and
    in narrow ones otherwise, so its results never depend on the other rows of the batch.

    Attributes:
        wide: there are wide rounds. narrow: there are narrow rounds; without them nothing is cached.
        persists: tokens are emitted only once a forward has written their final entries.
        fused: with `persists`: that forward also works on the next window. Otherwise it does nothing else (a commit
            forward).
        approximate: entries of tokens that are not emitted yet are written.
        beyond: entries after the text's new end are still attended to when a stop rule has cut the text.
        sizes: the numbers of nodes of the kinds of narrow rounds, ascending. None, which comes last, means all that
            `nodes` gives, dead ones included. A round takes the first size that fits its rows' live nodes.
        phases: for rules with more kinds of rounds than one wide and one narrow: which of the kinds are wide; otherwise
            ().
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
        """Returns `i32[B]`: the phase of a row's next round. For rules with phases this replaces `needs_refresh`."""
        return (~self.needs_refresh(view, memory)).astype(jnp.int32)

    def wrap_model(self, model: Any, phase: int) -> Any:
        """Returns the model as the rounds of one phase run it, and as it makes its cache; for rules with phases."""
        return model

    def hint(self, view: View, positions: Array, phase: int) -> Any:
        """Returns a struct for the model that the rule wraps, which reads it in `Window.hints`, or None; for rules with
        phases."""
        return None

    def needs_refresh(self, view: View, memory: Memory) -> Array:
        """Returns `bool[B]`: rows that need a wide round."""
        return jnp.zeros(view.start.shape, bool)

    def nodes(self, view: View, left: int, memory: Memory) -> Nodes:
        """Returns the nodes of a narrow round: the window, the `left` positions before it (where a shifted model
        predicts its first token), and any others that the rule recomputes. No position occurs twice among the nodes
        that are `own`.
        """
        return span(view, left, view.positions.shape[1])

    def writes(self, view: View, positions: Array, final: Array, valid: Array, memory: Memory) -> Array:
        """Returns `bool[B, n]`: nodes whose entries are written to the cache.

        Args:
            final: `i32[B]`: tokens before it are final.
            valid: `bool[B, n]`: the position has an entry already. No position has in a wide round, which begins with
                an empty cache.
        """
        return jnp.zeros(positions.shape, bool)


class Verify(DiffusionRule, Composed, abc.ABC):
    """Chooses among several canvases of a row that one forward scored.

    Attributes:
        assists: a second model judges the candidates: see `decodax.algorithms.diffusion.rules.judged`.
    """

    assists: bool = False

    @property
    @abc.abstractmethod
    def taken(self) -> tuple[tuple[int, ...], ...]:
        """Steps to come, counted from 0, that each canvas of a forward has taken. The first one, `()`, is the canvas
        itself. The others are drafts, ordered by their number of steps."""

    @abc.abstractmethod
    def path(self, drafts: View, results: View) -> Array:
        """Returns `bool[B, K]`: the drafts that are true; the result of the last one is taken. `drafts` and `results`
        have the axes `[B, K, ...]`: draft 0 is the canvas itself, and `results` are the drafts one step later."""
