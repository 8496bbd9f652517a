"""Where prompts come from: an iterable at hand, or one that may take its time, which a thread reads ahead.

Rows that run must not wait for a source that has nothing to give (a queue, a socket, a pipe), so its next item is asked
for in a thread of its own. How far that thread reads ahead is bounded. Items are turned into requests where they are
decoded, and draws are addressed by the items themselves: no answer depends on when an item came.
"""

from __future__ import annotations

import contextvars
import threading
from collections import deque
from collections.abc import Iterable
from typing import Any

CLOSING = 0.2
"""Seconds that `Arriving.close` waits for its thread, which cannot be interrupted while the source blocks."""


class AtHand:
    """An iterable that never blocks, such as a list: read when there is room, and to its end when the time is out.

    Attributes:
        over: whether nothing more comes. error: what ended the iterable, or None.
    """

    def __init__(self, items: Iterable[Any]):
        self._items, self.over = iter(items), False
        self.error: BaseException | None = None

    def take(self, most: int, patience: float | None) -> list[Any]:
        """Up to `most` items; fewer only at the end. It never waits, so `patience` does not matter."""
        found: list[Any] = []
        while len(found) < most and not self.over:
            try:
                found.append(next(self._items))
            except StopIteration:
                self.over = True
            except Exception as error:
                self.over, self.error = True, error
        return found

    def rest(self) -> Iterable[Any]:
        """What is answered though the time is out: all that is left."""
        while found := self.take(1, None):
            yield from found

    def allow(self, most: int) -> None:
        """Does nothing: no thread reads ahead."""

    def close(self) -> None:
        """Takes no more items."""
        self.over = True


class Arriving:
    """An iterable that may block, read ahead in a thread; attributes and methods as of `AtHand`.

    Attributes:
        exhausted: whether the iterable has given all that it has.

    Args:
        ahead: items that are read ahead at most, until `allow` says otherwise.
    """

    def __init__(self, items: Iterable[Any], ahead: int):
        self._held, self._ahead = deque[Any](), ahead
        self._ended = self._closed = self.exhausted = False
        self.error: BaseException | None = None
        self._change = threading.Condition()     # reentrant
        # a daemon: a source that blocks for ever does not keep the process from ending
        self._thread = threading.Thread(target=contextvars.copy_context().run, args=(self._read, items),
                                        name="decodax source", daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        with self._change:
            return (self._ended or self._closed) and not self._held

    def take(self, most: int, patience: float | None) -> list[Any]:
        """Up to `most` of the items that have come.

        Args:
            patience: seconds to wait for the first one if none has come; None: until one comes or the source ends.
        """
        with self._change:
            self._change.wait_for(lambda: self._held or self._ended, patience)
            found = [self._held.popleft() for _ in range(min(most, len(self._held)))]
            self._ahead -= len(found)
            return found

    def rest(self) -> Iterable[Any]:
        """What is answered though the time is out: items that have come."""
        with self._change:
            self._closed = True
            return self.take(len(self._held), 0)

    def allow(self, most: int) -> None:
        """Sets how many items may be held here; each that is taken leaves room for one less."""
        with self._change:
            self._ahead = most
            self._change.notify_all()

    def close(self) -> None:
        """Ends the thread, or lets it end as soon as the source gives it the next item. What has come is kept."""
        with self._change:
            self._closed = True
            self._change.notify_all()
        self._thread.join(CLOSING)

    def _read(self, items: Iterable[Any]) -> None:
        error: BaseException | None = None
        try:
            source = iter(items)
            del items       # so that a generator is closed when this thread ends
            while self._room():
                item = next(source)
                with self._change:
                    self._held.append(item)
                    self._change.notify_all()
        except StopIteration:
            self.exhausted = True
        except BaseException as found:      # whatever it is, the thread that decodes raises it
            error = found
        with self._change:
            self.error, self._ended = error, True
            self._change.notify_all()

    def _room(self) -> bool:
        """Waits until one more item may be read; False: none is wanted any more."""
        with self._change:
            self._change.wait_for(lambda: self._closed or len(self._held) < self._ahead)
            return not self._closed


def arrivals(items: Iterable[Any], ahead: int) -> AtHand | Arriving:
    """The source for an iterable of a caller: lists and tuples are at hand, all else may block."""
    return AtHand(items) if isinstance(items, (list, tuple)) else Arriving(items, ahead)
