"""Automata over the tokens of a vocabulary, made from automata over bytes.

Tokens that lead from every state to the same state share a class, so the table of an automaton over 150,000 tokens has
a few hundred columns.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np

from decodax.common.struct import short
from decodax.constraints.dfa import DEAD, Dfa, levels, neighbours

FAR = np.iinfo(np.int32).max // 2
"""A distance larger than any distance in an automaton."""


@dataclasses.dataclass(frozen=True, eq=False)
class TokenTrie:
    """The tokens of a vocabulary as a trie of their bytes, level by level. The nodes of a level are sorted by parent.

    Attributes:
        size: size of the vocabulary.
        byte: for each level, the byte of each node.
        children: for each level, `i32[n + 1]`, the index of the first child of each node on the next level.
        ends: for each level, `i32[n + 1]`, the index in `tokens` of the first token that ends at each node.
        tokens: for each level, the tokens that end on it.
    """

    __repr__ = short

    size: int
    byte: list[np.ndarray]
    children: list[np.ndarray]
    ends: list[np.ndarray]
    tokens: list[np.ndarray]

    @classmethod
    def build(cls, token_bytes: Sequence[bytes]) -> TokenTrie:
        """Builds the trie from the bytes of each token; tokens without bytes are left out."""
        lengths = np.array([len(t) for t in token_bytes])
        flat = np.frombuffer(b"".join(token_bytes), np.uint8)
        start = np.concatenate([[0], np.cumsum(lengths)])[:-1]
        node: np.ndarray = np.zeros(len(lengths), np.int64)             # node of each token on the current level
        live = np.flatnonzero(lengths > 0)
        byte, children, ends, tokens = [], [], [], []
        depth, nodes = 0, 1
        while True:
            # The tokens that end on this level.
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
    """A deterministic automaton over tokens.

    Attributes:
        classes: `i32[V]`, the class of each token.
        next: `i32[S, C]`, the next state for each class; -1 where tokens of the class are not allowed. End-of-sequence
            tokens lead to the last state, `S - 1`, from which no token is allowed.
        distance: `i32[S]`, the smallest number of tokens that complete the text, including the end-of-sequence token if
            there is one.
        starts: `i32[n]`, the first state of each language from which the automaton was built.
        forced: `i32[S]`, the longest token with which the text can continue if its continuation is unique; -1
            elsewhere.
    """

    __repr__ = short

    classes: np.ndarray
    next: np.ndarray
    distance: np.ndarray
    starts: np.ndarray
    forced: np.ndarray

    @classmethod
    def build(cls, parts: Sequence[Dfa], trie: TokenTrie, eos: Sequence[int], banned: Sequence[int] = ()) -> TokenDfa:
        """Builds one automaton that contains several languages side by side.

        Args:
            parts: automata over bytes.
            trie: the vocabulary.
            eos: end-of-sequence tokens, which are allowed where a text is complete. If there are none, a complete text
                needs no end.
            banned: tokens that are never allowed.
        """
        sizes = np.cumsum([0, *map(len, parts)])
        states = int(sizes[-1]) + 1
        following = np.concatenate([np.where(p.next >= 0, p.next + at, DEAD) for p, at in zip(parts, sizes[:-1],
                                                                                            strict=True)])
        final = np.concatenate([p.final for p in parts])
        barred = np.zeros(trie.size, bool)
        barred[list(banned)] = True
        barred[list(eos)] = True            # an end-of-sequence token is never read as text
        action, pairs = _actions(following, trie)
        action[barred] = NOTHING
        if ends := [e for e in eos if e not in set(banned)]:
            action[ends] = len(pairs)
            pairs.append(np.flatnonzero(final) * states + states - 1)
        used, classes = np.unique(action, return_inverse=True)
        table: np.ndarray = np.full((states, len(used)), DEAD, np.int32)
        for column, a in enumerate(used.tolist()):
            source, target = np.divmod(pairs[a], states)
            table[source, column] = target
        live, columns = np.nonzero(table >= 0)
        last = [states - 1] if ends else np.flatnonzero(final).tolist()
        far = levels(last, table[live, columns], live, states)
        return cls(classes.reshape(-1).astype(np.int32), table, np.where(far < 0, FAR, far).astype(np.int32),
                   sizes[:-1].astype(np.int32),
                   np.append(_forced(following, final, trie, barred), DEAD).astype(np.int32))

    def longest(self, start: int) -> int | None:
        """Returns the number of tokens of the longest text from a state, without the end-of-sequence token; None if
        there is no limit."""
        last = len(self.next) - 1
        source, column = np.nonzero(self.next >= 0)
        target = self.next[source, column]
        inner = target != last
        onwards = neighbours(source[inner], target[inner], last)
        reached = np.flatnonzero(levels([start], source[inner], target[inner], last) >= 0).tolist()
        ends = set(source[~inner].tolist()) or set(np.flatnonzero(self.distance[:-1] == 0).tolist())
        waits = dict.fromkeys(reached, 0)
        for state in reached:
            for there in onwards[state]:
                waits[there] += 1
        order = [start] if not waits[start] else []
        for state in order:         # the list grows during the loop
            for there in onwards[state]:
                waits[there] -= 1
                if not waits[there]:
                    order.append(there)
        if len(order) < len(reached):       # a state leads back to itself
            return None
        most: dict[int, float] = {}
        for state in reversed(order):
            further = max((most[there] + 1 for there in onwards[state]), default=-math.inf)
            most[state] = max(further, 0) if state in ends else further
        return max(int(most[start]), 0) if most[start] > -math.inf else 0


NOTHING = 0
"""The effect of a token after which no text can continue."""


def _actions(following: np.ndarray, trie: TokenTrie) -> tuple[np.ndarray, list[np.ndarray]]:
    """Computes the effect of each token on the states.

    Many tokens have the same effect, such as all words of five plain letters inside a JSON string. Each effect is
    computed once for each preceding effect and class of bytes, so the cost depends on the number of different effects
    and not on the number of tokens that a state allows.

    Returns:
        `i64[V]`, the index of each token's effect; and for each effect its sorted pairs of states before and after, as
        `before * (S + 1) + after`.
    """
    count = len(following)
    _, some, letters = np.unique(following, axis=1, return_index=True, return_inverse=True)
    moves, letters = following[:, some], letters.reshape(-1)
    pairs = [np.zeros(0, np.int64), np.arange(count, dtype=np.int64) * (count + 2)]
    numbers = {x.tobytes(): i for i, x in enumerate(pairs)}
    onwards: dict[int, int] = {}        # by action * letters + letter
    found: np.ndarray = np.full(trie.size, NOTHING)
    node: np.ndarray = np.ones(1, np.int64)         # action of each node of the current level
    for depth, starts in enumerate(trie.children):
        found[trie.tokens[depth]] = np.repeat(node, np.diff(trie.ends[depth]))
        if not node.any() or depth == len(trie.byte):
            break
        steps = np.repeat(node, np.diff(starts)) * len(some) + letters[trie.byte[depth]]
        steps, where = np.unique(steps, return_inverse=True)
        for step in steps.tolist():
            if step not in onwards:
                before, letter = divmod(step, len(some))
                source, target = np.divmod(pairs[before], count + 1)
                target = moves[target, letter]
                new = (source * (count + 1) + target)[target >= 0]
                number = onwards[step] = numbers.setdefault(new.tobytes(), len(pairs))
                if number == len(pairs):
                    pairs.append(new)
        node = np.array([onwards[step] for step in steps.tolist()])[where.reshape(-1)]
    return found, pairs


def _forced(following: np.ndarray, final: np.ndarray, trie: TokenTrie, barred: np.ndarray) -> np.ndarray:
    """Returns, for each state, the longest token that begins the only possible continuation, or -1 if there is more
    than one."""
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


@functools.lru_cache(maxsize=4)
def trie_of(token_bytes: tuple[bytes, ...]) -> TokenTrie:
    """Returns `TokenTrie.build(token_bytes)`, cached for the vocabularies in use."""
    return TokenTrie.build(token_bytes)
