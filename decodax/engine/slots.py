"""A batch whose places are given to one prompt after another: continuous batching (Orca: Yu et al., 2022; Flover: Yao
et al., 2023; E-BATCH: Silfa et al., 2020).

The rounds are those of any batch. They run until some rows have finished; then these are taken out, other prompts are
read beside the batch, and their rows are put in the free places, which costs what the new rows hold. A row has its own
policy, budget, seed and length, and does not depend on its neighbours, so each prompt gets the tokens that it would get
alone.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from decodax.cache.shared_prefix import sharing
from decodax.common.axes import DATA
from decodax.core import drivers
from decodax.core.algorithm import observer
from decodax.core.memory import afford, by_row, grows, power
from decodax.core.mesh import on_mesh
from decodax.core.state import Status
from decodax.engine.batch import BatchShape, DeviceBatch, collect
from decodax.engine.compilation import keep_room
from decodax.engine.piggyback import Piggyback
from decodax.engine.reading import chunk_width
from decodax.engine.request import Request
from decodax.engine.result import Result

READERS = 2
"""Prompts of which parts are read in one round of others: the end of one and the beginning of the next."""


@dataclasses.dataclass
class Use:
    """What places and forwards were used for.

    Attributes:
        forwards: of the rounds, all rows at once. prefill_forwards: of the prompts.
        row_rounds: rounds in which a row was running, of `slot_rounds` that all rows could have run.
        prompt_tokens: that were read, of `prefill_tokens` with those that fill up chunks and rows. prefix_tokens: that
            were not read, since others began with the same ones.
        seconds, prefill_seconds: of the rounds, and of reading prompts and putting them in their places.
        stalled: of the latter, those in which rows could have been running.
    """

    forwards: int = 0
    prefill_forwards: int = 0
    row_rounds: int = 0
    slot_rounds: int = 0
    prompt_tokens: int = 0
    prefill_tokens: int = 0
    prefix_tokens: int = 0
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    stalled: float = 0.0

    def add(self, other: Use) -> None:
        for field in dataclasses.fields(Use):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    @property
    def goodput(self) -> float:
        """The share of the rows' rounds in which they had something to do."""
        return self.row_rounds / max(self.slot_rounds, 1)


