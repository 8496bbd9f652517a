"""Schedules prompts to free rows. Requests that differ in method or kind of sampling run in separate batches."""

from __future__ import annotations

import collections
import dataclasses
import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import numpy as np

from decodax.common.struct import short
from decodax.core.state import Status
from decodax.engine.arrivals import Arriving, AtHand
from decodax.engine.prefixes import mates
from decodax.engine.request import OutOfTime, Request
from decodax.engine.result import LogProbs, Result, Statistics
from decodax.engine.slots import Slots, Use, kin

BURST = 0.05
"""Seconds of rounds between two checks of the clock and of the source."""

GATHER = 0.02
"""Seconds that an empty batch waits for further prompts after the first one, so that a source that has more can fill
it."""


@dataclasses.dataclass(frozen=True, eq=False)
class Ticket:
    """A waiting prompt.

    Attributes:
        request: the request of this one prompt.
        tag: any object by which the caller identifies it.
    """

    __repr__ = short

    request: Request
    tag: Any = None


@dataclasses.dataclass(frozen=True, eq=False)
class Refused:
    """A prompt that cannot be answered.

    Attributes:
        error: the reason.
        tag: any object by which the caller identifies it.
    """

    error: Exception
    tag: Any = None

    @property
    def outcome(self) -> Result | Exception:
        """The result for the caller of this prompt: the error, or if the prompt's time was over before it began, a
        `Result` without tokens and with `Status.TIME`."""
        return unstarted(self.error.request) if isinstance(self.error, OutOfTime) else self.error


Waiting = collections.deque[tuple[Ticket, Any]]
"""Waiting tickets, each with the `kin` of its request."""


