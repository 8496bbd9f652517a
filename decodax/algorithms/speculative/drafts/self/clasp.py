"""CLaSp: chooses the layers that the draft skips from the hidden states that the target has just computed ("CLaSp:
In-Context Layer Skip for Self-Speculative Decoding", Chen et al., 2025).

A draft that skips M layers should come close to the target's residual stream after every layer at the last accepted
token. Let `d[i][j]` be the best stream after `i` layers of which `j` were skipped:

    d[i][j] = the one nearer to the target's stream after layer i, by cosine, of
              d[i-1][j-1]             layer i is skipped
              layer_i(d[i-1][j])      layer i is run

(This is an approximation: the nearest stream of a cell need not lead to the nearest one of the next.) The choices that
led to `d[L][M]` are the layers for the next round. All `j` of a layer are one window, so a search costs about a forward
pass of the target over M + 1 tokens; with `interval` it is made only in some rounds. Before the first round the last
cached prompt token is used.

All rows of the batch skip the same layers, since only layers that no row runs save time: each choice is made by the
mean cosine over the running rows. So the *drafts* of a row depend on the other rows. Its output does not, under
`SeedExact` and in greedy rows; under other verifiers its distribution does not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafts.self.self_draft import SkipsLayers, whole_text
from decodax.algorithms.speculative.fixed_trees import Chain
from decodax.algorithms.speculative.source import Answer
from decodax.common.options import Count
from decodax.common.registry import ALGORITHMS
from decodax.common.struct import Struct, struct
from decodax.core.cache import require
from decodax.core.capabilities import Draftable, without_views
from decodax.core.state import State
from decodax.core.types import Decision, Out, Params
from decodax.core.window import Window, take


@struct
class InContext(Struct):
    """State of `CLaSp`, with a batch axis so that rows can be selected and sharded.

    Attributes:
        keep: `bool[B, L]`, layers that the draft runs; after a search equal in all rows.
        states: `f[B, L, D]`, the target's residual stream after each layer at the token before the newest one.
        known: `bool[B]`, True if `states` is known.
        wait: `i32[B]`, number of rounds until the next search.
        buffer: within a round, keys and values of the tree's nodes.
    """

    keep: Array
    states: Array
    known: Array
    wait: Array
    buffer: Draftable | None = None


@dataclasses.dataclass(frozen=True)
class CLaSp(SkipsLayers):
    """Drafts with the target without the layers that matter least in the present context (Chen et al., 2025).

    Attributes:
        skips: `M`, number of skipped layers; None: half of them, which is about best in the paper.
        interval: number of rounds from one search to the next (layer optimization interval).

    Raises:
        ValueError: `interval` is below 1.
    """

    skips: int | None = None
    interval: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.interval < 1:
            raise ValueError(f"interval: got {self.interval}, takes at least 1")

    def for_target(self, model: Any) -> CLaSp:
        new = super().for_target(model)
        L = new.model.depth
        if not 1 <= new.count < L:
            raise ValueError(f"skips: got {new.count}, takes 1 to {L - 1}")
        return new

    def check_fit(self, model: Any, cache: Any) -> None:
        super().check_fit(model, cache)
        # the searches read the whole text alone
        require(without_views(cache), frozenset(("truncation",)), "Speculative(CLaSp)")

    @property
    def count(self) -> int:
        """Number `M` of skipped layers."""
        return max(self.model.depth // 2, 1) if self.skips is None else self.skips

    @property
    def prefill_observer(self) -> CLaSp:
        return self

    def init(self, params: Params, s: State) -> InContext:
        L, M = self.model.depth, self.count
        # until a context is known: layers spread evenly over the middle
        first = jnp.asarray([(2 * k + 1) * L // (2 * M) for k in range(M)], jnp.int32)
        stream = jax.eval_shape(lambda p: self._walk(p, s, 1)[0], params)
        return InContext(keep=jnp.ones((s.batch, L), bool).at[:, first].set(False),
                         wait=jnp.zeros(s.batch, jnp.int32),
                         states=jnp.zeros((s.batch, L, stream.shape[-1]), stream.dtype), known=jnp.zeros(s.batch, bool))

    def start(self, params: Params, s: State, state: InContext, room: int) -> tuple[InContext, Answer]:
        use = (state.known & s.running).astype(jnp.float32)

        def search() -> Array:
            embedded, run = self._walk(params, s, self.count + 1)
            return ~skip_set(run, embedded, state.states, use, self.count)[None]

        first = jnp.argmax(s.running)
        due = (state.wait[first] <= 0) & (use.sum() > 0)
        keep = lax.cond(due, search, lambda: state.keep[first][None])
        wait = jnp.full(s.batch, jnp.where(due, self.interval, state.wait[first]) - 1)
        state = state.replace(keep=jnp.broadcast_to(keep, state.keep.shape), wait=wait)
        return super().start(params, s, state, room)

    def running(self, s: State, state: InContext) -> Array:
        return state.keep[:1]

    def observe(self, params: Params, s: State, window: Window, out: Out, decision: Decision | None,
                state: InContext) -> InContext:
        state = state.replace(buffer=None)
        if out.layers is None:      # under guidance: the set stays as it is
            return state
        if decision is None:
            here = window.live & (window.positions == s.prompt_length[:, None] - 2)
            node, found = jnp.argmax(here, 1), here.any(1)
        else:
            node = jnp.take_along_axis(decision.source, jnp.maximum(decision.count - 1, 0)[:, None], 1)[:, 0]
            found = s.running & (decision.count > 0)
        states = jnp.stack([take(x, node) for x in out.layers], 1)
        return state.replace(states=jnp.where(found[:, None, None], states, state.states), known=state.known | found)

    def _walk(self, params: Params, s: State, width: int) -> tuple[Array, Callable[[int, Array], Array]]:
        """Returns functions to run the network layer by layer at the token before the newest one (`LayeredModel.walk`),
        for `width` streams that do not attend to each other."""
        at = jnp.maximum(s.length - 2, 0)
        wide = lambda x: jnp.broadcast_to(x[:, None], (s.batch, width))
        window = Window(tokens=wide(jnp.take_along_axis(s.tokens, at[:, None], 1)[:, 0]), positions=wide(at),
                        mask=jnp.eye(width, dtype=bool)[None], live=jnp.ones((s.batch, width), bool))
        return self.model.walk(params.target, window, whole_text(s).truncate(at))


def skip_set(run: Callable[[int, Array], Array], embedded: Array, states: Array, use: Array, skips: int) -> Array:
    """Returns the layers to skip, found by the dynamic program of CLaSp.

    Args:
        run: maps (layer, streams `f[B, J, D]`) to the streams after it.
        embedded: `f[B, J, D]`, `J = skips + 1` copies of the stream before the first layer.
        states: `f[B, L, D]`, the target's stream after each layer.
        use: `f32[B]`, weight of each row's cosine.
        skips: number of layers to skip.

    Returns:
        `bool[L]`, True for the `skips` layers to skip.
    """
    L, J = states.shape[1], skips + 1
    d, choices = embedded, []
    for i in range(L):
        after = run(i, d)
        before = jnp.concatenate([jnp.zeros_like(d[:, :1]), d[:, :-1]], 1)      # cell j from d[i-1][j-1]
        near = lambda x, i=i: (use[:, None] * _cosine(x, states[:, i, None])).sum(0)
        j = jnp.arange(J)
        # of i + 1 layers, j skipped: running this one leaves j <= i, skipping it asks for 1 <= j <= i + 1
        runs, skipped = jnp.where(j <= i, near(after), -jnp.inf), jnp.where(j >= 1, near(before), -jnp.inf)
        skip = (skipped > runs) & (j <= i + 1)
        choices.append(skip)
        d = jnp.where(skip[:, None], before, after)
    j, chosen = jnp.asarray(skips, jnp.int32), [jnp.zeros((), bool)] * L
    for i in reversed(range(L)):
        chosen[i] = choices[i][j]
        j = j - chosen[i]
    return jnp.stack(chosen)


def _cosine(a: Array, b: Array) -> Array:
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    norms = jnp.linalg.norm(a, axis=-1) * jnp.linalg.norm(b, axis=-1)
    return (a * b).sum(-1) / jnp.maximum(norms, 1e-30)


@ALGORITHMS.register("clasp", "CLaSp: In-Context Layer Skip for Self-Speculative Decoding", "Chen et al. 2025",
                     family="speculative-self", guarantee="seed-exact")
def clasp(skips: Count | None = None, interval: Count = 4, length: Count = 4) -> Speculative:
    """Drafts with the target without the layers that matter least in the present context, found by dynamic programming.

    Nothing is fitted beforehand; the search costs about one forward pass every `interval` rounds.

    Args:
        skips: number of skipped layers; None: half of them.
        interval: number of rounds from one search to the next.
        length: number of drafts in a round.
    """
    return Speculative(CLaSp(skips, interval), shape=Chain(length))
