"""What the nine policies of masked diffusion see and give back. Each kind has a base class here, with its defaults.

A round looks at each row's *region*: `W` positions of the text from `start` on, `W = windows.width`. Policies get it as
a `View` and the model's answers at its positions as `Seen`. Their leading axis `R` is `B` rows, or `B * K` where a
verifier scores `K` canvases a row; a policy never mixes rows, so it need not care.
"""

from __future__ import annotations

import abc
from typing import Any, Self

import jax.numpy as jnp
from jax import Array

from decodax.core import keys
from decodax.core.keys import Purpose
from decodax.diffusion.adapter import Nodes
from decodax.diffusion.stats import DistributionStats
from decodax.struct import Struct, struct

Memory = Any


@struct
class Text(Struct):
    """The whole text of each row, by absolute position: `open` (`bool[B, N]`) and `when` (`i32[B, N]`) as in `View`;
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
        editable: `bool[R, W]` positions that decoding may write: not the prompt, no frozen token.
        active: `bool[R, W]` open positions that may be unmasked this round (`Windows.active`; False before it ran).
        when: `i32[R, W]` the `round` that decided the token, -1 for open, given and frozen ones.
        confidence: `f32[R, W]` the model's log-probability of the token when it was decided.
        start: `i32[R]` first position of the region: all before it is final.
        end: `i32[R]` end of the row's text. It shrinks when a stop rule says that the text ends early.
        step: `i32[R]` steps since the region moved to `start`. round: `i32[R]` steps of the row.
        opened: `i32[R]` open positions when the region moved to `start`.
        full: `i32[R]` steps since the last open position was unmasked.
        kept: `i32[R]` the cache holds the final entries of all positions before this one (of caches that `persist`).
        refreshed: `i32[R]` the `round` of the row's last wide forward, -1 before the first.
        prompt_length, min_new, key, eos: of the row: `i32[R]`, `i32[R]`, `key[R]`, `i32[R, E]` (padded with -1).
        text: what lies around the region; only `Caching` gets it.
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
    """What the model says about each position of the region, read off once a round; see `DistributionStats`.

    The mask token has been removed from the distributions: it has no probability.

    Attributes:
        token: `i32[R, W]` the candidate, drawn from the policy; negative where there is no distribution.
        reached: `bool[R, W]` positions that the round's forward scored. The others' numbers mean nothing.
        model: of the model's own distribution, as the shaper left it.
        policy: of the policy's, where a greedy row's temperature counts as 1; None unless a rule reads it.
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
    """Base of the policies: a frozen dataclass, static under jit, without a memory unless it says so.

    Attributes:
        of: "policy" makes the algorithm compute `Seen.policy`.
        reads: `k`, how many of `Seen.likeliest` it wants.
    """

    of: str = "model"
    reads: int = 0

    @property
    def longest(self) -> int:
        """How many steps of a region it counts on; 0 if it counts none."""
        return 0

    def fit(self, budget: int) -> Self:
        """The rule for texts of `budget` new tokens, where it left a size open."""
        return self

    def init(self, view: View) -> Memory:
        """What it remembers, a pytree whose leaves have a leading axis `B` and an explicit dtype, none as wide as the
        vocabulary; `view` is the first region."""
        return None

    def learn(self, before: View, seen: Seen, after: View, memory: Memory) -> Memory:
        """Its memory after a step. `after` may have moved: `after.start > before.start`, `after.step == 0`."""
        return memory


class Counts:
    """What rules with an attribute `steps` inherit."""

    steps: int | None

    @property
    def longest(self) -> int:
        return self.steps or 0


class Shaper(Rule, abc.ABC):
    """Changes the model's distributions before anything is read off them."""

    @abc.abstractmethod
    def __call__(self, view: View, logits: Array, memory: Memory) -> Array:
        """`f32[R, W, V]` from the model's."""


class Windows(Rule, abc.ABC):
    """Which positions are worked on, and when they are final: by default all of the region, once none of it is open."""

    @property
    def align(self) -> int | None:
        """The first region starts at a multiple of this at or below the prompt's end; None: at the prompt's end."""
        return None

    @property
    @abc.abstractmethod
    def width(self) -> int:
        """`W`, the positions of a region: the most tokens that a round can emit."""

    @property
    def least(self) -> int:
        """The fewest positions that a region moves by, but for the last."""
        return self.width

    def active(self, view: View, seen: Seen, memory: Memory) -> Array:
        """`bool[R, W]`: the part of the region in which open positions may be unmasked."""
        return view.masked

    def finished(self, view: View, memory: Memory) -> Array:
        """`i32[R]`: how many positions from `start` on are final, after a step: the region moves behind them."""
        left = jnp.maximum(jnp.minimum(view.start + view.positions.shape[1], view.end) - view.start, 0)
        return jnp.where(view.masked.any(1), 0, left)

    def last(self, start: Array, end: Array) -> Array:
        """`i32[B]`: where the last region ends if all are equally wide, from where the first begins and the text ends;
        less than a width behind that. Of models whose regions overhang the text."""
        return end


class Score(Rule, abc.ABC):
    """Ranks the candidates."""

    @abc.abstractmethod
    def __call__(self, view: View, seen: Seen, memory: Memory) -> Array:
        """`f32[R, W]`: the larger, the sooner it is unmasked."""


