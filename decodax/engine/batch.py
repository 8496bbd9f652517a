"""Batches on the device, and the compiled programs that run them: what all front ends share."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from decodax.common.struct import short
from decodax.core import drivers
from decodax.core.algorithm import Algorithm, findings, most_rounds
from decodax.core.cache import Cache
from decodax.core.memory import batch, bucket, power
from decodax.core.mesh import on_mesh
from decodax.core.start import init_state
from decodax.core.state import State, Status
from decodax.core.types import Params
from decodax.engine.compilation import keep_room
from decodax.engine.reading import Reader
from decodax.engine.request import Request
from decodax.engine.result import Result, Statistics, log_probs, new_tokens
from decodax.sampling import Policy
from decodax.sampling.guidance import guide
from decodax.sharding import place


@dataclasses.dataclass(frozen=True)
class BatchShape:
    """The sizes and settings that programs are compiled for. Batches with equal ones share their programs.

    Attributes:
        algorithm: the method without its weights.
        model: the network.
        params: all weights, which are arguments of the programs.
        size: number of token slots of a row.
        samples: number of rows of a prompt.
        mesh: the mesh that rows are placed on; None: one device.
        top_logprobs: number of likeliest tokens that are recorded at each position; None: nothing is recorded.
    """

    __repr__ = short

    algorithm: Algorithm
    model: Any
    params: Params
    size: int
    samples: int
    mesh: Mesh | None
    top_logprobs: int | None

    @classmethod
    def of(cls, request: Request, longest: int, more: int) -> BatchShape:
        """Returns the sizes and settings of the programs for requests with the model, method and options of `request`.

        Args:
            longest: largest number of tokens of a row, prompt and new tokens.
            more: largest number of tokens that a row commits after its cache has finished its prefill phase: new
                tokens, and prompt tokens after a context.
        """
        lm, algorithm = request.lm, request.algorithm.with_length(more)
        params = Params(target=lm.params, draft=algorithm.weights)
        return cls(algorithm.bare(), lm.model, params, bucket(longest), request.samples, lm.mesh, _rounded(request))

    def row_bytes(self, request: Request) -> int:
        """Returns the bytes that a row takes while it runs: its cache, the state of its drafts, tokens and records, and
        the logits of a round ("SpecMemo: Speculative Decoding is in Your Pocket", Yildirim and Chen, 2025, counts the
        same)."""
        one = request.select([0])
        blank = lambda params, policy, inputs: init_state(
            self.algorithm, self.model, params, policy, jnp.zeros((1, self.size), jnp.int32), jnp.ones(1, jnp.int32),
            size=self.size, max_new=jnp.ones(1, jnp.int32), seed=jnp.zeros((1, 2), jnp.uint32),
            top_logprobs=self.top_logprobs, inputs=inputs)
        state = jax.eval_shape(blank, self.params, one.firsts, one.inputs)
        held = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(state.replace(key=None)))
        return held + 4 * self.algorithm.traits.emits * request.lm.vocab_size

    def fill(self, rows: int) -> int:
        """Returns the number of rows that programs for `rows` rows have: the next larger size that is compiled."""
        return batch(self.algorithm, self.model, self.mesh, rows, self.size)

    def read(self, request: Request, prompts: int, rows: int | None = None,
             known: dict[tuple[int, ...], Cache] | None = None, later: bool = False) -> tuple[Any, Policy, State, int]:
        """Prefills prompts, and makes the rows of their samples.

        Args:
            request: the prompts.
            prompts: number of prompts that the program has; copies fill it up.
            rows: number of rows that the program has; finished rows fill it up. None: one row for each prompt.
            known: caches of prefixes; see `Reader`.
            later: True leaves the prompts to be prefilled within the rounds; see `Reader`.

        Returns:
            The model, whose cache may be one that rows share; the policy of the rows; their state; and the number of
            forwards of the prefill.
        """
        each = request.fill(prompts)
        on_device = lambda policy: place(self.mesh, jax.tree.map(jnp.asarray, policy))
        policy = on_device(each.firsts)
        reader = Reader(each, self.algorithm, self.model, self.params, policy, self.mesh, self.size, self.top_logprobs,
                        known, later)
        model, s, forwards = reader.read()
        if request.guidance is not None:
            model, s = guide(self.algorithm, model, self.params, policy, s, each.guidance, each.negative)
        if rows is None:
            return model, policy, s, forwards
        used = len(request) * self.samples
        live: Any = np.arange(rows) < used
        index: Any = np.minimum(np.arange(rows), used - 1)
        policy = on_device(request.policy.select(index))
        prompt: Any
        sample: Any
        prompt, sample = np.divmod(index.astype(np.int32), np.int32(self.samples))
        s = drivers.fan_out(s, policy, prompt, live, each.seeds[prompt], each.request_ids[prompt],
                            sample.astype(np.uint32))
        return model, policy, s, forwards


@dataclasses.dataclass
class DeviceBatch:
    """B rows on the device that run together in one compiled program: what every front end runs.

    Attributes:
        algorithm: the method without its weights.
        model: the network.
        params: all weights.
        policy: sampling options of each row.
        mesh: the mesh that rows are placed on; None: one device.
        state: state of all rows. Each run donates it and replaces it by the next one.
        status: `i32[B]` on the host, a `Status` for each row.
        counts: `i64[B]`, number of forwards that each row ran or waited through.
        seconds: time spent in rounds.
    """

    __repr__ = short

    algorithm: Algorithm
    model: Any
    params: Params
    policy: Policy
    mesh: Mesh | None
    state: State
    status: np.ndarray = dataclasses.field(init=False)
    counts: np.ndarray = dataclasses.field(init=False)
    seconds: float = dataclasses.field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.status = np.array(self.state.status)
        self.counts = np.zeros(len(self.status), np.int64)

    @property
    def most_rounds(self) -> int:
        """Number of rounds after which every row must have ended."""
        left = int((np.asarray(self.state.max_length) - np.asarray(self.state.length)).max())
        return most_rounds(self.algorithm, left, len(self.status))

    def rounds(self, most: int, fewest: int = 0) -> np.ndarray:
        """Runs `most` rounds at most, or until no more than `fewest` rows are running.

        Returns:
            `i64[B]`, number of forward passes of the target model in this call that each row took part in or waited for
            while it was running. The maximum is the number of forward passes.
        """
        clock = time.perf_counter()
        with on_mesh(self.mesh):
            self.state = drivers.advance(self.algorithm, self.model, self.params, self.policy, self.state,
                                         np.int32(most), np.int32(fewest))
        self.status = np.array(self.state.status)
        stats, before = self.state.stats, self.counts
        self.counts = np.asarray(stats.rounds).astype(np.int64) + np.asarray(stats.waited)
        self.seconds += time.perf_counter() - clock
        return self.counts - before

    def put(self, new: State, policy: Policy, to: np.ndarray) -> None:
        """Replaces rows of the batch by new rows.

        Args:
            new: a state with `B'` rows.
            policy: the policy of the new rows.
            to: `i32[B']`, the row that each new row replaces; a number beyond the batch drops the new row.
        """
        self.state, self.policy = drivers.refill(self.state, self.policy, new, policy, jnp.asarray(to))
        used = to < len(self.status)
        self.status[to[used]] = np.asarray(new.status)[used]
        self.counts[to[used]] = 0

    def end(self, rows: np.ndarray) -> None:
        """Ends those of `rows` (`bool[B]`) that are running, with `Status.TIME`."""
        late = rows & (self.status == Status.RUNNING)
        if late.any():
            self.status = np.where(late, np.int32(Status.TIME), self.status)
            with on_mesh(self.mesh):
                self.state = self.state.replace(status=jax.device_put(self.status, self.state.status.sharding))

    def outcome(self) -> tuple[State, dict[str, np.ndarray]]:
        """Returns the final state of all rows, without cache and states of method and policy, and the method's further
        results (`Algorithm` findings such as scores), arrays `[B, ...]` by name. All are on the host."""
        with on_mesh(self.mesh):
            s = drivers.outcome(self.algorithm, self.state)
            found = findings(self.algorithm, s)
        return host_rows(s, np.arange(len(self.status))), {name: np.asarray(x) for name, x in found.items()}


@dataclasses.dataclass
class Job:
    """A request all of whose prompts run at once, in one batch.

    Attributes:
        request: the prompts and options.
        batch: the rows, the first ones those of the request; further ones fill up the program.
        prefill_forwards: number of forwards of the prefill.
        prefill_seconds: time of the prefill.
        burst: number of rounds that the next bounded run takes.
    """

    __repr__ = short

    request: Request
    batch: DeviceBatch
    prefill_forwards: int
    prefill_seconds: float
    burst: int = 1

    @classmethod
    def begin(cls, request: Request, of: Request | None = None) -> Job:
        """Prefills the prompts of `request` and makes the rows of their samples; returns the job before its first
        round.

        Args:
            request: the prompts and options.
            of: the request that `request` is a part of: all its parts share their programs. Default: `request`.
        """
        keep_room(drivers.compiled())
        of = of or request
        shape, most = BatchShape.of(of, of.longest, of.more), min(of.batch_size or len(of), len(of))
        group = shape.algorithm.traits.samples or 1        # whole groups, of a method that works on rows together
        rows = None if request.samples == 1 else -(-shape.fill(most * request.samples) // group) * group
        clock = time.perf_counter()
        with on_mesh(shape.mesh):
            model, policy, s, forwards = shape.read(request, shape.fill(most), rows)
            # no round at all: compiles the loop, if it must, before the decode clock starts
            s = drivers.advance(shape.algorithm, model, shape.params, policy, s, np.int32(0), np.int32(0))
            jax.block_until_ready(s.length)
        batch = DeviceBatch(shape.algorithm, model, shape.params, policy, shape.mesh, s)
        return cls(request, batch, forwards, time.perf_counter() - clock)

    @property
    def rows(self) -> int:
        """Number of rows of the request (prompts times samples), without padding rows."""
        return len(self.request) * self.request.samples

    @property
    def state(self) -> State:
        """Decoding state of all rows of the batch, padding included. It can be assigned between runs."""
        return self.batch.state

    @state.setter
    def state(self, state: State) -> None:
        self.batch.state = state

    @property
    def status(self) -> np.ndarray:
        """`i32[rows]`, a `Status` for each row of the request: `RUNNING`, or why the row ended."""
        return self.batch.status[:self.rows]

    @property
    def running(self) -> bool:
        return bool((self.status == Status.RUNNING).any())

    @property
    def forwards(self) -> int:
        """Number of forward passes of the target model in the rounds so far, for the whole batch."""
        return int(self.batch.counts.max())

    @property
    def seconds(self) -> float:
        return self.batch.seconds

    @property
    def done(self) -> float:
        """Progress of the request in rows: each finished row counts 1, and each running row the share of its maximum
        number of new tokens that it has."""
        start, now, end = (np.asarray(x)[:self.rows] for x in (
            self.state.prompt_length, self.state.length, self.state.max_length))
        share = np.clip((now - start) / np.maximum(end - start, 1), 0, 1)
        return float(np.where(self.status == Status.RUNNING, share, 1).sum())

    def advance(self, seconds: float | None, rounds: int | None = None, fewest: int = 0) -> None:
        """Runs rows until no more than `fewest` are running, or until a limit.

        Args:
            seconds: the call runs a burst of rounds and returns. The first burst is one round; each that takes less
                than `seconds` doubles the next, up to 256. Call it again while rows are running.
            rounds: largest number of rounds; replaces the burst. None, with `seconds` None: no limit.
            fewest: number of rows that may still run at the end.

        Raises:
            RuntimeError: without a limit, rows still run after the most rounds that the method can need.
        """
        before, most = self.seconds, self.batch.most_rounds
        whole = seconds is None and rounds is None
        self.batch.rounds(most if whole else min(self.burst if rounds is None else rounds, most), fewest)
        if whole and int((self.status == Status.RUNNING).sum()) > fewest:
            raise RuntimeError(f"{self.batch.algorithm}: rows still running after {most} rounds; it makes no progress")
        if seconds is not None and self.seconds - before < seconds:
            self.burst = min(self.burst * 2, 256)

    def end(self, rows: np.ndarray) -> None:
        """Ends those of `rows` (`bool[rows]`) that are running, with `Status.TIME`."""
        self.batch.end(np.pad(rows, (0, len(self.batch.status) - len(rows))))

    def expire(self) -> None:
        """Gives running rows `Status.TIME` on the host. On the device they stay running, so that a method that keeps
        finished texts beside its rows treats them as unfinished."""
        status = self.batch.status
        self.batch.status = np.where(status == Status.RUNNING, np.int32(Status.TIME), status)

    def result(self) -> Result:
        """Returns the result of the request's rows."""
        s, found = jax.tree.map(lambda x: x[:self.rows], self.batch.outcome())
        return self.timed(collect(self.request, s, self.status, found), self.forwards)

    def timed(self, result: Result, forwards: int) -> Result:
        """Returns `result` with the batch's number of forward passes `forwards` and its prefill and decoding times in
        `stats`."""
        return dataclasses.replace(result, stats=dataclasses.replace(
            result.stats, forwards=forwards, prefill_forwards=self.prefill_forwards, seconds=self.seconds,
            prefill_seconds=self.prefill_seconds))


