"""Rows of one compiled batch that generate text step by step and continue one another's texts.

A step ends at a delimiter, after a number of tokens, or with the text. Between two steps the host reads the texts,
scores them, and decides which row continues which text. The model never processes a token twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from decodax.common.arguments import whole
from decodax.common.struct import short
from decodax.core import drivers
from decodax.core.algorithm import name_of
from decodax.core.mesh import on_mesh
from decodax.core.state import State, Status
from decodax.core.stops import StopTable, stop_strings
from decodax.engine.batch import Job, collect, host_rows
from decodax.engine.methods import model
from decodax.engine.request import Request
from decodax.engine.result import Result
from decodax.io.appended import appended
from decodax.search.text_rows import TextRows

WAITING = Status.LENGTH
"""The status that a row has on the device between two steps."""

BY_TEXT = 0x74657874
"""Last number folded into the keys of rows that fork by their text. `Purpose` never has this number."""


@dataclasses.dataclass
class Forks(TextRows):
    """Rows of texts that are extended by steps, forked, and fed with given text. The attributes are those of
    `TextRows`."""

    __repr__ = short

    @classmethod
    def begin(cls, lm: Any, prompts: Any, n: int, *, until: str | Sequence[str] | None = None,
              step_tokens: int | None = None, marks: Sequence[int] = (),
              amend: Callable[[Request], Request] | None = None, **options: Any) -> Self:
        """Prefills the prompts, and makes `n` rows for each.

        Args:
            lm: the model.
            prompts: one or several.
            n: number of rows of a prompt.
            until: strings that end a step, and are part of it.
            step_tokens: maximum number of tokens of a step. If neither is given, a step is the whole text.
            marks: ids of tokens that also end a step.
            amend: changes the request before the rows are made, for example adds transforms to its policy.
            options: options of `decodax.generate`. `max_new_tokens` limits the whole text, including text that is fed.

        Raises:
            ValueError: as in `decodax.generate`, or the algorithm has several rows of its own for a text.
            TypeError: as in `decodax.generate`.
        """
        ends, stop = stop_strings(until, "until"), stop_strings(options.pop("stop", None))
        step_tokens = None if step_tokens is None else whole("step_tokens", step_tokens, 1)
        if ends and model(lm).tokenizer is None:
            raise ValueError(f"until: got {ends[0]!r}, but the model has no tokenizer; takes None, with step_tokens")
        if both := sorted(set(ends) & set(stop)):
            raise ValueError(f"until and stop: got {both[0]!r} in both, takes it in one of them")
        request = Request.read(lm, prompts, num_samples=n, **{"logprobs": 0, **options, "stop": [*stop, *ends] or None})
        if request.algorithm.traits.samples is not None or request.algorithm.traits.canvas:
            raise ValueError(f"algorithm: {name_of(request.algorithm)} keeps rows of its own; takes one that writes "
                             "each text from left to right")
        if amend is not None:
            request = amend(request)
        if marks:
            policy = request.policy
            ids = jnp.tile(jnp.asarray(marks, jnp.int32), (policy.eos.shape[0], 1))
            request = dataclasses.replace(request, policy=policy.replace(eos=jnp.concatenate([policy.eos, ids], 1)))
        job = Job.begin(request)
        # Ends of steps count from the first token on; the policy holds back an end of sequence.
        job.state = job.state.replace(min_new=jnp.zeros_like(job.state.min_new))
        shape = (len(request), n)
        first = host_rows(job.state, np.arange(len(request) * n))
        return cls(job=job, n=n, until=ends, step_tokens=step_tokens, stop=stop, marks=tuple(marks),
                   status=np.asarray(first.status).reshape(shape).copy(), keys=job.state.key.copy(),
                   lengths=np.asarray(first.length, np.int64).reshape(shape),
                   bound=np.asarray(first.max_length, np.int64).reshape(shape))

    def extend(self, which: np.ndarray | None = None, tokens: int | None = None, whole: bool = False,
               fewest: int = 0) -> np.ndarray:
        """Lets rows generate one more step.

        Args:
            which: `bool[P, n]`; None: all live rows.
            tokens: maximum number of tokens of this step, in place of `step_tokens`.
            whole: True generates to the end of the text.
            fewest: return as soon as at most this many rows are still within their step; a later call can continue
                them.

        Returns:
            `bool[P, n]`, rows that have generated tokens.
        """
        which = self.live if which is None else which & self.live
        tokens = self.step_tokens if tokens is None else tokens
        before = self.lengths.copy()
        todo = which.copy()
        while todo.any():
            limit = self.bound if tokens is None or whole else np.minimum(before + tokens, self.bound)
            self._set(np.where(todo, Status.RUNNING, WAITING), limit)
            taken = self._taken()
            self.job.advance(None, fewest=fewest)
            self.rounds += int((self._taken() - taken).max())       # the row that ran longest took part in every round
            state = host_rows(self.job.state, np.arange(self.rows))
            status, length = (x.reshape(self.status.shape) for x in (state.status, state.length))
            self.lengths = np.where(todo, length, self.lengths).astype(np.int64)
            full = self.lengths >= self.bound
            matched = (status == Status.STOP) & ~self._ended_by_stop(todo & (status == Status.STOP))
            newest = np.asarray(state.tokens)[np.arange(self.rows), state.length - 1].reshape(self.status.shape)
            matched |= (status == Status.EOS) & np.isin(newest, self.marks)
            waits = matched | ((status == Status.LENGTH) & ~full)
            self.status = np.where(todo & ~waits, status, self.status)
            self.status = np.where(todo & waits & full, Status.LENGTH, self.status).astype(np.int32)
            # With `whole`, continue through the ends of steps to the end of the text.
            todo = todo & waits & ~full if whole else np.zeros_like(todo)
        self.spent += int((self.lengths - before).sum())
        return which

    def _taken(self) -> np.ndarray:
        stats = self.job.state.stats
        return np.asarray(stats.rounds) + np.asarray(stats.waited)

    def _ended_by_stop(self, rows: np.ndarray) -> np.ndarray:
        """Returns `bool[P, n]`: the rows among `rows` that were ended by a string in `stop`, and not by one in `until`.
        """
        if not rows.any() or not self.stop or not self.until:
            return rows if self.stop else np.zeros_like(rows)
        out = np.zeros_like(rows)
        request = self.job.request
        assert request.lm.tokenizer is not None
        for p, i in zip(*np.nonzero(rows), strict=True):
            text = request.lm.tokenizer.detokenizer(self.prompts[p], stop=self.stop, min_new=int(request.min_new[p]),
                                                    skip_special_tokens=request.skip_special_tokens)
            text.feed(self.tokens(p, i))
            out[p, i] = text.stopped
        return out

    def fork(self, parents: np.ndarray, by_text: bool = False) -> None:
        """Lets row `i` of prompt `p` continue the text of row `parents[p, i]` (`i64[P, n]`).

        A row that is its own parent does not change. Other rows get new random keys: from their row and the number of
        forks of their prompt, or with `by_text` from their parent's key and the length of its text, so that the keys do
        not depend on row and time.
        """
        parents = np.asarray(parents, np.int64)
        own = np.arange(self.n)
        if (parents == own).all():
            return
        self.generation = self.generation + (parents != own).any(1)
        rows = np.arange(self.job.state.batch)
        rows[:self.rows] = (np.arange(len(self))[:, None] * self.n + parents).reshape(-1)
        with on_mesh(self.job.request.lm.mesh):
            keys: Any
            last: Any
            moved: Any = rows.astype(np.int32)
            keys, last = self.keys, self._turn()
            if by_text:
                s, last = self.job.state, np.full(len(rows), BY_TEXT, np.uint32)
                mothers = jax.random.wrap_key_data(jnp.asarray(np.asarray(jax.random.key_data(s.key))[rows]),
                                                   impl=jax.random.key_impl(s.key))
                keys = jax.device_put(_folded(mothers, np.asarray(s.length)[rows]), self.keys.sharding)
            self.job.state = drivers.fork(self.job.state, moved, keys, last)
        take = lambda x: np.take_along_axis(x, parents, 1)
        self.status, self.lengths = take(self.status), take(self.lengths)

    def feed(self, texts: Sequence[Sequence[str | Sequence[int] | None]]) -> None:
        """Appends a text or token ids to live rows.

        A row that becomes full ends. A text that does not fit is not appended, and its row ends too. Texts are
        tokenized as the continuation of the row (`decodax.io.appended`).

        Args:
            texts: `[P][n]`, a text or ids for each row; None appends nothing.

        Raises:
            ValueError: the policy has a transform with a state, which cannot follow text from outside.
        """
        if jax.tree.leaves(self.job.state.policy):
            raise ValueError("feed: takes a policy without transforms that follow the text token by token")
        tokenizer = self.job.request.lm.tokenizer
        new: list[list[int]] = [[] for _ in range(self.job.state.batch)]
        row: Any
        for p, row in enumerate(texts):
            for i, text in enumerate(row):
                if text is None or not len(text) or not self.live[p, i]:
                    continue
                if isinstance(text, str):
                    if tokenizer is None:
                        raise ValueError("feed: got a text, but the model has no tokenizer; takes ids")
                    text = appended(tokenizer, self.prompts[p] + self.tokens(p, i), text)
                ids = [int(t) for t in text]
                if self.lengths[p, i] + len(ids) >= self.bound[p, i]:
                    self.status[p, i] = Status.LENGTH
                if self.lengths[p, i] + len(ids) > self.bound[p, i]:
                    continue
                new[p * self.n + i] = ids
                self.lengths[p, i] += len(ids)
                self.fed += len(ids)
        if not any(new):
            return
        s = self.job.state
        tokens, length = np.array(s.tokens), np.array(s.length)
        for i, ids in enumerate(new):
            tokens[i, length[i]:length[i] + len(ids)] = ids
            length[i] += len(ids)
        given = np.array([bool(ids) for ids in new])
        with on_mesh(self.job.request.lm.mesh):
            put = lambda x, like: jax.device_put(x, like.sharding)
            at = put(length, s.length)
            status = put(np.where(given, Status.RUNNING, WAITING).astype(np.int32), s.status)
            prompt_length = s.prompt_length
            told: State = s.replace(tokens=put(tokens, s.tokens), length=at, prompt_length=at + 0, status=status)
            batch = self.job.batch
            told = drivers.extend(batch.algorithm, batch.model, batch.params, told, width=min(32, s.cache.capacity))
            self.job.state = told.replace(prompt_length=prompt_length, stop=s.stop)
            self._restart(given, length)
        broken = (np.asarray(self.job.state.status) == Status.INVALID)[:self.rows].reshape(self.status.shape)
        self.status = np.where(broken, Status.INVALID, self.status)

    def cut(self, p: int, i: int, status: int = Status.LENGTH) -> None:
        """Ends row `i` of prompt `p` with `status`."""
        self.status[p, i] = status

    def rewind(self, made: np.ndarray) -> None:
        """Truncates rows to their first `made[p, i]` new tokens and makes them live again, to draw with new keys; -1
        leaves a row unchanged.

        Raises:
            ValueError: the cache or a transform of the policy cannot be truncated, or the algorithm has a state of its
                own.
        """
        s = self.job.state
        if not (made >= 0).any():
            return
        if jax.tree.leaves((s.policy, s.algo)) or "truncation" not in s.cache.supports:
            raise ValueError("rewind: takes a cache that supports truncation, an algorithm without a state of its own, "
                             "and a policy without transforms that follow the text token by token")
        start = np.array([[len(prompt)] for prompt in self.prompts])
        back = made >= 0
        self.generation = self.generation + back.any(1)
        self.lengths = np.where(back, start + made, self.lengths)
        self.status = np.where(back, Status.RUNNING, self.status).astype(np.int32)
        length, moved = np.array(s.length), np.zeros(s.batch, bool)
        length[:self.rows], moved[:self.rows] = self.lengths.reshape(-1), back.reshape(-1)
        with on_mesh(self.job.request.lm.mesh):
            moves: Any = length, moved, self.keys, self._turn()
            self.job.state = drivers.rewind(s, *moves)
            self._restart(moved, np.asarray(self.job.state.prompt_length))

    def _restart(self, rows: np.ndarray, front: np.ndarray) -> None:
        """Recomputes the state of the stop strings' automaton in `rows` (`bool[B]`), from the tokens after the first
        `front`."""
        s, stops = self.job.state, self.job.batch.policy.stops
        if isinstance(stops, StopTable):        # with a constraint that ends rows too, none is fed or rewound
            stop = np.where(rows, np.asarray(stops.resume(s.tokens, jnp.asarray(front), s.length)), np.asarray(s.stop))
            self.job.state = s.replace(stop=jax.device_put(stop.astype(np.int32), s.stop.sharding))

    def _turn(self) -> Any:
        """Returns the generation of each row's prompt, `u32[B]`."""
        turn = np.zeros(self.job.state.batch, np.uint32)
        turn[:self.rows] = np.repeat(self.generation, self.n)
        return turn

    def ahead(self, which: np.ndarray | None = None, tokens: int | None = None) -> Forks:
        """Returns a copy of all rows in which the rows `which` are generated further, by `tokens` tokens or to their
        end. This object is not changed, except that the copy's tokens count in `spent`."""
        batch = dataclasses.replace(self.job.batch, state=jax.tree.map(lambda x: x.copy(), self.job.state))
        job = dataclasses.replace(self.job, batch=batch)
        other = dataclasses.replace(self, job=job, status=self.status.copy(), lengths=self.lengths.copy(), spent=0)
        other.extend(which, tokens, whole=tokens is None)
        self.spent += other.spent
        return other

    def result(self) -> Result:
        """Returns all rows as a result of `decodax.generate`; rows that have not ended get `Status.TIME`."""
        self._set(np.where(self.live, Status.TIME, self.status), self.bound)
        s = host_rows(self.job.state, np.arange(self.rows))
        request = dataclasses.replace(self.job.request, stop=self.stop)
        return self.job.timed(collect(request, s, self.status.reshape(-1), {}), self.rounds)

    def _set(self, status: np.ndarray, bound: np.ndarray) -> None:
        s = self.job.state
        wide, limit = np.full(s.batch, WAITING, np.int32), np.array(s.max_length)
        wide[:self.rows], limit[:self.rows] = status.reshape(-1), bound.reshape(-1)
        with on_mesh(self.job.request.lm.mesh):
            self.job.state = s.replace(status=jax.device_put(wide, s.status.sharding),
                                       max_length=jax.device_put(limit, s.max_length.sharding))


@jax.jit
def _folded(keys: Any, numbers: Any) -> Any:
    return jax.vmap(jax.random.fold_in)(keys, numbers)
