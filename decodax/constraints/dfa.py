"""Deterministic finite automata over bytes, the basis of regular constraints."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable

import numpy as np

from decodax.common.struct import short

DEAD = -1
LARGEST = 20_000
"""Largest number of states of an automaton."""

STEPS = 3_000_000
"""Largest number of steps of the subset construction, which takes about a second."""


class TooLarge(ValueError):
    """The automaton has more than `LARGEST` states, or takes too long to construct."""


@dataclasses.dataclass(frozen=True, eq=False)
class Dfa:
    """A deterministic automaton over bytes without useless states: a language of byte strings. State 0 is the start.

    Attributes:
        next: `i32[S, 256]`, the next state for each byte; -1 where no accepted text continues with the byte.
        final: `bool[S]`, True for states in which a text may end.
    """

    __repr__ = short

    next: np.ndarray
    final: np.ndarray

    def __len__(self) -> int:
        return len(self.final)

    @property
    def empty(self) -> bool:
        """True if the automaton accepts no text at all."""
        return not self.final.any()

    def accepts(self, text: bytes) -> bool:
        """True if `text` is in the language."""
        state = 0
        for byte in text:
            state = int(self.next[state, byte])
            if state < 0:
                return False
        return bool(self.final[state])

    def distance(self) -> np.ndarray:
        """Returns the smallest number of bytes from each state to a final state, `i64[S]`."""
        source, byte = np.nonzero(self.next >= 0)
        return levels(np.flatnonzero(self.final).tolist(), self.next[source, byte], source, len(self))

    def __and__(self, other: Dfa) -> Dfa:
        """Returns the automaton of the texts that both accept."""
        return _product(self, other, lambda a, b: a & b)

    def __sub__(self, other: Dfa) -> Dfa:
        """Returns the automaton of the texts that this automaton accepts and the other does not."""
        whole = Dfa(np.vstack([np.where(other.next < 0, len(other), other.next),
                               np.full((1, 256), len(other), np.int32)]), np.append(other.final, False))
        return _product(self, whole, lambda a, b: a & ~b)

    @classmethod
    def of(cls, following: np.ndarray, final: np.ndarray, letters: np.ndarray | None = None) -> Dfa:
        """Returns the minimal automaton equivalent to a given one whose start is state 0.

        Args:
            following: `i32[S, K]`, the next state for each letter; -1 for none.
            final: `bool[S]`, True for states in which a text may end.
            letters: `i64[256]`, the column of `following` for each byte. None: column `i` belongs to byte `i`.
        """
        if letters is None:
            _, some, letters = np.unique(following, axis=1, return_index=True, return_inverse=True)
            following, letters = following[:, some], letters.reshape(-1)
        moves, final = _minimal(*_useful(following, final))
        return cls(moves[:, letters], final)


def _product(a: Dfa, b: Dfa, final: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Dfa:
    """Returns the product automaton, restricted to states from which both automata can continue. `final` combines the
    two flags of final states."""
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
    """Returns, for each of `count` states, the distinct heads of the edges (tail, head) that leave it."""
    pairs = np.sort(tail.astype(np.int64) * count + head)       # np.unique hashes, which is far slower
    tail, head = np.divmod(pairs[np.diff(pairs, prepend=-1) > 0], count)
    bounds, heads = np.searchsorted(tail, np.arange(count + 1)).tolist(), head.tolist()
    return [heads[a:b] for a, b in itertools.pairwise(bounds)]


def levels(start: Iterable[int], tail: np.ndarray, head: np.ndarray, count: int) -> np.ndarray:
    """Returns the smallest number of steps from a state in `start` to each state, along the edges (tail, head):
    `i64[count]`, -1 if it cannot be reached.

    >>> levels([0], np.array([0, 1, 0]), np.array([1, 2, 2]), 4).tolist()
    [0, 1, 1, -1]
    """
    onwards, todo = neighbours(tail, head, count), list(start)
    far = [-1] * count
    for state in todo:
        far[state] = 0
    for state in todo:          # the list grows during the loop
        for there in onwards[state]:
            if far[there] < 0:
                far[there] = far[state] + 1
                todo.append(there)
    return np.array(far)


def _useful(moves: np.ndarray, final: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Removes states that cannot be reached or from which no text is accepted; state 0 is kept."""
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
    """Returns `i64[S]` with equal entries exactly for states that accept the same texts.

    A partition is refined as in J. Hopcroft (1971): only states that lead into a newly split part of a block are
    examined again, and the largest part of a block keeps its name, so that a state is renamed at most log S times. The
    transitions of states are compared by a sum of random numbers, one for each pair of letter and block.
    """
    count, letters = moves.shape
    source, letter = np.nonzero(moves >= 0)
    before = neighbours(moves[source, letter], source, count)
    rng = np.random.default_rng(0)
    codes, weights = (rng.integers(1 << 64, size=n, dtype=np.uint64) for n in (count + 2, letters))
    block: np.ndarray = np.zeros(count + 1, np.int64)           # the last entry stands for no transition
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
    # Equal sums do not prove equal transitions; this does.
    some = np.zeros(len(members), np.int64)
    some[block[:-1]] = np.arange(count)
    if not (block[moves] == block[moves[some[block[:-1]]]]).all():
        raise AssertionError("two states with different transitions have the same sum")
    return block[:-1]


def _minimal(moves: np.ndarray, final: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Merges states that accept the same texts; the merged states are ordered by the first state of each."""
    _, first, block = np.unique(_blocks(moves, final), return_index=True, return_inverse=True)
    order = np.argsort(first)
    names = np.empty(len(first) + 1, np.int32)
    names[order], names[-1] = np.arange(len(first)), DEAD
    chosen = moves[first[order]]
    return np.where(chosen >= 0, names[block.reshape(-1)[chosen]], DEAD).astype(np.int32), final[first[order]]
