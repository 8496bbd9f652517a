"""Automata over the tokens of a vocabulary, made of automata over bytes.

Tokens that nothing tells apart share a class, so the table of an automaton over 150,000 tokens has a few hundred
columns.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from decodax.constraints.dfa import DEAD, Dfa
from decodax.struct import short

FAR = np.iinfo(np.int32).max // 2
"""A distance that nothing reaches."""


@dataclasses.dataclass(frozen=True, eq=False)
class Trie:
    """The tokens of a vocabulary by their bytes. Level by level; the nodes of a level are sorted by parent.

    Attributes:
        size: of the vocabulary. byte: for each level, the byte of each node. children: for each level, `i32[n + 1]`,
            where the children of each node begin on the next one. ends: for each level, `i32[n + 1]`, where the tokens
            that end at each node begin in `tokens`, an array for each level.
    """

    __repr__ = short

    size: int
    byte: list[np.ndarray]
    children: list[np.ndarray]
    ends: list[np.ndarray]
    tokens: list[np.ndarray]

    @classmethod
    def build(cls, token_bytes: Sequence[bytes]) -> Trie:
        """Of the bytes that each token adds to a text; those that add none are left out."""
        lengths = np.array([len(t) for t in token_bytes])
        flat = np.frombuffer(b"".join(token_bytes), np.uint8)
        start = np.concatenate([[0], np.cumsum(lengths)])[:-1]
        node: np.ndarray = np.zeros(len(lengths), np.int64)             # of each token on the present level
        live = np.flatnonzero(lengths > 0)
        byte, children, ends, tokens = [], [], [], []
        depth, nodes = 0, 1
        while True:
            # the tokens that end on this level
            here = live[lengths[live] == depth]
            here = here[np.argsort(node[here], kind="stable")]
            tokens.append(here.astype(np.int32))
            ends.append(np.searchsorted(node[here], np.arange(nodes + 1)).astype(np.int32))
            live = live[lengths[live] > depth]
            if not len(live):
                children.append(np.zeros(nodes + 1, np.int32))
                break
            code = node[live] * 256 + flat[start[live] + depth]
            known, node[live] = np.unique(code, return_inverse=True)
            byte.append((known % 256).astype(np.int32))
            children.append(np.searchsorted(known // 256, np.arange(nodes + 1)).astype(np.int32))
            depth, nodes = depth + 1, len(known)
        return cls(len(lengths), byte, children, ends, tokens)


@dataclasses.dataclass(frozen=True, eq=False)
class TokenDfa:
    """An automaton over tokens.

    Attributes:
        classes: `i32[V]`, the class of each token.
        next: `i32[S, C]`, -1 where a token of the class is not allowed. Ends of the sequence lead to `S - 1`, the last
            state, from which nothing goes on.
        distance: `i32[S]`, the fewest tokens that complete the text, with the end of the sequence if there is one.
        starts: `i32[n]`, the first state of each of the automata that it is made of.
        forced: `i32[S]`, the longest token with which the text goes on where only one text can follow; -1 elsewhere.
    """

    __repr__ = short

    classes: np.ndarray
    next: np.ndarray
    distance: np.ndarray
    starts: np.ndarray
    forced: np.ndarray

    @classmethod
    def build(cls, parts: Sequence[Dfa], trie: Trie, eos: Sequence[int], banned: Sequence[int] = ()) -> TokenDfa:
        """Of several languages side by side.

        Args:
            eos: the ends of the sequence, which are allowed where a text is complete; none: it is complete without one.
            banned: tokens that are never allowed.
        """
        sizes = np.cumsum([0, *map(len, parts)])
        states = int(sizes[-1]) + 1
        following = np.concatenate([np.where(p.next >= 0, p.next + at, DEAD) for p, at in zip(parts, sizes[:-1],
                                                                                            strict=True)])
        final = np.concatenate([p.final for p in parts])
        barred = np.zeros(trie.size, bool)
        barred[list(banned)] = True
        barred[list(eos)] = True            # an end of the sequence is that, whatever its text
        source, token, target = _lift(following, trie)
        keep = ~barred[token]
        ends = [e for e in eos if e not in set(banned)]
        at_end = np.flatnonzero(final)
        source = np.concatenate([source[keep], *[at_end for _ in ends]])
        token = np.concatenate([token[keep], *[np.full(len(at_end), e) for e in ends]])
        target = np.concatenate([target[keep], *[np.full(len(at_end), states - 1) for _ in ends]])

        classes, some = _classes(source, token, target, trie.size)
        table: np.ndarray = np.full((states, len(some)), DEAD, np.int32)
        mine = some[classes[token]] == token                # the pairs of one token of each class
        table[source[mine], classes[token[mine]]] = target[mine]
        # equal hashes do not prove equal columns; this does
        if not (table[source, classes[token]] == target).all() or len(source) != (table >= 0).sum(0)[classes].sum():
            raise AssertionError("two columns of the token table have one hash")
        far: np.ndarray = np.full(states, FAR, np.int64)
        if ends:
            far[-1] = 0
        else:
            far[:-1][final] = 0
        return cls(classes.astype(np.int32), table, _distances(table, far), sizes[:-1].astype(np.int32),
                   np.append(_forced(following, final, trie, barred), DEAD).astype(np.int32))


def _lift(following: np.ndarray, trie: Trie) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All moves by a token: from which state, by which, to which."""
    source, tokens, target = [], [], []
    chunk = 32          # of which the arrays stay in a processor's cache
    for low in range(0, len(following), chunk):
        begin = np.arange(low, min(low + chunk, len(following)), dtype=np.int32)
        node, now = np.zeros(len(begin), np.int32), begin
        for depth, starts in enumerate(trie.children):
            which, at = _expand(node, trie.ends[depth])
            source.append(begin[which])
            tokens.append(trie.tokens[depth][at])
            target.append(now[which])
            which, node = _expand(node, starts)
            if not len(which):
                break
            now = following[now[which], trie.byte[depth][node]]
            alive = now >= 0
            begin, node, now = begin[which][alive], node[alive], now[alive]
    return np.concatenate(source), np.concatenate(tokens), np.concatenate(target)


