"""Masked diffusion decoding: a canvas of unknown tokens is decided over several rounds, in any order.

All published samplers are one algorithm here. They differ in its nine policies (`policies.py`). A round works on one
window of each row:

    1. adapter: tokens, positions and attention. `Caching` decides which entries are recomputed and which are cached.
    2. predictions: candidates and the model's probabilities (`Seen`), after the shaper and the policy's transforms.
    3. windows: the open positions that may be unmasked in this step.
    4. score: the order in which they are unmasked.
    5. unmask: the positions that are unmasked; at least one for each row and step, so every step makes progress.
    6. remask: the tokens that are masked or overwritten again.
    7. stop: whether the text ends here. Verify chooses among several canvases that took steps 2 to 7 in parallel.
    8. windows: the positions that are final. They join the verified text, which is searched for end of sequence and
       stop strings and counted against the budget, and the next window begins after them.

Each row has its own window, steps and phase, independent of the other rows of the batch. Prompt and frozen tokens never
change.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from decodax.algorithms.diffusion.adapter import Adapter, FillsCanvas
from decodax.algorithms.diffusion.caching.blocks import NoCache
from decodax.algorithms.diffusion.canvas import Canvas, look, survey
from decodax.algorithms.diffusion.guidance import guide
from decodax.algorithms.diffusion.policies import (
    BudgetSized,
    Caching,
    Remask,
    Score,
    Shaper,
    Stop,
    Unmask,
    Verify,
    Windows,
)
from decodax.algorithms.diffusion.round import Round
from decodax.algorithms.diffusion.rules.defaults import AsIs, Keep, Sequential
from decodax.algorithms.diffusion.rules.scores import Confidence
from decodax.algorithms.diffusion.rules.stops import EndOfText
from decodax.algorithms.diffusion.rules.unmasking import Quota, best
from decodax.algorithms.diffusion.rules.windows import Blocks
from decodax.algorithms.diffusion.view import Seen, View
from decodax.core.algorithm import ChecksFit, GuidesItself, Paced, Traits, Varies
from decodax.core.cache import NONE, Feature
from decodax.core.record import empty_record
from decodax.core.state import State
from decodax.core.types import Decision, Model, Out, Params
from decodax.core.window import Window

RULES = ("shaper", "windows", "score", "unmask", "remask", "caching", "verify")
"""The fields of `MaskedDiffusion` with one rule."""


@dataclasses.dataclass(frozen=True)
class MaskedDiffusion(Varies, Paced, GuidesItself, ChecksFit, FillsCanvas):
    """A sampler of masked diffusion, made of nine policies.

    Attributes:
        adapter: positions, attention and mask token of the model.
        windows: the positions that a round works on.
        score: the order in which candidates are unmasked.
        unmask: the candidates that are unmasked in a step.
        remask: the tokens that are masked or overwritten again.
        caching: the entries that are recomputed, and those that are cached.
        verify: chooses among several canvases of a row.
        stops: any number of rules that end a row early.
        shaper: changes the model's distributions.

    Raises:
        ValueError: the policies do not fit each other.
    """

    adapter: Adapter
    windows: Windows = Blocks()
    score: Score = Confidence()
    unmask: Unmask = Quota()
    remask: Remask = Keep()
    caching: Caching = NoCache()
    verify: Verify = Sequential()
    stops: tuple[Stop, ...] = (EndOfText(),)
    shaper: Shaper = AsIs()

    def __post_init__(self) -> None:
        if self.caching.approximate and self.adapter.attention.causal:
            raise ValueError(f"caching: got {self.caching} for causal attention, takes one that persists, or NoCache")
        if self.adapter.conditioning and (len(self.verify.taken) > 1 or self.caching.phases):
            raise ValueError(f"verify, caching: got {self.verify} and {self.caching} for a model with "
                             "self-conditioning, takes one canvas of each row, and rounds without phases")

    @property
    def traits(self) -> Traits:
        caches, approximate = self.caching.narrow, self.caching.approximate
        needs: tuple[Feature, ...] = ("trees", "subsets", "rewrites") if approximate else ("trees", "subsets")
        # a window as long as the text has no width before `with_length`
        open_ = isinstance(self.windows, BudgetSized) and self.windows.size is None
        no_mask = () if self.adapter.mask is not None else (
            ("guidance_scale", "the model has no mask token, which replaces the prompt"),)
        return Traits(emits=1 if open_ else self.windows.width, canvas=True, caches=caches, refuses=no_mask,   # type: ignore[arg-type]
                      needs=frozenset(needs) if caches else NONE,
                      prefills=self.caching.persists and self.adapter.attention.causal)

    def with_length(self, budget: int) -> MaskedDiffusion:
        """Returns the sampler for texts of at most `budget` new tokens: sizes of its windows and cache that were None
        are set."""
        return dataclasses.replace(self, windows=self.windows.with_length(budget),
                                   caching=self.caching.with_length(budget))

    def most_rounds(self, budget: int, rows: int) -> int:
        """Returns an upper bound on the number of rounds of a batch of `rows` rows with `budget` new tokens each."""
        steps = max(rule.longest for rule in (self.unmask, self.remask, *self.stops))
        steps = max(steps, self.windows.width) + self.remask.most + 2
        # a window moves by its width, or by less; rows may wait for the others' wide rounds
        count = -(-budget // self.windows.least) + 1
        return (count * steps + 8) * (rows + 1 if self.variants else 1)

    @property
    def kinds(self) -> tuple[Round, ...]:
        """The kinds of rounds of this sampler, each compiled by itself: with `caching.phases`, one for each phase; else
        a wide one (it computes the whole text) if the cache has any, then narrow ones (some positions) of each size."""
        if self.caching.phases:
            return tuple(Round(self, wide, phase=i) for i, wide in enumerate(self.caching.phases))
        wide = (Round(self, True),) if self.caching.wide and not self.traits.prefills else ()
        return wide + (tuple(Round(self, False, n) for n in self.caching.sizes) if self.caching.narrow else ())

    @property
    def variants(self) -> tuple[Round, ...]:
        """The kinds of rounds (see `kinds`) if there are several; `choose` picks one for each round. Empty if there is
        only one."""
        return self.kinds if len(self.kinds) > 1 else ()

    def choose(self, params: Params, policy: Any, s: State) -> Array:
        """Returns the kind of the next round, `i32[]`: a wide one if half of the running rows need it; the other rows
        wait.

        A narrow round has the smallest size that fits the nodes of its rows. With phases, it is the phase of the
        largest number of running rows.
        """
        if count := len(self.caching.phases):
            wanted = jnp.where(s.running, self.phase(s), -1)
            return jnp.argmax((wanted[:, None] == jnp.arange(count)).sum(0)).astype(jnp.int32)
        stale = self.needs_refresh(s) & s.running
        narrow = 2 * stale.sum() < s.running.sum()
        smaller = [n for n in self.caching.sizes if n is not None]
        if not smaller:
            return narrow.astype(jnp.int32)
        most = jnp.where(s.running & ~stale, self.kinds[-1].live_nodes(s), 0).max()
        rung = (most > jnp.array(smaller, jnp.int32)).sum(dtype=jnp.int32)
        return jnp.where(narrow, len(self.kinds) - len(self.caching.sizes) + rung, 0)

    def check_fit(self, model: Any, cache: Any) -> None:
        super().check_fit(model, cache)
        rules = (*(getattr(self, name) for name in RULES), *self.stops)
        if len(self.verify.taken) > 1 and any(rule.remembers for rule in rules):
            raise ValueError(f"verify: got {self.verify} with rules that remember; drafts need rules without a memory")

    def init(self, params: Params, s: State) -> Canvas:
        N, W, align = s.tokens.shape[1], self.windows.width, self.windows.align
        zero = lambda: jnp.zeros(s.batch, jnp.int32)
        start = s.prompt_length + 0 if align is None else s.prompt_length // align * align
        end = self.whole(s)
        tokens, open = self.adapter.canvas.fill(self.adapter, s.tokens, s.prompt_length, s.key)
        kept = s.prompt_length - 1 if self.traits.prefills else zero()
        slots = jnp.arange(N - W if self.traits.caches else 0, dtype=jnp.int32)
        c = Canvas(
            tokens=tokens, open=open, editable=open & True, when=jnp.full((s.batch, N), -1, jnp.int32),
            confidence=jnp.zeros((s.batch, N), jnp.float32), start=start, end=end, step=zero(), round=zero(),
            opened=zero(), full=zero(), kept=kept, refreshed=zero() - 1, final=start + 0,
            valid=slots < kept[:, None], drafts=None, memory=None,
            record=None if s.record is None else empty_record((s.batch, N), s.record.count))
        view = look(s, c, W)
        memory = {name: getattr(self, name).init(view) for name in RULES}
        memory["stops"] = tuple(stop.init(view) for stop in self.stops)
        if self.adapter.conditioning:
            c = c.replace(expected=jnp.zeros((s.batch, W, self.adapter.conditioning), jnp.float32))
        if self.verify.assists:
            c = c.replace(assistant=self.verify.begin(params, s, N - W))      # type: ignore[attr-defined]
        assert len(self.verify.taken) == 1 or not jax.tree.leaves(memory)       # `check_fit`
        return c.replace(opened=view.masked.sum(1, dtype=jnp.int32), memory=memory, drafts=self.no_drafts(view))

    def whole(self, s: State) -> Array:
        """Returns the position after the last token of each row's text, `i32[B]`, before any stop rule ends it: by the
        row's maximum length and the buffer, extended to whole windows for models that need them."""
        # a text beyond the buffer is cut there, and its status says so
        end = jnp.minimum(s.max_length, s.tokens.shape[1] - self.windows.width)
        if self.adapter.attention.overhangs and not self.adapter.canvas.given:
            start, align = s.prompt_length, self.windows.align
            end = self.windows.last(start if align is None else start // align * align, end)
        return end

    def guide(self, model: Model, params: Params, policy: Any, s: State, scale: Any) -> tuple[Model, State]:
        """Puts a state before its first round under classifier-free guidance, and returns the guided model and the new
        state. The unconditional branch has mask tokens in the prompt's place; `scale` is the guidance scale.
        """
        assert self.adapter.mask is not None        # or its traits refuse guidance
        return guide(self, model, params, policy, s, scale, self.adapter.mask,
                     bool(self.traits.prefills))

    def propose(self, params: Params, policy: Any, s: State) -> tuple[Window, Canvas]:
        return self.kinds[0].propose(params, policy, s)

    def decide(self, params: Params, dist: Any, s: State, window: Window, out: Out, algo: Canvas) -> Decision:
        return self.kinds[0].decide(params, dist, s, window, out, algo)

    # the steps of a round, for one canvas a row

    def advance(self, view: View, seen: Seen, memory: Any) -> View:
        """Takes one denoising step: unmasks and remasks positions of the window, and ends the text if a stop rule says
        so.

        Args:
            view: the windows before the step.
            seen: the model's predictions for their positions.
            memory: the memories of the rules, by field name.

        Returns:
            The windows after the step, at the same positions.
        """
        view = view.replace(active=self.windows.active(view, seen, memory["windows"]) & view.masked & seen.reached)
        score = self.score(view, seen, memory["score"])
        unmask = self.unmask(view, seen, score, memory["unmask"]) & view.active
        force = best(score, view.active, jnp.ones_like(view.step)) & ~unmask.any(1)[:, None]
        if self.unmask.patient:
            force = jnp.zeros_like(force)
        early = jnp.zeros(view.step.shape, bool)
        for stop, own in zip(self.stops, memory["stops"], strict=True):
            early = early | stop.early_stop(view, seen, own)
        unmask = jnp.where(early[:, None], view.masked & seen.reached, unmask | force)
        after = view.replace(
            tokens=jnp.where(unmask, seen.token, view.tokens), open=view.open & ~unmask, step=view.step + 1,
            round=view.round + 1, full=jnp.where(view.masked.any(1), 0, view.full + 1))
        new = self.remask(view, seen, after, memory["remask"])
        may = view.editable & view.inside & ~early[:, None]
        after = after.replace(tokens=jnp.where(may, new.tokens, after.tokens),
                              open=jnp.where(may, new.open, after.open))
        if not self.remask.noisy:
            after = after.replace(tokens=jnp.where(after.open & may, jnp.int32(self.adapter.blank), after.tokens))
        # a token that may still be remasked ends nothing, unless a stop rule has unmasked it for good
        open = self.remask.busy(view, after, memory["remask"]) & ~early
        for stop, own in zip(self.stops, memory["stops"], strict=True):
            cut = jnp.minimum(after.end, stop.end(view, seen, after, own))
            after = after.replace(end=jnp.where(open, after.end, cut))
        return after

    def drafts(self, view: View, c: Canvas) -> View:
        """Returns the `K` canvases of each row that a round scores, with axes `[B, K, ...]`: first the current one
        (`view`), then the stored drafts, which have taken some further steps in advance."""
        K = len(self.verify.taken)
        ahead = jnp.array([len(taken) for taken in self.verify.taken], jnp.int32)
        wide = jax.tree.map(lambda x: jnp.broadcast_to(x[:, None], (x.shape[0], K, *x.shape[1:])), view)
        if K > 1:
            stack = lambda own, more: jnp.concatenate([own[:, None], more], 1)
            tokens, open = c.drafts
            wide = wide.replace(tokens=stack(view.tokens, tokens), open=stack(view.open, open))
        return wide.replace(step=wide.step + ahead, round=wide.round + ahead)

    def no_drafts(self, view: View) -> Any:
        """Returns the stored drafts for a window that has none: `K - 1` copies of its tokens and undecided positions,
        which do not equal the result of a step and so are not accepted. None if the verifier uses no drafts."""
        more = len(self.verify.taken) - 1
        again = lambda x: jnp.broadcast_to(x[:, None], (x.shape[0], more, *x.shape[1:]))
        return None if more == 0 else (again(view.tokens), again(view.open))

    def wrap_model(self, model: Any) -> Any:
        """Returns the model with which the cache is made: `model`, or its wrapper if the caching rule has one."""
        return self.kinds[0].wrap_model(model)

    def phase(self, s: State) -> Array:
        """Returns for each row the index in `caching.phases` of the kind of round that it needs next, `i32[B]`."""
        return self.caching.phase(survey(s, s.algo, self.windows.width), s.algo.memory["caching"])

    def needs_refresh(self, s: State) -> Array:
        """Returns the rows that next need a wide round, which computes the whole text and rewrites the cache:
        `bool[B]`."""
        return self.caching.needs_refresh(survey(s, s.algo, self.windows.width), s.algo.memory["caching"])
