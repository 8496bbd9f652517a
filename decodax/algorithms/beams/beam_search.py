"""Beam search: keeps the most promising texts of a prompt side by side, one round a token.

The rules are those of the vectorised search of transformers, for each prompt by itself. Beam sampling, patience,
diverse groups, regularised scores and drafted beams are options of the same class.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from decodax.algorithms.beams.pool import Finished, append
from decodax.algorithms.beams.step import Beams, BeamText, Group, Step
from decodax.algorithms.beams.uid import UID
from decodax.algorithms.speculative.contracts import propose
from decodax.algorithms.speculative.fixed_trees import Fixed
from decodax.algorithms.speculative.grown import Grown
from decodax.algorithms.speculative.source import Draft, Shape, Source
from decodax.algorithms.speculative.tree import tree, window
from decodax.common.options import Count, Positive
from decodax.common.registry import ALGORITHMS
from decodax.core.algorithm import Concludes, Grouped, LearnsFromPrompt, Traits
from decodax.core.cache import NONE
from decodax.core.composed import data
from decodax.core.record import Record, record
from decodax.core.state import State, Status
from decodax.core.types import Decision, Out, Params
from decodax.core.window import Window, causal, take

EarlyStopping = bool | Literal["never"]
Counting = Literal["chosen", "candidates"]


TWO_CHAINS = Fixed.of([[0], [1], [0, 0], [1, 0], [0, 0, 0], [1, 0, 0]])
"""Survivors often come from one beam, so a window must hold more than the likeliest token."""


@dataclasses.dataclass(frozen=True)
class BeamSearch(LearnsFromPrompt, Grouped, Concludes):
    """Beam search, and beam sampling where the policy samples.

    Each step takes the best candidates of all live beams of a prompt. Those that end and are among the best `width` go
    to a pool, scored by their log-probability over `length ** length_penalty`; the best of the others live on. The
    policy acts on log-probabilities, and its output is not normalised again unless `renormalize` is set. The search
    under a ban or a grammar therefore finds the likeliest of the allowed texts. If the policy samples,
    log-probabilities are divided by its temperature, and the candidates are drawn without replacement.

    The result has the best `returns` texts of each prompt, the best first. A text that does not exist ends as
    `Status.DEAD_END` and is empty. Numbers may change without a retrace.

    Attributes:
        width: `K`, number of live beams of a prompt, and of places of its pool.
        returns: number of texts of a prompt in the result.
        length_penalty: exponent of the length by which a score is divided; positive prefers long texts, negative short
            ones.
        early_stopping: when the search of a prompt is over. True: once the pool has had `patience` times `K` texts.
            False: once no live beam would enter a full pool if it ended at its present length. "never": once none can
            at any length.
        patience: factor of `K` with `early_stopping=True` (Kasai et al., 2022).
        groups: `G`, number of groups of `K / G` beams, which are searched one after the other, each with a pool of its
            own (Diverse Beam Search: Vijayakumar et al., 2016).
        diversity_penalty: loss of score for each time that earlier groups have taken the token in this step.
        counting: tokens that count as taken: those "chosen" by live beams, as in transformers, or those among the
            "candidates", as in fairseq.
        uid: a regulariser of surprisal, which is subtracted from the score with weight `strength`; None for none.
        renormalize: normalise the policy's output.
        draft: a draft or source that drafts a tree for each beam. A round makes steps as long as the trees contain all
            live beams. The result is that of the search without it.
        shape: how the tree of a `Source` grows; default the two likeliest tokens, each with a chain of two after it.

    Raises:
        ValueError: a number out of its range, or a combination that makes no sense.
    """

    width: int
    returns: int = 1
    length_penalty: float = data(1.0, bare=1.0)
    early_stopping: EarlyStopping = False
    patience: float = data(1.0, bare=1.0)
    groups: int = 1
    diversity_penalty: float = data(0.0, bare=0.0)
    counting: Counting = "chosen"
    uid: UID | None = None
    strength: float = data(0.0, bare=0.0)
    renormalize: bool = False
    draft: Draft | Source | None = None
    shape: Shape | None = None

    def __post_init__(self) -> None:
        at_least = lambda name, low: getattr(self, name) >= low
        for name, low in (("width", 1), ("returns", 1), ("groups", 1), ("diversity_penalty", 0), ("strength", 0)):
            if not at_least(name, low):
                raise ValueError(f"{name}: got {getattr(self, name)!r}, takes {low} or more")
        if self.returns > self.width:
            raise ValueError(f"returns: got {self.returns} for a width of {self.width}, takes at most that")
        if self.width % self.groups:
            raise ValueError(f"groups: got {self.groups} for a width of {self.width}, takes a divisor of it")
        if self.early_stopping not in (True, False, "never"):
            raise ValueError(f"early_stopping: got {self.early_stopping!r}, takes True, False or 'never'")
        if not self.patience > 0 or (self.patience != 1 and self.early_stopping is not True):
            raise ValueError(f"patience: got {self.patience!r} with early_stopping={self.early_stopping!r}, takes a "
                             "number above 0 with early_stopping=True")
        if self.counting not in ("chosen", "candidates"):
            raise ValueError(f"counting: got {self.counting!r}, takes 'chosen' or 'candidates'")
        if self.shape is not None and not isinstance(self.draft, Source):
            raise ValueError(f"shape: got one with {type(self.draft).__name__}, which makes its own trees or none; "
                             "takes a Source")
        if self.strength and self.uid is None:
            raise ValueError(f"strength: got {self.strength!r} without uid")

    @property
    def traits(self) -> Traits:
        emits = 1 if self.drafter is None else self.drafter.length + 1
        return Traits(f"BeamSearch({self.width})", emits, commits=emits, samples=self.width, answers=self.returns,
                      needs=NONE if self.drafter is None else self.drafter.cache_needs)

    @property
    def drafter(self) -> Draft | None:
        if isinstance(self.draft, Source):
            return Grown(self.draft, self.shape or self.draft.shape or TWO_CHAINS)
        return self.draft

    def answering(self, count: int) -> BeamSearch:
        if count > self.width:
            raise ValueError(f"num_samples: got {count} for {self.width} beams, takes at most as many")
        return dataclasses.replace(self, returns=count)

    @property
    def weights(self) -> Any:
        """Numbers that may change without a retrace, and the draft's weights."""
        number = lambda x: np.float32(x)
        return (tuple(map(number, (self.length_penalty, self.patience, self.diversity_penalty, self.strength))),
                None if self.draft is None else self.draft.weights)

    @property
    def observer(self) -> Any:
        reader = None if self.drafter is None else self.drafter.reader
        return None if reader is None else BeamReader(reader)

    def findings(self, s: State) -> dict[str, Array]:
        """Returns `score`; `log_prob` of the text; `beam_indices` `i32[B, N]`, the beam that each token continued, -1
        after the last."""
        held = s.algo.finished
        return {"score": held.score, "log_prob": held.log_prob, "beam_indices": held.beams}

    def init(self, params: Params, s: State) -> Beams:
        zeros = jnp.zeros(s.batch, jnp.float32)
        return Beams(score=zeros, log_prob=zeros, beams=jnp.full_like(s.tokens, -1),
                     memory=self.memory(params, zeros), finished=Finished.empty(s),
                     ended=jnp.zeros_like(s.length), over=jnp.zeros(s.batch, bool),
                     drafts=None if self.drafter is None else self.drafter.init(self._of_draft(params), s))

    def memory(self, params: Params, like: Array) -> Any:
        """Returns the search's memory of texts without a token; `like` is `f32[B]`."""
        return None if self.uid is None else self.uid.init(like)

    def stepper(self, params: Params, *scored: Any) -> Step:
        """Returns the `Step` of a round; `scored` are its further arguments."""
        return Step(self, params.draft[0], *scored)

    def _of_draft(self, params: Params) -> Params:
        return params.replace(draft=None if params.draft is None else params.draft[1])

    def propose(self, params: Params, policy: Any, s: State) -> tuple[Window, Any]:
        if self.drafter is None:
            return causal(s.newest[:, None], s.length - 1, s.running[:, None]), (s.algo, None)
        drawn: Any = "ranked"
        proposal, drafts = propose(self.drafter, self._of_draft(params), policy, s, s.algo.drafts, drawn)
        t = tree(s.newest, proposal, self.drafter.length)
        return window(t, s.length - 1, s.running, proposal.probes, proposal.begun), (s.algo.replace(drafts=drafts), t)

    def decide(self, params: Params, dist: Any, s: State, window: Window, out: Out, algo: Any) -> Decision:
        algo, t = algo
        if t is not None and window.width > t.size:
            dist = dist.first(t.size)
        raw = jax.nn.log_softmax(dist.logits(), -1)
        # the policy acts on log-probabilities; at temperature 1 where it is greedy
        processed = dist.scores(raw)
        if self.renormalize:
            processed = jax.nn.log_softmax(processed, -1)
        step = self.stepper(params, dist.policy, s, processed, t)
        groups = step.begin(algo)
        if self.traits.emits == 1:
            groups = step(groups)
        else:
            groups = lax.while_loop(lambda groups: functools.reduce(jnp.logical_or, [g.goes.any() for g in groups]),
                                    step, groups)
        d, algo = self._decision(s, window, raw, processed, algo, groups)
        if self.drafter is not None:
            assert t is not None and d.rows is not None
            rows = d.rows
            d = d.replace(drafted=t.live[:, 1:].sum(1, dtype=jnp.int32), accepted=jnp.maximum(d.count - 1, 0))
            # a state with one row is the same for all rows
            drafts = jax.tree.map(lambda x: x if x.shape[0] == 1 else x[rows], algo.drafts)
            algo = algo.replace(drafts=self.drafter.observe(s.succeed(rows), window.select(rows), out.rows(rows), d,
                                                            drafts))
        return d.replace(algo=algo)

    def _decision(self, s: State, window: Window, raw: Array, processed: Array, algo: Beams,
                  groups: tuple[Group, ...]) -> tuple[Decision, Beams]:
        """What a round comes to."""
        k, B = self.width // self.groups, s.batch
        flat = lambda xs: jnp.concatenate(xs, 1).reshape(B, *xs[0].shape[2:])
        rows_of = lambda pick: jax.tree.map(lambda *xs: flat(xs), *map(pick, groups))
        each = lambda x: jnp.repeat(x[:, None], k, 1)
        live, done = rows_of(lambda g: g.live), rows_of(lambda g: g.finished)
        over, ended, steps = rows_of(lambda g: (each(g.over), each(g.ended), each(g.steps)))
        own = jnp.arange(B, dtype=jnp.int32)
        first = own // k * k                                            # of each row's group
        broken = jnp.isnan(processed).any((1, 2)) & s.running
        broken = jnp.repeat(broken.reshape(-1, self.width).any(1), self.width)
        works = s.running & ~broken
        where = lambda new, old: jax.tree.map(
            lambda a, b: jnp.where(works.reshape(-1, *[1] * (a.ndim - 1)), a, b), new, old)

        # the live beams
        rows, count = where(first + live.origin, own), jnp.where(works & ~over, steps, 0)
        on = (live.nodes[:, :, None] == jnp.arange(window.width)) & (
            jnp.arange(self.traits.emits, dtype=jnp.int32) < count[:, None])[:, :, None]
        slots = jnp.where(on.any(1), window.positions[rows], -1)
        status = jnp.where(broken, jnp.int32(Status.INVALID), jnp.where(works & over, jnp.int32(Status.LENGTH),
                                                                        jnp.int32(Status.RUNNING)))
        made = s.length - s.prompt_length
        score, log_prob, memory = where((live.score, live.log_prob, live.memory),
                                        (algo.score, algo.log_prob, algo.memory))
        beams = append(algo.beams[rows], live.beams, made[rows], count)

        # finished texts: from a live beam, or from their places
        joins = works & (done.origin < k)
        source = where(first + jnp.where(done.origin < k, done.origin, done.origin - k), own)
        new = jnp.where(joins, done.count, 0)
        held = algo.finished.select(source)
        text = lambda live, held: jax.tree.map(
            lambda a, b: jnp.where(joins.reshape(-1, *[1] * (a.ndim - 1)), a[source], b), live, held)
        noted = text(s.record, held.record)
        if s.record is not None:
            noted = jax.tree.map(lambda x, y: append(x, y, s.length[source], new), noted,
                                 self._record(raw, source, done, s.record.count))
        finished = Finished(
            tokens=append(text(s.tokens, held.tokens), done.tokens, s.length[source], new),
            length=text(s.length, held.length) + new, record=noted,
            beams=append(text(algo.beams, held.beams), done.beams, made[source], new),
            **{n: where(getattr(done, n), getattr(algo.finished, n)) for n in ("status", "score", "log_prob")})
        algo = algo.replace(score=score, log_prob=log_prob, memory=memory, beams=beams, finished=finished,
                            ended=where(ended, algo.ended), over=algo.over | (works & over))
        noted = None if s.record is None else self._record(raw, rows, live, s.record.count)
        return Decision(tokens=live.tokens, count=count, slots=slots, source=live.nodes, algo=None, rows=rows,
                        status=status, record=noted), algo

    def _record(self, raw: Array, rows: Array, text: BeamText, count: int) -> Record:
        """Returns the record of the new tokens of texts `[B, M]`, decided at nodes of rows `rows`."""
        logits = take(raw[rows], text.nodes)
        return record(logits, logits, text.tokens, count).replace(processed=text.processed)

    def outcome(self, s: State) -> State:
        """Returns the best texts of each prompt. Where the search was cut short, live beams take the empty places."""
        by_prompt = lambda x: x.reshape(s.batch // self.width, self.width, *x.shape[1:])
        held, algo = s.algo.finished, s.algo
        filled, cut = held.score > -jnp.inf, ~algo.over & (algo.score > -jnp.inf)
        none = jnp.where(s.status == Status.INVALID, s.status, jnp.int32(Status.DEAD_END))
        ended = held.replace(length=jnp.where(filled, held.length, s.prompt_length),
                             status=jnp.where(filled, held.status, none))
        live = Finished(tokens=s.tokens, length=s.length, status=s.status, score=jnp.where(cut, algo.score, -jnp.inf),
                        log_prob=algo.log_prob, beams=algo.beams, record=s.record)
        both = jax.tree.map(lambda a, b: jnp.concatenate([by_prompt(a), by_prompt(b)], 1), ended, live)
        # ended texts come before live ones, and both before empty places
        rank = jnp.concatenate([by_prompt(jnp.where(filled, 0, 2)), by_prompt(jnp.where(cut, 1, 3))], 1)
        order = jnp.lexsort((-both.score, rank), axis=1)[:, :self.width]
        best = jax.tree.map(lambda x: take(x, order).reshape(s.batch, *x.shape[2:]), both)
        return s.replace(tokens=best.tokens, length=best.length, status=best.status, record=best.record,
                         algo=algo.replace(finished=best))


@dataclasses.dataclass(frozen=True)
class BeamReader:
    """Observer of a search with drafts, which passes prompts to the draft's reader."""

    reader: Any

    def observe(self, s: State, window: Window, out: Out, algo: Beams) -> Beams:
        return algo.replace(drafts=self.reader.observe(s, window, out, None, algo.drafts))


@ALGORITHMS.register("beam-search", "Beam search", "", family="search")
def beam_search(width: Count = 4, length_penalty: float = 1.0, early_stopping: EarlyStopping = False, *,
                num_beam_groups: Count = 1, diversity_penalty: float = 0.0, patience: Positive = 1.0,
                renormalize: bool = False, draft: Any = None) -> BeamSearch:
    """Finds likely texts by keeping the best `width` beginnings of each prompt.

    For tasks with one right answer, such as translation. The rules and options are those of transformers.
    `algorithms.beam_search(4)` is its `num_beams=4`. The result has the best text of each prompt, or the best
    `num_samples`; `findings` has their scores.

    Args:
        width: number of beams of a prompt.
        length_penalty: exponent of the length by which a score is divided: positive prefers long texts, negative short
            ones, 0 compares log-probabilities.
        early_stopping: True: the search is over once `width` texts have ended. False: once no beam would be among the
            best if it ended now. "never": once none can be at any length.
        num_beam_groups: number of groups that are searched one after the other (diverse beam search).
        diversity_penalty: loss of score for each earlier group that has taken a token in this step.
        patience: with `early_stopping=True`, number of ended texts that end the search, in multiples of `width`.
        renormalize: normalise log-probabilities again after penalties and bans.
        draft: a draft or source of drafts; beams then take several steps in a forward, with the same result. None: one
            step a forward.
    """
    return BeamSearch(width, length_penalty=length_penalty, early_stopping=early_stopping, groups=num_beam_groups,
                      diversity_penalty=diversity_penalty, patience=patience, renormalize=renormalize, draft=draft)