class Unmask(Rule, abc.ABC):
    """Which candidates are unmasked."""

    @property
    def patient(self) -> bool:
        """Whether a step may unmask nothing, since the rule ends by its own clock."""
        return False

    @abc.abstractmethod
    def __call__(self, view: View, seen: Seen, score: Array, memory: Memory) -> Array:
        """`bool[R, W]`, of which those in `view.active` count. If there are none the best by score is unmasked, so
        every step makes progress; but not where `patient`."""


class Remask(Rule, abc.ABC):
    """What becomes of tokens after unmasking.

    Attributes:
        noisy: open positions keep the tokens that it gave them.
        most: steps of a full region that it may take.
    """

    noisy: bool = False
    most: int = 0

    @abc.abstractmethod
    def __call__(self, before: View, seen: Seen, after: View, memory: Memory) -> View:
        """`after` with other `tokens` or reopened positions (`open`). What it leaves open gets the mask token back,
        unless `noisy`; only `editable` positions change."""

    def busy(self, before: View, after: View, memory: Memory) -> Array:
        """`bool[R]`: rows whose full region must not be final yet."""
        return jnp.zeros(after.start.shape, bool)


class Stop(Rule):
    """When a row is done before its canvas is; by default never.

    Attributes:
        filled: what lies behind the end is read as more of its last token, and not left out.
    """

    filled: bool = False

    def early_stop(self, view: View, seen: Seen, memory: Memory) -> Array:
        """`bool[R]`: rows whose open positions are all unmasked now, without remasking."""
        return jnp.zeros(view.start.shape, bool)

    def end(self, before: View, seen: Seen, after: View, memory: Memory) -> Array:
        """`i32[R]`: where the text ends, after a step; no larger than `after.end`."""
        return after.end


class Caching(Rule):
    """What a forward recomputes and what it reads from the cache; by default never stale, with nothing that persists.

    Rounds are wide (the whole text) or narrow (`nodes`). A row takes part in wide rounds while it is `stale` and in
    narrow ones otherwise, so what it computes never depends on its batch mates.

    Attributes:
        wide: there are wide rounds. narrow: there are narrow rounds; without them nothing is cached.
        persists: tokens are emitted only once a forward has written their final entries.
        fused: with `persists`: that forward also works on the next region; else on none (a commit forward).
        approximate: entries of tokens that are not emitted yet are written.
        beyond: what a stop rule has cut off stays to be seen: the entries behind the text's new end.
        sizes: how many nodes the kinds of narrow rounds have, ascending; None, which comes last: as many as `nodes`
            gives, dead ones and all. A round takes the first size that fits its rows' live nodes.
        phases: of rules with more kinds of rounds than a wide and a narrow one: which of them are wide. () else.
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
        """`i32[B]`: which of its phases a row's next round is. A rule with phases is asked this and not `stale`."""
        return (~self.stale(view, memory)).astype(jnp.int32)

    def through(self, model: Any, phase: int) -> Any:
        """Of rules with phases: the model as rounds of one run it, and as it makes its cache."""
        return model

    def reuse(self, view: View, positions: Array, phase: int) -> Array | None:
        """`Window.reuse` of such a round: what the rule tells the model that it wraps, `[B, ...]`."""
        return None

    def stale(self, view: View, memory: Memory) -> Array:
        """`bool[B]`: rows that need a wide round."""
        return jnp.zeros(view.start.shape, bool)

    def nodes(self, view: View, left: int, memory: Memory) -> Nodes:
        """What a narrow round scores: the region, the `left` positions before it, where a shifted model predicts its
        first token, and whatever else is worth it. Among the nodes that are `own` no position stands twice."""
        return span(view, left, view.positions.shape[1])

    def writes(self, view: View, positions: Array, final: Array, valid: Array, memory: Memory) -> Array:
        """`bool[B, n]`: which nodes' entries enter the cache.

        Args:
            final: `i32[B]`: tokens before it are final.
            valid: `bool[B, n]`: the position has an entry. None has in a wide round, which begins with an empty cache.
        """
        return jnp.zeros(positions.shape, bool)


def span(view: View, before: int, width: int) -> Nodes:
    """`width` positions from the region's beginning on and `before` ones before it; all that lie in the text."""
    positions = view.start[:, None] - before + jnp.arange(before + width, dtype=jnp.int32)
    return Nodes(positions=positions, live=(positions >= 0) & (positions < view.end[:, None]),
                 own=jnp.ones(positions.shape, bool))


class Verify(Rule, abc.ABC):
    """Several canvases a row in one forward: which of their steps are true.

    Attributes:
        assists: a second model judges the candidates: see `decodax.diffusion.parallel.product`.
    """

    assists: bool = False

    @property
    @abc.abstractmethod
    def taken(self) -> tuple[tuple[int, ...], ...]:
        """Which of the coming steps, counted from 0, each canvas of a forward has taken. The first, `()`, is the canvas
        itself; the others are drafts, by the number of steps."""

    @property
    def weights(self) -> Any:
        """The second model's weights that it was made with."""
        return None

    def bare(self) -> Self:
        """The rule without those weights."""
        return self

    @abc.abstractmethod
    def path(self, drafts: View, results: View) -> Array:
        """`bool[B, K]`: the drafts that are true, of which the last one's result is taken. `drafts` and `results` have
        the axes `[B, K, ...]`: draft 0 is the canvas itself, and `results` are the drafts one step later."""
