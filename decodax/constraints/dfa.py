"""Finite automata over bytes: what regular constraints are made of.

A `Dfa` is a language of byte strings. `Builder` puts such languages together, as Thompson (1968) does.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import numpy as np

from decodax.common.struct import short

DEAD = -1
LARGEST = 20_000
"""States that an automaton may have."""

STEPS = 3_000_000
"""Steps through a nondeterministic automaton that making it deterministic may take: about a second."""


LINE_FEED = 10


class TooLarge(ValueError):
    """An automaton has more than `LARGEST` states, or it takes too long to find them."""


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
        source, byte = np.nonzero(self.next >= 0)
        return levels(np.flatnonzero(self.final).tolist(), self.next[source, byte], source, len(self))

    def __and__(self, other: Dfa) -> Dfa:
        """What both accept."""
        return _product(self, other, lambda a, b: a & b)

    def __sub__(self, other: Dfa) -> Dfa:
        """What this one accepts and the other does not."""
        whole = Dfa(np.vstack([np.where(other.next < 0, len(other), other.next),
                               np.full((1, 256), len(other), np.int32)]), np.append(other.final, False))
        return _product(self, whole, lambda a, b: a & ~b)

    @classmethod
    def of(cls, following: np.ndarray, final: np.ndarray, letters: np.ndarray | None = None) -> Dfa:
        """The smallest automaton of the language of one whose state 0 is the first.

        Args:
            following: `i32[S, K]`. letters: `i64[256]`, the column of each byte; default: each has its own.
        """
        if letters is None:
            _, some, letters = np.unique(following, axis=1, return_index=True, return_inverse=True)
            following, letters = following[:, some], letters.reshape(-1)
        moves, final = _minimal(*_useful(following, final))
        return cls(moves[:, letters], final)


Anchor = Literal["front", "end", "line"]
"""Where in the whole text: in front of it, at its end, and there or in front of a line feed that ends it."""


class Builder:
    """A nondeterministic automaton under construction. Its parts are pairs of states, where they begin and end."""

    def __init__(self, largest: int = 50 * LARGEST):
        self.largest = largest
        self.free: list[list[int]] = []                                 # moves without a byte
        self.moves: list[list[tuple[int, int, int]]] = []               # from byte, to byte, target
        self.anchors: dict[int, tuple[Anchor, int]] = {}                # moves without a byte at some places alone

    def state(self) -> int:
        if len(self.free) >= self.largest:
            raise TooLarge(f"more than {self.largest} states before they are joined")
        self.free.append([])
        self.moves.append([])
        return len(self.free) - 1

    def room(self, copies: int, before: int) -> None:
        """Raises TooLarge where `copies` copies of all that came after the first `before` states are too many."""
        if before + (len(self.free) - before) * copies > self.largest:
            times = str(copies) if copies < 10 ** 12 else f"{copies!s:.12}..."
            raise TooLarge(f"a repetition of {times} times makes more than {self.largest} states")

    def join(self, source: int, target: int) -> None:
        self.free[source].append(target)

    def nothing(self) -> tuple[int, int]:
        """The empty text."""
        here = self.state()
        return here, here

    def anchor(self, at: Anchor) -> tuple[int, int]:
        """The empty text, at a place of the whole text that `build` makes of the parts."""
        a, b = self.state(), self.state()
        self.anchors[a] = at, b
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
        a, b = self.any_of(part)
        self.join(a, b)
        return a, b

    def star(self, part: tuple[int, int]) -> tuple[int, int]:
        a, b = self.state(), self.state()
        self.join(a, part[0])
        self.join(part[1], a)
        self.join(a, b)
        return a, b

    def repeat(self, make: Callable[[], tuple[int, int]], least: int, most: int | None) -> tuple[int, int]:
        """A part from `least` to `most` times in a row (None: without end); `make` puts another copy of it there.

        Raises:
            ValueError: `most` is below `least`. TooLarge: there would be too many states.
        """
        if most is not None and most < least:
            raise ValueError(f"a repetition of at least {least} and at most {most} times")
        a, end, copies = self.state(), self.state(), least if most is None else most
        here, used = a, len(self.free)
        for i in range(copies):
            if i >= least:
                self.join(here, end)
            part = make()
            self.join(here, part[0])
            here = part[1]
            self.room(copies - i, used)
            used = len(self.free)
        if most is None:
            again = self.star(make())
            self.join(here, again[0])
            here = again[1]
        self.join(here, end)
        return a, end

    def build(self, whole: tuple[int, int], largest: int = LARGEST) -> Dfa:
        """The smallest deterministic automaton of a part.

        Raises:
            TooLarge: it has more states than `largest`.
        """
        start, end = whole
        lines = any(at == "line" for at, _ in self.anchors.values())
        edges = sorted({cut for moves in self.moves for low, high, _ in moves for cut in (low, high + 1)} | {0, 256}
                       | ({LINE_FEED, LINE_FEED + 1} if lines else set()))
        classes = np.repeat(np.arange(len(edges) - 1), np.diff(edges))          # bytes that nothing tells apart
        number, steps = classes.tolist(), 0

        @functools.cache
        def moves_of(state: int) -> list[tuple[int, int]]:
            """Classes and targets."""
            return [(c, target) for low, high, target in self.moves[state]
                    for c in range(number[low], number[high] + 1)]

        def after(group: Iterable[int]) -> dict[int, set[int]]:
            """Returns the state to which a byte of each class leads."""
            nonlocal steps
            targets: dict[int, set[int]] = {}
            for state in group:
                for c, target in moves_of(state):
                    targets.setdefault(c, set()).add(target)
                    steps += 1
            return targets

        @functools.cache
        def closure(group: frozenset[int], *places: Anchor) -> frozenset[int]:
            """Where the states of a group lead without a byte. Only states that read a byte, end the text or depend on
            the place tell such sets apart."""
            nonlocal steps
            seen, todo = set(group), list(group)
            while todo:
                state = todo.pop()
                at, beyond = self.anchors.get(state, (None, 0))
                for target in (*self.free[state], *([beyond] if at in places else [])):
                    if target not in seen:
                        seen.add(target)
                        todo.append(target)
            steps += len(seen)
            return frozenset(s for s in seen if self.moves[s] or s == end or s in self.anchors)

        # a state has where it leads, whether the text may end there, and whether nothing has been read
        group = frozenset([start])
        first = closure(group, "front"), end in closure(group, "front", "end", "line"), True
        names, rows, final, todo = {first: 0}, [], [], [first]
        for here, ends, in_front in todo:           # it grows while it is read
            final.append(ends)
            targets, row = after(here), [DEAD] * (len(edges) - 1)
            last: dict[int, set[int]] = {}
            if lines:           # a line feed that ends the text has been seen before it is read
                last = after(closure(here, "line", *(("front",) if in_front else ())))
                targets.setdefault(number[LINE_FEED], set())
            for c, onwards in targets.items():
                group = frozenset(onwards)
                by = frozenset(last.get(c, ())) if lines and c == number[LINE_FEED] else group
                there = closure(group), end in closure(by, *(("end", "line") if self.anchors else ())), False
                if not there[0] and not there[1]:
                    continue
                if there not in names:
                    names[there] = len(names)
                    todo.append(there)
                row[c] = names[there]
            rows.append(row)
            if len(names) > 4 * largest or steps > STEPS:
                raise TooLarge(f"more than {largest} states" if steps <= STEPS else
                               f"more than {STEPS} steps to find its states")
        found = Dfa.of(np.array(rows, np.int32), np.array(final), classes)
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


def neighbours(tail: np.ndarray, head: np.ndarray, count: int) -> list[list[int]]:
    """For each of `count` states the heads of the pairs whose tail it is, each once."""
    pairs = np.sort(tail.astype(np.int64) * count + head)       # np.unique hashes, which is slower by far
    tail, head = np.divmod(pairs[np.diff(pairs, prepend=-1) > 0], count)
    bounds, heads = np.searchsorted(tail, np.arange(count + 1)).tolist(), head.tolist()
    return [heads[a:b] for a, b in itertools.pairwise(bounds)]


def levels(start: Iterable[int], tail: np.ndarray, head: np.ndarray, count: int) -> np.ndarray:
    """`i64[count]`: the fewest steps from a state of `start` to each one along the pairs (tail, head); -1: none lead
    there.

    >>> levels([0], np.array([0, 1, 0]), np.array([1, 2, 2]), 4).tolist()
    [0, 1, 1, -1]
    """
    onwards, todo = neighbours(tail, head, count), list(start)
    far = [-1] * count
    for state in todo:
        far[state] = 0
    for state in todo:          # it grows while it is read
        for there in onwards[state]:
            if far[there] < 0:
                far[there] = far[state] + 1
                todo.append(there)
    return np.array(far)


def _useful(moves: np.ndarray, final: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Without states that cannot be reached or from which nothing can be accepted; state 0 stays."""
    count = len(final)
    source, letter = np.nonzero(moves >= 0)
    target = moves[source, letter]
    keep = (levels([0], source, target, count) >= 0) & (
        levels(np.flatnonzero(final).tolist(), target, source, count) >= 0)
    keep[0] = True
    names = np.full(count + 1, DEAD, np.int32)
    names[:-1][keep] = np.arange(keep.sum())
    return names[moves[keep]], final[keep]


