"""Serving: answers prompts from an iterator and yields each result as soon as it is finished."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import os
import time
from collections.abc import Generator, Iterable, Mapping
from typing import Any, Unpack

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
from decodax.front.options import ServeOptions, merged
from decodax.io.load import LM
from decodax.io.prompts import TAKES

NOT_HERE = {**dict.fromkeys(("search", "select"), "decodax.generate searches and selects"),
            "batch_size": "slots= says how many prompts run at once", "progress": "results come as they finish",
            "request_ids": "give each prompt an id", "guidance_scale": "decodax.generate guides",
            "negative_prompts": "decodax.generate guides"}

ON_ERROR = ("return", "raise")

ALONE = "prompts[0]: "
"""The beginning of the messages of `Request.read` about its only prompt."""

SHARED = ("cache: rows of this kind share memory, so none can take the place of another; takes another kind, or "
          "decodax.generate")


@dataclasses.dataclass(frozen=True)
class Served:
    """A prompt that has been answered, or could not be.

    Attributes:
        index: its index among the prompts.
        id: the id given with the prompt, or None.
        result: the result of this prompt with all its samples; None if there is an error.
        error: why it could not be answered, or None.
    """

    __repr__ = short

    index: int
    id: Any
    result: Result | None
    error: Exception | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns the entries of `Result.to_dict` with `index`, `id` and the text of `error`, ready for JSON."""
        found = {} if self.result is None else self.result.to_dict()
        return {"index": self.index, "id": json_ready(self.id), **found,
                "error": None if self.error is None else str(self.error)}


def serve(lm: LM | str | os.PathLike[str], prompts: Iterable[Any], *, slots: int = 16, ahead: int | None = None,
          memory: str | None = None, token_budget: int | None = None, max_time: float | None = None,
          on_error: str = "return", use: Use | None = None,
          **options: Unpack[ServeOptions]) -> Generator[Served, None, None]:
    """Continues any number of prompts and yields each result as soon as it is finished, not in their order.

    The tokens of a prompt are those of `generate` with this prompt alone, the same options and the same request id;
    they do not depend on prompts that run at the same time. Prompts are taken only when there is room for them, so that
    the source may be endless. An iterable other than a list or a tuple is read in a separate thread; while it blocks,
    the prompts read so far are answered. Closing the returned iterator ends that thread, at the latest with the next
    prompt of a source that blocks.

    >>> import decodax as dx
    >>> for one in dx.serve("pycode", ["def area(", "import "], max_new_tokens=5):        # doctest: +SKIP
    ...     print(one.index, one.result.text)

    Args:
        lm: the model, as in `generate`.
        prompts: prompts as in `generate`; or mappings with a `prompt`, an `id` and options for this prompt: `{"prompt":
            "def f(", "id": "a-17", "temperature": 0.5, "max_new_tokens": 100}`. An option that is None counts as not
            given, except `eos_token_id`, for which None means that no token ends a text. `max_time` counts from the
            prefill of the prompt. Random numbers depend on the id, or else on the index of the prompt.
        slots: number of prompts that run at once. Prompts that differ in method, cache, number of samples, stop strings
            or kind of sampling run in separate batches, one after the other.
        ahead: maximum number of waiting prompts; default 4 times `slots`.
        memory: memory for rows, such as "8GB": their caches, the state of drafts, and the logits of a round. It limits
            the number of slots, computed for the longest of the waiting prompts. Not included are the rows that are
            being prefilled, an eighth of the slots, and the caches of up to four common prefixes that are kept.
        token_budget: maximum number of tokens in a round. Prompts are then prefilled in chunks within the rounds of
            other prompts, so that a long prompt does not delay them (Sarathi-Serve). None: they are prefilled between
            rounds. So are, in any case, prompts of methods that learn from prompts, prompts with several samples, and
            all prompts on a mesh.
        max_time: seconds for all prompts, after which unfinished ones end with `Status.TIME`. Prompts that a source
            other than a list or a tuple has not yet yielded are not asked for. The clock is checked between bursts of
            rounds; a compilation is not interrupted.
        on_error: "return": a prompt that cannot be answered yields a `Served` with its `error`. "raise": the error is
            raised after all prompts before it have been answered, and no further prompts are read.
        use: a `decodax.engine.slots.Use` to which counts and times are added.
        options: options of `generate`, for prompts that do not set them.

    Raises:
        ValueError, TypeError: an argument is wrong; or, with `on_error="raise"`, a prompt, whose index the message
            gives.
        Exception: an error of the iterable, raised after all prompts that it yielded have been answered.
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
    lm, common = settled(lm, options, slots)
    if isinstance(prompts, (str, bytes, Mapping)) or not isinstance(prompts, Iterable):
        raise TypeError(f"prompts: got {shown(prompts)}, takes a list or an iterator of prompts")
    places, source = itertools.count(), arrivals(prompts, ahead)
    failed: Exception | None = None

    def wrong(index: int, error: Exception) -> Exception:
        """Returns the error with the index of the prompt in its message."""
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
            return Ticket(read(lm, prompt, where, own, common), (index, name))
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
    """Builds the cache and the algorithm that `serve` uses for all prompts. Returns the model with this cache, and the
    options with the algorithm as an object.

    Raises:
        TypeError, ValueError: as in `Request.read`; an option that `serve` does not take; or a cache whose rows share
            memory.
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
    """Returns the entries of `options`, and of the object under "sampling" in it, that are not None. `eos_token_id` is
    kept even if it is None, which means that no token ends a text."""
    said = {name: x for name, x in options.items() if x is not None or name in ("eos", "eos_token_id")}
    return merged(said.pop("sampling", None), said)


def read(lm: LM, prompt: Any, where: int, own: Mapping[str, Any], options: Mapping[str, Any]) -> Request:
    """Returns the request of one prompt.

    Args:
        lm: the model.
        prompt: the prompt.
        where: its request id.
        own: options of this prompt.
        options: options of all prompts.

    Raises:
        ValueError, TypeError: as in `Request.read`; or the method cannot replace single rows of a batch.
    """
    own = without("serve", given(own), NOT_HERE)
    if isinstance(prompt, Mapping) and "input_ids" not in prompt:
        raise TypeError(f"prompt: got {shown(prompt)}, takes {TAKES}")
    request = Request.read(lm, [prompt], request_ids=[where], **by_name({**options, **own}))
    if not possible(request):
        raise ValueError(SHARED)
    return request.narrow()


def address(name: Any) -> int:
    """Returns the entry of `request_ids` for a prompt with an id: the first 32 bits of the BLAKE2b hash of the id as
    text.

    >>> import decodax as dx
    >>> dx.jobs.address("a-17")
    3923269141
    """
    return int.from_bytes(hashlib.blake2b(unicode("id", str(name)).encode(), digest_size=4).digest(), "big")
