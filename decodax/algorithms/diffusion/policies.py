"""The base classes of the nine policies of masked diffusion, with their defaults.

A round works on one *region* of each row: the `W = windows.width` positions of the text from `start` on. For samplers
that fill the text block by block it is the block; for others it is the whole text, a sliding window or several blocks.
Policies get the region as a `View` and the model's answers at its positions as `Seen`. The leading axis `R` of both is
`B` rows, or `B * K` where a verifier scores `K` canvases a row. A policy never mixes rows, so it need not know which.
"""

from __future__ import annotations

import abc
from typing import Any, Self

import jax.numpy as jnp
from jax import Array

from decodax.algorithms.diffusion.adapter import Nodes
from decodax.algorithms.diffusion.stats import DistributionStats
from decodax.common.struct import Struct, struct
from decodax.core import keys
from decodax.core.keys import Purpose

Memory = Any


@struct
class Text(Struct):
    """The whole text of each row, by absolute position: `open` (`bool[B, N]`) and `when` (`i32[B, N]`) as in `View`,
    and the model's `cache`."""

    open: Array
    when: Array
    cache: Any


@struct
class View(Struct):
    """The region of each row before or after a step.

    Attributes:
        positions: `i32[R, W]` absolute positions, `start` first.
        tokens: `i32[R, W]`; an open position holds the mask token, or noise.
        open: `bool[R, W]` positions whose token is not decided.
        editable: `bool[R, W]` positions that decoding may write: not those of the prompt or of frozen tokens.
        active: `bool[R, W]` open positions that may be unmasked in this round (`Windows.active`; False before it ran).
        when: `i32[R, W]` the `round` that decided the token; -1 where the token is open, given or frozen.
        confidence: `f32[R, W]` the model's log-probability of the token when it was decided.
        start: `i32[R]` first position of the region; all positions before it are final.
        end: `i32[R]` end of the row's text. It shrinks when a stop rule ends the text early.
        step: `i32[R]` steps since the region moved to `start`. round: `i32[R]` steps of the row.
        opened: `i32[R]` how many positions were open when the region moved to `start`.
        full: `i32[R]` steps since the last open position was unmasked.
        kept: `i32[R]` the cache holds the final entries of all positions before this one (of caches that `persist`).
        refreshed: `i32[R]` the `round` of the row's last wide forward, -1 before the first.
        prompt_length, min_new, key, eos: of the row: `i32[R]`, `i32[R]`, `key[R]`, `i32[R, E]` (padded with -1).
        text: the text around the region; None for all policies but `Caching`.
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
    text: Text | None = None

    @property
    def inside(self) -> Array:
        """`bool[R, W]`: positions before the end of the text."""
        return self.positions < self.end[:, None]

    @property
    def masked(self) -> Array:
        """`bool[R, W]`: open positions of the text."""
        return self.open & self.inside

    @property
    def unmasked(self) -> Array:
        """`bool[R, W]`: decided tokens that decoding wrote and may write again."""
        return ~self.open & self.editable & self.inside

    def uniforms(self, purpose: Purpose) -> Array:
        """`f32[R, W, 2]`: two uniforms for each position, of this round."""
        return keys.uniforms(self.key, self.positions, purpose, salt=self.round)

    def addresses(self, purpose: Purpose) -> Array:
        """`u32[R, W, 2]`: the address of a draw from the vocabulary at each position, in this round."""
        return keys.addresses(self.key, self.positions, purpose, salt=self.round)


@struct
class Seen(Struct):
    """What the model says about each position of the region; see `DistributionStats`.

    The mask token is removed from the distributions: its probability is 0.

    Attributes:
        token: `i32[R, W]` the candidate, drawn from the policy; negative where there is no distribution.
        reached: `bool[R, W]` positions that the round's forward scored. The numbers of all others are meaningless.
        model: statistics of the model's own distribution after the shaper.
        policy: statistics of the policy's distribution, in which a greedy row has temperature 1; None unless a rule
            reads it.
        likeliest: `i32[R, W, k]` and `f32[R, W, k]` the model's likeliest tokens, before the shaper, and their
            log-probabilities; None unless a rule asks for `k`.
        agreed: `bool[R, W]` whether a second model chose the same token; None without one.
    """

    token: Array
    reached: Array
    model: DistributionStats
    policy: DistributionStats | None
    likeliest: tuple[Array, Array] | None = None
    agreed: Array | None = None

    def of(self, name: str) -> DistributionStats:
        """`model` or `policy`."""
        stats = self.policy if name == "policy" else self.model
        assert stats is not None
        return stats


class Rule:
    """Base of the policies: a frozen dataclass, static under jit. It has a memory only if it overrides `init`.

    Attributes:
        of: "policy" makes the algorithm compute `Seen.policy`.
        reads: `k`, how many of the likeliest tokens the rule wants in `Seen.likeliest`.
    """

    of: str = "model"
    reads: int = 0

    @property
    def longest(self) -> int:
        """The largest number of steps of a region that the rule counts on; 0 if it counts none."""
        return 0

    def fit(self, budget: int) -> Self:
        """The rule for texts of `budget` new tokens, with every size filled in that was left open."""
        return self

    def init(self, view: View) -> Memory:
        """The rule's memory before the first step: a pytree whose leaves have a leading axis `B` and an explicit dtype,
        none as wide as the vocabulary. `view` is the first region."""
        return None

    def learn(self, before: View, seen: Seen, after: View, memory: Memory) -> Memory:
        """The rule's memory after a step. The region may have moved: then `after.start > before.start` and `after.step
        == 0`."""
        return memory


class Counts:
    """Base of rules with an attribute `steps`, the number of steps of a region."""

    steps: int | None

    @property
    def longest(self) -> int:
        return self.steps or 0


class Shaper(Rule, abc.ABC):
    """Changes the model's distributions before candidates and statistics are taken from them."""

    @abc.abstractmethod
    def __call__(self, view: View, logits: Array, memory: Memory) -> Array:
        """`f32[R, W, V]`: the new logits, from the model's."""


class Windows(Rule, abc.ABC):
    """Which positions are worked on, and when they are final. By default all positions of the region are active, and
    they are final once none of them is open."""

    @property
    def align(self) -> int | None:
        """The first region starts at a multiple of this, at or below the prompt's end. None: at the prompt's end."""
        return None

    @property
    @abc.abstractmethod
    def width(self) -> int:
        """`W`, the number of positions of a region, and the most tokens that a round can emit."""

    @property
    def least(self) -> int:
        """The fewest positions that a region moves by, except for the last one."""
        return self.width

    def active(self, view: View, seen: Seen, memory: Memory) -> Array:
        """`bool[R, W]`: the part of the region in which open positions may be unmasked."""
        return view.masked

    def finished(self, view: View, memory: Memory) -> Array:
        """`i32[R]`: how many positions from `start` on are final after a step. The region moves behind them."""
        left = jnp.maximum(jnp.minimum(view.start + view.positions.shape[1], view.end) - view.start, 0)
        return jnp.where(view.masked.any(1), 0, left)

    def last(self, start: Array, end: Array) -> Array:
        """`i32[B]`: where the last region ends if all regions are equally wide, given where the first one begins and
        where the text ends. It lies less than one width behind the end of the text. For models whose regions overhang
        the text."""
        return end


class Score(Rule, abc.ABC):
    """Ranks the candidates; the best are unmasked first."""

    @abc.abstractmethod
    def __call__(self, view: View, seen: Seen, memory: Memory) -> Array:
        """`f32[R, W]`: candidates with larger scores are unmasked sooner."""


class Unmask(Rule, abc.ABC):
    """Chooses the candidates that are unmasked in a step."""

    @property
    def patient(self) -> bool:
        """Whether a step may unmask nothing. Such a rule must end by its own clock."""
        return False

    @abc.abstractmethod
    def __call__(self, view: View, seen: Seen, score: Array, memory: Memory) -> Array:
        """`bool[R, W]`: the chosen positions; only those in `view.active` count. If there are none, the best one by
        score is unmasked, so that every step makes progress; a `patient` rule is exempt."""


class Remask(Rule, abc.ABC):
    """Masks or overwrites tokens again after unmasking.

    Attributes:
        noisy: open positions keep the tokens that the rule gave them.
        most: the most steps that the rule may spend on a region without open positions.
    """

    noisy: bool = False
    most: int = 0

    @abc.abstractmethod
    def __call__(self, before: View, seen: Seen, after: View, memory: Memory) -> View:
        """`after` with other `tokens` or reopened positions (`open`). Positions that it leaves open get the mask token
        back, unless `noisy`. Only `editable` positions change."""

    def busy(self, before: View, after: View, memory: Memory) -> Array:
        """`bool[R]`: rows whose region has no open position left but must not be final yet."""
        return jnp.zeros(after.start.shape, bool)


class Stop(Rule):
    """Ends a row before all of its canvas is decided; by default never.

    Attributes:
        filled: the model reads the positions behind the end as copies of the last token; otherwise they are left out.
    """

    filled: bool = False

    def early_stop(self, view: View, seen: Seen, memory: Memory) -> Array:
        """`bool[R]`: rows whose open positions are all unmasked in this step, without remasking."""
        return jnp.zeros(view.start.shape, bool)

    def end(self, before: View, seen: Seen, after: View, memory: Memory) -> Array:
        """`i32[R]`: where the text ends after a step; at most `after.end`."""
        return after.end


class Caching(Rule):
    """What a forward recomputes and what it reads from the cache. By default no row is ever stale and nothing persists.

    Rounds are wide (the whole text) or narrow (`nodes`). A row takes part in wide rounds while it is `stale` and in
    narrow ones otherwise, so what it computes never depends on its batch mates.

    Attributes:
        wide: there are wide rounds. narrow: there are narrow rounds; without them nothing is cached.
        persists: tokens are emitted only once a forward has written their final entries.
        fused: with `persists`: that forward also works on the next region. Otherwise it does nothing else (a commit
            forward).
        approximate: entries of tokens that are not emitted yet are written.
        beyond: entries behind the text's new end are still attended to when a stop rule has cut the text.
        sizes: the numbers of nodes of the kinds of narrow rounds, ascending. None, which comes last, stands for all
            that `nodes` gives, dead ones included. A round takes the first size that fits its rows' live nodes.
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
        """`i32[B]`: which of its phases a row's next round is. For rules with phases this replaces `stale`."""
        return (~self.stale(view, memory)).astype(jnp.int32)

    def through(self, model: Any, phase: int) -> Any:
        """For rules with phases: the model as the rounds of one phase run it, and as it makes its cache."""
        return model

    def hint(self, view: View, positions: Array, phase: int) -> Any:
        """Of such a round: a struct that the rule leaves in the window for the model that it wraps (`Window.hints`), or
        None."""
        return None

    def stale(self, view: View, memory: Memory) -> Array:
        """`bool[B]`: rows that need a wide round."""
        return jnp.zeros(view.start.shape, bool)

    def nodes(self, view: View, left: int, memory: Memory) -> Nodes:
        """The nodes of a narrow round: the region, the `left` positions before it (where a shifted model predicts its
        first token), and any others that the rule recomputes. No position occurs twice among the nodes that are `own`.
        """
        return span(view, left, view.positions.shape[1])

    def writes(self, view: View, positions: Array, final: Array, valid: Array, memory: Memory) -> Array:
        """`bool[B, n]`: which nodes' entries enter the cache.

        Args:
            final: `i32[B]`: tokens before it are final.
            valid: `bool[B, n]`: the position has an entry already. No position has in a wide round, which begins with
                an empty cache.
        """
        return jnp.zeros(positions.shape, bool)


def span(view: View, before: int, width: int) -> Nodes:
    """The `width` positions from the region's start on and the `before` ones before it, as far as they lie in the text.
    """
    positions = view.start[:, None] - before + jnp.arange(before + width, dtype=jnp.int32)
    return Nodes(positions=positions, live=(positions >= 0) & (positions < view.end[:, None]),
                 own=jnp.ones(positions.shape, bool))


class Verify(Rule, abc.ABC):
    """Chooses among several canvases of a row that one forward scored.

    Attributes:
        assists: a second model judges the candidates: see `decodax.algorithms.diffusion.parallel.product`.
    """

    assists: bool = False

    @property
    @abc.abstractmethod
    def taken(self) -> tuple[tuple[int, ...], ...]:
        """Which of the coming steps, counted from 0, each canvas of a forward has taken. The first one, `()`, is the
        canvas itself. The others are drafts, ordered by their number of steps."""

    @property
    def weights(self) -> Any:
        """The weights of the second model, if the rule was made with them."""
        return None

    def bare(self) -> Self:
        """The rule without those weights."""
        return self

    @abc.abstractmethod
    def path(self, drafts: View, results: View) -> Array:
        """`bool[B, K]`: the drafts that are true; the result of the last one is taken. `drafts` and `results` have the
        axes `[B, K, ...]`: draft 0 is the canvas itself, and `results` are the drafts one step later."""
