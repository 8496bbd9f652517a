"""A batch on its way through the compiled drivers: what all front ends share."""

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
    """What the programs of a request are compiled for; batches of the same shape share them.

    Attributes:
        algorithm: without its weights. model: the network. params: all weights, which travel as data.
        size: slots of a row. samples: rows of a prompt. mesh: where rows lie, or None. top_logprobs: how many most
            likely tokens are recorded.
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
        """That of requests for rows of up to `longest` tokens, of which `more` come when the cache has settled."""
        lm, algorithm = request.lm, request.algorithm.fit(more)
        params = Params(target=lm.params, draft=algorithm.weights)
        return cls(algorithm.bare(), lm.model, params, bucket(longest), request.samples, lm.mesh, _rounded(request))

    def row_bytes(self, request: Request) -> int:
        """Bytes that a row takes while it runs: its cache, what its drafts keep, tokens and records, and a round's
        logits ("SpecMemo: Speculative Decoding is in Your Pocket", Yildirim and Chen, 2025, counts the same)."""
        one = request.select([0])
        blank = lambda params, policy, inputs: init_state(
            self.algorithm, self.model, params, policy, jnp.zeros((1, self.size), jnp.int32), jnp.ones(1, jnp.int32),
            size=self.size, max_new=jnp.ones(1, jnp.int32), seed=jnp.zeros((1, 2), jnp.uint32),
            top_logprobs=self.top_logprobs, inputs=inputs)
        state = jax.eval_shape(blank, self.params, one.firsts, one.inputs)
        held = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(state.replace(key=None)))
        return held + 4 * self.algorithm.traits.emits * request.lm.vocab_size

    def fill(self, rows: int) -> int:
        """How many rows the programs for so many have."""
        return batch(self.algorithm, self.model, self.mesh, rows, self.size)

    def read(self, request: Request, prompts: int, rows: int | None = None,
             known: dict[tuple[int, ...], Cache] | None = None, later: bool = False) -> tuple[Any, Policy, State, int]:
        """Reads the prompts, filled up to so many, and fans out their samples, filled up to so many rows.

        Args:
            known, later: as of `Reader`.

        Returns:
            The model as rows came to share a cache, the policy of the rows, their state, and how many forwards it took.
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
class Job:
    """A batch on its way: the compiled drivers, and the clock. The state is donated from burst to burst."""

    __repr__ = short

    request: Request
    algorithm: Algorithm
    model: Any
    params: Params
    policy: Policy
    state: State
    prefill_forwards: int
    prefill_seconds: float
    seconds: float = 0.0
    forwards: int = 0
    burst: int = 1
    status: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(1, np.int32))

    @classmethod
    def begin(cls, request: Request, of: Request | None = None) -> Job:
        """Prefills the prompts and fans out their samples.

        Args:
            of: the request of which this is a batch; its batches share their programs. Default: it is the only one.
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
        job = cls(request, shape.algorithm, model, shape.params, policy, s, forwards, time.perf_counter() - clock)
        job.status = np.asarray(s.status)[:len(request) * request.samples]
        return job

    @property
    def running(self) -> bool:
        return bool((self.status == Status.RUNNING).any())

    @property
    def finished(self) -> int:
        return int((self.status != Status.RUNNING).sum())

    @property
    def done(self) -> float:
        """How many rows have finished; those that run count by how much of their budget they have."""
        start, now, end = (np.asarray(x)[:len(self.status)] for x in (
            self.state.prompt_length, self.state.length, self.state.max_length))
        share = np.clip((now - start) / np.maximum(end - start, 1), 0, 1)
        return float(np.where(self.status == Status.RUNNING, share, 1).sum())

    def advance(self, seconds: float | None, rounds: int | None = None, fewest: int = 0) -> None:
        """Runs to the end, or for about this long, or so many rounds, or until no more than `fewest` rows
        are running."""
        clock = time.perf_counter()
        budget = int((np.asarray(self.state.max_length) - np.asarray(self.state.length)).max())
        bound = most_rounds(self.algorithm, budget, self.state.batch)
        whole = seconds is None and rounds is None
        rounds = bound if whole else min(self.burst if rounds is None else rounds, bound)
        with on_mesh(self.request.lm.mesh):
            self.state = drivers.advance(self.algorithm, self.model, self.params, self.policy, self.state,
                                         np.int32(rounds), np.int32(fewest))
        self.status = np.asarray(self.state.status)[:len(self.status)]
        spent = time.perf_counter() - clock
        self.seconds += spent
        # the row that runs longest took part in each of them, or waited while rows of another kind did
        stats = self.state.stats
        self.forwards = int((np.asarray(stats.rounds) + np.asarray(stats.waited)).max())
        if whole and int((self.status == Status.RUNNING).sum()) > fewest:
            raise RuntimeError(f"{self.algorithm}: rows still running after {rounds} rounds; it makes no progress")
        if seconds is not None and spent < seconds:
            self.burst = min(self.burst * 2, 256)

    def end(self, rows: np.ndarray) -> None:
        """Ends those of `rows` (`bool[B]`) that still run: nobody waits for them."""
        wide = np.zeros(self.state.batch, bool)
        wide[:len(rows)] = rows
        status = np.array(self.state.status)
        status[wide & (status == Status.RUNNING)] = Status.TIME
        with on_mesh(self.request.lm.mesh):
            self.state = self.state.replace(status=jax.device_put(status, self.state.status.sharding))
        self.status = status[:len(self.status)]

    def expire(self) -> None:
        """Ends the rows that still run: their time is out."""
        self.status = np.where(self.status == Status.RUNNING, np.int32(Status.TIME), self.status)

    def result(self) -> Result:
        """What came out."""
        with on_mesh(self.request.lm.mesh):
            s = drivers.outcome(self.algorithm, self.state)
            found = findings(self.algorithm, s)
        # without the rows that fill up the batch
        result = collect(self.request, host_rows(s, np.arange(len(self.status))), self.status,
                         {name: np.asarray(x)[:len(self.status)] for name, x in found.items()})
        return dataclasses.replace(result, stats=dataclasses.replace(
            result.stats, forwards=self.forwards, prefill_forwards=self.prefill_forwards, seconds=self.seconds,
            prefill_seconds=self.prefill_seconds))


def host_rows(s: State, rows: np.ndarray) -> State:
    """These rows of a state on the host, without its cache and what methods carry."""
    return jax.tree.map(lambda x: np.asarray(x)[rows], s.replace(cache=None, algo=None, policy=None, key=None))


def collect(request: Request, s: State, status: np.ndarray, findings: dict[str, np.ndarray]) -> Result:
    """The result of a request's rows, without times and counts of the batch that they ran in.

    Args:
        s: of these rows alone, on the host. status: `i32[B]`, why each ended that is running in `s`.
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
    """How many most likely tokens the programs record: a power of two, of which the result takes what was asked."""
    return request.logprobs and min(power(request.logprobs), request.lm.vocab_size)
