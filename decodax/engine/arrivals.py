"""Sources of prompts: an iterable that never blocks, or one that may block, which a thread reads ahead.

Running rows must not wait for a source that has no item yet (a queue, a socket, a pipe), so its items are requested in
a separate thread, which reads ahead up to a limit. The results do not depend on the time at which an item arrives.
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
    """A source that never blocks, such as a list.

    Attributes:
        over: True if no more items follow.
        error: the error that ended the iterable, or None.
    """

    def __init__(self, items: Iterable[Any]):
        self._items, self.over = iter(items), False
        self.error: BaseException | None = None

    def take(self, most: int, patience: float | None) -> list[Any]:
        """Returns up to `most` items; fewer only at the end of the source. It never waits, so `patience` has no effect.
        """
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
        """Yields all remaining items. The scheduler calls it when its time limit has passed, to answer them with
        `Status.TIME`."""
        while found := self.take(1, None):
            yield from found

    def allow(self, most: int) -> None:
        """Does nothing, since no thread reads ahead; `Arriving.allow` sets the number of items that are read ahead."""

    def close(self) -> None:
        """Takes no more items."""
        self.over = True


class Arriving:
    """A source that may block and is read ahead in a thread. It has the attributes and methods of `AtHand`.

    Attributes:
        exhausted: True if the iterable has yielded all its items.

    Args:
        items: the iterable.
        ahead: maximum number of items that are read ahead, until `allow` changes it.
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
        """Returns up to `most` of the items that have arrived.

        Args:
            most: maximum number of items.
            patience: seconds to wait for the first item if none has arrived; None: until one arrives or the source
                ends.
        """
        with self._change:
            self._change.wait_for(lambda: self._held or self._ended, patience)
            found = [self._held.popleft() for _ in range(min(most, len(self._held)))]
            self._ahead -= len(found)
            return found

    def rest(self) -> Iterable[Any]:
        """Returns the items that have arrived and were not taken. The scheduler calls it when its time limit has
        passed, to answer them with `Status.TIME`."""
        with self._change:
            self._closed = True
            return self.take(len(self._held), 0)

    def allow(self, most: int) -> None:
        """Sets to `most` the number of items that the thread may read ahead of `take`; each item that `take` returns
        lowers it by one."""
        with self._change:
            self._ahead = most
            self._change.notify_all()

    def close(self) -> None:
        """Ends the thread, at the latest when the source yields its next item. Items that have arrived are kept."""
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
        """Waits until one more item may be read. Returns False if no more items are wanted."""
        with self._change:
            self._change.wait_for(lambda: self._closed or len(self._held) < self._ahead)
            return not self._closed


def arrivals(items: Iterable[Any], ahead: int) -> AtHand | Arriving:
    """Returns the source for an iterable: lists and tuples never block, other iterables may."""
    return AtHand(items) if isinstance(items, (list, tuple)) else Arriving(items, ahead)
