"""Several ways to draft, called arms, of which a controller chooses one for each round: a draft length, a source, or no
drafts.

An arm is a `Speculative` algorithm; `NOTHING` is the arm without drafts. All arms observe every round; trained heads
observe those without drafts later (`later`). The batch has one arm, since the window has one shape. With `SeedExact`
the tokens do not depend on the choice; with other verifiers their distribution does not.

In rounds without drafts, drafts that come from the text (`Drafter.free`) are tested without a forward pass: now and
then one is looked up, stored, and compared with the tokens of plain decoding. This shows how often they would be
accepted, at the cost of the lookup alone.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from decodax.algorithms.speculative.adaptive.controllers import Arms, Controller, RoundOutcome
from decodax.algorithms.speculative.adaptive.later import MOST, after_reading, empty_unread, with_chunk, with_round
from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafter import CHAINS
from decodax.algorithms.speculative.drafts.model.draft_model import DraftModel
from decodax.algorithms.speculative.drafts.text.prompt_lookup import PromptLookup
from decodax.algorithms.speculative.fixed_trees import Chain
from decodax.algorithms.speculative.source import Draft, Drawn
from decodax.algorithms.speculative.tree import Proposal
from decodax.common.struct import Struct, struct
from decodax.core.algorithm import Algorithm, ChecksFit, LearnsFromPrompt, Traits, Varies, prefill_observer
from decodax.core.around import Around
from decodax.core.cache import NONE, Feature
from decodax.core.state import State
from decodax.core.types import Decision, Out, Params
from decodax.core.window import Window, take


@dataclasses.dataclass(frozen=True)
class Nothing(Draft):
    """A draft that proposes no tokens, so that the round is one step of plain decoding."""

    length: ClassVar[int] = 0
    cache_needs: ClassVar[frozenset[Feature]] = CHAINS

    def propose(self, params: Params, policy: Any, s: State, state: Any, drawn: Drawn) -> tuple[Proposal, Any]:
        return Proposal(tokens=jnp.zeros((s.batch, 0), jnp.int32), live=jnp.zeros((s.batch, 0), bool)), state


NOTHING = Speculative(Nothing())
"""The arm without drafts, plain decoding."""


def chains(draft: Any, lengths: tuple[int, ...]) -> tuple[Speculative, ...]:
    """Returns one `Speculative` algorithm (arm) for each draft length in `lengths`. The drafts are chains of the draft
    model `draft`, a result of `decodax.load`, or of prompt lookup if it is None; length 0 is plain decoding."""
    source = PromptLookup(max(lengths)) if draft is None else DraftModel(draft)
    return tuple(NOTHING if k == 0 else Speculative(source, shape=Chain(k)) for k in lengths)


@struct
class Paper(Struct):
    """Drafts that are compared with the tokens of plain decoding, without a forward pass.

    Attributes:
        tokens: `i32[B, K]`, the drafts, padded with -1.
        next: `i32[B]`, index of the draft that is compared with the next token.
        held: `bool[B]`, True if all drafts before it were equal; False before the first draft.
    """

    tokens: Array
    next: Array
    held: Array


EVERY = 8
"""Number of rounds between lookups of drafts that are only compared. Their cost is then small compared with the rounds,
even of a tiny model."""


@dataclasses.dataclass(frozen=True)
class Adaptive(LearnsFromPrompt, Varies, ChecksFit):
    """Speculative decoding with several arms, of which a controller chooses one for each round.

    Attributes:
        arms: the algorithms; arms with equal drafts share the draft's state.
        controller: the rule that chooses the next arm.

    Raises:
        ValueError: no arms, arms whose verifiers have different guarantees, or two drafts that differ only in their
            weights (a corpus, a model's parameters), since compiled programs could not distinguish them.
    """

    arms: tuple[Speculative, ...]
    controller: Controller

    def __post_init__(self) -> None:
        if not self.arms:
            raise ValueError("arms: got none, takes one or more")
        if len(kinds := {arm.traits.guarantee for arm in self.arms if arm != NOTHING}) > 1:
            raise ValueError(f"arms: keep different guarantees ({', '.join(sorted(kinds))}), takes one")
        told: dict[Any, Any] = {}
        for draft in (arm.draft for arm in self.arms):
            if (other := told.setdefault(draft.bare(), draft)) is not draft and not _same(other.weights, draft.weights):
                raise ValueError(f"arms: got two {type(draft).__name__} that differ in their weights alone, takes arms "
                                 "that differ in another option too, or share the weights")

    @functools.cached_property
    def traits(self) -> Traits:
        arms = [arm.traits for arm in self.arms]
        guarantee = next((arm.traits.guarantee for arm in self.arms if arm != NOTHING), NOTHING.traits.guarantee)
        return Traits(emits=max(arm.emits for arm in arms), guarantee=guarantee,
                      needs=NONE.union(*(arm.needs for arm in arms)), window=max(arm.window for arm in arms))

    def check_fit(self, model: Any, cache: Any) -> None:
        for arm in self.arms:
            arm.check_fit(model, cache)
        self.controller.check_arms(len(self.arms))

    @functools.cached_property
    def drafts(self) -> tuple[Any, ...]:
        """The different drafts of all arms, in the order of their first arm. Arms with equal drafts share one, and its
        state."""
        return tuple(dict.fromkeys(arm.draft for arm in self.arms))

    @property
    def weights(self) -> Any:
        return tuple(draft.weights for draft in self.drafts)

    @property
    def variants(self) -> tuple[_Arm, ...]:
        """The algorithms of which the core runs one in each round: one for each arm, and, if some drafts defer reading
        (see `deferred`), a last one that is plain decoding after which these drafts read what they have missed."""
        last = (_Arm(self, self.arms.index(NOTHING), tells=True),) if self.deferred else ()
        return (*(_Arm(self, i) for i in range(len(self.arms))), *last)

    @functools.cached_property
    def deferred(self) -> tuple[int, ...]:
        """Indices, in `drafts`, of the drafts that do not read the target's output in each round of plain decoding but
        later, several rounds at once (`Drafter.defers`). Empty if no arm is plain decoding."""
        return () if NOTHING not in self.arms else tuple(i for i, draft in enumerate(self.drafts) if draft.defers)

    @functools.cached_property
    def skips_prompts(self) -> bool:
        """True if the `deferred` drafts read the last tokens of a prompt alone, before the first drafts. This holds
        if decoding begins without drafts and none of these drafts has to read every token."""
        first = self.controller.first(self.known)
        return (bool(self.deferred) and first is not None and self.arms[first] == NOTHING
                and all(self.drafts[i].takes_gaps for i in self.deferred))

    @functools.cached_property
    def known(self) -> Arms:
        """Description of the arms for the controller: lengths, which arms share a draft, and which are also compared
        for free."""
        free = {self.arms[i].draft for i in self.free}
        return Arms(lengths=tuple(arm.traits.emits - 1 for arm in self.arms),
                    families=tuple(self.drafts.index(arm.draft) for arm in self.arms),
                    on_paper=tuple(arm.draft in free for arm in self.arms))

    def init(self, params: Params, s: State) -> Any:
        states = [next(arm for arm in self.arms if arm.draft == draft).drafter.init(self._own(params, draft), s)
                  for draft in self.drafts]
        return (self.controller.init(self.known, s.batch), tuple(states), tuple(self._papers(s.batch)),
                empty_unread(self._forms(params, s), s.batch))

    def _forms(self, params: Params, s: State) -> tuple[Any, ...]:
        """Returns zeros in the form of what each of the `deferred` drafts reads of the target's output."""
        return tuple(self.drafts[i].unread(self._own(params, self.drafts[i]), s.batch) for i in self.deferred)

    def choose(self, params: Params, policy: Any, s: State) -> Array:
        arm = self.controller.choose(self.known, s.algo[0], s)
        if not self.deferred:
            return arm
        unread = jnp.where(s.running, s.algo[3].count, 0).max()
        due = (unread > 0) & (arm != self.arms.index(NOTHING))
        if not all(self.drafts[i].takes_gaps for i in self.deferred):
            due |= unread >= MOST
        return jnp.where(due, len(self.arms), arm)

    def propose(self, params: Params, policy: Any, s: State) -> tuple[Window, Any]:
        return self._first.propose(params, policy, s)

    def decide(self, params: Params, dist: Any, s: State, window: Window, out: Out, algo: Any) -> Decision:
        return self._first.decide(params, dist, s, window, out, algo)

    @property
    def _first(self) -> _Arm:
        """The rounds of the first arm, for a caller that does not choose; no draft reads their output later."""
        return self.variants[-1 if self.deferred and self.arms[0] == NOTHING else 0]

    @property
    def prefill_observer(self) -> Adaptive | None:
        return None if all(prefill_observer(arm) is None for arm in self.arms) else self

    def observe(self, params: Params, s: State, window: Window, out: Out, algo: Any) -> Any:
        """Returns the state of the algorithm after all drafts have read a prefill chunk of the prompts."""
        control, states, papers, unread = algo
        if self.skips_prompts:
            unread = with_chunk(unread, self._forms(params, s), window, out)
        states = self._tell(params, s, window, out, None, states, self.deferred if self.skips_prompts else ())
        return control, states, papers, unread

    @functools.cached_property
    def free(self) -> tuple[int, ...]:
        """Indices of the arms whose drafts are also made in rounds of plain decoding and compared with its tokens,
        since they cost no model (`Drafter.free`): of each such draft the longest arm. Empty if the controller does not
        use the comparison."""
        if NOTHING not in self.arms or not self.controller.notes:
            return ()
        longest = {arm.draft: i for i, arm in sorted(enumerate(self.arms), key=lambda x: x[1].traits.emits)
                   if arm.draft.free}
        return tuple(longest.values())

    def _papers(self, batch: int) -> list[Paper]:
        return [Paper(tokens=jnp.full((batch, self.arms[i].traits.emits - 1), -1, jnp.int32),
                      next=jnp.zeros(batch, jnp.int32), held=jnp.zeros(batch, bool)) for i in self.free]

    def _tell(self, params: Params, s: State, window: Window, out: Out, decision: Decision | None, states: Any,
              later: tuple[int, ...] = ()) -> Any:
        """Returns the states of the drafts after a round or a prefill chunk; those with the indices `later` do not
        change."""
        return tuple(x if i in later else self._drafter(i).observe(self._own(params, self.drafts[i]), s, window, out,
                                                                   decision, x) for i, x in enumerate(states))

    def _tell_later(self, params: Params, s: State, out: Out, unread: Any, states: Any) -> Any:
        """Returns the states of the drafts, after drafts that read rounds later have read the rounds so far."""
        forms = self._forms(params, s)
        new = {i: after_reading(unread, n, forms[n], self._drafter(i), self._own(params, self.drafts[i]), s, out,
                                states[i])
               for n, i in enumerate(self.deferred)}
        return tuple(new.get(i, x) for i, x in enumerate(states))

    def _drafter(self, index: int) -> Draft:
        return next(arm for arm in self.arms if arm.draft == self.drafts[index]).drafter

    def _own(self, params: Params, draft: Any) -> Params:
        return params if params.draft is None else params.replace(draft=params.draft[self.drafts.index(draft)])


@dataclasses.dataclass(frozen=True)
class _Arm(Around):
    """The rounds of one arm; all arms observe them. `tells` is True for those of `NOTHING` that also tell drafts of the
    rounds before."""

    adaptive: Adaptive
    index: int
    tells: bool = False

    @property
    def inner(self) -> Adaptive:
        """The method with all arms, which have a common state, weights and cache."""
        return self.adaptive

    @property
    def arm(self) -> Speculative:
        return self.adaptive.arms[self.index]

    @property
    def traits(self) -> Traits:
        return dataclasses.replace(super().traits, commits=self.arm.traits.commits)

    @property
    def variants(self) -> tuple[Algorithm, ...]:
        return ()

    def propose(self, params: Params, policy: Any, s: State) -> tuple[Window, Any]:
        control, states, papers, unread = s.algo
        own = self.adaptive.drafts.index(self.arm.draft)
        window, (state, tree) = self.arm.propose(self.adaptive._own(params, self.arm.draft), policy,
                                                 s.replace(algo=(states[own], None)))
        if self.arm == NOTHING:
            papers = tuple(self._renew(i, params, policy, s, paper)
                           for i, paper in zip(self.adaptive.free, papers, strict=True))
        return window, ((control, tuple(state if i == own else x for i, x in enumerate(states)), papers, unread), tree)

    def _renew(self, index: int, params: Params, policy: Any, s: State, paper: Paper) -> Paper:
        arm, K = self.adaptive.arms[index], paper.tokens.shape[1]
        over = ~paper.held | (paper.next >= K)
        due = (s.running & over).any() & (s.stats.rounds.max() % EVERY == 0)

        def look() -> Paper:
            at = self.adaptive.drafts.index(arm.draft)
            found, _ = arm.drafter.propose(self.adaptive._own(params, arm.draft), policy, s, s.algo[1][at],
                                           arm.verify.drawn)
            tokens = jnp.where(over[:, None], jnp.where(found.live, found.tokens, -1), paper.tokens)
            return Paper(tokens=tokens, next=jnp.where(over, 0, paper.next), held=over | paper.held)

        return lax.cond(due, look, lambda: paper)

    def _compare(self, control: Any, papers: Any, s: State, d: Decision, seen: RoundOutcome) -> tuple[Any, Any]:
        """Compares stored drafts with this round's tokens. A round in which another arm drafted drops them."""
        if self.arm != NOTHING:
            return control, tuple(paper.replace(held=jnp.zeros_like(paper.held)) for paper in papers)
        renewed = []
        for index, paper in zip(self.adaptive.free, papers, strict=True):
            K = paper.tokens.shape[1]
            tried = paper.held & (paper.next < K) & s.running
            held = tried & (take(paper.tokens, jnp.minimum(paper.next, K - 1)[:, None])[:, 0] == d.tokens[:, 0])
            at = paper.next[:, None] == jnp.arange(self.traits.emits - 1)
            own = seen.replace(arm=index, tried=tried[:, None] & at, held=held[:, None] & at)
            control = self.adaptive.controller.note(self.adaptive.known, control, own)
            renewed.append(paper.replace(next=paper.next + 1, held=held))
        return control, tuple(renewed)

    def decide(self, params: Params, dist: Any, s: State, window: Window, out: Out, algo: Any) -> Decision:
        (control, states, papers, unread), tree = algo
        d = self.arm.judge(dist, s, window, out, tree)
        assert d.accepted is not None
        depth, running = jnp.arange(1, self.traits.emits), s.running[:, None]
        seen = RoundOutcome(
            arm=self.index, running=s.running, tokens=d.count, accepted=d.accepted,
            tried=running & (depth <= d.accepted[:, None] + 1) & (depth < self.arm.traits.emits),
            held=running & (depth <= d.accepted[:, None]))
        if self.tells:
            states = self.adaptive._tell_later(params, s, out, unread, states)
            unread = unread.replace(count=jnp.zeros_like(unread.count))
        later = self.adaptive.deferred if self.arm == NOTHING and not self.tells else ()
        states = self.adaptive._tell(params, s, window, out, d, states, later)
        unread = with_round(unread, self.adaptive._forms(params, s), s, out) if later else unread
        if not self.tells:      # a round that was not chosen for what it does
            control = self.adaptive.controller.update(self.adaptive.known, control, seen)
        control, papers = self._compare(control, papers, s, d, seen)
        return d.replace(algo=(control, states, papers, unread))


def _same(a: Any, b: Any) -> bool:
    """Returns True if two pytrees of weights have the same arrays."""
    equal = lambda x, y: x is y or (isinstance(x, np.ndarray) and isinstance(y, np.ndarray) and np.array_equal(x, y))
    one, other = jax.tree.leaves(a), jax.tree.leaves(b)
    return len(one) == len(other) and all(map(equal, one, other))
