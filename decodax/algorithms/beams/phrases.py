"""Phrases that a text must contain, and the progress of a text through them, token by token.

Phrases are sequences of tokens. The progress of a text is a pytree of arrays with any leading shape `...`, which a
search copies with the text. The tables of the phrases are data, so other phrases of the same lengths need no retrace.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from decodax.common.struct import Struct, struct

Phrases = tuple[tuple[int, ...], ...]
Rule = Literal["paper", "fairseq"]


def phrases_of(given: Any) -> Phrases:
    """Checks an argument `phrases`, a list of lists of token ids, and returns it as a tuple of tuples of ints.

    Raises:
        ValueError: there is no phrase, a phrase is empty, or an entry is not a non-negative integer.
    """
    whole = lambda t: isinstance(t, (int, np.integer)) and not isinstance(t, bool) and t >= 0
    listed = isinstance(given, Sequence) and not isinstance(given, str) and given
    if not listed or not all(isinstance(p, Sequence) and len(p) and all(map(whole, p)) for p in given):
        raise ValueError(f"phrases: got {given!r}, takes a list of one phrase or more, each a list of token ids")
    return tuple(tuple(int(t) for t in p) for p in given)


def _known(rule: str) -> None:
    if rule not in ("paper", "fairseq"):
        raise ValueError(f"rule: got {rule!r}, takes 'paper' or 'fairseq'")


class PhraseProgress(abc.ABC):
    """Base class of trackers of the phrases that texts contain. `tables` in its methods are the arrays that `table`
    returned; a state is a pytree of arrays whose leading axes `...` are those of the texts."""

    @abc.abstractmethod
    def table(self, phrases: Phrases) -> Any:
        """Returns the tables of the given phrases, a pytree of host arrays. Shapes depend only on the lengths of the
        phrases, so other phrases of the same lengths need no retrace."""

    @abc.abstractmethod
    def start(self, tables: Any, shape: tuple[int, ...]) -> Any:
        """Returns the state of texts that have no new token yet, with leading axes `shape`."""

    @abc.abstractmethod
    def advance(self, tables: Any, state: Any, token: Array) -> Any:
        """Returns the state after each text is extended by `token`, `i32[...]`."""

    @abc.abstractmethod
    def bank(self, tables: Any, state: Any) -> Array:
        """Returns the number of phrase tokens that each text contains, `i32[...]`; those of a phrase that is begun but
        not complete count, too."""

    @abc.abstractmethod
    def met(self, tables: Any, state: Any) -> Array:
        """Returns whether each text contains all phrases, `bool[...]`."""

    @abc.abstractmethod
    def next(self, tables: Any, state: Any) -> tuple[Array, Array]:
        """Returns for each text the tokens that would begin or continue a phrase that it lacks, `i32[..., n]`, and
        which of these entries are valid, `bool[..., n]`."""


@struct
class InOrder(Struct):
    """Tables of `Ordered`.

    Attributes:
        tokens: `i32[C]`, the tokens of all phrases in their order.
        ends: `bool[C]`, True at the last token of a phrase.
        back: `i32[C]`, number of phrase tokens that are left if a phrase is broken after this many tokens.
    """

    tokens: Array
    ends: Array
    back: Array


@dataclasses.dataclass(frozen=True)
class Ordered(PhraseProgress):
    """Phrases that appear in the text in the given order, with any tokens between them. The state is the number of
    phrase tokens in the text, `i32[...]`.

    Attributes:
        rule: the phrases that are lost if a token breaks an open phrase. "paper": the open phrase (Post and Vilar,
            2018). "fairseq": also all phrases before it, so a text must contain them again.
    """

    rule: Rule = "paper"

    def __post_init__(self) -> None:
        _known(self.rule)

    def table(self, phrases: Phrases) -> InOrder:
        begins = np.cumsum([0, *map(len, phrases)])
        back = np.concatenate([np.full(len(p), b if self.rule == "paper" else 0)
                               for p, b in zip(phrases, begins, strict=False)])
        ends = np.concatenate([np.arange(len(p)) == len(p) - 1 for p in phrases])
        arrays: Any = np.concatenate(phrases).astype(np.int32), ends, back.astype(np.int32)
        return InOrder(*arrays)

    def start(self, tables: InOrder, shape: tuple[int, ...]) -> Array:
        return jnp.zeros(shape, jnp.int32)

    def _at(self, tables: InOrder, state: Array) -> tuple[Array, Array, Array]:
        """Returns the token that continues the text's phrase, True if a phrase is open, and the state after the phrase
        is broken."""
        here = jnp.minimum(state, tables.tokens.shape[0] - 1)
        is_open = (state > 0) & ~jnp.asarray(tables.ends)[jnp.maximum(state - 1, 0)]
        return jnp.asarray(tables.tokens)[here], is_open, jnp.asarray(tables.back)[here]

    def advance(self, tables: InOrder, state: Array, token: Array) -> Array:
        follows, is_open, back = self._at(tables, state)
        again = back + (token == jnp.asarray(tables.tokens)[back])
        after = jnp.where(token == follows, state + 1, jnp.where(is_open, again, state))
        return jnp.where(self.met(tables, state), state, after)

    def bank(self, tables: InOrder, state: Array) -> Array:
        return state

    def met(self, tables: InOrder, state: Array) -> Array:
        return state == tables.tokens.shape[0]

    def next(self, tables: InOrder, state: Array) -> tuple[Array, Array]:
        follows, is_open, back = self._at(tables, state)
        tokens = jnp.stack([follows, jnp.asarray(tables.tokens)[back]], -1)
        # fairseq offers the very first token also where no phrase is open
        again = is_open if self.rule == "paper" else state > 1
        return tokens, jnp.stack([~self.met(tables, state), again], -1)


@struct
class PhraseTrie(Struct):
    """A trie of the phrases; node 0 is its root, and nodes after the last one are empty.

    Attributes:
        token: `i32[n]`, token of each node; -1 for the root and empty nodes.
        parent: `i32[n]`, parent of each node; -1 for the root and empty nodes.
        below: `i32[n]`, number of phrases that pass through the node or end there.
        ends: `i32[n]`, number of phrases that end there.
    """

    token: Array
    parent: Array
    below: Array
    ends: Array


@struct
class Walk(Struct):
    """State of `Unordered`.

    Attributes:
        node: `i32[...]`, node of the trie at which the text is.
        made: `i32[..., n]`, number of times that the text passed through each node, for phrases that it has and the
            open one.
        whole: `i32[..., n]`, number of completed phrases that end at each node.
    """

    node: Array
    made: Array
    whole: Array


@dataclasses.dataclass(frozen=True)
class Unordered(PhraseProgress):
    """Phrases in any order, tracked in a trie with counts (Hu et al., 2019). A phrase that is given twice must appear
    twice.

    A text goes down the trie as long as its tokens continue phrases that it still needs. If a token does not, the
    longest needed phrase on the path is counted as complete, the tokens of the path after it are lost, and the token
    may begin a phrase at the root.

    Attributes:
        rule: whether a token that breaks a phrase may begin the same phrase again if it is needed only once. "paper":
            yes. "fairseq": no, since the lost tokens still count at that token.
    """

    rule: Rule = "paper"

    def __post_init__(self) -> None:
        _known(self.rule)

    def table(self, phrases: Phrases) -> PhraseTrie:
        size = sum(map(len, phrases)) + 1
        token, parent = np.full(size, -1, np.int32), np.full(size, -1, np.int32)
        below, ends = np.zeros(size, np.int32), np.zeros(size, np.int32)
        nodes: dict[tuple[int, int], int] = {}
        for phrase in phrases:
            node = 0
            below[0] += 1
            for t in phrase:
                child = nodes.setdefault((node, t), len(nodes) + 1)
                token[child], parent[child] = t, node
                below[child] += 1
                node = child
            ends[node] += 1
        arrays: Any = token, parent, below, ends
        return PhraseTrie(*arrays)

    def start(self, tables: PhraseTrie, shape: tuple[int, ...]) -> Walk:
        none = jnp.zeros((*shape, tables.token.shape[0]), jnp.int32)
        return Walk(jnp.zeros(shape, jnp.int32), none, none)

    def advance(self, tables: PhraseTrie, state: Walk, token: Array) -> Walk:
        t = jax.tree.map(jnp.asarray, tables)
        size = t.token.shape[0]
        one = lambda node: jax.nn.one_hot(node, size, dtype=jnp.int32)
        of = lambda x, node: jnp.take_along_axis(x, node[..., None], -1)[..., 0]

        def child(node: Array, made: Array) -> tuple[Array, Array]:
            hit = (t.parent == node[..., None]) & (t.token == token[..., None])
            found = jnp.argmax(hit, -1).astype(jnp.int32)
            return found, hit.any(-1) & (of(made, found) < t.below[found])

        def up(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            at, made, whole = carry
            counts = (t.ends[at] > 0) & (of(whole, at) < t.ends[at])
            climbs = at > 0
            whole = whole + jnp.where((climbs & counts)[..., None], one(at), 0)
            made = made - jnp.where((climbs & ~counts)[..., None], one(at), 0)
            return jnp.where(climbs & ~counts, t.parent[at], 0), made, whole

        down, goes = child(state.node, state.made)
        broken = (jnp.where(goes, 0, state.node), state.made, state.whole)
        _, made, whole = lax.while_loop(lambda carry: (carry[0] > 0).any(), up, broken)
        first, begins = child(jnp.zeros_like(state.node), made if self.rule == "paper" else state.made)
        node = jnp.where(goes, down, jnp.where(begins, first, 0))
        made = made + jnp.where((goes | begins)[..., None], one(node), 0)
        return Walk(node, made, whole)

    def bank(self, tables: PhraseTrie, state: Walk) -> Array:
        return state.made.sum(-1, dtype=jnp.int32)

    def met(self, tables: PhraseTrie, state: Walk) -> Array:
        ends = jnp.asarray(tables.ends)[state.node]
        here = (ends > 0) & (jnp.take_along_axis(state.whole, state.node[..., None], -1)[..., 0] < ends)
        return state.whole.sum(-1, dtype=jnp.int32) + here == tables.below[0]

    def next(self, tables: PhraseTrie, state: Walk) -> tuple[Array, Array]:
        parent = jnp.asarray(tables.parent)
        ok = (parent == 0) | ((parent == state.node[..., None]) & (parent >= 0))
        return jnp.broadcast_to(jnp.asarray(tables.token), ok.shape), ok


@struct
class Cover(Struct):
    """State of texts in a grid search.

    Attributes:
        has: `bool[..., n]`, phrases that the text has.
        phrase: `i32[...]`, the open phrase, -1 for none.
        at: `i32[...]`, number of tokens of the open phrase in the text.
        text: `i32[...]`, equal for live beams of a prompt with equal tokens.
    """

    has: Array
    phrase: Array
    at: Array
    text: Array
