"""Masked diffusion decoding: a canvas of unknown tokens is decided over several rounds, in any order.

One algorithm for the whole family; what the published samplers differ in are its nine policies (`policies.py`). A
round looks at one region of each row:

1. adapter: tokens, positions and who sees whom; `Caching` says what is recomputed and what is read.
2. statistics: candidates and what the model says of them (`Seen`), through the shaper and the policy's transforms.
3. windows: which open positions may be committed now.
4. score: in which order. 5. commit: which. At least one a row and step, so every step makes progress.
6. revise: what is taken back or overwritten.
7. stop: whether the text ends here. Verify picks among several canvases that took steps 2 to 7 side by side.
8. windows: what is final. It joins the verified text, where end of sequence, stop strings and budgets are looked at,
   and the region moves behind it.

Rows have their own regions, steps and phases; none depends on its batch mates. Prompt and frozen tokens never change.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from decodax.cache import Window
from decodax.core.record import empty_record
from decodax.core.state import State
from decodax.core.types import Algorithm, Decision, Model, Out, Params
from decodax.diffusion.adapter import Adapter
from decodax.diffusion.caching import NoCache
from decodax.diffusion.canvas import Canvas, look, survey
from decodax.diffusion.commits import Quota, best
from decodax.diffusion.guidance import guide
from decodax.diffusion.policies import Caching, Commit, Revise, Score, Seen, Shaper, Stop, Verify, View, Windows
from decodax.diffusion.revisions import Keep
from decodax.diffusion.round import Round
from decodax.diffusion.scores import Confidence
from decodax.diffusion.shapers import AsIs
from decodax.diffusion.stops import EndOfText
from decodax.diffusion.verifies import Sequential
from decodax.diffusion.windows import Fixed


@dataclasses.dataclass(frozen=True)
class MaskedDiffusion(Algorithm):
    """A sampler made of nine policies.

    Attributes:
        adapter: how the model speaks of a canvas.
        windows, score, commit, revise, caching, verify, stops, shaper: see `decodax.diffusion.policies`; stops are
            several.

    Raises:
        ValueError: parts that do not fit each other.
    """

    adapter: Adapter
    windows: Windows = Fixed()
    score: Score = Confidence()
    commit: Commit = Quota()
    revise: Revise = Keep()
    caching: Caching = NoCache()
    verify: Verify = Sequential()
    stops: tuple[Stop, ...] = (EndOfText(),)
    shaper: Shaper = AsIs()

    def __post_init__(self) -> None:
        if self.caching.approximate and self.adapter.attention.causal:
            raise ValueError(f"caching: got {self.caching} for causal attention, takes one that persists, or NoCache")

    def fit(self, budget: int) -> MaskedDiffusion:
        """With windows and a cache for texts of `budget` new tokens, where their size was left open."""
        return dataclasses.replace(self, windows=self.windows.fit(budget), caching=self.caching.fit(budget))

    def most_rounds(self, budget: int, rows: int) -> int:
        """More rounds than a batch can take for `budget` new tokens a row."""
        steps = max(rule.longest for rule in (self.commit, self.revise, *self.stops))
        steps = max(steps, self.windows.width) + self.revise.most + 2
        # a region moves by its width, or by less; rows may wait for the others' wide rounds
        regions = -(-budget // self.windows.least) + 1
        return (regions * steps + 8) * (rows + 1 if self.variants else 1)

    @property
    def weights(self) -> Any:
        """A second model's, which a front door puts into `Params.draft`; None without one."""
        return self.verify.weights

    def bare(self) -> MaskedDiffusion:
        """This sampler without the weights that it was made with, as the compiled programs take it."""
        return dataclasses.replace(self, verify=self.verify.bare())

    @property
    def canvas(self) -> bool:
        return True

    @property
    def emits(self) -> int:
        return self.windows.width

    @property
    def caches(self) -> bool:
        return self.caching.narrow

    @property
    def prefills(self) -> bool:
        """Whether the causal prefill writes the prompt's entries."""
        return self.caching.persists and self.adapter.attention.causal

    @property
    def kinds(self) -> tuple[Round, ...]:
        """Wide and narrow rounds, those by size, or the ones that occur."""
        if self.caching.phases:
            return tuple(Round(self, wide, phase=i) for i, wide in enumerate(self.caching.phases))
        wide = (Round(self, True),) if self.caching.wide and not self.prefills else ()
        return wide + (tuple(Round(self, False, n) for n in self.caching.sizes) if self.caching.narrow else ())

    @property
    def variants(self) -> tuple[Round, ...]:
        """What the core picks from."""
        return self.kinds if len(self.kinds) > 1 else ()

    def choose(self, params: Params, policy: Any, s: State) -> Array:
        """Wide where half of the running rows need it: rows that need the other kind wait. Narrow rounds are as small
        as their rows' nodes allow. Of phases the one that most running rows are in."""
        if count := len(self.caching.phases):
            wanted = jnp.where(s.running, self.phase(s), -1)
            return jnp.argmax((wanted[:, None] == jnp.arange(count)).sum(0)).astype(jnp.int32)
        stale = self.stale(s) & s.running
        narrow = 2 * stale.sum() < s.running.sum()
        smaller = [n for n in self.caching.sizes if n is not None]
        if not smaller:
            return narrow.astype(jnp.int32)
        most = jnp.where(s.running & ~stale, self.kinds[-1].needs(s), 0).max()
        rung = (most > jnp.array(smaller, jnp.int32)).sum(dtype=jnp.int32)
        return jnp.where(narrow, len(self.kinds) - len(self.caching.sizes) + rung, 0)

    def init(self, params: Params, s: State) -> Canvas:
        N, W, align = s.tokens.shape[1], self.windows.width, self.windows.align
        zero = lambda: jnp.zeros(s.batch, jnp.int32)
        start = s.prompt_length + 0 if align is None else s.prompt_length // align * align
        end = self.whole(s)
        tokens, open = self.adapter.canvas.fill(self.adapter, s.tokens, s.prompt_length, s.key)
        kept = s.prompt_length - 1 if self.prefills else zero()
        slots = jnp.arange(N - W if self.caches else 0, dtype=jnp.int32)
        c = Canvas(
            tokens=tokens, open=open, editable=open & True, when=jnp.full((s.batch, N), -1, jnp.int32),
            confidence=jnp.zeros((s.batch, N), jnp.float32), start=start, end=end, step=zero(), round=zero(),
            opened=zero(), full=zero(), kept=kept, refreshed=zero() - 1, final=start + 0,
            valid=slots < kept[:, None], drafts=None, memory=None,
            record=None if s.record is None else empty_record((s.batch, N), s.record.count))
        view = look(s, c, W)
        names = ("shaper", "windows", "score", "commit", "revise", "caching", "verify")
        memory = {name: getattr(self, name).init(view) for name in names}
        memory["stops"] = tuple(stop.init(view) for stop in self.stops)
        if self.verify.assists:
            c = c.replace(assistant=self.verify.begin(params, s, N - W))      # type: ignore[attr-defined]
        if len(self.verify.taken) > 1 and jax.tree.leaves(memory):
            raise ValueError(f"verify: got {self.verify} with rules that remember; drafts need rules without a memory")
        return c.replace(opened=view.masked.sum(1, dtype=jnp.int32), memory=memory, drafts=self.no_drafts(view))

    def whole(self, s: State) -> Array:
        """`i32[B]`: the end of a text that no stop rule ends earlier."""
        # a text beyond the buffer is cut there, and says so
        end = jnp.minimum(s.max_length, s.tokens.shape[1] - self.windows.width)
        if self.adapter.attention.overhangs and not self.adapter.canvas.given:
            start, align = s.prompt_length, self.windows.align
            end = self.windows.last(start if align is None else start // align * align, end)
        return end

    def guide(self, model: Model, params: Params, policy: Any, s: State, scale: Any) -> tuple[Model, State]:
        """The model and a state before its first round under classifier-free guidance: see `diffusion.guidance`.

        Raises:
            ValueError: the model has no mask token to put in the prompt's place.
        """
        if self.adapter.mask is None:
            raise ValueError("guidance_scale: the model has no mask token, which stands for the prompt")
        return guide(self, model, params, policy, s, scale, self.adapter.mask, self.prefills)

    def propose(self, params: Params, policy: Any, s: State) -> tuple[Window, Canvas]:
        return self.kinds[0].propose(params, policy, s)

    def decide(self, dist: Any, s: State, window: Window, out: Out, algo: Canvas) -> Decision:
        return self.kinds[0].decide(dist, s, window, out, algo)

    # the steps of a round, for one canvas a row

    def advance(self, view: View, seen: Seen, memory: Any) -> View:
        """One step: 3 to 7. `view` and the result lie over the same positions."""
        view = view.replace(active=self.windows.active(view, seen, memory["windows"]) & view.masked & seen.reached)
        score = self.score(view, seen, memory["score"])
        commit = self.commit(view, seen, score, memory["commit"]) & view.active
        force = best(score, view.active, jnp.ones_like(view.step)) & ~commit.any(1)[:, None]
        if self.commit.patient:
            force = jnp.zeros_like(force)
        rush = jnp.zeros(view.step.shape, bool)
        for stop, own in zip(self.stops, memory["stops"], strict=True):
            rush = rush | stop.rush(view, seen, own)
        commit = jnp.where(rush[:, None], view.masked & seen.reached, commit | force)
        after = view.replace(
            tokens=jnp.where(commit, seen.token, view.tokens), open=view.open & ~commit, step=view.step + 1,
            round=view.round + 1, full=jnp.where(view.masked.any(1), 0, view.full + 1))
        new = self.revise(view, seen, after, memory["revise"])
        may = view.editable & view.inside & ~rush[:, None]
        after = after.replace(tokens=jnp.where(may, new.tokens, after.tokens),
                              open=jnp.where(may, new.open, after.open))
        if not self.revise.noisy:
            after = after.replace(tokens=jnp.where(after.open & may, jnp.int32(self.adapter.blank), after.tokens))
        # a token that may still be revised ends nothing, unless a stop rule has committed it for good
        open = self.revise.busy(view, after, memory["revise"]) & ~rush
        for stop, own in zip(self.stops, memory["stops"], strict=True):
            cut = jnp.minimum(after.end, stop.end(view, seen, after, own))
            after = after.replace(end=jnp.where(open, after.end, cut))
        return after

    def drafts(self, view: View, c: Canvas) -> View:
        """The canvases of a round, `[B, K, ...]`: the region itself, then the drafts, so many steps further."""
        K = len(self.verify.taken)
        ahead = jnp.array([len(taken) for taken in self.verify.taken], jnp.int32)
        wide = jax.tree.map(lambda x: jnp.broadcast_to(x[:, None], (x.shape[0], K, *x.shape[1:])), view)
        if K > 1:
            stack = lambda own, more: jnp.concatenate([own[:, None], more], 1)
            tokens, open = c.drafts
            wide = wide.replace(tokens=stack(view.tokens, tokens), open=stack(view.open, open))
        return wide.replace(step=wide.step + ahead, round=wide.round + ahead)

    def no_drafts(self, view: View) -> Any:
        """Drafts that equal the canvas, and so no result of a step."""
        more = len(self.verify.taken) - 1
        again = lambda x: jnp.broadcast_to(x[:, None], (x.shape[0], more, *x.shape[1:]))
        return None if more == 0 else (again(view.tokens), again(view.open))

    def through(self, model: Any) -> Any:
        """The model as it makes its cache."""
        return self.kinds[0].through(model)

    def phase(self, s: State) -> Array:
        """`i32[B]`: which of the caching rule's phases a row's next round is."""
        return self.caching.phase(survey(s, s.algo, self.windows.width), s.algo.memory["caching"])

    def stale(self, s: State) -> Array:
        """`bool[B]`: rows whose next round is a wide one."""
        return self.caching.stale(survey(s, s.algo, self.windows.width), s.algo.memory["caching"])
