"""ADED, adaptive draft-verification: drafts by a tree search on a trigram matrix ("Adaptive Draft-Verification for
Efficient Large Language Model Decoding", Liu et al., 2024).

The matrix estimates the probability of each token after the last two tokens, from the prompt, the tokens decided since,
and a corpus if there is one. The draft tree is that of a Monte-Carlo tree search from the newest token. Each simulation
goes down to the child with the largest

    PUCT = Q + explore * P * sqrt(visits of the parent) / (1 + visits of the child)

until it reaches a child that is not in the tree yet. It adds this child, and adds the child's probability of being
reached (the product of P along its path) to all nodes above, whose mean of these values is Q. So likely branches become
deep, and rarely visited siblings are also tried.

The matrix is a hash table for each batch row, with `rows` entries of `k` counted successors. Two pairs with the same
hash replace each other, and in a full entry a new successor replaces the one with the smallest count.

The rule is the standard PUCT (Rosin 2011). The authors' code (liuxukun2000/Adaptix) is randomised: a simulation expands
all children of a node, continues at random for four tokens and returns 1 plus the sum of their probabilities, with 32
or more for `explore`; the drafts are the 24 most visited paths.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafter import Form
from decodax.algorithms.speculative.drafts.text.history import FromText
from decodax.algorithms.speculative.source import Draft, Drawn
from decodax.algorithms.speculative.tree import Proposal
from decodax.algorithms.speculative.verifier import SeedExact, Verifier
from decodax.common.arguments import check_counts
from decodax.common.options import Count
from decodax.common.registry import ALGORITHMS
from decodax.common.struct import Struct, struct
from decodax.core.state import State
from decodax.core.types import Decision, Out, Params
from decodax.core.window import Window


@struct
class Trigrams(Struct):
    """A hash table of trigram counts: for each pair of tokens up to `k` tokens that followed it. `rows` is its number
    of entries; a new pair replaces an old one with the same hash.

    Attributes:
        pair: `i32[..., rows, 2]`, the pair of tokens of each entry, -1 for none.
        tokens: `i32[..., rows, k]`, the tokens that followed the pair.
        counts: `f32[..., rows, k]`, how often each did; 0 for a free place.
    """

    pair: Array
    tokens: Array
    counts: Array

    @classmethod
    def empty(cls, rows: int, k: int) -> Trigrams:
        """Returns an empty table for one text, with `rows` entries and places for `k` successors of each pair."""
        return cls(pair=jnp.full((rows, 2), -1, jnp.int32), tokens=jnp.zeros((rows, k), jnp.int32),
                   counts=jnp.zeros((rows, k), jnp.float32))

    def slot(self, first: Array, second: Array) -> Array:
        """Returns the index in the table, `i32[]`, to which a pair of tokens is hashed."""
        mixed = first.astype(jnp.uint32) * jnp.uint32(2654435761) + second.astype(jnp.uint32) * jnp.uint32(40503)
        return ((mixed ^ (mixed >> 15)) % jnp.uint32(self.pair.shape[0])).astype(jnp.int32)

    def add(self, first: Array, second: Array, token: Array) -> Trigrams:
        """Returns the table after `token` has followed the tokens `first` and `second` once more (`i32[]` each, no
        batch axis); it is unchanged if one of them is negative. If all places of the pair are taken, the rarest
        successor is replaced."""
        at = self.slot(first, second)
        pair = jnp.stack([first, second])
        counts = jnp.where((self.pair[at] == pair).all(), self.counts[at], 0)
        hit = (self.tokens[at] == token) & (counts > 0)
        place = jnp.where(hit.any(), jnp.argmax(hit), jnp.argmin(counts))
        counts = counts.at[place].set(jnp.where(hit.any(), counts[place] + 1, 1))
        at = jnp.where((first >= 0) & (second >= 0) & (token >= 0), at, self.pair.shape[0])
        return Trigrams(pair=self.pair.at[at].set(pair, mode="drop"),
                        tokens=self.tokens.at[at, place].set(token, mode="drop"),
                        counts=self.counts.at[at].set(counts, mode="drop"))

    def read(self, text: Array, begin: Array, end: Array) -> Trigrams:
        """Adds every trigram of `text` (`i32[N]`) whose last token has an index from `begin` to `end - 1`."""
        def step(i: Array, table: Trigrams) -> Trigrams:
            return table.add(text[i - 2], text[i - 1], text[i])

        return lax.fori_loop(jnp.maximum(begin, 2), end, step, self)

    def after(self, first: Array, second: Array) -> tuple[Array, Array]:
        """Returns the tokens that have followed a pair of tokens, `i32[k]`, and their shares of all counted ones,
        `f32[k]`; the shares of free places are 0, and all are 0 if the pair is not in the table."""
        at = self.slot(first, second)
        known = (self.pair[at] == jnp.stack([first, second])).all() & (second >= 0)
        counts = jnp.where(known, self.counts[at], 0)
        return self.tokens[at], counts / jnp.maximum(counts.sum(), 1)


@dataclasses.dataclass(frozen=True)
class ADED(FromText, Draft):
    """Drafts the tree of a PUCT search on the trigrams of the text (Liu et al., 2024).

    Attributes:
        nodes: number of nodes of the tree.
        depth: largest number of tokens on a path.
        k: number of successors kept for each pair of tokens.
        rows: number of entries of the hash table.
        explore: weight of exploration.

    Raises:
        ValueError: a number below 1, or a negative weight.
    """

    nodes: int = 24
    depth: int = 6
    k: int = 8
    rows: int = 4096
    explore: float = 1.25
    proposes: ClassVar[frozenset[Form]] = frozenset(("trees",))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, "nodes", "depth", "k", "rows")
        if self.explore < 0:
            raise ValueError(f"explore: got {self.explore}, takes at least 0")

    @property
    def length(self) -> int:
        return min(self.depth, self.nodes)

    def init(self, params: Params, s: State) -> Trigrams:
        table = Trigrams.empty(self.rows, self.k)
        corpus = self.weights if params.draft is None else params.draft
        if corpus is not None:
            table = table.read(jnp.asarray(corpus), jnp.int32(0), jnp.int32(corpus.shape[0]))
        return jax.vmap(table.read, (0, None, 0))(s.tokens, jnp.int32(0), s.length)

    def propose(self, params: Params, policy: Any, s: State, state: Any, drawn: Drawn) -> tuple[Proposal, Any]:
        before = jnp.where(s.length > 1, jnp.take_along_axis(s.tokens, jnp.maximum(s.length - 2, 0)[:, None], 1)[:, 0],
                           -1)
        return jax.vmap(self._search)(state, before, s.newest), state

    def observe(self, params: Params, s: State, window: Window, out: Out, decision: Decision | None, state: Any) -> Any:
        if decision is None:
            return state

        def row(table: Trigrams, text: Array, length: Array, tokens: Array, count: Array) -> Trigrams:
            last = jnp.where(length - 2 + jnp.arange(2) >= 0, text[jnp.maximum(length - 2 + jnp.arange(2), 0)], -1)
            new = jnp.where(jnp.arange(tokens.shape[0]) < count, tokens, -1)
            return table.read(jnp.concatenate([last, new]), jnp.int32(2), jnp.int32(2 + tokens.shape[0]))

        return jax.vmap(row)(state, s.tokens, s.length, decision.tokens, decision.count)

    def _search(self, table: Trigrams, before: Array, newest: Array) -> Proposal:
        """Returns the tree of one row, from its last two tokens, `i32[]` each."""
        size, k = 1 + self.nodes, self.k
        slots = lambda fill, dtype: jnp.full((size, k), fill, dtype)
        at_root, p_root = table.after(before, newest)
        tree = dict(
            tokens=jnp.zeros(size, jnp.int32).at[0].set(newest), parents=jnp.zeros(size, jnp.int32),
            live=jnp.zeros(size, bool).at[0].set(True), reach=jnp.zeros(size, jnp.float32).at[0].set(1),
            sees=jnp.zeros((size, size), bool).at[0, 0].set(True),
            visits=jnp.zeros(size, jnp.float32).at[0].set(1), value=jnp.zeros(size, jnp.float32),
            successors=slots(0, jnp.int32).at[0].set(at_root), p=slots(0, jnp.float32).at[0].set(p_root),
            child=slots(-1, jnp.int32))

        def best(tree: Any, node: Array) -> Array:
            child = tree["child"][node]
            n = jnp.where(child >= 0, tree["visits"][child], 0)
            q = jnp.where(child >= 0, tree["value"][child] / jnp.maximum(n, 1), 0)
            score = q + self.explore * tree["p"][node] * jnp.sqrt(tree["visits"][node]) / (1 + n)
            return jnp.argmax(jnp.where(tree["p"][node] > 0, score, -jnp.inf))

        def simulate(new: Array, tree: Any) -> Any:
            def descend(_: Any, node: Array) -> Array:
                child = tree["child"][node, best(tree, node)]
                return jnp.where(child >= 0, child, node)

            node = lax.fori_loop(0, self.length, descend, jnp.zeros((), jnp.int32))
            rank = best(tree, node)
            grows = tree["p"][node, rank] > 0        # else a leaf without successors: the visit counts
            token = tree["successors"][node, rank]
            reach = tree["reach"][node] * tree["p"][node, rank]
            path = tree["sees"][node]
            put = lambda x, value: x.at[jnp.where(grows, new, size)].set(value, mode="drop")
            successors, p = table.after(tree["tokens"][node], token)
            p = jnp.where(path.sum() < self.length, p, 0)     # as deep as a path may be
            own = path.at[new].set(True)
            visited = jnp.where(grows, own, path)
            return dict(
                tokens=put(tree["tokens"], token), parents=put(tree["parents"], node), live=put(tree["live"], True),
                reach=put(tree["reach"], reach), sees=put(tree["sees"], own),
                visits=tree["visits"] + visited,
                value=tree["value"] + visited * jnp.where(grows, reach, tree["reach"][node]),
                successors=put(tree["successors"], successors), p=put(tree["p"], p),
                child=tree["child"].at[jnp.where(grows, node, size), rank].set(new.astype(jnp.int32), mode="drop"))

        tree = lax.fori_loop(1, size, simulate, tree)
        return Proposal(tokens=tree["tokens"][1:], live=tree["live"][1:], parents=tree["parents"][1:])


@ALGORITHMS.register("aded", "Adaptive Draft-Verification for Efficient Large Language Model Decoding",
                     "Liu et al. 2024", family="speculative-tree", guarantee="seed-exact")
def aded(nodes: Count = 24, depth: Count = 6, verify: Verifier = SeedExact()) -> Speculative:
    """Drafts a tree by a PUCT search on a trigram matrix that is updated while decoding.

    It needs no draft model. Likely branches become deep, and rarely visited siblings are also tried.

    Args:
        nodes: number of nodes of the draft tree.
        depth: largest number of tokens on a path.
        verify: the rule that accepts drafts.
    """
    return Speculative(ADED(nodes, depth), verify)
