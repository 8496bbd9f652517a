"""Continuous batching: a prompt that waits takes the rows of one that has finished (Orca: Yu et al., 2022; Flover: Yao
et al., 2023; E-BATCH: Silfa et al., 2020).

The batch runs until some rows have finished. Their results are taken out, waiting prompts are prefilled in a batch of
their own, and their rows replace the finished ones, which costs the bytes of the new rows. A row has its own policy,
budget, seed and length and does not depend on its neighbours, so each prompt gets the tokens that it would get alone.
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
from decodax.common.axes import replicas
from decodax.core import drivers
from decodax.core.algorithm import prefill_observer
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
"""Number of prompts that a round prefills parts of: the end of one and the beginning of the next."""


@dataclasses.dataclass
class Use:
    """Counts of how the rows and forwards of a batch were used.

    Attributes:
        forwards: number of forwards of the rounds, each of all rows.
        prefill_forwards: number of forwards that prefilled prompts.
        row_rounds: sum over rows of the rounds in which the row was running.
        slot_rounds: sum over rows of all rounds, also those in which the row was free.
        prompt_tokens: number of prompt tokens that were prefilled.
        prefill_tokens: the same with the padding of chunks and rows.
        prefix_tokens: number of prompt tokens that were not prefilled, since another prompt began with the same ones.
        seconds: time of the rounds.
        prefill_seconds: time of the prefill, and of moving its rows into the batch.
        stalled: part of `prefill_seconds` in which other rows could have been running.
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
        """Share of the rows' rounds in which the row was running, from 0 to 1."""
        return self.row_rounds / max(self.slot_rounds, 1)


class Slots:
    """A batch with seats for several prompts. A seat has all rows (samples) of its prompt.

    Args:
        first: a request; all that come later have an equal `kin`.
        seats: number of prompts at once; rounded up to a number of rows that programs are compiled for.
        longest: largest number of tokens of a row, prompt and new tokens.
        more: largest number of tokens that a row commits after its prefill phase; see `BatchShape.of`.
        use: counts to add to.
        memory: bytes that the rows may take; it may lower the number of seats. None: no limit.
        token_budget: number of tokens of a round. Prompts are then prefilled within the rounds of other prompts, where
            that is possible. None: they are prefilled between rounds.

    Raises:
        ValueError: the memory does not hold the rows of one prompt.
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
        parts = replicas(shape.mesh)
        self.seats: list[Any] = [None] * (rows // each)
        self._ends = [math.inf] * (rows // each)        # when the time of each is out, by `time.monotonic`
        self.rows = rows
        few = 1 << (max(len(self.seats) // 8, 1).bit_length() - 1)
        self.few = min(-(-few // parts) * parts, len(self.seats))
        """Number of prompts that are prefilled together while other rows are running."""
        self.use = Use() if use is None else use
        self.splits = shape.mesh is None and _splits(first)
        """True if a prompt may be prefilled in two parts, the first of which is shared with other prompts."""
        self.rides = (token_budget is not None and self.splits and first.samples == 1
                      and not first.algorithm.traits.canvas)
        """True if prompts are prefilled within the rounds of other prompts."""
        if self.rides:
            assert token_budget is not None
            self.shape = dataclasses.replace(shape, algorithm=Piggyback(
                shape.algorithm, token_budget, min(first.chunk, token_budget), min(self.few, READERS)))
        self._batch: DeviceBatch | None = None
        self._known: dict[tuple[int, ...], Any] | None = {} if shape.mesh is None else None
        self._burst, self._barren, self._bound = 1, 0, 0

    def fits(self, request: Request) -> bool:
        """Returns True if the rows of this batch are large enough for `request`: for its longest row, and for the
        tokens that it commits after its prefill phase."""
        return request.longest <= self.shape.size and request.more <= self.more

    @property
    def known(self) -> list[tuple[int, ...]]:
        """Token ids of each prefix whose cache is kept, so that later prompts that begin with it need not prefill
        it."""
        return list(self._known or ())

    @property
    def free(self) -> list[int]:
        return [i for i, held in enumerate(self.seats) if held is None]

    @property
    def timed(self) -> bool:
        """True if a running prompt has a time limit."""
        return any(end < math.inf for end, held in zip(self._ends, self.seats, strict=True) if held is not None)

    @property
    def running(self) -> int:
        """Number of rows that have not finished."""
        return 0 if self._batch is None else int((self._batch.status == Status.RUNNING).sum())

    def admit(self, requests: Sequence[Request], tags: Sequence[Any], prefix: int = 0) -> None:
        """Prefills prompts and gives them free seats.

        Args:
            requests: requests of one prompt each: at most `few` of them while other rows are running, else at most as
                many as there are seats.
            tags: what `finished` returns with the result of each.
            prefix: number of first tokens that all of them share. They are prefilled once, and kept for later prompts.
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
        """Adds the counts of a prefill to `use`. `read` is the number of tokens of a shared prefix that it
        prefilled."""
        left = [len(request.prompts[0]) - 1 - prefix for request in requests]
        width = lambda left: chunk_width(left, self.first.chunk, self.shape.size)
        first = -(-(read - 1) // width(read - 1)) if read > 1 else 0        # forwards of one row
        beside = sum(left) if later else prompts * (forwards - first) * width(max(left))
        self.use.add(Use(prefill_forwards=forwards, prefill_seconds=seconds, prompt_tokens=sum(left) + read,
                         prefix_tokens=prefix * len(left) - read,
                         prefill_tokens=first * width(read - 1) + beside))

    def advance(self, leave: int = 0, seconds: float | None = None) -> None:
        """Runs until the seats of `leave` further prompts are free; 0: until all rows have finished.

        Args:
            leave: number of prompts.
            seconds: approximate time after which it returns; None: no limit.

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
        """Frees the seats of the prompts all of whose rows have finished, and returns their tags and results."""
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
        """Ends the running rows of prompts whose time limit has passed at `now` (`time.monotonic`; `math.inf`: all)."""
        if self._batch is not None:
            out = np.repeat([end <= now for end in self._ends], self.first.samples)
            self._batch.end(np.pad(out, (0, self.rows - len(out))))


def _splits(request: Request) -> bool:
    if request.context is not None or request.inputs is not None or request.behind is not None:
        return False
    method = request.algorithm
    traits = method.traits
    return bool(traits.caches and traits.prefills and prefill_observer(method) is None
                and grows(method, request.lm.model))


def possible(request: Request) -> bool:
    """Returns True if prompts like those of the request can replace one another in a batch. They cannot if rows share
    memory, nor under guidance, whose second branch is as long as its prompts."""
    if request.guidance is not None or sharing(request.lm.model, 1, 1) is not None:
        return False
    return by_row(request.algorithm, request.lm.model)


def kin(request: Request) -> Any:
    """Returns a value to compare requests by: two requests with equal values have the same model, method and kind of
    sampling, and their prompts can run in one batch."""
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
