"""Best-first beam search: finds the texts that beam search finds with fewer forward passes of the model ("Best-First
Beam Search", Meister, Vieira and Cotterell, 2020)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.algorithms.beams.pool import Finished
from decodax.common.options import Count, NonNegative, check_options
from decodax.common.registry import ALGORITHMS
from decodax.common.struct import Struct, struct
from decodax.core.algorithm import Concludes, Grouped, Paced, Traits
from decodax.core.composed import data
from decodax.core.packing import Packing
from decodax.core.record import record
from decodax.core.state import State, Status
from decodax.core.types import Decision, Out, Params
from decodax.core.window import Window, causal, take
from decodax.pallas_kernels.vocabulary import top_k


@struct
class Queue(Struct):
    """State of a best-first search. Each row of a prompt holds one text that was taken from the queue. The queue has
    extensions of these texts by one token.

    Attributes:
        score: `f32[B]`, score of the row's text.
        fresh: `bool[B]`, True if the model has not scored the row's text yet.
        scores: `f32[B, C]`, scores of the extensions of each row's text; -inf: the extension was taken.
        tokens: `i32[B, C]`, the last tokens of the extensions.
        ends: `i32[B, C]`, the `Status` with which each extension ends, or `RUNNING`.
        noted: the record of these tokens, `[B, C, ...]`, or None.
        finished: texts that have ended, in the first places of a prompt, in no order.
        used: `i32[B]`, number of rows in use. This field and those below are equal in all rows of a prompt.
        taken: `i32[B, L + 1]`, number of texts of each length that were taken from the queue.
        lives: `i32[B, L + 1]`, number of these that did not end.
        read: `i32[B]`, number of texts that the model has scored.
        over: `bool[B]`, True if the search has ended.
    """

    score: Array
    fresh: Array
    scores: Array
    tokens: Array
    ends: Array
    noted: Any
    finished: Finished
    used: Array
    taken: Array
    lives: Array
    read: Array
    over: Array


@struct
class Taking(Struct):
    """State of the loop that takes texts from the queue in one round, for `P` prompts with `R` rows each.

    Attributes:
        q: the queue.
        parent: `i32[P, R]`, for each row that gets a text, the row of the text that it extends by one token.
        token: `i32[P, R]`, the last token of that text; -1 for rows that get none.
        longest: `i32[P]`, largest length of a text that may be taken next.
    """

    q: Queue
    parent: Array
    token: Array
    longest: Array


@dataclasses.dataclass(frozen=True)
class BestFirst(Grouped, Concludes, Paced):
    """Best-first beam search (Meister et al., 2020).

    All extensions of texts are in one queue, whatever their length. The one with the best score is taken and, if it has
    not ended, extended by the model; at most `width` of each length are. Since scores only fall as texts grow, texts of
    one length are taken in the order of their scores, and the taken texts are those that beam search would keep. But
    when `returns` texts have ended, no text with a lower score is extended. The texts and scores are those of
    `BeamSearch(width, returns, early_stopping="never")` with the same `length_penalty`. With a penalty, the search ends
    when the best score in the queue, divided as for a text of the largest length, is no better than that of the last
    text to be returned.

    Each round takes the best text and up to `at_once - 1` more that are no longer than the one before. Some of these
    would not have been extended one at a time, but of each length never more than in a beam search.

    A prompt has `1 + width * (longest - 1)` rows, but dense layers process only those with a new text; `cache="paged"`
    stores common entries of rows once. A temperature divides log-probabilities, and nothing is drawn. If the policy
    makes log-probabilities positive (a bias), scores may rise and the result may differ from that of beam search.

    Attributes:
        width: `K`, number of texts of each length that are extended, and size of the pool of ended texts.
        returns: number of texts of a prompt in the result.
        longest: largest number of new tokens of a text; `max_new_tokens` may be smaller.
        length_penalty: exponent of the length by which a score is divided, 0 or more.
        at_once: number of texts taken from the queue in a round.

    Raises:
        ValueError: a number out of its range, or `max_new_tokens` above `longest`.
    """

    width: Count
    returns: Count = 1
    longest: Count = 32
    length_penalty: NonNegative = data(0.0, bare=0.0)
    at_once: Count = 1

    def __post_init__(self) -> None:
        check_options(type(self), vars(self))
        if self.returns > self.width:
            raise ValueError(f"returns: got {self.returns} for a width of {self.width}, takes at most that")

    @property
    def group(self) -> int:
        """Number of rows of a prompt, one for each text that may be extended."""
        return max(1 + self.width * (self.longest - 1), self.width)

    @property
    def traits(self) -> Traits:
        return Traits(f"BestFirst({self.width})", commits=1, samples=self.group, answers=self.returns)

    def answering(self, count: int) -> BestFirst:
        if count > self.width:
            raise ValueError(f"num_samples: got {count} for a width of {self.width}, takes at most that")
        return dataclasses.replace(self, returns=count)

    def with_length(self, budget: int) -> BestFirst:
        if budget > self.longest:
            raise ValueError(f"max_new_tokens: got {budget} for a search with longest={self.longest}, takes at most "
                             "that")
        return self

    def most_rounds(self, budget: int, rows: int) -> int:
        # for each length `width` texts that live on, and as many that have ended, whose rounds read nothing
        return 2 * self.width * budget + 8

    def findings(self, s: State) -> dict[str, Array]:
        """Returns `score`, `f32[B]`; `log_prob`, `f32[B]`, log-probability of each text; and `expansions`, `i32[B]`,
        the number of texts of its prompt that the model has extended."""
        q: Queue = s.algo
        return {"score": q.finished.score, "log_prob": q.finished.log_prob, "expansions": q.read}

    def init(self, params: Params, s: State) -> Queue:
        C, L = self._offers(s), self.longest
        zeros = lambda *more: jnp.zeros((s.batch, *more), jnp.int32)
        noted = None if s.record is None else jax.tree.map(
            lambda x: jnp.zeros((s.batch, C, *x.shape[2:]), x.dtype), s.record)
        return Queue(score=jnp.zeros(s.batch, jnp.float32), fresh=jnp.ones(s.batch, bool),
                     scores=jnp.full((s.batch, C), -jnp.inf), tokens=zeros(C), ends=zeros(C), noted=noted,
                     finished=Finished.empty(s), used=zeros() + 1, taken=zeros(L + 1), lives=zeros(L + 1), read=zeros(),
                     over=jnp.zeros(s.batch, bool))

    def _offers(self, s: State) -> int:
        """Returns the number of extensions of a row's text in the queue. At least `width` of them do not end."""
        return 2 * self.width + 2

    def propose(self, params: Params, policy: Any, s: State) -> tuple[Window, Any]:
        R, q = self.group, s.algo
        # the rows of a prompt begin as one and the same text, which is read once
        fresh = q.fresh & s.running & ((s.length > s.prompt_length) | (jnp.arange(s.batch) % R == 0))
        w = causal(s.newest[:, None], s.length - 1, fresh[:, None])
        size = s.batch // R * min(self.at_once, self.width)
        return w.replace(hints=(*w.hints, Packing((size,), bounded=True))), q.replace(fresh=fresh)

    def decide(self, params: Params, dist: Any, s: State, window: Window, out: Out, algo: Any) -> Decision:
        R = self.group
        P, m = s.batch // R, min(self.at_once, self.width)
        group = lambda x: x.reshape(P, R, *x.shape[1:])
        flat = lambda x: x.reshape(s.batch, *x.shape[2:])
        own = jnp.arange(s.batch, dtype=jnp.int32)
        q, broken = self._read(dist, s, algo, m)
        budget = group(s.max_length - s.prompt_length)[:, 0]
        made = group(s.length - s.prompt_length)

        grouped = jax.tree.map(group, q)
        none = jnp.zeros((P, R), jnp.int32)
        taking = Taking(grouped, none + jnp.arange(R, dtype=jnp.int32), none - 1, jnp.full(P, self.longest, jnp.int32))
        # tokens before the last one of a text when it is taken
        state = jax.tree.map(group, (s.tokens, s.length, s.record))
        taking = lax.fori_loop(0, m, lambda _, t: jax.vmap(self._take, (0, 0, 0, None))(t, made, state, params.draft),
                               taking)
        q = jax.tree.map(flat, taking.q)
        given = taking.token >= 0                                                       # [P, R]
        # the search is over if no text in the queue or read next can reach the result
        open_scores = self._open(taking.q, made).max((1, 2))
        waiting = jnp.maximum(open_scores, jnp.where(given, taking.q.score, -jnp.inf).max(1))
        bound = waiting / budget.astype(jnp.float32) ** params.draft
        worst = lax.top_k(taking.q.finished.score, self.returns)[0][:, -1]
        running = group(s.running)[:, 0]
        over = running & ~(bound > worst)
        each = lambda x: jnp.repeat(x, R)
        goes = each(running & ~broken)
        rows = jnp.where(goes, own // R * R + flat(taking.parent), own)
        given = flat(given) & goes & ~each(over)
        token = jnp.where(given, flat(taking.token), 0)[:, None]
        read = algo.fresh & goes
        slots = jnp.where(read[rows, None] & (token >= 0), window.positions[rows], -1)
        status = jnp.where(each(broken & running), jnp.int32(Status.INVALID), jnp.where(
            each(over), jnp.int32(Status.LENGTH), jnp.int32(Status.RUNNING)))
        noted = None
        if s.record is not None:        # the text's place in the queue
            at = jnp.argmax(q.tokens[rows] == token, 1)[:, None]
            noted = jax.tree.map(lambda x: take(x[rows], at), q.noted)
        old = lambda new, before: jax.tree.map(
            lambda a, b: jnp.where(goes.reshape(-1, *[1] * (a.ndim - 1)), a, b), new, before)
        new = old(q.replace(fresh=given, over=q.over | each(over)), algo.replace(fresh=jnp.zeros_like(given)))
        return Decision(tokens=token, count=given.astype(jnp.int32), slots=slots, source=jnp.zeros_like(token),
                        algo=new, rows=rows, status=status, record=noted, idle=~read)

    def _read(self, dist: Any, s: State, q: Queue, m: int) -> tuple[Queue, Array]:
        """Returns the queue with the extensions of the texts that the model has just scored, and the prompts with
        invalid logits, `bool[P]`."""
        R, C = self.group, q.scores.shape[1]
        P = s.batch // R
        which = jnp.argsort(~q.fresh.reshape(P, R), axis=1, stable=True)[:, :m].astype(jnp.int32)
        rows = (which + R * jnp.arange(P, dtype=jnp.int32)[:, None]).reshape(-1)
        policy, raw = dist.policy, jax.nn.log_softmax(dist.logits(), -1)
        # the policy acts on log-probabilities, as in a beam search
        log_p = dist.scores(raw)[rows, 0]
        logits = raw[rows, 0]
        real = q.fresh[rows]
        broken = (jnp.isnan(log_p).any(-1) & real).reshape(P, m).any(1)
        V = log_p.shape[-1]
        total = q.score[rows, None] + log_p
        best, token = top_k(total, min(C, V))
        best, token = (jnp.pad(x, ((0, 0), (0, C - min(C, V))), constant_values=fill)
                       for x, fill in ((best, -jnp.inf), (token.astype(jnp.int32), 0)))
        made = (s.length - s.prompt_length)[rows, None] + 1
        budget, ripe = (s.max_length - s.prompt_length)[rows, None], made > s.min_new[rows, None]
        eos = (token[..., None] == policy.eos[rows, None]).any(-1) & ripe
        hit = jnp.zeros_like(eos)
        if policy.stops is not None:
            here = jnp.broadcast_to(s.stop[rows, None], token.shape)
            hit = policy.stops.advance(here, token, budget - made)[1] & ripe
        full = made >= budget
        why = jnp.where(eos, Status.EOS, jnp.where(hit, Status.STOP, jnp.where(full, Status.LENGTH, Status.RUNNING)))
        put = lambda old, new: old.at[jnp.where(real, rows, s.batch)].set(new.astype(old.dtype), mode="drop")
        noted = q.noted
        if s.record is not None:
            wide = jnp.broadcast_to(logits[:, None], (*token.shape, V))
            seen = record(wide, jnp.broadcast_to(log_p[:, None], wide.shape), token, s.record.count)
            noted = jax.tree.map(put, noted, seen)
        count = real.reshape(P, m).sum(1, dtype=jnp.int32)
        return q.replace(scores=put(q.scores, best), tokens=put(q.tokens, token), ends=put(q.ends, why), noted=noted,
                         read=q.read + jnp.repeat(count, R)), broken

    def _open(self, q: Queue, made: Array) -> Array:
        """Returns the scores of extensions that may be taken, `f32[..., R, C]`; -inf if `width` texts of that length
        were taken."""
        length = jnp.minimum(made + 1, self.longest)                                    # [..., R]
        seen, lives = (jnp.take_along_axis(x[..., 0, :], length, -1)[..., None] for x in (q.taken, q.lives))
        shut = jnp.where(q.ends == Status.RUNNING, lives, seen) >= self.width
        return jnp.where(shut, -jnp.inf, q.scores)

    def _take(self, t: Taking, made: Array, state: Any, length_penalty: Array) -> Taking:
        """Returns the state after one text was taken from the queue of one prompt; arrays `[R, ...]`."""
        q, C = t.q, t.q.scores.shape[1]
        open_ = jnp.where((made + 1 <= t.longest)[:, None], self._open(q, made), -jnp.inf)
        index = jnp.argmax(open_)
        row, at = index // C, index % C
        score, token, why, length = open_[row, at], q.tokens[row, at], q.ends[row, at], made[row] + 1
        there = score > -jnp.inf
        lives = there & (why == Status.RUNNING)
        count = lambda x, more: x.at[:, length].add(more.astype(jnp.int32))

        # a text that has ended takes the place of the worst finished one
        finished = q.finished
        norm = score / length.astype(jnp.float32) ** length_penalty
        worst = jnp.argmin(finished.score[:self.width])
        place = jnp.where(there & ~lives & (norm > finished.score[worst]), worst, self.group)
        put = lambda x, new: x.at[place].set(jnp.asarray(new, x.dtype), mode="drop")
        tokens, lengths, noted = state
        finished = finished.replace(
            tokens=put(finished.tokens, tokens[row].at[lengths[row]].set(token)),
            length=put(finished.length, lengths[row] + 1), status=put(finished.status, why),
            score=put(finished.score, norm), log_prob=put(finished.log_prob, score),
            record=jax.tree.map(lambda x, of, one: put(x, of[row].at[lengths[row]].set(one[row, at])), finished.record,
                                noted, q.noted))

        # a text that has not ended gets a row, which continues that of the text
        new = jnp.where(lives, q.used[0], self.group)
        give = lambda x, value: x.at[new].set(jnp.asarray(value, x.dtype), mode="drop")
        q = q.replace(scores=q.scores.at[row, at].set(jnp.where(there, -jnp.inf, q.scores[row, at])),
                      score=give(q.score, score), finished=finished, used=q.used + lives,
                      taken=count(q.taken, there), lives=count(q.lives, lives))
        return Taking(q, give(t.parent, row), give(t.token, token),
                      jnp.where(there, jnp.minimum(t.longest, length), t.longest).astype(jnp.int32))

    def outcome(self, s: State) -> State:
        """Returns the state in which the rows of a prompt have its finished texts by falling score. Rows without a text
        get the status DEAD_END, or keep theirs if the search was stopped early."""
        R, q = self.group, s.algo
        held = q.finished
        filled = held.score > -jnp.inf
        ended = jnp.where(s.status == Status.INVALID, s.status, jnp.where(
            q.over, jnp.int32(Status.DEAD_END), s.status))
        held = held.replace(length=jnp.where(filled, held.length, s.prompt_length),
                            status=jnp.where(filled, held.status, ended))
        by_prompt = lambda x: x.reshape(s.batch // R, R, *x.shape[1:])
        order = jnp.argsort(-by_prompt(held.score), axis=1, stable=True)
        best = jax.tree.map(lambda x: take(by_prompt(x), order).reshape(s.batch, *x.shape[1:]), held)
        return s.replace(tokens=best.tokens, length=best.length, status=best.status, record=best.record,
                         algo=q.replace(finished=best))


@ALGORITHMS.register("best-first-beam-search", "Best-First Beam Search", "Meister et al. 2020", family="search")
def best_first_beam_search(width: Count = 4, longest: Count = 32, length_penalty: float = 0.0,
                           at_once: Count = 1) -> BestFirst:
    """Finds the texts of a beam search, the best one first, with fewer forward passes of the model.

    For short answers, since a prompt needs one row for each text that may be extended.

    Args:
        width: number of texts of each length that are extended.
        longest: largest number of new tokens of a text.
        length_penalty: exponent of the length by which a score is divided, 0 or more.
        at_once: number of texts taken from the queue in a round. A larger number needs fewer rounds, but extends more
            texts.
    """
    return BestFirst(width, longest=longest, length_penalty=length_penalty, at_once=at_once)
