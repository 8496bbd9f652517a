"""Answers as they finish: prompts come from any iterator, one after another takes a place that has become free."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from decodax.io.load import LM
from decodax.io.prompts import TAKES
from decodax.jobs.schedule import Ticket, schedule
from decodax.jobs.slots import Use, possible
from decodax.kvcache.selection import in_bytes
from decodax.methods import chosen, model, with_cache
from decodax.policy.arguments import positive, shown, unicode, whole
from decodax.request import Request, without
from decodax.result import Result
from decodax.struct import short

NOT_HERE = {"batch_size": "slots= says how many prompts run at once", "progress": "results come as they finish",
            "request_ids": "give each prompt an id", "guidance_scale": "decodax.generate guides",
            "negative_prompts": "decodax.generate guides"}


@dataclasses.dataclass(frozen=True)
class Served:
    """A prompt that has been answered.

    Attributes:
        index: its place among the prompts. id: its own, or None. result: of this one prompt, all its samples.
    """

    __repr__ = short

    index: int
    id: Any
    result: Result


def serve(lm: LM | str | os.PathLike[str], prompts: Iterable[Any], *, slots: int = 16, ahead: int | None = None,
          memory: str | None = None, token_budget: int | None = None, max_time: float | None = None,
          use: Use | None = None, **options: Any) -> Iterator[Served]:
    """Continues prompts of any number and gives each result as it comes, not in their order.

    The tokens of a prompt are those that `generate` gives it alone with the same options and the same address,
    whatever runs beside it. Prompts are taken as there is room for them, so a source may be endless, and one that makes
    them as they are asked for is never far ahead of the work.

    >>> import decodax as dx
    >>> for one in dx.serve("pycode", ["def area(", "import "], max_new_tokens=5):        # doctest: +SKIP
    ...     print(one.index, one.result.text)

    Args:
        lm: as `generate` takes it.
        prompts: prompts as `generate` takes one; or mappings with a `prompt`, an `id` and options of their own:
            `{"prompt": "def f(", "id": "a-17", "temperature": 0.5, "max_new_tokens": 100}`. Randomness is addressed by
            the id, else by the place among the prompts.
        slots: prompts at once. Those that differ in method, cache, number of samples, stop strings or kind of sampling
            take turns.
        ahead: prompts that wait at most; default 4 times the slots.
        memory: bytes that rows may take ("8GB"): their caches, what drafts keep, and a round's logits. There are then
            no more slots than that, by the longest of the prompts that wait. Beside them come the rows that are being
            read, an eighth, and those of up to four beginnings that are kept.
        token_budget: tokens of a round. Prompts are then read in the rounds of others, in chunks that the budget leaves
            room for, so that a long one does not hold them up (Sarathi-Serve). Default: they are read between rounds,
            and so are those of methods that learn from prompts, of several samples, and all over a mesh.
        max_time: seconds for all; what has not ended then does so with `Status.TIME`.
        use: a `decodax.jobs.Use`, to which counts and times are added.
        options: of `generate`, for all prompts that do not say otherwise.

    Raises:
        ValueError, TypeError: as `generate`, with the prompt's place, when it comes to that prompt; or rows of the
            cache share memory.
    """
    slots = whole("slots", slots, 1)
    ahead = None if ahead is None else whole("ahead", ahead, 1)
    end = None if max_time is None else time.monotonic() + positive("max_time", max_time)
    room = None if memory is None else in_bytes(memory, "memory")
    token_budget = None if token_budget is None else whole("token_budget", token_budget, 1)
    lm, options = settled(lm, options, slots)
    if isinstance(prompts, (str, bytes, Mapping)) or not isinstance(prompts, Iterable):
        raise TypeError(f"prompts: got {shown(prompts)}, takes a list or an iterator of prompts")

    def tickets() -> Iterator[Ticket]:
        for index, item in enumerate(prompts):
            try:
                name, request = read(lm, item, index, options)
            except (ValueError, TypeError) as error:
                raise type(error)(f"prompts[{index}]: {error}") from error
            yield Ticket(request, (index, name))

    for (index, name), result in schedule(tickets(), slots, ahead=ahead, end=end, memory=room,
                                          token_budget=token_budget, use=use):
        yield Served(index, name, result)


def settled(lm: Any, options: Mapping[str, Any], slots: int) -> tuple[LM, dict[str, Any]]:
    """The model with its cache, and the options with the method, which are made once for all prompts.

    Raises:
        TypeError, ValueError: as `Request.read`; or an option that is none of `serve`.
    """
    lm, options = model(lm), without("serve", options, NOT_HERE)
    if (cache := options.pop("cache", None)) is not None:
        lm = with_cache(lm, cache)
    options["algorithm"] = chosen(lm, options.get("algorithm"), slots)
    Request.read(lm, [[0]], **options)      # what is wrong with the options is wrong with every prompt
    return lm, options


def read(lm: LM, item: Any, index: int, options: Mapping[str, Any]) -> tuple[Any, Request]:
    """The id of a prompt, or None, and its request.

    Raises:
        ValueError, TypeError: as `Request.read`; or its rows cannot take the place of others.
    """
    name, own, prompt = None, {}, item
    if isinstance(item, Mapping) and "prompt" in item:
        own = dict(item)
        prompt, name = own.pop("prompt"), own.pop("id", None)
        own = without("serve", own, NOT_HERE)
    if isinstance(prompt, Mapping) and "input_ids" not in prompt:
        raise TypeError(f"prompt: got {shown(prompt)}, takes {TAKES}")
    request = Request.read(lm, [prompt], request_ids=[index % (1 << 32) if name is None else address(name)],
                           **{**options, **own})
    if not possible(request):
        raise ValueError("cache: rows of this kind share memory, so none can take the place of another; takes another "
                         "kind, or decodax.generate")
    return name, request


def address(name: Any) -> int:
    """The `request_ids` entry of a prompt with an id: the first 32 bits of the BLAKE2b hash of its text.

    >>> import decodax as dx
    >>> dx.jobs.address("a-17")
    3923269141
    """
    return int.from_bytes(hashlib.blake2b(unicode("id", str(name)).encode(), digest_size=4).digest(), "big")