class Slots:
    """Places for `seats` prompts, each with all rows of its prompt.

    Args:
        first: a request like all that will come: `kin` of them is the same.
        seats: prompts at once; rounded up to a number of rows that programs are made for.
        longest: of a row, prompt and new tokens. more: tokens that come when a row's cache has settled.
        use: is added to. memory: bytes that rows may take, which may make the seats fewer.
        token_budget: of a round: prompts are read in the rounds of others, as far as it goes, where that is possible.

    Raises:
        ValueError: not even the rows of one prompt fit the memory.
    """

    def __init__(self, first: Request, seats: int, longest: int, more: int, use: Use | None = None,
                 memory: int | None = None, token_budget: int | None = None):
        self.first, self.more = first, power(more)
        self.shape = shape = BatchShape.of(first, longest, self.more)
        group, each = shape.algorithm.traits.samples or 1, first.samples
        rows = -(-shape.fill(seats * each) // group) * group
        if memory is not None:
            row = shape.row_bytes(first)
            if memory < each * row:
                raise ValueError(f"memory: got {memory:,} bytes; a prompt of up to {longest} tokens takes "
                                 f"{each * row:,}")
            if rows * row > memory:
                seats = memory // (each * row)
                rows = seats * each         # not filled up
        afford(shape.algorithm, shape.model, shape.mesh, rows, longest, "slots")
        parts = 1 if shape.mesh is None else shape.mesh.shape.get(DATA, 1)
        self.seats: list[Any] = [None] * (rows // each)
        self._ends = [math.inf] * (rows // each)        # when the time of each is out, by `time.monotonic`
        self.rows = rows
        few = 1 << (max(len(self.seats) // 8, 1).bit_length() - 1)
        self.few = min(-(-few // parts) * parts, len(self.seats))
        """How many prompts are read at once where others are being continued."""
        self.use = Use() if use is None else use
        self.splits = shape.mesh is None and _splits(first)
        """Whether a prompt may be read in two parts, of which others share the first."""
        self.rides = (token_budget is not None and self.splits and first.samples == 1
                      and not first.algorithm.traits.canvas)
        """Whether prompts are read in the rounds of others."""
        if self.rides:
            assert token_budget is not None
            self.shape = dataclasses.replace(shape, algorithm=Piggyback(
                shape.algorithm, token_budget, min(first.chunk, token_budget), min(self.few, READERS)))
        self._batch: DeviceBatch | None = None
        self._known: dict[tuple[int, ...], Any] | None = {} if shape.mesh is None else None
        self._burst, self._barren, self._bound = 1, 0, 0

    def fits(self, request: Request) -> bool:
        """Whether the places are large enough for it."""
        return request.longest <= self.shape.size and request.more <= self.more

    @property
    def known(self) -> list[tuple[int, ...]]:
        """The beginnings whose caches are kept."""
        return list(self._known or ())

    @property
    def free(self) -> list[int]:
        return [i for i, held in enumerate(self.seats) if held is None]

    @property
    def timed(self) -> bool:
        """Whether the time of a prompt that runs may run out."""
        return any(end < math.inf for end, held in zip(self._ends, self.seats, strict=True) if held is not None)

    @property
    def running(self) -> int:
        """Rows that have not finished."""
        return 0 if self._batch is None else int((self._batch.status == Status.RUNNING).sum())

    def admit(self, requests: Sequence[Request], tags: Sequence[Any], prefix: int = 0) -> None:
        """Reads prompts, one of each request, and gives them free places: up to `few` where others are being continued,
        else as many as there are.

        Args:
            prefix: so many tokens they all begin with, which are read once, also for prompts to come.
        """
        keep_room(drivers.compiled())
        now, clock = time.monotonic(), time.perf_counter()
        each, free, running = self.first.samples, self.free, self.running
        whole = len(free) == len(self.seats)
        prompts = self.few if not whole else self.rows if each == 1 else self.shape.fill(len(self.seats))
        assert 0 < len(requests) <= min(prompts, len(free))
        joined = Request.join(requests)
        new = prefix > 0 and tuple(requests[0].prompts[0][:prefix]) not in (self._known or ())
        if prefix:
            joined = dataclasses.replace(joined, context=np.full(len(requests), prefix, np.int32))
        if whole:
            self._batch = None      # what it held is free before the next is made
        with on_mesh(self.shape.mesh):
            rows = None if each == 1 else self.rows if whole else prompts * each
            model, policy, s, forwards = self.shape.read(joined, prompts, rows, self._known, self.rides and not whole)
            if whole:
                free = list(range(len(requests)))
                self._batch = DeviceBatch(self.shape.algorithm, model, self.shape.params, policy, self.shape.mesh, s)
            else:
                assert self._batch is not None and model == self._batch.model
                to = np.full(prompts * each, self.rows, np.int32)
                for i, seat in enumerate(free[:len(requests)]):
                    to[i * each:(i + 1) * each] = np.arange(seat * each, (seat + 1) * each)
                self._batch.put(s, policy, to)
            jax.block_until_ready(self._batch.state.length)
        for seat, request, tag in zip(free, requests, tags, strict=False):
            self.seats[seat] = request, tag
            self._ends[seat] = math.inf if request.max_time is None else now + request.max_time
        self._barren = 0
        seconds = time.perf_counter() - clock
        self.use.stalled += seconds * (running > 0)
        self._account(requests, prompts, forwards, prefix if new else 0, prefix, self.rides and not whole, seconds)

    def _account(self, requests: Sequence[Request], prompts: int, forwards: int, read: int, prefix: int,
                 later: bool, seconds: float) -> None:
        """Adds what reading prompts took, of whose beginning so many tokens were `read`."""
        left = [len(request.prompts[0]) - 1 - prefix for request in requests]
        width = lambda left: chunk_width(left, self.first.chunk, self.shape.size)
        first = -(-(read - 1) // width(read - 1)) if read > 1 else 0        # forwards of one row
        beside = sum(left) if later else prompts * (forwards - first) * width(max(left))
        self.use.add(Use(prefill_forwards=forwards, prefill_seconds=seconds, prompt_tokens=sum(left) + read,
                         prefix_tokens=prefix * len(left) - read,
                         prefill_tokens=first * width(read - 1) + beside))

    def advance(self, leave: int = 0, seconds: float | None = None) -> None:
        """Runs until places for `leave` prompts are free, or to the end of all.

        Args:
            seconds: for about so long at most; None: as long as it takes.

        Raises:
            RuntimeError: the method makes no progress.
        """
        batch, running = self._batch, self.running
        assert batch is not None
        before, bound = batch.seconds, batch.most_rounds
        if self.rides:      # a round reads one token at least
            bound += sum(len(request.prompts[0]) for request, _ in filter(None, self.seats))
        if self._barren == 0:
            self._bound = bound
        fewest = running - leave * self.first.samples if leave else 0
        took = batch.rounds(bound if seconds is None else min(bound, self._burst), max(fewest, 0))
        forwards, spent = int(took.max()), batch.seconds - before
        self.use.add(Use(forwards=forwards, row_rounds=int(took.sum()), slot_rounds=forwards * self.rows,
                         seconds=spent))
        if seconds is not None:
            self._burst = max(min(self._burst * 2, bound) if spent < seconds else self._burst // 2, 1)
        # rounds since a row ended: what ran then has ended by now
        self._barren = 0 if self.running < running else self._barren + forwards
        if self.running == running and (seconds is None or self._barren >= self._bound):
            raise RuntimeError(f"{self.shape.algorithm}: rows still running after {self._bound} rounds; it makes no "
                               "progress")

    def finished(self) -> list[tuple[Any, Result]]:
        """Takes out the prompts all of whose rows have finished: their tags and results."""
        each, batch, out = self.first.samples, self._batch, []
        done = [] if batch is None else [
            i for i, held in enumerate(self.seats) if held is not None
            and not (batch.status[i * each:(i + 1) * each] == Status.RUNNING).any()]
        if not done or batch is None:
            return []
        results = batch.outcome()
        for seat in done:
            request, tag = self.seats[seat]
            rows = slice(seat * each, (seat + 1) * each)
            s, found = jax.tree.map(lambda x, rows=rows: x[rows], results)
            result, forwards = collect(request, s, batch.status[rows], found), int(batch.counts[rows].max())
            out.append((tag, dataclasses.replace(result, stats=dataclasses.replace(result.stats, forwards=forwards))))
            self.seats[seat] = None
        return out

    def expire(self, now: float) -> None:
        """Ends the rows that still run of prompts whose time is out: at `now`, by `time.monotonic`; `math.inf`: all."""
        if self._batch is not None:
            out = np.repeat([end <= now for end in self._ends], self.first.samples)
            self._batch.end(np.pad(out, (0, self.rows - len(out))))


def _splits(request: Request) -> bool:
    if request.context is not None or request.inputs is not None or request.behind is not None:
        return False
    method = request.algorithm
    traits = method.traits
    return bool(traits.caches and traits.prefills and observer(method) is None and grows(method, request.lm.model))


def possible(request: Request) -> bool:
    """Whether prompts of a request can take one another's places: not where rows share memory, and not under guidance,
    whose second branch is as long as its prompts."""
    if request.guidance is not None or sharing(request.lm.model, 1, 1) is not None:
        return False
    return by_row(request.algorithm, request.lm.model)


def kin(request: Request) -> Any:
    """What requests have in common whose prompts may stand in one batch: compared with `==`."""
    lm, policy = request.lm, request.policy
    leaves, structure = jax.tree.flatten(policy.own)
    of = lambda tree: jax.tree.map(lambda x: (x.shape[1:], str(x.dtype)), tree)
    weights = tuple(map(id, jax.tree.leaves((lm.params, request.algorithm.weights))))
    inputs = jax.tree.flatten(request.inputs)
    return (request.algorithm, weights, lm.model, lm.mesh, lm.vocab_size, request.samples, request.stop,
            request.logprobs, request.chunk, request.skip_special_tokens, request.include_stop, structure,
            tuple(of(x) for x in leaves), inputs[1], tuple(of(x) for x in inputs[0]), request.context is None,
            request.guidance is None, request.behind is None,
            tuple(map(id, jax.tree.leaves(policy.tables))))
