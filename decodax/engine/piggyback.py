"""Chunked prefill that piggybacks on decoding: prompts are prefilled within the rounds of other prompts.

SARATHI (Agrawal et al., 2023) and Sarathi-Serve (Agrawal et al., 2024): a round has a budget of tokens. The rows that
decode come first, with one token each or a window of drafts; the rest of the budget goes to chunks of prompts, in the
order of their arrival. So a long prompt does not delay the others, and its tokens share each read of the weights with
theirs.

The window of a round has the decoding nodes first and the nodes of chunks after them; a row has live nodes in one of
the two parts. Dense layers process the live nodes of all rows side by side, and attention processes the second part
only for the rows that are being prefilled (`decodax.core.packing`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from decodax.core.algorithm import Algorithm, Traits, name_of
from decodax.core.around import Around
from decodax.core.packing import Packing
from decodax.core.prefill import Extend
from decodax.core.state import State, Status
from decodax.core.types import Decision, Out, Params
from decodax.core.window import Window, causal


@dataclasses.dataclass(frozen=True)
class Piggyback(Around):
    """Decodes by `method` while some rows are still being prefilled.

    Attributes:
        method: the decoding method.
        budget: maximum number of tokens in a round, over all rows; more than the rows that decode need.
        chunk: maximum number of tokens of one prompt in a round.
        readers: number of prompts that are prefilled in one round.
    """

    method: Algorithm
    budget: int
    chunk: int
    readers: int

    @property
    def inner(self) -> Algorithm:
        return self.method

    @property
    def variants(self) -> tuple[Algorithm, ...]:
        """Two kinds of rounds: those of `method`, and rounds (`Mixed`) in which some rows are prefilled while the
        others decode."""
        return self.method, Mixed(self.method, self.budget, self.chunk, self.readers)

    def choose(self, params: Params, policy: Any, s: State) -> Array:
        return Extend.left(s).any().astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class Mixed(Around):
    """The method for rounds in which some rows are prefilled while the others decode by `method`. The attributes have
    the same meaning as those of `Piggyback`."""

    method: Algorithm
    budget: int
    chunk: int
    readers: int

    @property
    def inner(self) -> Algorithm:
        return self.method

    @property
    def traits(self) -> Traits:
        return dataclasses.replace(super().traits, commits=None)      # it keeps a chunk of a row that reads

    def propose(self, params: Params, policy: Any, s: State) -> tuple[Window, Any]:
        reads = Extend.left(s)
        own, algo = self.method.propose(params, policy, self._decoding(s, reads))
        if own.cached is not None or own.embeddings is not None:
            raise ValueError(f"token_budget: {name_of(self.method)} has windows of its own kind, beside which no "
                             "prompt can be read")
        count, start = own.width, s.cache.length
        if self.budget <= s.batch * count:
            raise ValueError(f"token_budget: got {self.budget}; {s.batch} rows with windows of {count} take "
                             f"{s.batch * count}, and prompts one more")
        at = start[:, None] + jnp.arange(self.chunk, dtype=jnp.int32)
        tokens = jnp.take_along_axis(s.tokens, jnp.minimum(at, s.tokens.shape[1] - 1), 1)
        spare = self.budget - own.live.sum(dtype=jnp.int32)
        live = jnp.arange(self.chunk) < self._shares(s, reads, spare)[:, None]
        chunk = causal(tokens, start, live)
        rows = max(own.mask.shape[0], chunk.mask.shape[0])
        square = lambda mask, before, behind: jnp.pad(
            jnp.broadcast_to(mask, (rows, *mask.shape[1:])), ((0, 0), (0, 0), (before, behind)))
        beside = lambda a, b: jnp.concatenate([a, b], 1)
        window = Window(
            tokens=beside(own.tokens, chunk.tokens), positions=beside(own.positions, chunk.positions),
            live=beside(own.live, chunk.live), num_scored=count,
            mask=beside(square(own.mask, 0, self.chunk), square(chunk.mask, count, 0)),
            hints=(Packing((self.budget,), bounded=True, tail=(count, self.readers)),))
        return window, (own, algo)

    def decide(self, params: Params, dist: Any, s: State, window: Window, out: Out, algo: Any) -> Decision:
        own, algo = algo
        reads, count = Extend.left(s), own.width
        d = self.method.decide(params, dist, self._decoding(s, reads), own, out.first(count), algo)
        finite = jnp.isfinite(out.hidden[:, count:]).all(-1)
        keep = window.live[:, count:]
        if (horizon := s.cache.max_commit()) is not None:
            keep &= jnp.arange(self.chunk, dtype=jnp.int32) < horizon[:, None]
        broken = (keep & ~finite).any(1)
        row = lambda where, a, b: jnp.where(where.reshape(-1, *[1] * (a.ndim - 1)), a, b)
        none = lambda x: None if x is None else jnp.where(reads, 0, x)
        return d.replace(
            tokens=row(reads, jnp.full_like(d.tokens, -1), d.tokens), count=jnp.where(reads, broken, d.count),
            slots=jnp.concatenate([row(reads, jnp.full_like(d.slots, -1), d.slots),
                                   jnp.where(keep & finite, window.positions[:, count:], -1)], 1),
            algo=jax.tree.map(lambda old, new: row(reads, old, new), s.algo, d.algo),
            drafted=none(d.drafted), accepted=none(d.accepted), idle=reads if d.idle is None else reads | d.idle)

    def _decoding(self, s: State, reads: Array) -> State:
        """Returns the state as the method sees it: rows that are being prefilled are not running."""
        return s.replace(status=jnp.where(reads, jnp.int32(Status.TIME), s.status))

    def _shares(self, s: State, reads: Array, spare: Array) -> Array:
        """Returns the number of tokens of each prompt that this round prefills, `i32[B]`."""
        left = jnp.where(reads, s.prompt_length - 1 - s.cache.length, 0)
        # first come, first served: who reads waits
        order = jnp.lexsort((left, -s.stats.waited, ~reads))
        wants = jnp.minimum(left, self.chunk)[order]
        wants = jnp.where(jnp.arange(s.batch) < self.readers, wants, 0)
        given = jnp.clip(spare - (jnp.cumsum(wants) - wants), 0, wants)
        return jnp.zeros_like(left).at[order].set(given.astype(left.dtype))
