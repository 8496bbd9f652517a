"""The algorithm of lattice decoding (Xu, Jonnalagadda and Durrett, 2022), without a model."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from typing import Any

import numpy as np

from decodax.common.struct import short

Path = tuple[int, ...]
"""The new tokens of a text, from its first one on."""

Following = tuple[list[int], list[float]]
"""The most likely tokens after a text, best first, and their log-probabilities."""


@dataclasses.dataclass(frozen=True)
class TextLattice:
    """The result of lattice decoding: a directed acyclic graph whose paths from node 0 to one of `ends` are texts.

    Attributes:
        tokens: `i32[N]`, the token of each node; parents come before their children. Node 0 is the prompt, and has its
            last token.
        parents: `i32[N, M]`, the parents of each node, padded with -1. The first one is the node after which it was
            found.
        scores: `f64[N, M]`, the log-probability of the node's token after each parent; 0 for padding.
        ends: `i32[E]`, nodes that end texts.
        texts: texts that the search itself has completed, in the order of their completion; token ids if there is no
            tokenizer.
        ids: the token ids of `texts`.
        log_probs: `f64[len(texts)]`, log-probabilities of `texts`. Each token is conditioned on the text that the model
            processed before it.
        calls: number of model calls, counted as in the paper.
        read: number of tokens that the rows have processed, including tokens processed again or not used.
        merges: number of merged nodes.
        why: what ended the search: "calls", the budget was used; "queue", no text was left; "logits", the model
            returned a NaN.
    """

    __repr__ = short

    tokens: np.ndarray
    parents: np.ndarray
    scores: np.ndarray
    ends: np.ndarray
    texts: list[Any]
    ids: list[list[int]]
    log_probs: np.ndarray
    calls: int
    read: int
    merges: int
    why: str

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def count(self) -> int:
        """Number of texts: of paths from node 0 to one of `ends`."""
        ways = [1]
        for row in self.parents[1:]:
            ways.append(sum(ways[j] for j in row if j >= 0))
        return sum(ways[e] for e in self.ends)

    def paths(self) -> Iterator[tuple[list[int], float]]:
        """Yields the tokens of each path and the sum of its scores.

        After a merge the scores are those of the first text that reached the node, so that the sum only approximates
        the log-probability of the text. The number of paths may be huge.
        """
        for end in self.ends.tolist():
            stack: list[tuple[int, Path, float]] = [(end, (), 0.0)]
            while stack:
                node, behind, total = stack.pop()
                if node == 0:
                    yield list(behind), total
                    continue
                for j, score in zip(self.parents[node].tolist(), self.scores[node].tolist(), strict=True):
                    if j >= 0:
                        stack.append((j, (int(self.tokens[node]), *behind), total + score))


@dataclasses.dataclass(frozen=True)
class Recombination:
    """The options of a lattice search: arguments of `lattice_decode`; `longest` is its `max_new_tokens`."""

    calls: int
    k: int
    merge: str
    suffix: int
    gap: int
    length_penalty: float
    longest: int


@dataclasses.dataclass
class _Node:
    token: int
    score: float
    prev: list[int]
    prev_scores: list[float]
    path: Path              # with the root's token first
    total: float
    master: int             # the most likely of its siblings


class Growing:
    """The lattice (a graph of tokens whose paths are texts) of one prompt during the search. Nodes are numbered in the
    order in which they were added; 0 is the prompt."""

    def __init__(self, rule: Recombination, first: int, eos: frozenset[int], reads: Callable[[int], Hashable]) -> None:
        self.rule, self.eos, self.reads = rule, eos, reads
        self.nodes = [_Node(first, 0.0, [], [], (first,), 0.0, 0)]
        self.into = [0]                                     # the node that each was merged into, or itself
        self.met: dict[int, int] = {}                       # for "rcb": the node that took over a node's parent
        self.by_suffix: dict[Path, list[int]] = {}
        self.done: list[int] = []
        self.calls = self.merges = 0

    def root(self, u: int) -> int:
        while self.into[u] != u:
            u = self.into[u]
        return u

    def parents(self, u: int) -> list[int]:
        return list(dict.fromkeys(map(self.root, self.nodes[u].prev)))

    def add(self, token: int, score: float, parent: int, master: int | None = None) -> int:
        """Adds a node and returns its number. Its text is the path along first parents, as they are at this moment.

        Args:
            token: its token.
            score: log-probability of the token.
            parent: the node after which it was found.
            master: the greedy node beside which it was queued; the queued text is dropped if that node is merged away.
                None: the node itself.
        """
        path, total, at = [token], score, [parent]
        while at:
            node = self.nodes[self.root(at[0])]
            path.append(node.token)
            total += node.score
            at = node.prev
        new = len(self.nodes)
        self.nodes.append(_Node(token, score, [parent], [score], tuple(reversed(path)), total,
                                new if master is None else master))
        self.into.append(new)
        return new

    def ended(self, u: int) -> bool:
        node = self.nodes[u]
        return u > 0 and (node.token in self.eos or len(node.path) > self.rule.longest)

    def ancestors(self, u: int) -> set[int]:
        seen, todo = set[int](), self.parents(u)
        while todo:
            at = todo.pop()
            if at not in seen:
                seen.add(at)
                todo += self.parents(at)
        return seen

    def note(self, pointer: int, new: int) -> None:
        """Enters the node `new`, a child of node `pointer`, into the index of nodes by their last `suffix` tokens, once
        for each path that leads to it."""
        def ending(u: int, n: int) -> list[Path]:
            if n == 1:
                return [(self.nodes[u].token,)]
            return [(*front, self.nodes[u].token) for v in self.parents(u) for front in ending(v, n - 1)]

        for front in ending(self.root(pointer), self.rule.suffix - 1):
            self.by_suffix.setdefault((*front, self.nodes[new].token), []).append(new)

    def matched(self, u: int, ngram: Path) -> tuple[list[int], int] | None:
        """Searches the paths that end at node `u` for one whose last tokens are `ngram`. Returns the nodes of these
        tokens, from `u` backwards, and the number of tokens of the path from the root; None if there is none."""
        paths = [[u]]
        for token in reversed(ngram):
            paths = [[*path, v] for path in paths if self.nodes[path[-1]].token == token
                     for v in self.parents(path[-1])]
        if not paths:
            return None
        *nodes, v = paths[0]
        length, at = len(ngram), [v]
        while at:
            length, at = length + 1, self.nodes[self.root(at[0])].prev
        return nodes, length

    def like(self, new: int) -> tuple[int, list[int]] | None:
        """Returns an earlier node with which the node `new` may be merged, and that node's last `suffix` nodes,
        backwards; None if there is none. Their last `suffix` tokens are equal, and their lengths differ by less than
        `gap`."""
        n, path = self.rule.suffix, self.nodes[new].path
        if len(path) <= n:
            return None
        for u in dict.fromkeys(map(self.root, self.by_suffix.get(path[-n:], []))):
            found = self.matched(u, path[-n:])
            if found and found[1] > n and abs(found[1] - len(path)) < self.rule.gap:
                return u, found[0]
        return None

    def apart(self, a: int, b: int) -> bool:
        """True if the nodes differ and neither leads to the other, so that merging them creates no loop."""
        return a != b and a not in self.ancestors(b) and b not in self.ancestors(a)

    def merge(self, kept: int, new: int, common: Sequence[int]) -> bool:
        node = self.nodes[new]
        if self.rule.merge == "rcb":
            pointer = self.root(node.prev[0])
            if not self.apart(kept, pointer):
                return False
            self.nodes[kept].prev.append(pointer)
            self.nodes[kept].prev_scores.append(node.score)
            self.met[new] = kept
            self.merges += 1
            return True
        merged = 0
        for old in common:
            if not self.apart(old, new):
                break
            self.into[new] = old
            self.nodes[old].prev += self.nodes[new].prev
            self.nodes[old].prev_scores += self.nodes[new].prev_scores
            merged += 1
            new = self.root(self.nodes[new].prev[0])
        self.merges += merged
        return merged > 0

    def run(self) -> Generator[Path, Following | None, str]:
        """Runs the search as a generator: yields texts whose next tokens it needs, and is sent the `k` most likely ones
        (None if there are none). Returns why the search ended."""
        rule, heap, made = self.rule, [(-1.0, 0, 0)], 0
        while self.calls < rule.calls:
            if not heap:
                return "queue"
            _, _, pointer = heapq.heappop(heap)
            node = self.nodes[pointer]
            # Texts after a node that was merged away are left to the node that was kept.
            if any(self.root(u) != u for u in (node.master, *node.prev[:1])):
                continue
            while not self.ended(pointer):
                following = yield self.nodes[pointer].path[1:]
                if following is None:
                    return "logits"
                self.calls += 1
                (token, *others), (score, *scores) = following
                best = self.add(token, score, pointer)
                similar = self.like(best)
                merged = similar is not None and self.merge(similar[0], best, similar[1])
                if not merged:
                    self.note(pointer, best)
                if self.ended(best):
                    self.done.append(best)
                seen = {self.reads(token)}
                for token, score in zip(others, scores, strict=True):
                    if (how := self.reads(token)) in seen:
                        continue
                    seen.add(how)
                    new = self.add(token, score, pointer, best)
                    if self.ended(new):
                        self.done.append(new)
                        continue
                    made += 1
                    made_score = self.nodes[new].total / len(self.nodes[new].path) ** rule.length_penalty
                    heapq.heappush(heap, (-made_score, made, new))
                if merged:
                    break
                pointer = best
        return "calls"

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns the array fields of `TextLattice`, with the nodes that lead to the end of a text, parents first."""
        last = {self.root(u) for u in self.done if u not in self.met}
        last |= {u for u in self.done if u in self.met and self.root(self.met[u]) not in last}
        order: dict[int, int] = {0: 0}
        todo = sorted(last, reverse=True)
        while todo:
            if missing := [v for v in self.parents(todo[-1]) if v not in order]:
                todo += missing[::-1]
            else:
                u = todo.pop()
                order.setdefault(u, len(order))
        edges = [dict(reversed([(self.root(v), s) for v, s in zip(self.nodes[u].prev, self.nodes[u].prev_scores,
                                                                 strict=True)])) for u in order]
        wide = max(1, *map(len, edges))
        parents, scores = np.full((len(order), wide), -1, np.int32), np.zeros((len(order), wide))
        for i, (u, of) in enumerate(zip(order, edges, strict=True)):
            for j, v in enumerate(self.parents(u)):
                parents[i, j], scores[i, j] = order[v], of[v]
        return dict(tokens=np.array([self.nodes[u].token for u in order], np.int32), parents=parents, scores=scores,
                    ends=np.array(sorted(order[u] for u in last), np.int32))