def _forced(following: np.ndarray, final: np.ndarray, trie: Trie, barred: np.ndarray) -> np.ndarray:
    """For each state the longest token of the text that must follow, or -1."""
    found: np.ndarray = np.full(len(final), DEAD)
    one = ((following >= 0).sum(1) == 1) & ~final
    only = np.argmax(following >= 0, 1)
    for state in np.flatnonzero(one).tolist():
        here, node = state, 0
        for depth in range(len(trie.byte)):
            if not one[here]:
                break
            low, high = trie.children[depth][node], trie.children[depth][node + 1]
            node = int(low + np.searchsorted(trie.byte[depth][low:high], only[here]))
            if node >= high or trie.byte[depth][node] != only[here]:
                break
            here = int(following[here, only[here]])
            ends = trie.tokens[depth + 1][trie.ends[depth + 1][node]:trie.ends[depth + 1][node + 1]]
            if len(free := ends[~barred[ends]]):
                found[state] = free[0]
    return found


def _expand(node: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each node the entries from `starts[node]` to `starts[node + 1]`: which node, and which entry."""
    first = starts[node]
    count = starts[node + 1] - first
    if not count.any():
        return np.zeros(0, np.int32), np.zeros(0, np.int32)
    live = np.flatnonzero(count).astype(np.int32)
    first, count = first[live], count[live]
    # steps of 1, but for the first entry of each node
    at = np.ones(int(count.sum()), np.int32)
    at[0] = first[0]
    begins = np.cumsum(count)[:-1]
    at[begins] = first[1:] - (first[:-1] + count[:-1] - 1)
    return np.repeat(live, count), np.cumsum(at, dtype=np.int32)


def _classes(source: np.ndarray, token: np.ndarray, target: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens with equal moves: the class of each, and a token of each class."""
    def mix(x: np.ndarray) -> np.ndarray:
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))

    sums: np.ndarray = np.zeros(size, np.uint64)
    moves = (source.astype(np.uint64) << np.uint64(32)) | target.astype(np.uint64)
    np.add.at(sums, token, mix(moves + np.uint64(0x9E3779B97F4A7C15)))
    _, some, classes = np.unique(sums, return_index=True, return_inverse=True)
    return classes.reshape(-1), some


def _distances(table: np.ndarray, far: np.ndarray) -> np.ndarray:
    """The fewest moves to a state whose distance is 0."""
    far = far.copy()
    source, column = np.nonzero(table >= 0)
    target = table[source, column]
    pairs = np.unique(source.astype(np.int64) * len(table) + target)
    source, target = np.divmod(pairs, len(table))
    step = 0
    while len(now := np.flatnonzero(far == step)):
        hit = np.zeros(len(far), bool)
        hit[now] = True
        before = source[hit[target]]
        far[before] = np.minimum(far[before], step + 1)
        step += 1
    return far.astype(np.int32)


@functools.lru_cache(maxsize=4)
def trie_of(token_bytes: tuple[bytes, ...]) -> Trie:
    """`Trie.build`, kept for the vocabularies in use."""
    return Trie.build(token_bytes)
