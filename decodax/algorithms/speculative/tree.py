"""Draft trees: the proposal of a drafter, and its topology. A chain is a tree.

Window node 0 is the newest token, nodes 1 to N are drafts, and after them come probes, which the target scores in the
same forward pass but a verifier never accepts. Parents come before their children, and siblings are in the order in
which they are tried.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.common.struct import Struct, struct
from decodax.core.checks import array
from decodax.core.types import PartialForward
from decodax.core.window import Window
from decodax.models.drafters.hidden_transfer import Transfer

Drawn = Literal["coupled", "ranked", "distinct", "independent"]
"""The ways to draw drafts for a verifier. "coupled": with the noise of the target's own draw (`decodax.sampling.draw`),
in the order of arrival in that race under the draft's distribution. "ranked": the most likely tokens in order.
"distinct": children of a node are drawn without replacement. "independent": each child is drawn by itself. For the last
two a drafter returns the distribution from which it drew, `log_q`."""


@struct
class Probes(Struct):
    """Window nodes that are scored but never accepted, such as lookahead windows, mask tokens or prompts in parallel.

    Attributes:
        tokens: `i32[B, P]`, their tokens.
        offset: `i32[B or 1, P]`, their positions minus that of the newest token.
        sees: `bool[B or 1, P, 1 + N + P]`, window nodes to which each attends: newest token, drafts, probes.
        embeddings: `f[B or 1, P, D]`, vectors in place of the embeddings of their tokens; None: there are none.
        transfer: the layers and maps that make the probes of other nodes; None: they are like all nodes.
    """

    tokens: Array
    offset: Array
    sees: Array
    embeddings: Array | None = None
    transfer: Transfer | None = None


@struct
class Proposal(Struct):
    """Drafts of the tokens after each row's newest one.

    Attributes:
        tokens: `i32[B, N]`, the drafts.
        live: `bool[B, N]`, False for padding, which is never accepted, and whose descendants are not accepted either.
            Whether a draft is live must not depend on its own token. Among siblings drawn without replacement, a dead
            one before a live one counts as drawn, unless its token is negative: the later ones were drawn without its
            token.
        parents: `i32[B or 1, N]`, window node of each draft's parent (0: the newest token, `i`: draft `i - 1`); a NumPy
            array if the topology is fixed; None for a chain.
        log_q: `f32[B, J, V]`, for the first J window nodes the log of the distribution from which their children *were
            drawn*; None if drafts are deterministic. Nodes from J on have no children.
        drawn_at: `i32[N]`, a NumPy array: the entry of `log_q` from which each draft was drawn, if that is not its
            parent's because several sources drew. Such siblings are independent draws.
        probes: further nodes that the target scores; None: none.
        begun: the part of the target's forward pass over newest token and drafts that drafting has already computed;
            not possible with probes.
        match: `i32[B]`, number of last tokens of the text with which the drafts were looked up; None for other drafts.
    """

    tokens: Array
    live: Array
    parents: Any = None
    log_q: Array | None = None
    probes: Probes | None = None
    begun: PartialForward | None = None
    match: Array | None = None
    drawn_at: Any = None

    @property
    def count(self) -> Array:
        """Number of drafts of each row without padding, `i32[B]`."""
        return self.live.sum(1, dtype=jnp.int32)


def chain(tokens: Array, count: Array, log_q: Array | None = None) -> Proposal:
    """Returns drafts that form a chain in each row, as a `Proposal`.

    Args:
        tokens: `i32[B, K]`, the drafts.
        count: `i32[B]`, how many of them are used; the others are padding.
        log_q: `f32[B, K, V]`, log of the distribution from which each draft was drawn; None: they were not drawn.

    Raises:
        TypeError: an array of another dtype or shape.
    """
    sizes: dict[str, int] = {}
    array("chain", "tokens", tokens, "i[B, K]", sizes)
    array("chain", "count", count, "i[B]", sizes)
    live = jnp.arange(tokens.shape[1]) < count[:, None]
    return Proposal(tokens=tokens, live=live, log_q=log_q)


@dataclasses.dataclass(frozen=True)
class Tree:
    """A proposal with its topology, over the newest token and the drafts. It exists inside one trace.

    Attributes:
        tokens: `i32[B, 1 + N]`; dead nodes have token 0.
        live: `bool[B, 1 + N]`, False for padding and for descendants of padding.
        drawn: `i32[B, 1 + N]`, tokens as drawn, also those of dead nodes.
        parents: `i32[B or 1, 1 + N]`, parent of each node; -1 for the newest token.
        sees: `bool[B or 1, 1 + N, 1 + N]`, True if node `j` is node `i` or an ancestor of it.
        depth: `i32[B or 1, 1 + N]`, distance from the newest token.
        longest: largest number of drafts on a path.
        log_q: see `Proposal`.
        drawn_at: see `Proposal`.
    """

    tokens: Array
    live: Array
    drawn: Array
    parents: Any
    sees: Any
    depth: Any
    longest: int
    log_q: Array | None
    drawn_at: np.ndarray | None = None

    @property
    def size(self) -> int:
        return self.tokens.shape[1]


def tree(newest: Array, proposal: Proposal, longest: int) -> Tree:
    """Returns the `Tree` of a proposal: its drafts and the tokens `newest` (`i32[B]`) at its root, with depths and
    ancestors of all nodes. `longest` is the largest number of drafts on a path."""
    N = proposal.tokens.shape[1]
    above = np.arange(N, dtype=np.int32)[None] if proposal.parents is None else proposal.parents
    xp: Any = np if isinstance(above, np.ndarray) else jnp      # a fixed topology is a constant of the program
    parents = xp.concatenate([xp.full((above.shape[0], 1), -1, xp.int32), above.astype(xp.int32)], 1)
    sees = xp.eye(N + 1, dtype=bool)[None] | (parents[:, :, None] == xp.arange(N + 1))
    reach = 1
    while reach < longest:      # each squaring doubles how far up a node sees
        sees = (sees.astype(xp.float32) @ sees.astype(xp.float32)) > 0
        reach *= 2
    live = jnp.concatenate([jnp.ones((newest.shape[0], 1), bool), proposal.live], 1)
    live = (live[:, None, :] | ~sees).all(-1)
    tokens = jnp.concatenate([newest[:, None], proposal.tokens], 1)
    return Tree(tokens=jnp.where(live, tokens, 0).astype(jnp.int32), live=live, drawn=tokens.astype(jnp.int32),
                parents=parents, sees=sees, depth=sees.sum(-1, dtype=xp.int32) - 1, longest=longest,
                log_q=proposal.log_q, drawn_at=proposal.drawn_at)


def window(t: Tree, start: Array, running: Array, probes: Probes | None, begun: PartialForward | None = None) -> Window:
    """Returns the window that the target scores: the tree's nodes, then the probes.

    Args:
        t: the tree.
        start: `i32[B]`, position of the newest token.
        running: `bool[B]`; nodes of other rows are dead.
        probes: additional nodes, or None.
        begun: the part of the forward pass that drafting has computed, or None; not used with probes.
    """
    B = t.tokens.shape[0]
    start = start[:, None].astype(jnp.int32)
    live = t.live & running[:, None]
    if probes is None:
        return Window(tokens=t.tokens, positions=start + t.depth, mask=jnp.asarray(t.sees), live=live,
                      hints=() if begun is None else (begun,))
    P = probes.tokens.shape[1]
    rows = max(t.sees.shape[0], probes.sees.shape[0])
    above = jnp.broadcast_to(jnp.concatenate([t.sees, jnp.zeros((*t.sees.shape[:2], P), bool)], 2),
                             (rows, t.size, t.size + P))
    mask = jnp.concatenate([above, jnp.broadcast_to(probes.sees, (rows, P, t.size + P))], 1)
    vectors, embedded = probes.embeddings, None
    if vectors is not None:
        vectors = jnp.pad(jnp.broadcast_to(vectors, (B, *vectors.shape[1:])), ((0, 0), (t.size, 0), (0, 0)))
        embedded = jnp.broadcast_to(np.arange(t.size + P) >= t.size, (B, t.size + P))
    return Window(tokens=jnp.concatenate([t.tokens, probes.tokens.astype(jnp.int32)], 1),
                  positions=jnp.concatenate([start + t.depth, start + probes.offset], 1), mask=mask,
                  live=jnp.concatenate([live, jnp.broadcast_to(running[:, None], (B, P))], 1),
                  embeddings=vectors, embedded=embedded, hints=() if probes.transfer is None else (probes.transfer,))


def path_to(t: Tree, node: Array) -> Array:
    """Returns the indices of the nodes on the path from the newest token (index 0) to the tree node `node` (`i32[B]`),
    both included, `i32[B, longest + 1]`. The entry at `d` has depth `d`; entries after `node` are 0."""
    on = jnp.take_along_axis(jnp.broadcast_to(t.sees, (node.shape[0], t.size, t.size)), node[:, None, None], 1)
    here = on & (t.depth[:, None, :] == jnp.arange(t.longest + 1)[:, None])
    return jnp.argmax(here, -1).astype(jnp.int32)


def deepest(t: Tree, holds: Array) -> tuple[Array, Array]:
    """Returns the longest path on which all drafts may be accepted, and its length.

    Args:
        t: the tree.
        holds: `bool[B, 1 + N]`, True if a node may be accepted after its parent; the newest token's entry is ignored.

    Returns:
        path: `i32[B, longest + 1]`, window nodes from the newest token down, padded with 0; accepted: `i32[B]`.
    """
    holds = (holds & t.live).at[:, 0].set(True)
    good = (holds[:, None, :] | ~t.sees).all(-1)
    depth = jnp.where(good, t.depth, -1)
    node = jnp.argmax(depth, 1)       # the first of the deepest: among equal siblings the earlier one
    return path_to(t, node), jnp.take_along_axis(depth, node[:, None], 1)[:, 0]


def at_parents(t: Tree, x: Array) -> Array:
    """Returns the value that `x` (`[B, 1 + N, ...]`) has at each node's parent: `[B, 1 + N, ...]`. The newest token,
    which has no parent, gets its own value."""
    up = jnp.maximum(jnp.broadcast_to(t.parents, t.tokens.shape), 0)
    return jnp.take_along_axis(x, up.reshape(*up.shape, *[1] * (x.ndim - 2)), 1)


def of_tokens(t: Tree, x: Array) -> Array:
    """Returns the value that `x` (`[B, 1 + N, V]`, such as log-probabilities of the next token) has for each node's
    token at the node's parent: `[B, 1 + N]`."""
    up = jnp.maximum(jnp.broadcast_to(t.parents, t.tokens.shape), 0)
    return x[jnp.arange(up.shape[0])[:, None], up, t.tokens]


def at_end(x: Array, path: Array, accepted: Array) -> Array:
    """Returns the value of `x` (`[B, 1 + N]`) at the last accepted node, `[B]`: node `path[b, accepted[b]]`, where
    `path` (`i32[B, D]`) are the nodes from the newest token on and `accepted` (`i32[B]`) is the number of accepted
    drafts."""
    node = jnp.take_along_axis(path, accepted[:, None], 1)
    return jnp.take_along_axis(x, node, 1)[:, 0]
