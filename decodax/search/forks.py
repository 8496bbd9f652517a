"""Rows of one compiled batch that go on by steps, fork, and are fed, between bounded runs.

A step ends at a delimiter, after so many tokens, or where the text ends. Between steps the host looks at the texts,
weighs them, and says which row goes on from which. Nothing that has been read is read again.
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
from decodax.core.algorithm import findings, name_of
from decodax.core.mesh import on_mesh
from decodax.core.state import State, Status
from decodax.core.stops import StopTable, stop_strings
from decodax.engine.batch import Job, collect, host_rows
from decodax.engine.methods import model
from decodax.engine.request import Request
from decodax.engine.result import Result
from decodax.io.appended import appended

WAITING = Status.LENGTH
"""What the device takes a row for that stands between two steps."""

BY_TEXT = 0x74657874
"""What the keys of rows that fork by their text are folded with last. `Purpose` never has this number."""


@dataclasses.dataclass
class Forks:
    """`n` rows of each of `P` prompts. Arrays about rows have the shape `[P, n]`.

    Attributes:
        job: the batch. n: rows of a prompt. until, step_tokens: what ends a step. stop: what ends a text.
        marks: ids of tokens that end a step, too.
        status: `i32[P, n]`, why a text has ended; `Status.RUNNING` where it has not.
        lengths: `i64[P, n]`, tokens of each row, with the prompt. bound: `i64[P, n]`, how many it may have.
        keys: of the places. spent: tokens made so far, also of rows that are gone. fed: tokens that were put in.
        generation: how often rows have forked. rounds: target forwards of the rows so far.
    """

    __repr__ = short

    job: Job
    n: int
    until: tuple[str, ...]
    step_tokens: int | None
    stop: tuple[str, ...]
    status: np.ndarray
    lengths: np.ndarray
    bound: np.ndarray
    keys: Any
    spent: int = 0
    fed: int = 0
    generation: int = 0
    marks: tuple[int, ...] = ()
    rounds: int = 0

    @classmethod
    def begin(cls, lm: Any, prompts: Any, n: int, *, until: str | Sequence[str] | None = None,
              step_tokens: int | None = None, marks: Sequence[int] = (),
              amend: Callable[[Request], Request] | None = None, **options: Any) -> Self:
        """Reads the prompts, and makes `n` rows of each.

        Args:
            until: strings with which a step ends; they are part of it. step_tokens: tokens of a step at most. Without
                either, a step is the whole text.
            marks: ids of tokens with which a step ends, too. amend: what a search changes of the request, such as
                links of its policy.
            options: of `decodax.generate`. `max_new_tokens` bounds the whole text, with what is fed.

        Raises:
            ValueError, TypeError: as `decodax.generate`; or a method that works on rows of its own.
        """
        ends, stop = stop_strings(until, "until"), stop_strings(options.pop("stop", None))
        step_tokens = None if step_tokens is None else whole("step_tokens", step_tokens, 1)
        if ends and model(lm).tokenizer is None:
            raise ValueError(f"until: got {ends[0]!r}, and the model has no tokenizer; takes step_tokens")
        if both := sorted(set(ends) & set(stop)):
            raise ValueError(f"until and stop: got {both[0]!r} in both")
        request = Request.read(lm, prompts, num_samples=n, **{"logprobs": 0, **options, "stop": [*stop, *ends] or None})
        if request.algorithm.traits.samples is not None or request.algorithm.traits.canvas:
            raise ValueError(f"algorithm: {name_of(request.algorithm)} keeps rows of its own; takes a method that "
                             "writes each text from left to right")
        if amend is not None:
            request = amend(request)
        if marks:
            policy = request.policy
            ids = jnp.tile(jnp.asarray(marks, jnp.int32), (policy.eos.shape[0], 1))
            request = dataclasses.replace(request, policy=policy.replace(eos=jnp.concatenate([policy.eos, ids], 1)))
        job = Job.begin(request)
        # ends of steps count from the first token on; an end of sequence is kept back by the policy
        job.state = job.state.replace(min_new=jnp.zeros_like(job.state.min_new))
        shape = (len(request), n)
        first = host_rows(job.state, np.arange(len(request) * n))
        return cls(job=job, n=n, until=ends, step_tokens=step_tokens, stop=stop, marks=tuple(marks),
                   status=np.asarray(first.status).reshape(shape).copy(), keys=job.state.key.copy(),
                   lengths=np.asarray(first.length, np.int64).reshape(shape),
                   bound=np.asarray(first.max_length, np.int64).reshape(shape))

    def __len__(self) -> int:
        return len(self.status)

    @property
    def rows(self) -> int:
        return self.status.size

    @property
    def live(self) -> np.ndarray:
        """`bool[P, n]`: texts that have not ended."""
        return self.status == Status.RUNNING

    @property
    def prompts(self) -> list[list[int]]:
        return self.job.request.prompts

    def rng(self, prompt: int) -> np.random.Generator:
        """Random numbers of a prompt at this generation: of its seed and address, whoever stands beside it."""
        r = self.job.request
        words = [*r.seeds[prompt].tolist(), int(r.request_ids[prompt]), self.generation]
        return np.random.default_rng(np.random.SeedSequence(words))

    def extend(self, which: np.ndarray | None = None, tokens: int | None = None, whole: bool = False,
               fewest: int = 0) -> np.ndarray:
        """Lets rows write one step more.

        Args:
            which: `bool[P, n]`; None: all that live. tokens: in place of `step_tokens`. whole: to the text's end.
            fewest: stops when no more rows than this are still within their step; they live, and can go on with it.

        Returns:
            `bool[P, n]`, which rows have written.
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
            self.rounds += int((self._taken() - taken).max())       # the row that ran longest took part in each
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
            # to the end of the text through the ends of steps
            todo = todo & waits & ~full if whole else np.zeros_like(todo)
        self.spent += int((self.lengths - before).sum())
        return which

    def _taken(self) -> np.ndarray:
        stats = self.job.state.stats
        return np.asarray(stats.rounds) + np.asarray(stats.waited)

    def _ended_by_stop(self, rows: np.ndarray) -> np.ndarray:
        """Of rows that a string has stopped, those that one of `stop` has."""
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
        """Row `i` of prompt `p` goes on from what row `parents[p, i]` was. A row that goes on from itself is as it was;
        the others draw by keys of their own: those of their places and the generation; or `by_text` those of their
        parents and the lengths of their texts, whichever row they take and whenever it is."""
        parents = np.asarray(parents, np.int64)
        own = np.arange(self.n)
        if (parents == own).all():
            return
        self.generation += 1
        rows = np.arange(self.job.state.batch)
        rows[:self.rows] = (np.arange(len(self))[:, None] * self.n + parents).reshape(-1)
        with on_mesh(self.job.request.lm.mesh):
            keys: Any
            last: Any
            moved: Any = rows.astype(np.int32)
            keys, last = self.keys, np.uint32(self.generation)
            if by_text:
                s, last = self.job.state, np.uint32(BY_TEXT)
                mothers = jax.random.wrap_key_data(jnp.asarray(np.asarray(jax.random.key_data(s.key))[rows]),
                                                   impl=jax.random.key_impl(s.key))
                keys = jax.device_put(_folded(mothers, np.asarray(s.length)[rows]), self.keys.sharding)
            self.job.state = drivers.fork(self.job.state, moved, keys, last)
        take = lambda x: np.take_along_axis(x, parents, 1)
        self.status, self.lengths = take(self.status), take(self.lengths)

    def feed(self, texts: Sequence[Sequence[str | Sequence[int] | None]]) -> None:
        """Puts a text, or ids, after rows that live; None: nothing. What fills a row ends it; what does not fit ends
        it, too, and is not put there. Texts become tokens in their place (`decodax.io.appended`).

        Raises:
            ValueError: a link of the policy keeps a state of its own, which could not follow.
        """
        if jax.tree.leaves(self.job.state.policy):
            raise ValueError("feed: a link of the policy follows the text token by token, and cannot follow this one")
        tokenizer = self.job.request.lm.tokenizer
        new: list[list[int]] = [[] for _ in range(self.job.state.batch)]
        row: Any
        for p, row in enumerate(texts):
            for i, text in enumerate(row):
                if text is None or not len(text) or not self.live[p, i]:
                    continue
                if isinstance(text, str):
                    if tokenizer is None:
                        raise ValueError("feed: got a text, and the model has no tokenizer")
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
            told = drivers.extend(self.job.algorithm, self.job.model, self.job.params, told,
                                  width=min(32, s.cache.capacity))
            self.job.state = told.replace(prompt_length=prompt_length, stop=s.stop)
            self._restart(given, length)
        broken = (np.asarray(self.job.state.status) == Status.INVALID)[:self.rows].reshape(self.status.shape)
        self.status = np.where(broken, Status.INVALID, self.status)

    def cut(self, p: int, i: int, status: int = Status.LENGTH) -> None:
        """Ends a row where it stands."""
        self.status[p, i] = status

    def rewind(self, made: np.ndarray) -> None:
        """Takes rows back to their first tokens, `made[p, i]` of the new ones; -1 leaves a row alone. They live again.

        Raises:
            ValueError: the cache, or a link of the policy, cannot go back, or the method keeps something of its own.
        """
        s = self.job.state
        if not (made >= 0).any():
            return
        if jax.tree.leaves((s.policy, s.algo)) or "truncation" not in s.cache.supports:
            raise ValueError("rewind: takes a cache that can be cut short, a method that keeps nothing beside it, and "
                             "a policy without links that follow the text token by token")
        start = np.array([[len(prompt)] for prompt in self.prompts])
        back = made >= 0
        self.generation += 1
        self.lengths = np.where(back, start + made, self.lengths)
        self.status = np.where(back, Status.RUNNING, self.status).astype(np.int32)
        length, moved = np.array(s.length), np.zeros(s.batch, bool)
        length[:self.rows], moved[:self.rows] = self.lengths.reshape(-1), back.reshape(-1)
        with on_mesh(self.job.request.lm.mesh):
            self.job.state = drivers.rewind(s, *self._moves(length, moved))
            self._restart(moved, np.asarray(self.job.state.prompt_length))

    def _restart(self, rows: np.ndarray, front: np.ndarray) -> None:
        """Lets the automaton of stop strings read the tokens of `rows` (`bool[B]`) after the first `front` again."""
        s, stops = self.job.state, self.job.policy.stops
        if isinstance(stops, StopTable):        # where a constraint ends rows as well, none is fed or rewound
            stop = np.where(rows, np.asarray(stops.resume(s.tokens, jnp.asarray(front), s.length)), np.asarray(s.stop))
            self.job.state = s.replace(stop=jax.device_put(stop.astype(np.int32), s.stop.sharding))

    def _moves(self, *rows: Any) -> tuple[Any, ...]:
        """What says how rows move, with the keys that they then draw by."""
        return *rows, self.keys, np.uint32(self.generation)

    def ahead(self, which: np.ndarray | None = None, tokens: int | None = None) -> Forks:
        """A copy in which rows are written on, to the end or by so many tokens; this one stays where it is."""
        job = dataclasses.replace(self.job, state=jax.tree.map(lambda x: x.copy(), self.job.state))
        other = dataclasses.replace(self, job=job, status=self.status.copy(), lengths=self.lengths.copy(), spent=0)
        other.extend(which, tokens, whole=tokens is None)
        self.spent += other.spent
        return other

    def tokens(self, p: int, i: int) -> list[int]:
        """The new tokens of a row."""
        return self._host_tokens()[p * self.n + i, len(self.prompts[p]):int(self.lengths[p, i])].tolist()

    def _host_tokens(self) -> np.ndarray:
        return np.asarray(self.job.state.tokens)

    def texts(self, which: np.ndarray | None = None, raw: bool = False) -> list[list[Any]]:
        """The new text of each row, up to the string that ended it; ids without a tokenizer. Those that are not in
        `which` are empty. `raw`: also that string and what its token has behind it."""
        lm, held = self.job.request.lm, self._host_tokens()
        out: list[list[Any]] = []
        for p, prompt in enumerate(self.prompts):
            row: list[Any] = []
            for i in range(self.n):
                ids = held[p * self.n + i, len(prompt):int(self.lengths[p, i])].tolist()
                if which is not None and not which[p, i]:
                    row.append("" if lm.tokenizer else [])
                elif lm.tokenizer is None:
                    row.append(ids)
                else:
                    stop = self.stop if self.status[p, i] == Status.STOP and not raw else ()
                    row.append(lm.tokenizer.continuation(prompt, ids, stop=stop,
                                                         skip_special_tokens=self.job.request.skip_special_tokens))
            out.append(row)
        return out

    def since(self, lengths: np.ndarray) -> list[list[Any]]:
        """What each row has written after its first `lengths[p, i]` tokens (`i64[P, n]`, with the prompt), as in
        `texts`, without the token that ended it. A character that those tokens only began belongs to it."""
        request, out = self.job.request, []
        for p, prompt in enumerate(self.prompts):
            row: list[Any] = []
            for i in range(self.n):
                ids, made = self.tokens(p, i), int(lengths[p, i]) - len(prompt)
                ids = ids[:-1] if self.status[p, i] == Status.EOS else ids
                if request.lm.tokenizer is None:
                    row.append(ids[made:])
                    continue
                text = request.lm.tokenizer.detokenizer(
                    prompt, stop=self.stop if self.status[p, i] == Status.STOP else (),
                    skip_special_tokens=request.skip_special_tokens)
                text.feed(ids[:made])
                row.append(text.feed(ids[made:]) + text.finish())
            out.append(row)
        return out

    def log_probs(self, processed: bool = False) -> np.ndarray:
        """`f64[P, n]`: of each row's new tokens under the model, or under the policy. What was fed counts 0."""
        record = self.job.state.record
        assert record is not None
        values = np.asarray(record.processed if processed else record.raw)[:self.rows].astype(np.float64)
        first = np.array([len(prompt) for prompt in self.prompts]).repeat(self.n)
        place = np.arange(values.shape[1])
        inside = (place >= first[:, None]) & (place < self.lengths.reshape(-1)[:, None])
        return np.where(inside, values, 0).sum(1).reshape(self.status.shape)

    def log_weights(self) -> np.ndarray:
        """`f64[P, n]`: the log of the weight that a method gives to each row so far, where it does not draw by the
        policy (`decodax.algorithms.contrastive.awrs.AWRS`): weighted by it, its rows are draws by the policy. 0 of
        most methods."""
        found = findings(self.job.algorithm, self.job.state).get("log_weight")
        if found is None:
            return np.zeros(self.status.shape)
        return np.asarray(found)[:self.rows].astype(np.float64).reshape(self.status.shape)

    def result(self) -> Result:
        """All rows as `decodax.generate` gives them."""
        self._set(np.where(self.live, Status.TIME, self.status), self.bound)
        s = host_rows(self.job.state, np.arange(self.rows))
        job = self.job
        request = dataclasses.replace(job.request, stop=self.stop)
        result = collect(request, s, self.status.reshape(-1), {})
        return dataclasses.replace(result, stats=dataclasses.replace(
            result.stats, forwards=self.rounds, prefill_forwards=job.prefill_forwards, seconds=job.seconds,
            prefill_seconds=job.prefill_seconds))

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
