"""Finite automata over bytes: what regular constraints are made of.

A `Dfa` is a language of byte strings. `Builder` puts such languages together, as Thompson (1968) does.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from decodax.struct import short

DEAD = -1
LARGEST = 20_000
"""States that an automaton may have."""


class TooLarge(ValueError):
    """An automaton has more than `LARGEST` states."""


@dataclasses.dataclass(frozen=True, eq=False)
class Dfa:
    """A deterministic automaton without useless states. State 0 is the first.

    Attributes:
        next: `i32[S, 256]`, -1 where no text goes on. final: `bool[S]`.
    """

    __repr__ = short

    next: np.ndarray
    final: np.ndarray

    def __len__(self) -> int:
        return len(self.final)

    @property
    def empty(self) -> bool:
        """Whether it accepts nothing at all."""
        return not self.final.any()

    def accepts(self, text: bytes) -> bool:
        state = 0
        for byte in text:
            state = int(self.next[state, byte])
            if state < 0:
                return False
        return bool(self.final[state])

    def distance(self) -> np.ndarray:
        """`i64[S]`: the fewest bytes from each state to a final one."""
        far = np.where(self.final, 0, np.iinfo(np.int32).max).astype(np.int64)
        for _ in range(len(self)):
            step = np.where(self.next >= 0, far[self.next], np.iinfo(np.int32).max).min(1) + 1
            new = np.minimum(far, step)
            if (new == far).all():
                break
            far = new
        return far

    def __and__(self, other: Dfa) -> Dfa:
        """What both accept."""
        return _product(self, other, lambda a, b: a & b)

    def __sub__(self, other: Dfa) -> Dfa:
        """What this one accepts and the other does not."""
        whole = Dfa(np.vstack([np.where(other.next < 0, len(other), other.next),
                               np.full((1, 256), len(other), np.int32)]), np.append(other.final, False))
        return _product(self, whole, lambda a, b: a & ~b)

    @classmethod
    def of(cls, following: np.ndarray, final: np.ndarray) -> Dfa:
        """The smallest automaton of the language of one whose state 0 is the first."""
        return _minimal(*_useful(following, final))


class Builder:
    """A nondeterministic automaton under construction. Its parts are pairs of states, where they begin and end."""

    def __init__(self, largest: int = 50 * LARGEST):
        self.largest = largest
        self.free: list[list[int]] = []                                 # moves without a byte
        self.moves: list[list[tuple[int, int, int]]] = []               # from byte, to byte, target

    def state(self) -> int:
        if len(self.free) >= self.largest:
            raise TooLarge(f"more than {self.largest} states before they are joined")
        self.free.append([])
        self.moves.append([])
        return len(self.free) - 1

    def join(self, source: int, target: int) -> None:
        self.free[source].append(target)

    def nothing(self) -> tuple[int, int]:
        """The empty text."""
        a, b = self.state(), self.state()
        self.join(a, b)
        return a, b

    def bytes(self, text: bytes) -> tuple[int, int]:
        a = here = self.state()
        for byte in text:
            there = self.state()
            self.moves[here].append((byte, byte, there))
            here = there
        return a, here

    def ranges(self, *spans: tuple[int, int]) -> tuple[int, int]:
        """One byte."""
        a, b = self.state(), self.state()
        self.moves[a] += [(low, high, b) for low, high in spans]
        return a, b

    def dfa(self, part: Dfa) -> tuple[int, int]:
        states = [self.state() for _ in range(len(part))]
        end = self.state()
        for i, row in enumerate(part.next):
            if part.final[i]:
                self.join(states[i], end)
            cuts = np.flatnonzero(np.diff(row)) + 1
            for low, high in zip([0, *cuts.tolist()], [*cuts.tolist(), 256], strict=True):
                if row[low] >= 0:
                    self.moves[states[i]].append((low, high - 1, states[row[low]]))
        return states[0], end

    def seq(self, *parts: tuple[int, int]) -> tuple[int, int]:
        if not parts:
            return self.nothing()
        for (_, end), (start, _) in itertools.pairwise(parts):
            self.join(end, start)
        return parts[0][0], parts[-1][1]

    def any_of(self, *parts: tuple[int, int]) -> tuple[int, int]:
        a, b = self.state(), self.state()
        for start, end in parts:
            self.join(a, start)
            self.join(end, b)
        return a, b

    def maybe(self, part: tuple[int, int]) -> tuple[int, int]:
        return self.any_of(part, self.nothing())

    def star(self, part: tuple[int, int]) -> tuple[int, int]:
        a, b = self.state(), self.state()
        self.join(a, part[0])
        self.join(part[1], a)
        self.join(a, b)
        return a, b

    def repeat(self, make: Callable[[], tuple[int, int]], least: int, most: int | None) -> tuple[int, int]:
        parts = [make() for _ in range(least)]
        if most is None:
            return self.seq(*parts, self.star(make()))
        end = self.state()
        a = self.state()
        here = a
        for i in range(most):
            part = parts[i] if i < least else make()
            if i >= least:
                self.join(here, end)
            self.join(here, part[0])
            here = part[1]
        self.join(here, end)
        return a, end

    def build(self, whole: tuple[int, int], largest: int = LARGEST) -> Dfa:
        """The smallest deterministic automaton of a part.

        Raises:
            TooLarge: it has more states than `largest`.
        """
        start, end = whole
        edges = sorted({cut for moves in self.moves for low, high, _ in moves for cut in (low, high + 1)} | {0, 256})
        classes = np.repeat(np.arange(len(edges) - 1), np.diff(edges))          # bytes that nothing tells apart
        closed: dict[int, frozenset[int]] = {}

        def closure(state: int) -> frozenset[int]:
            if state not in closed:
                seen, todo = {state}, [state]
                while todo:
                    for target in self.free[todo.pop()]:
                        if target not in seen:
                            seen.add(target)
                            todo.append(target)
                # only states that read a byte, or end the text, tell sets apart
                closed[state] = frozenset(s for s in seen if self.moves[s] or s == end)
            return closed[state]

        first = closure(start)
        names, rows, final, todo = {first: 0}, [], [], [first]
        while todo:
            batch, todo = todo, []
            for here in batch:
                final.append(end in here)
                targets: dict[int, set[int]] = {}
                for state in here:
                    for low, high, target in self.moves[state]:
                        for c in range(int(classes[low]), int(classes[high]) + 1):
                            targets.setdefault(c, set()).add(target)
                row, known = [DEAD] * (len(edges) - 1), {}
                for c, group in targets.items():
                    key = frozenset(group)
                    if key not in known:
                        there = frozenset().union(*map(closure, group))
                        if there not in names:
                            if len(names) > 4 * largest:
                                raise TooLarge(f"more than {largest} states")
                            names[there] = len(names)
                            todo.append(there)
                        known[key] = names[there]
                    row[c] = known[key]
                rows.append(row)
        found = Dfa.of(np.array(rows, np.int32)[:, classes], np.array(final))
        if len(found) > largest:
            raise TooLarge(f"{len(found)} states, more than {largest}")
        return found


def union(parts: Sequence[Dfa]) -> Dfa:
    """What one of several accepts."""
    b = Builder()
    return b.build(b.any_of(*map(b.dfa, parts)))


def literals(texts: Iterable[bytes]) -> Dfa:
    """Some texts and nothing else."""
    b = Builder()
    return b.build(b.any_of(*map(b.bytes, texts)))


@functools.cache
def empty() -> Dfa:
    return Dfa(np.full((1, 256), DEAD, np.int32), np.zeros(1, bool))


def _product(a: Dfa, b: Dfa, final: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Dfa:
    """Both side by side, as far as both go on."""
    names: dict[int, int] = {0: 0}
    order, rows, at = [0], [], 0
    while at < len(order):
        batch = np.array(order[at:])
        at = len(order)
        x, y = a.next[batch // len(b)], b.next[batch % len(b)]
        codes = np.where((x >= 0) & (y >= 0), x.astype(np.int64) * len(b) + y, -1)
        for code in np.unique(codes[codes >= 0]).tolist():
            if code not in names:
                names[code] = len(names)
                order.append(code)
        if len(names) > 4 * LARGEST:
            raise TooLarge(f"more than {LARGEST} states")
        known = np.array(sorted(names), np.int64)
        number = np.array([names[int(k)] for k in known], np.int32)
        rows.append(np.where(codes >= 0, number[np.searchsorted(known, np.maximum(codes, 0))], DEAD))
    ordered = np.array(order)
    return Dfa.of(np.concatenate(rows).astype(np.int32), final(a.final[ordered // len(b)], b.final[ordered % len(b)]))


def _useful(following: np.ndarray, final: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Without states that cannot be reached or from which nothing can be accepted; state 0 stays."""
    count = len(final)
    source, byte = np.nonzero(following >= 0)
    pairs = np.unique(source.astype(np.int64) * count + following[source, byte])
    tail, head = np.divmod(pairs, count)

    def spread(seen: np.ndarray, tail: np.ndarray, head: np.ndarray) -> np.ndarray:
        while True:
            new = seen.copy()
            new[head[seen[tail]]] = True
            if (new == seen).all():
                return seen
            seen = new

    reached = spread(np.arange(count) == 0, tail, head)
    alive = spread(final.copy(), head, tail)
    keep = reached & alive
    keep[0] = True
    names = np.full(count + 1, DEAD, np.int32)
    names[:-1][keep] = np.arange(keep.sum())
    return names[following[keep]], final[keep]


def _minimal(following: np.ndarray, final: np.ndarray) -> Dfa:
    """States that accept the same are one (Moore, 1956)."""
    _, columns = np.unique(following, axis=1, return_inverse=True)      # bytes that nothing tells apart
    columns = columns.reshape(-1)
    some = np.unique(columns, return_index=True)[1]
    moves = following[:, some]
    block = final.astype(np.int64)
    count = len(np.unique(block))
    while True:
        seen = np.where(moves >= 0, block[moves], -1)
        _, block = np.unique(np.column_stack([block, seen]), axis=0, return_inverse=True)
        block = block.reshape(-1)
        if (now := int(block.max()) + 1) == count:
            break
        count = now
    first = np.full(count, -1)
    first[block[::-1]] = np.arange(len(block))[::-1]                    # a state of each block
    order = np.argsort(np.where(np.arange(count) == block[0], -1, first))
    names = np.empty(count + 1, np.int32)
    names[order], names[-1] = np.arange(count), DEAD
    chosen = following[first[order]]
    return Dfa(np.where(chosen >= 0, names[block[chosen]], DEAD).astype(np.int32), final[first[order]])
