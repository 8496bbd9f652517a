"""Beam search: extends several texts of a prompt side by side, one token in each round, and keeps the best.

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

from decodax.algorithms.beams.beam_search import BeamStep
from decodax.algorithms.beams.pool import Finished, append
from decodax.algorithms.beams.step import Beams, BeamText, Group
from decodax.algorithms.beams.uid import UID
from decodax.algorithms.speculative.contracts import propose
from decodax.algorithms.speculative.fixed_trees import Fixed
from decodax.algorithms.speculative.grown import Grown
from decodax.algorithms.speculative.source import Draft, Shape, Source
from decodax.algorithms.speculative.tree import tree, window
from decodax.common.options import Count, NonNegative, check_options
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
"""Default draft tree of a beam: the two most likely tokens, each with a chain of two after it. Several new beams often
continue the same beam, so a tree with only the most likely token would not contain them."""


@dataclasses.dataclass(frozen=True)
class BeamSearch(LearnsFromPrompt, Grouped, Concludes):
    """Beam search; beam sampling if the policy samples.

    Each step ranks the extensions of all live beams of a prompt by one token. Extensions that end, if they are among
    the best `width`, go to a pool of finished texts, with their log-probability divided by `length ** length_penalty`
    as score. The best `width` others are the new live beams. The policy is applied to log-probabilities, and its output
    is normalised again only with `renormalize`, so under a ban or a grammar the search finds the most likely of the
    allowed texts. If the policy samples, log-probabilities are divided by its temperature, and the extensions are drawn
    without replacement.

    The result has the best `returns` texts of each prompt, the best first. If there are fewer, the others are empty and
    have `Status.DEAD_END`. Numbers that are not static (`length_penalty`, `patience`, `diversity_penalty`, `strength`)
    may change without a retrace.

    Attributes:
        width: `K`, number of live beams of a prompt, and size of its pool.
        returns: number of texts of a prompt in the result.
        length_penalty: exponent of the length by which a score is divided; positive prefers long texts, negative short
            ones.
        early_stopping: when the search of a prompt ends. True: when `patience * K` texts have finished. False: when no
            live beam would enter the full pool if it ended at its present length. "never": when none could enter it at
            any length.
        patience: factor of `K` with `early_stopping=True` (Kasai et al., 2022).
        groups: `G`, number of groups of `K / G` beams, which are searched one after the other, each with a pool of its
            own (Diverse Beam Search: Vijayakumar et al., 2016).
        diversity_penalty: amount subtracted from the score of a token for each time that earlier groups have taken it
            in this step.
        counting: tokens that count as taken: those "chosen" by live beams, as in transformers, or those among the
            "candidates", as in fairseq.
        uid: a regulariser of surprisal, subtracted from the score with weight `strength`; None: none.
        strength: weight of `uid`.
        renormalize: True: normalise the policy's output.
        draft: a draft or source that drafts a tree for each beam. A round then makes several steps, as long as the
            trees contain all live beams. The result is that of the search without drafts.
        shape: shape of the tree of a `Source`; default the two most likely tokens, each with a chain of two after it.

    Raises:
        ValueError: a number out of its range, or options that cannot be combined.
    """

    width: Count
    returns: Count = 1
    length_penalty: float = data(1.0, bare=1.0)
    early_stopping: EarlyStopping = False
    patience: float = data(1.0, bare=1.0)
    groups: Count = 1
    diversity_penalty: NonNegative = data(0.0, bare=0.0)
    counting: Counting = "chosen"
    uid: UID | None = None
    strength: NonNegative = data(0.0, bare=0.0)
    renormalize: bool = False
    draft: Draft | Source | None = None
    shape: Shape | None = None

    def __post_init__(self) -> None:
        if self.early_stopping not in (True, False, "never"):
            raise ValueError(f"early_stopping: got {self.early_stopping!r}, takes True, False or 'never'")
        check_options(type(self), vars(self))
        if self.returns > self.width:
            raise ValueError(f"returns: got {self.returns} for a width of {self.width}, takes at most that")
        if self.width % self.groups:
            raise ValueError(f"groups: got {self.groups} for a width of {self.width}, takes a divisor of it")
        if not self.patience > 0 or (self.patience != 1 and self.early_stopping is not True):
            raise ValueError(f"patience: got {self.patience!r} with early_stopping={self.early_stopping!r}, takes a "
                             "number above 0 with early_stopping=True")
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
        """The arguments of the compiled programs that may change without a retrace: a pair of the numbers (length
        penalty, patience, diversity penalty, strength), `f32[]` each, and the draft's weights or None."""
        number = lambda x: np.float32(x)
        return (tuple(map(number, (self.length_penalty, self.patience, self.diversity_penalty, self.strength))),
                None if self.draft is None else self.draft.weights)

    @property
    def prefill_observer(self) -> Any:
        reader = None if self.drafter is None else self.drafter.prefill_observer
        return None if reader is None else BeamReader(reader)

    def findings(self, s: State) -> dict[str, Array]:
        """Returns `score`, `f32[B]`; `log_prob`, `f32[B]`, log-probability of each text; and `beam_indices`, `i32[B,
        N]`, the beam that each token continued, -1 after the last token."""
        held = s.algo.finished
        return {"score": held.score, "log_prob": held.log_prob, "beam_indices": held.beams}

    def init(self, params: Params, s: State) -> Beams:
        zeros = jnp.zeros(s.batch, jnp.float32)
        return Beams(score=zeros, log_prob=zeros, beams=jnp.full_like(s.tokens, -1),
                     memory=self.memory(params, zeros), finished=Finished.empty(s),
                     ended=jnp.zeros_like(s.length), over=jnp.zeros(s.batch, bool),
                     drafts=None if self.drafter is None else self.drafter.init(self._of_draft(params), s))

    def memory(self, params: Params, like: Array) -> Any:
        """Returns the initial additional state of all beams, such as the statistics of surprisals of `uid`: a pytree
        with leading axis `B`, or None if the search has none. `like` is any `f32[B]`, used for its shape."""
        return None if self.uid is None else self.uid.init(like)

    def stepper(self, params: Params, *scored: Any) -> BeamStep:
        """Returns the `Step` that a round applies; `scored` are its arguments `policy`, `s`, `processed` and `t`."""
        return BeamStep(self, params.draft[0], *scored)

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
            algo = algo.replace(drafts=self.drafter.observe(params, s.succeed(rows), window.select(rows),
                                                            out.rows(rows), d, drafts))
        return d.replace(algo=algo)

    def _decision(self, s: State, window: Window, raw: Array, processed: Array, algo: Beams,
                  groups: tuple[Group, ...]) -> tuple[Decision, Beams]:
        """Returns the decision of a round and the new state of the search, from the groups after their steps."""
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
        """Returns the record of the new tokens of texts `[B, M]`, which were scored at nodes of the rows `rows`."""
        logits = take(raw[rows], text.nodes)
        return record(logits, logits, text.tokens, count).replace(processed=text.processed)

    def outcome(self, s: State) -> State:
        """Returns the state in which the `width` rows of a prompt have its results, the best first: finished texts by
        falling score, then, if the search was stopped early, live beams. Rows that are left get the status DEAD_END."""
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
    """The observer of a beam search with drafts: passes each prefill chunk of the prompts to the draft `reader`, which
    updates its state (`Beams.drafts`)."""

    reader: Any

    def observe(self, params: Params, s: State, window: Window, out: Out, algo: Beams) -> Beams:
        return algo.replace(drafts=self.reader.observe(params, s, window, out, None, algo.drafts))