def host_rows(s: State, rows: np.ndarray) -> State:
    """Returns rows of a state on the host, without the cache and the states of method and policy."""
    return jax.tree.map(lambda x: np.asarray(x)[rows], s.replace(cache=None, algo=None, policy=None, key=None))


def collect(request: Request, s: State, status: np.ndarray, findings: dict[str, np.ndarray]) -> Result:
    """Returns the result of a request's rows, without times and counts of the batch that they ran in.

    Args:
        request: the prompts and options.
        s: state of these rows alone, on the host.
        status: `i32[B]`, a `Status` for each row that is still running in `s`.
        findings: what the method found of each row, arrays `[B, ...]`.
    """
    status = np.where(s.status == Status.RUNNING, status, s.status)
    first = np.arange(len(status)).reshape(-1, request.samples)[:, :request.answers].reshape(-1)
    if len(first) < len(status):
        s, status, findings = jax.tree.map(lambda x: x[first], (s, status, findings))
    tokens, lengths = new_tokens(s, request.lm.pad)
    text, tokenizer = None, request.lm.tokenizer
    if tokenizer is not None:
        text = [tokenizer.continuation(
            request.prompts[i // request.answers], tokens[i, :n].tolist(), stop=request.stop,
            min_new=int(request.min_new[i // request.answers]), skip_special_tokens=request.skip_special_tokens,
            include_stop=request.include_stop) for i, n in enumerate(lengths)]
    stats: dict[str, Any] = {k: getattr(s.stats, k).astype(np.int64)
                             for k in ("rounds", "drafted", "accepted", "histogram")}
    return Result(tokens=tokens, lengths=lengths, status=[Status(int(x)) for x in status], text=text,
                  logprobs=log_probs(s, request.logprobs), findings=findings,
                  stats=Statistics(forwards=0, prefill_forwards=0, tokens=lengths.astype(np.int64), seconds=0.0,
                                   prefill_seconds=0.0, **stats))


def _rounded(request: Request) -> int | None:
    """Returns the number of likeliest tokens that the programs record: a power of two, so that few programs serve all
    requests. The result has as many as were asked for."""
    return request.logprobs and min(power(request.logprobs), request.lm.vocab_size)