def schedule(tickets: Iterable[Any] | AtHand | Arriving, seats: int, *,
             read: Callable[[Any], Ticket | Refused | None] = lambda item: item, ahead: int | None = None,
             end: float | None = None, longest: int = 1, more: int = 1, memory: int | None = None,
             token_budget: int | None = None,
             use: Use | None = None) -> Generator[tuple[Any, Result | Exception], None, None]:
    """Runs prompts in rows that are refilled as they become free. Yields tags with results as they finish, or with the
    error of a prompt that cannot be answered.

    Tickets are taken only when there is room for them; running rows do not wait for a source that has no ticket yet
    (`Arriving`). Of the waiting prompts, those of similar length are prefilled together. A ticket that does not fit the
    current batch (another method, model or kind of sampling, or a longer text) waits until the batch has run empty;
    after `ahead` other tickets have passed it, no others are added to the batch. A row whose request has a `max_time`
    ends with `Status.TIME` when that time has passed since the prefill of its prompt began.

    Args:
        tickets: tickets, or items from which `read` makes them; a plain iterable counts as `AtHand`.
        seats: number of prompts that run at once.
        read: returns the ticket of an item, or None to skip it. An error that it raises ends the source.
        ahead: maximum number of waiting tickets; default 4 times `seats`.
        end: time limit, by `time.monotonic`: running and waiting prompts then end with `Status.TIME`.
        longest: minimum size of rows, in tokens. If the longest text to come is known, no second batch has to be made.
        more: minimum number of tokens of a row after its cache is finished (`finish_prefill`), likewise.
        memory: bytes that rows may take, as counted by `BatchShape.row_bytes`; limits the number of rows.
        token_budget: maximum number of tokens in a round; see `Slots`.
        use: a `Use` to which counts and times are added.

    Raises:
        Exception: an error of the source or of `read`, raised after all earlier prompts have been answered.
    """
    use = Use() if use is None else use
    source = tickets if isinstance(tickets, (AtHand, Arriving)) else AtHand(tickets)
    waiting: Waiting = collections.deque()
    ahead = ahead_of(seats, ahead)
    slots: Slots | None = None
    group: Any = None
    passed = 0
    failure: BaseException | None = None

    def made(items: Iterable[Any]) -> Iterator[Ticket | Refused]:
        nonlocal failure
        for item in items:
            try:
                ticket = read(item)
            except Exception as error:
                failure = error
                return
            if ticket is not None:
                yield ticket

    try:
        while True:
            idle, until = slots is None or len(slots.free) == len(slots.seats), time.monotonic() + GATHER
            while len(waiting) < ahead and failure is None and not source.over:
                source.allow(ahead - len(waiting))
                # an empty batch waits for its first prompt, and a moment for others; rows that run wait for none
                clock = time.monotonic()
                patience = 0 if not idle else until - clock if waiting else None if end is None else end - clock
                items = source.take(ahead - len(waiting), patience)
                until = until if waiting else time.monotonic() + GATHER
                for ticket in made(items):
                    if isinstance(ticket, Refused):
                        yield ticket.tag, ticket.outcome
                    else:
                        waiting.append((ticket, kin(ticket.request)))
                if not items or not idle:
                    break
            if end is not None and time.monotonic() > end:
                if slots is not None:
                    slots.expire(math.inf)
                    yield from slots.finished()
                yield from ((ticket.tag, unstarted(ticket.request)) for ticket, _ in waiting)
                for ticket in made(source.rest()):
                    yield ticket.tag, ticket.outcome if isinstance(ticket, Refused) else unstarted(ticket.request)
                break
            over = failure is not None or source.over
            if idle and not waiting:
                if over:
                    break
                continue
            if idle and (slots is None or group != waiting[0][1] or not slots.fits(waiting[0][0].request)):
                group, slots = waiting[0][1], None
                try:
                    slots = _places(waiting, seats, over, longest, more, use, memory, token_budget)
                except ValueError as error:     # it is too long for the memory
                    yield waiting.popleft()[0].tag, error
                    continue
            assert slots is not None
            while passed < ahead:
                chosen, prefix = _choose(waiting, group, slots)
                if not chosen:
                    break
                first = chosen[0] is waiting[0]
                passed = 0 if first else passed + len(chosen)
                for ticket_and_kin in chosen:
                    waiting.remove(ticket_and_kin)
                source.allow(ahead - len(waiting))
                tags = [ticket.tag for ticket, _ in chosen]
                try:
                    slots.admit([ticket.request for ticket, _ in chosen], tags, prefix)
                except (ValueError, TypeError) as error:        # found before anything ran, so rows that run go on
                    yield from ((tag, error) for tag in tags)
                yield from slots.finished()         # of prompts that may make no token
            if slots.running:
                leave = min(slots.few, -(-slots.running // slots.first.samples))
                watched = end is not None or slots.timed or (slots.free and len(waiting) < ahead and not over)
                slots.advance(leave, BURST if watched else None)
                slots.expire(time.monotonic())
            elif len(slots.free) == len(slots.seats):
                passed = 0
            yield from slots.finished()
    finally:
        source.close()
    failure = source.error if failure is None else failure
    if failure is not None:
        raise failure


def ahead_of(seats: int, ahead: int | None) -> int:
    """Returns the maximum number of waiting tickets: `ahead` but at least `seats`, or 4 times `seats` if `ahead` is
    None."""
    return 4 * seats if ahead is None else max(ahead, seats)


def _places(waiting: Waiting, seats: int, over: bool, longest: int, more: int, use: Use, memory: int | None,
            token_budget: int | None) -> Slots:
    """Returns a batch for the prompts that are of the same kind as the one that waits longest: large enough for all of
    them, or, if memory does not suffice, for those that are not longer than the first.

    Raises:
        ValueError: memory does not suffice for the first one either.
    """
    like = [ticket.request for ticket, own in waiting if own == waiting[0][1]]
    short = [r for r in like if r.longest <= like[0].longest and r.more <= like[0].more]

    def made(requests: list[Request]) -> Slots:
        places = min(seats, len(like)) if over else seats
        return Slots(like[0], places, max(longest, *(r.longest for r in requests)),
                     max(more, *(r.more for r in requests)), use, memory, token_budget)

    try:
        return made(like)
    except ValueError:
        return made(short)


def _choose(waiting: Waiting, group: Any, slots: Slots) -> tuple[list[tuple[Ticket, Any]], int]:
    """Returns the prompts that are prefilled next, and the length of their common prefix. They are the one that waits
    longest and those with the same prefix or nearly its length; none if too few rows are free."""
    free = len(slots.free)
    most = free if free == len(slots.seats) else slots.few
    fit = [item for item in waiting if item[1] == group and slots.fits(item[0].request)]
    if not fit or free < min(most, len(fit)):
        return [], 0
    prompts = [item[0].request.prompts[0] for item in fit]
    prefix, which = mates(prompts, known=slots.known) if slots.splits else (0, [])
    which = which or list(range(len(fit)))
    near = sorted(which[1:], key=lambda i: (abs(len(prompts[i]) - len(prompts[0])), i))
    return [fit[i] for i in (which[0], *near[:min(most, free) - 1])], prefix


def unstarted(request: Request) -> Result:
    """Returns the result of prompts whose time was over before they began: no tokens, `Status.TIME`."""
    rows = len(request) * request.answers
    none: Any = np.zeros(rows, np.int64)
    width = request.logprobs
    empty = lambda *more, dtype=np.float32: np.zeros((rows, 0, *more), dtype)
    noted = None if width is None else LogProbs(empty(), empty(), empty(width, dtype=np.int32), empty(width))
    stats = Statistics(forwards=0, prefill_forwards=0, rounds=none, tokens=none, drafted=none, accepted=none,
                       histogram=np.zeros((rows, request.algorithm.traits.emits + 1), np.int64), seconds=0.0,
                       prefill_seconds=0.0)
    return Result(tokens=np.zeros((rows, 0), np.int32), lengths=np.zeros(rows, np.int32),
                  status=[Status.TIME] * rows, text=None if request.lm.tokenizer is None else [""] * rows,
                  logprobs=noted, stats=stats)
