"""Builds automata over bytes from parts: texts, sequences, alternatives, repetitions (Thompson, 1968)."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Literal

import numpy as np

from decodax.constraints.dfa import DEAD, LARGEST, STEPS, Dfa, TooLarge

LINE_FEED = 10

Part = tuple[int, int]
"""A part of an automaton under construction: its first and its last state."""

Anchor = Literal["front", "end", "line"]
"""A place in the whole text: its beginning, its end, or the end or before a line feed that ends it."""


class Builder:
    """A nondeterministic automaton under construction (Thompson, 1968). A part is a pair of states, its first and its
    last one; the texts on the paths from one to the other are the texts of the part. Methods that add a part return
    it."""

    def __init__(self, largest: int = 50 * LARGEST):
        self.largest = largest
        self.free: list[list[int]] = []                                 # transitions without a byte
        self.moves: list[list[tuple[int, int, int]]] = []               # from byte, to byte, target
        self.anchors: dict[int, tuple[Anchor, int]] = {}                # transitions without a byte at certain places

    def state(self) -> int:
        """Adds a state and returns its number."""
        if len(self.free) >= self.largest:
            raise TooLarge(f"more than {self.largest} states before minimisation")
        self.free.append([])
        self.moves.append([])
        return len(self.free) - 1

    def room(self, copies: int, before: int) -> None:
        """Raises TooLarge if the automaton would have too many states after copies of a part.

        Args:
            copies: number of copies of the part, whose states are those added after the first `before` ones.
            before: number of states before the part was added.
        """
        if before + (len(self.free) - before) * copies > self.largest:
            times = str(copies) if copies < 10 ** 12 else f"{copies!s:.12}..."
            raise TooLarge(f"a repetition of {times} times makes more than {self.largest} states")

    def join(self, source: int, target: int) -> None:
        """Adds a transition from state `source` to state `target` that consumes no byte."""
        self.free[source].append(target)

    def nothing(self) -> Part:
        """Adds a part for the empty text."""
        here = self.state()
        return here, here

    def anchor(self, at: Anchor) -> Part:
        """Adds a part for the empty text that is allowed only at a certain place of the whole text, such as the end of
        a line."""
        a, b = self.state(), self.state()
        self.anchors[a] = at, b
        return a, b

    def bytes(self, text: bytes) -> Part:
        """Adds a part for one text."""
        a = here = self.state()
        for byte in text:
            there = self.state()
            self.moves[here].append((byte, byte, there))
            here = there
        return a, here

    def ranges(self, *spans: tuple[int, int]) -> Part:
        """Adds a part for one byte in any of the given inclusive ranges."""
        a, b = self.state(), self.state()
        self.moves[a] += [(low, high, b) for low, high in spans]
        return a, b

    def dfa(self, part: Dfa) -> Part:
        """Adds a part for the texts of another automaton."""
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

    def seq(self, *parts: Part) -> Part:
        """Joins parts one after the other, and returns the part whose texts are concatenations of a text of each."""
        if not parts:
            return self.nothing()
        for (_, end), (start, _) in itertools.pairwise(parts):
            self.join(end, start)
        return parts[0][0], parts[-1][1]

    def any_of(self, *parts: Part) -> Part:
        """Adds a part whose texts are those of any of the given parts, and returns it."""
        a, b = self.state(), self.state()
        for start, end in parts:
            self.join(a, start)
            self.join(end, b)
        return a, b

    def maybe(self, part: Part) -> Part:
        """Adds a part for the texts of `part` and the empty text."""
        a, b = self.any_of(part)
        self.join(a, b)
        return a, b

    def star(self, part: Part) -> Part:
        """Adds a part for any number of repetitions of `part`."""
        a, b = self.state(), self.state()
        self.join(a, part[0])
        self.join(part[1], a)
        self.join(a, b)
        return a, b

    def repeat(self, make: Callable[[], Part], least: int, most: int | None) -> Part:
        """Adds a part for `least` to `most` repetitions (None: unbounded). Each call of `make` adds another copy of the
        repeated part.

        Raises:
            ValueError: `most` is below `least`.
            TooLarge: there would be too many states.
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

    def build(self, whole: Part, largest: int = LARGEST) -> Dfa:
        """Returns the minimal deterministic automaton of the part `whole`.

        Raises:
            TooLarge: it has more than `largest` states, or takes too many steps to construct.
        """
        start, end = whole
        lines = any(at == "line" for at, _ in self.anchors.values())
        edges = sorted({cut for moves in self.moves for low, high, _ in moves for cut in (low, high + 1)} | {0, 256}
                       | ({LINE_FEED, LINE_FEED + 1} if lines else set()))
        classes = np.repeat(np.arange(len(edges) - 1), np.diff(edges))          # classes of equivalent bytes
        number, steps = classes.tolist(), 0

        @functools.cache
        def moves_of(state: int) -> list[tuple[int, int]]:
            """Returns the transitions of a state, as pairs of byte class and target."""
            return [(c, target) for low, high, target in self.moves[state]
                    for c in range(number[low], number[high] + 1)]

        def after(group: Iterable[int]) -> dict[int, set[int]]:
            """Returns, for each byte class, the states that it leads to from a group of states."""
            nonlocal steps
            targets: dict[int, set[int]] = {}
            for state in group:
                for c, target in moves_of(state):
                    targets.setdefault(c, set()).add(target)
                    steps += 1
            return targets

        @functools.cache
        def closure(group: frozenset[int], *places: Anchor) -> frozenset[int]:
            """Returns the states that the group reaches without consuming a byte.

            Only states that consume a byte, end the text or depend on the place are kept, since the others do not
            distinguish sets.
            """
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

        # A deterministic state consists of the states reached, whether the text may end, and whether nothing has been
        # read.
        group = frozenset([start])
        first = closure(group, "front"), end in closure(group, "front", "end", "line"), True
        names, rows, final, todo = {first: 0}, [], [], [first]
        for here, ends, in_front in todo:           # the list grows during the loop
            final.append(ends)
            targets, row = after(here), [DEAD] * (len(edges) - 1)
            last: dict[int, set[int]] = {}
            if lines:           # whether a line feed ends the text is decided before it is read
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


def literals(texts: Iterable[bytes]) -> Dfa:
    """Returns the automaton of the given texts."""
    b = Builder()
    return b.build(b.any_of(*map(b.bytes, texts)))