def _blocks(moves: np.ndarray, final: np.ndarray) -> np.ndarray:
    """`i64[S]`: equal for states that accept the same texts, and for no others.

    A partition is refined as J. Hopcroft (1971) does: only states that lead into a part of a block that has split off
    are looked at again, and the largest part of a block keeps its name, so that a state is renamed log S times at most.
    What a state does is compared by a sum of random numbers, one for each pair of letter and block.
    """
    count, letters = moves.shape
    source, letter = np.nonzero(moves >= 0)
    before = neighbours(moves[source, letter], source, count)
    rng = np.random.default_rng(0)
    codes, weights = (rng.integers(1 << 64, size=n, dtype=np.uint64) for n in (count + 2, letters))
    block: np.ndarray = np.zeros(count + 1, np.int64)           # the last one is where no move leads
    block[:-1] = 1 + final
    label, members = codes[block], [{count}, set(), set()]
    for state, name in enumerate(block[:-1].tolist()):
        members[name].add(state)
    touched = list(range(count))
    while touched:
        sums = (label[moves[touched]] * (weights | np.uint64(1))).sum(1)
        found: dict[int, dict[int, set[int]]] = {}
        for state, name, value in zip(touched, block[touched].tolist(), sums.tolist(), strict=True):
            found.setdefault(name, {}).setdefault(value, set()).add(state)
        renamed: list[int] = []
        for name, parts in found.items():
            rest = members[name]
            for part in parts.values():
                rest.difference_update(part)
            *smaller, members[name] = sorted([rest, *parts.values()], key=len)
            for part in filter(None, smaller):
                renamed += part
                block[list(part)] = len(members)
                members.append(part)
        label[renamed] = codes[block[renamed]]
        touched = sorted({state for there in renamed for state in before[there]})
    # equal sums do not prove equal moves; this does
    some = np.zeros(len(members), np.int64)
    some[block[:-1]] = np.arange(count)
    if not (block[moves] == block[moves[some[block[:-1]]]]).all():
        raise AssertionError("two states that do not accept the same have one sum")
    return block[:-1]


def _minimal(moves: np.ndarray, final: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """States that accept the same are one, in the order of the first of each."""
    _, first, block = np.unique(_blocks(moves, final), return_index=True, return_inverse=True)
    order = np.argsort(first)
    names = np.empty(len(first) + 1, np.int32)
    names[order], names[-1] = np.arange(len(first)), DEAD
    chosen = moves[first[order]]
    return np.where(chosen >= 0, names[block.reshape(-1)[chosen]], DEAD).astype(np.int32), final[first[order]]
