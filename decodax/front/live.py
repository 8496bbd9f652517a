"""The base class of `Stream` and `Watch`: a text that is generated while its pieces are consumed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

from decodax.common.arguments import scalar
from decodax.engine.batch import Job
from decodax.engine.request import Request
from decodax.engine.result import Result
from decodax.front.options import merged

Piece = TypeVar("Piece")


class Live(Iterator[Piece]):
    """An iterator over pieces that are generated when they are asked for. As a context manager, it stops the generation
    on exit.

    Attributes:
        result: the result of the whole text, after the last piece; None before, and if the iterator was closed early.
    """

    def __init__(self, request: Request, clock: float):
        self.result: Result | None = None
        self._request, self._job = request, Job.begin(request)
        self._end = None if request.max_time is None else clock + request.max_time
        self._closed = False

    def close(self) -> None:
        """Ends the iteration and frees the memory of the cache. It may be called repeatedly."""
        self._closed = True
        self.__dict__.pop("_job", None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def _advance(self, seconds: float | None, rounds: int | None = None) -> None:
        self._job.advance(seconds, rounds)
        if self._end is not None and time.monotonic() > self._end:
            self._job.expire()


def one_row(where: str, lm: Any, prompt: Any, given: Mapping[str, Any]) -> Request:
    """Checks the arguments of a function that takes a single prompt, such as `stream`, and returns them as a request.
    `where` is the name of the function, for errors.

    Raises:
        TypeError, ValueError: as in `Request.read`, or an argument that needs several rows.
    """
    options = dict(given)
    options = merged(options.pop("sampling", None), options)
    for name in ("search", "select"):
        if options.pop(name, None) is not None:
            raise TypeError(f"{name}: {where} takes no such argument; it is known which text is taken when all rows "
                            "have ended, so use generate")
    for name, none in (("num_samples", 1), ("batch_size", 1), ("progress", False)):
        value = options.pop(name, None)
        plain = scalar(name, value, repr(none))
        if value is not None and (type(plain) is not type(none) or plain != none):
            raise ValueError(f"{name}: got {value!r}; for generate only, a {where} is one row")
    return Request.read(lm, prompt, where, **options)
