"""Answers as they finish: prompts come from any iterator, one after another takes a place that has become free."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import os
import time
from collections.abc import Generator, Iterable, Mapping
from typing import Any

from decodax.common.arguments import positive, shown, unicode, whole
from decodax.common.sizes import in_bytes
from decodax.common.struct import short
from decodax.engine.arrivals import arrivals
from decodax.engine.methods import chosen, model, with_cache
from decodax.engine.names import by_name, without
from decodax.engine.queue import Refused, Ticket, ahead_of, schedule
from decodax.engine.request import Request
from decodax.engine.result import Result, json_ready
from decodax.engine.slots import Use, possible
from decodax.front.options import merged
from decodax.io.load import LM
from decodax.io.prompts import TAKES

NOT_HERE = {**dict.fromkeys(("search", "select"), "decodax.generate searches and selects"),
            "batch_size": "slots= says how many prompts run at once", "progress": "results come as they finish",
            "request_ids": "give each prompt an id", "guidance_scale": "decodax.generate guides",
            "negative_prompts": "decodax.generate guides"}

ON_ERROR = ("return", "raise")

ALONE = "prompts[0]: "
"""What `Request.read` says of the only prompt of a request."""

SHARED = ("cache: rows of this kind share memory, so none can take the place of another; takes another kind, or "
          "decodax.generate")


@dataclasses.dataclass(frozen=True)
class Served:
    """A prompt that has been answered, or could not be.

    Attributes:
        index: its place among the prompts. id: its own, or None. result: of this one prompt, all its samples; None if
            there is an error. error: why it could not be answered, or None.
    """

    __repr__ = short

    index: int
    id: Any
    result: Result | None
    error: Exception | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns it as JSON has it: the entries of `Result.to_dict`, with `index`, `id` and the error's text."""
        found = {} if self.result is None else self.result.to_dict()
        return {"index": self.index, "id": json_ready(self.id), **found,
                "error": None if self.error is None else str(self.error)}


def serve(lm: LM | str | os.PathLike[str], prompts: Iterable[Any], *, slots: int = 16, ahead: int | None = None,
          memory: str | None = None, token_budget: int | None = None, max_time: float | None = None,
          on_error: str = "return", use: Use | None = None, **options: Any) -> Generator[Served, None, None]:
    """Continues prompts of any number and gives each result as it comes, not in their order.

    The tokens of a prompt are those that `generate` gives it alone with the same options and the same address,
    whatever runs beside it. Prompts are taken as there is room for them, so a source may be endless, and one that makes
    them as they are asked for is never far ahead of the work. An iterable other than a list or a tuple is read in a
    thread of its own: while it blocks, the prompts that it gave are answered. Closing the iterator that `serve` returns
    ends the thread, or lets it end with the next prompt if the iterable blocks.

    >>> import decodax as dx
    >>> for one in dx.serve("pycode", ["def area(", "import "], max_new_tokens=5):        # doctest: +SKIP
    ...     print(one.index, one.result.text)

    Args:
        lm: as `generate` takes it.
        prompts: prompts as `generate` takes one; or mappings with a `prompt`, an `id` and options of their own:
            `{"prompt": "def f(", "id": "a-17", "temperature": 0.5, "max_new_tokens": 100}`. An option that is None is
            not given (but `eos_token_id`, for which None means that there is no end, as for `generate`). `max_time`
            counts from where the prompt begins to be read. Randomness is addressed by the id, else by the place among
            the prompts.
        slots: prompts at once. Those that differ in method, cache, number of samples, stop strings or kind of sampling
            take turns.
        ahead: prompts that wait at most; default 4 times the slots.
        memory: bytes that rows may take ("8GB"): their caches, what drafts keep, and a round's logits. There are then
            no more slots than that, by the longest of the prompts that wait. Beside them come the rows that are being
            read, an eighth, and those of up to four beginnings that are kept.
        token_budget: tokens of a round. Prompts are then read in the rounds of others, in chunks that the budget leaves
            room for, so that a long one does not hold them up (Sarathi-Serve). Default: they are read between rounds,
            and so are those of methods that learn from prompts, of several samples, and all over a mesh.
        max_time: seconds for all; what has not ended then does so with `Status.TIME`. Prompts that a source other than
            a list or a tuple has not given by then are not asked for. It is looked at between bursts of rounds; a
            compilation is not cut short.
        on_error: what a prompt that cannot be answered does: "return" gives a `Served` with its `error`; "raise" raises
            the error after what was read before the prompt has been answered, and reads no others.
        use: a `decodax.engine.slots.Use`, to which counts and times are added.
        options: of `generate`, for all prompts that do not say otherwise.

    Raises:
        ValueError, TypeError: an argument is wrong; or, with `on_error="raise"`, a prompt, whose place it says.
        Exception: what the iterable of prompts raises, after all prompts that it gave have been answered.
    """
    slots = whole("slots", slots, 1)
    ahead = ahead_of(slots, None if ahead is None else whole("ahead", ahead, 1))
    end = None if max_time is None else time.monotonic() + positive("max_time", max_time)
    room = None if memory is None else in_bytes(memory, "memory")
    token_budget = None if token_budget is None else whole("token_budget", token_budget, 1)
    if not (use is None or isinstance(use, Use)):
        raise TypeError(f"use: got {shown(use)}, takes a decodax.engine.slots.Use")
    if on_error not in ON_ERROR:
        raise ValueError(f"on_error: got {shown(on_error)}, takes {' or '.join(map(repr, ON_ERROR))}")
    lm, options = settled(lm, options, slots)
    if isinstance(prompts, (str, bytes, Mapping)) or not isinstance(prompts, Iterable):
        raise TypeError(f"prompts: got {shown(prompts)}, takes a list or an iterator of prompts")
    places, source = itertools.count(), arrivals(prompts, ahead)
    failed: Exception | None = None

    def wrong(index: int, error: Exception) -> Exception:
        """The error with the prompt's place."""
        try:
            placed = type(error)(f"prompts[{index}]: {str(error).removeprefix(ALONE)}")
        except Exception:       # one that is made of other things than a message
            return error
        placed.__cause__ = error
        return placed

    def ticket(item: Any) -> Ticket | Refused | None:
        if failed is not None:
            return None
        index = next(places)
        own = dict(item) if isinstance(item, Mapping) and "prompt" in item else {"prompt": item}
        prompt, name = own.pop("prompt"), own.pop("id", None)
        try:
            where = index % (1 << 32) if name is None else address(name)
            return Ticket(read(lm, prompt, where, own, options), (index, name))
        except Exception as error:
            return Refused(error, (index, name))

    answers = schedule(source, slots, read=ticket, ahead=ahead, end=end, memory=room, token_budget=token_budget,
                       use=use)
    with contextlib.closing(answers):
        for (index, name), result in answers:
            if not isinstance(result, Exception):
                yield Served(index, name, result)
            elif on_error == "return":
                yield Served(index, name, None, wrong(index, result))
            else:
                failed = failed or wrong(index, result)
                source.close()
    if failed is not None:
        raise failed


