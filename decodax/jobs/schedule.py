"""Which prompt takes which place. Requests that differ in method or kind of sampling go through places of their own."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from decodax.core.state import Status
from decodax.jobs.prefixes import mates
from decodax.jobs.slots import Slots, Use, kin
from decodax.request import Request
from decodax.result import LogProbs, Result, Statistics
from decodax.struct import short

BURST = 64
"""Rounds between two looks at the clock, where there is one to look at."""


@dataclasses.dataclass(frozen=True, eq=False)
class Ticket:
    """A prompt that waits.

    Attributes:
        request: of this one prompt. tag: whatever its owner knows it by.
    """

    __repr__ = short

    request: Request
    tag: Any = None


def schedule(tickets: Iterable[Ticket], seats: int, *, ahead: int | None = None, end: float | None = None,
             longest: int = 1, more: int = 1, memory: int | None = None, token_budget: int | None = None,
             use: Use | None = None) -> Iterator[tuple[Any, Result]]:
    """Runs prompts through places that are filled again as they become free; gives tags and results as they finish.

    Tickets are taken when there is room for them, so a source that makes them as they are asked for is never far ahead
    of the work. Of those that wait, prompts of similar length are read together. A ticket that cannot stand in the
    batch at hand (another method or model, other kinds of sampling, or longer than its places) waits until that has
    run empty, which it does as soon as `ahead` others went past.

    Args:
        seats: prompts at once.
        ahead: how many tickets wait at most; default 4 times the seats.
        end: when the time is out, by `time.monotonic`: what runs ends with `Status.TIME`, and so does what waits.
        longest, more: what places are made for at least: tokens of a row, and those that come when its cache has
            settled. What is known of all that will come spares programs and places of another size.
        memory: bytes that rows may take, by `BatchShape.row_bytes`: there are no more places than that.
        token_budget: tokens of a round, by `Slots`. use: is added to.
    """
    use = Use() if use is None else use
    source, waiting = iter(tickets), collections.deque[tuple[Ticket, Any]]()
    ahead = 4 * seats if ahead is None else max(ahead, seats)
    slots: Slots | None = None
    group: Any = None
    passed, open_ = 0, True
    while True:
        while open_ and len(waiting) < ahead:
            ticket = next(source, None)
            open_ = ticket is not None
            if ticket is not None:
                waiting.append((ticket, kin(ticket.request)))
        if end is not None and time.monotonic() > end:
            if slots is not None:
                slots.expire()
                yield from slots.finished()
            yield from ((ticket.tag, unstarted(ticket.request)) for ticket, _ in waiting)
            yield from ((ticket.tag, unstarted(ticket.request)) for ticket in source)
            return
        idle = slots is None or len(slots.free) == len(slots.seats)
        if idle and not waiting:
            return
        if idle and (slots is None or group != waiting[0][1] or not slots.fits(waiting[0][0].request)):
            group = waiting[0][1]
            like = [ticket.request for ticket, own in waiting if own == group]
            places = seats if open_ else min(seats, len(like))
            slots = Slots(like[0], places, max(longest, *(r.longest for r in like)), max(more, *(r.more for r in like)),
                          use, memory, token_budget)
        assert slots is not None
        while passed < ahead:
            chosen, prefix = _choose(waiting, group, slots)
            if not chosen:
                break
            first = chosen[0] is waiting[0]
            passed = 0 if first else passed + len(chosen)
            for item in chosen:
                waiting.remove(item)
            slots.admit([ticket.request for ticket, _ in chosen], [ticket.tag for ticket, _ in chosen], prefix)
            yield from slots.finished()         # of prompts that may make no token
        if slots.running:
            leave = min(slots.few, -(-slots.running // slots.first.samples))
            slots.advance(leave, None if end is None else BURST)
        elif len(slots.free) == len(slots.seats):
            passed = 0
        yield from slots.finished()


def _choose(waiting: collections.deque[tuple[Ticket, Any]], group: Any,
            slots: Slots) -> tuple[list[tuple[Ticket, Any]], int]:
    """The prompts that are read next, if there are enough places: the one that waits longest, and those with the same
    beginning, or else of nearly its length; and how many tokens of a beginning they have in common that others have
    too."""
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
    """The result of a prompt whose time was out before it began."""
    rows = request.samples
    none: Any = np.zeros(rows, np.int64)
    width = request.logprobs
    empty = lambda *more, dtype=np.float32: np.zeros((rows, 0, *more), dtype)
    noted = None if width is None else LogProbs(empty(), empty(), empty(width, dtype=np.int32), empty(width))
    stats = Statistics(forwards=0, prefill_forwards=0, rounds=none, tokens=none, drafted=none, accepted=none,
                       histogram=np.zeros((rows, request.algorithm.emits + 1), np.int64), seconds=0.0,
                       prefill_seconds=0.0)
    return Result(tokens=np.zeros((rows, 0), np.int32), lengths=np.zeros(rows, np.int32),
                  status=[Status.TIME] * rows, text=None if request.lm.tokenizer is None else [""] * rows,
                  logprobs=noted, stats=stats)
