"""Group Think: several threads of one text that are written side by side and attend to each other token by token
("Group Think: Multiple Concurrent Reasoning Agents Collaborating at Token Level Granularity", Hsu et al., 2025)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.common.options import Count, TokenId
from decodax.common.registry import ALGORITHMS
from decodax.common.struct import Struct, struct
from decodax.core.algorithm import Concludes, Paced, Traits, check_policy
from decodax.core.state import State, Status
from decodax.core.types import Decision, Out, Params
from decodax.core.window import Window
from decodax.models.transformer import Transformer


@struct
class Threads(Struct):
    """State of the threads of each row.

    Attributes:
        owner: `i32[B, N]`, the thread that wrote each token of the buffer; -1: the prompt.
        live: `bool[B, n]`, threads that have not ended.
        newest: `i32[B, n]`, the last token of each thread.
        slot: `i32[B, n]`, cache slot of that token.
        lengths: `i32[B, n]`, number of tokens of each thread.
        step: `i32[B]`, number of tokens of each live thread.
        cut: `bool[B]`, True if a thread has reached its largest length.
    """

    owner: Array
    live: Array
    newest: Array
    slot: Array
    lengths: Array
    step: Array
    cut: Array


@dataclasses.dataclass(frozen=True)
class GroupThink(Concludes, Paced):
    """Several threads that write one text together (Hsu et al., 2025): in each round every thread writes its next
    token, given the prompt and the tokens of all threads so far.

    All threads share one cache, in which tokens are stored in the order in which they are written. Each thread has a
    range of positions of its own after the prompt: the new tokens divided by `threads`, which is also the largest
    length of a thread. A window has the newest token of each thread, and these attend to each other. With one thread
    the result is that of plain decoding, with the same draws.

    A thread ends with an end token, which is left out of the text. A row ends with its last thread. The final text has
    the threads one after the other; `findings["thread_lengths"]` has their lengths, and `split` separates them. The
    policy must not depend on the text (penalties, constraints), stop strings are refused, and the model must have no
    layers with sliding windows.

    Attributes:
        threads: number of threads.
        starts: token ids with which each thread begins, such as those of its name; they count as new tokens. Without
            them, the first tokens of greedy threads are the same.
        together: True: tokens of the same round attend to each other. False: a thread attends to tokens of other
            threads one round later.
    """

    threads: int = 4
    starts: tuple[tuple[int, ...], ...] = ()
    together: bool = True

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ValueError(f"threads: got {self.threads}, takes at least 1")
        if self.starts and len(self.starts) != self.threads:
            raise ValueError(f"starts: got {len(self.starts)} for {self.threads} threads")

    @property
    def traits(self) -> Traits:
        return Traits(emits=self.threads, needs=frozenset(("trees",)), window=self.threads, refuses=(
            ("stop", "group-think writes several texts at once, in which no stop string is looked for"),
            ("transforms", "and there are several texts")))

    def most_rounds(self, budget: int, rows: int) -> int:
        return budget + 8

    def findings(self, s: State) -> dict[str, Array]:
        """Returns `thread_lengths`, `i32[B, threads]`, the number of tokens of each thread."""
        return {"thread_lengths": s.algo.lengths}

    def init(self, params: Params, s: State) -> Threads:
        each = lambda value: jnp.full((s.batch, self.threads), value, jnp.int32)
        none = jnp.zeros(s.batch, jnp.int32)
        return Threads(owner=jnp.full(s.tokens.shape, -1, jnp.int32), live=jnp.ones((s.batch, self.threads), bool),
                       newest=each(0), slot=each(0), lengths=each(0), step=none, cut=none > 0)

    def _places(self, s: State) -> Array:
        """Returns the position of each thread's next token, `i32[B, n]`."""
        first = s.prompt_length[:, None] + jnp.arange(self.threads, dtype=jnp.int32) * self._bound(s)[:, None]
        return first + s.algo.step[:, None]

    def _bound(self, s: State) -> Array:
        """Returns the largest number of tokens of a thread, `i32[B]`."""
        return jnp.maximum((s.max_length - s.prompt_length) // self.threads, 1)

    def propose(self, params: Params, policy: Any, s: State) -> tuple[Window, Threads]:
        check_policy(self, policy)
        a: Threads = s.algo
        begins = (a.step == 0)[:, None]
        tokens = jnp.where(begins, s.newest[:, None], a.newest)
        positions = jnp.where(begins, s.length[:, None] - 1, self._places(s) - 1)
        # in the first round all read the prompt's last token, each its own copy
        own = jnp.eye(self.threads, dtype=bool)[None]
        mask = own | ~begins[:, None] if self.together else jnp.broadcast_to(own, (s.batch, *own.shape[1:]))
        return Window(tokens=tokens, positions=positions, mask=mask, live=a.live & s.running[:, None]), a

    def decide(self, params: Params, dist: Any, s: State, window: Window, out: Out, algo: Threads) -> Decision:
        places, begins = self._places(s), (algo.step == 0)[:, None]
        # a draw is addressed by the position of its token
        token = dist.policy.over_logits(s, window.replace(positions=places - 1), dist.logits()).draw()
        if self.starts:
            token = self._started(token, algo.step)
        ends = (token[:, :, None] == dist.policy.eos[:, None]).any(-1) & (token >= 0)
        writes = algo.live & ~ends
        rank = jnp.cumsum(writes, 1, dtype=jnp.int32) - 1
        order = jnp.argsort(~writes, axis=1, stable=True).astype(jnp.int32)
        count = writes.sum(1, dtype=jnp.int32)
        slot = s.length[:, None] + rank
        goes = writes & (algo.step + 1 < self._bound(s))[:, None]
        cut = algo.cut | (writes & ~goes).any(1)
        held = jnp.where(begins, jnp.where(jnp.arange(self.threads) == 0, s.length[:, None] - 1, -1),
                         jnp.where(algo.live, algo.slot, -1))
        thread = jnp.arange(self.threads, dtype=jnp.int32)
        put = lambda row, at, yes: row.at[jnp.where(yes, at, row.shape[0])].set(thread, mode="drop")
        new = Threads(owner=jax.vmap(put)(algo.owner, slot, writes & s.running[:, None]), live=goes, newest=token,
                      slot=slot, lengths=algo.lengths + (writes & s.running[:, None]), step=algo.step + 1, cut=cut)
        over = jnp.where(goes.any(1), Status.RUNNING, jnp.where(cut, Status.LENGTH, Status.EOS))
        # always true, but it makes the slots depend on the logits: XLA's CPU else copies the cache to be safe
        decided = token > jnp.iinfo(jnp.int32).min
        return Decision(tokens=jnp.take_along_axis(token, order, 1), count=count, source=order, algo=new,
                        slots=jnp.where(decided, held, -1), status=over.astype(jnp.int32))

    def _started(self, token: Array, step: Array) -> Array:
        """Returns the drawn tokens, replaced by those of `starts` where a thread is still at its start."""
        width = max(map(len, self.starts))
        table = jnp.array([[*start, *[-1] * (width + 1 - len(start))] for start in self.starts], jnp.int32)
        given = table[:, jnp.minimum(step, width)].T
        return jnp.where(given >= 0, given, token)

    def outcome(self, s: State) -> State:
        """Returns the state with the threads of each text one after the other."""
        place = jnp.arange(s.tokens.shape[1])
        inside = (place >= s.prompt_length[:, None]) & (place < s.length[:, None])
        rank = jnp.where(inside, s.algo.owner, jnp.where(place < s.prompt_length[:, None], -1, self.threads))
        order = jnp.argsort(rank, axis=1, stable=True)
        moved = lambda x: jax.vmap(lambda row, i: row[i])(x, order)
        return s.replace(tokens=moved(s.tokens), record=jax.tree.map(moved, s.record))


def split(tokens: Any, lengths: Any) -> list[list[int]]:
    """Splits one text into its threads.

    Args:
        tokens: `i32[n]`, the text (`Result.row`).
        lengths: `i32[threads]`, the row of `findings["thread_lengths"]`.

    >>> split([5, 6, 7], [1, 2])
    [[5], [6, 7]]
    """
    parts = np.split(np.asarray(tokens), np.cumsum(np.asarray(lengths))[:-1])
    return [part.tolist() for part in parts]


@ALGORITHMS.register("group-think",
                     "Group Think: Multiple Concurrent Reasoning Agents Collaborating at Token Level Granularity",
                     "Hsu et al. 2025", family="search", needs="a model")
def group_think(lm: Any, threads: Count = 4, starts: tuple[tuple[TokenId, ...], ...] = (),
                together: bool = True) -> GroupThink:
    """Writes several threads of one text side by side; each attends to the tokens of all others.

    For problems that divide into parts, and models whose layers attend to the complete text. `split` separates the
    threads of a result.

    Args:
        threads: number of threads.
        starts: token ids with which each thread begins, such as those of its name. (): none; the first tokens of greedy
            threads are then the same.
        together: True: tokens of the same round attend to each other. False: one round later.
    """
    if isinstance(lm.model, Transformer) and any(layer.sliding for layer in lm.model.config.layers):
        raise ValueError("algorithm: 'group-think' gives threads blocks of positions of their own; takes a model whose "
                         "layers attend to the whole text")
    return GroupThink(threads, tuple(map(tuple, starts)), together)