def settled(lm: Any, options: Mapping[str, Any], slots: int) -> tuple[LM, dict[str, Any]]:
    """The model with its cache, and the options with the method, which are made once for all prompts.

    Raises:
        TypeError, ValueError: as `Request.read`; an option that is none of `serve`; or rows of the cache share memory.
    """
    lm, options = model(lm), without("serve", given(options), NOT_HERE)
    if (cache := options.pop("cache", None)) is not None:
        lm = with_cache(lm, cache)
    if "algorithm" in options:
        options["algorithm"] = chosen(lm, options["algorithm"], slots, options.pop("draft", None))
    # what is wrong with the options is wrong with every prompt
    if not possible(Request.read(lm, [[0]], **by_name(options))):
        raise ValueError(SHARED)
    return lm, options


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that say something, with those of `sampling`: None says nothing, as in a column of options that some
    rows lack, but for an end of sequence, of which it says that there is none."""
    said = {name: x for name, x in options.items() if x is not None or name in ("eos", "eos_token_id")}
    return merged(said.pop("sampling", None), said)


def read(lm: LM, prompt: Any, where: int, own: Mapping[str, Any], options: Mapping[str, Any]) -> Request:
    """The request of a prompt.

    Args:
        where: its address. own, options: its own options, and those of all prompts.

    Raises:
        ValueError, TypeError: as `Request.read`; or its rows cannot take the place of others.
    """
    own = without("serve", given(own), NOT_HERE)
    if isinstance(prompt, Mapping) and "input_ids" not in prompt:
        raise TypeError(f"prompt: got {shown(prompt)}, takes {TAKES}")
    request = Request.read(lm, [prompt], request_ids=[where], **by_name({**options, **own}))
    if not possible(request):
        raise ValueError(SHARED)
    return request


def address(name: Any) -> int:
    """The `request_ids` entry of a prompt with an id: the first 32 bits of the BLAKE2b hash of its text.

    >>> import decodax as dx
    >>> dx.jobs.address("a-17")
    3923269141
    """
    return int.from_bytes(hashlib.blake2b(unicode("id", str(name)).encode(), digest_size=4).digest(), "big")
