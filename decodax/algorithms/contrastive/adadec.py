"""AdaDec: where the model is uncertain, candidates are ranked by the probability of their continuations ("Towards
Better Code Generation: Adaptive Decoding with Uncertainty Guidance", He et al., 2025)."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.common.options import Count, NonNegative, Range
from decodax.common.registry import ALGORITHMS
from decodax.common.struct import Struct, struct
from decodax.core.algorithm import Algorithm, Concludes, Paced, Traits, Varies
from decodax.core.composed import data
from decodax.core.state import State
from decodax.core.types import Decision, Out, Params
from decodax.core.window import Window, causal, take
from decodax.pallas_kernels.vocabulary import top_k

Counting = Literal["ended", "running"]


@struct
class LookAhead(Struct):
    """State of the look-ahead: `k` candidates of each row with their greedy continuations. A candidate with its
    continuation is called a chain.

    Attributes:
        depth: `i32[B]`, number of tokens in each chain; 0: the row is not looking ahead.
        tokens: `i32[B, k, L + 1]`, the chains; `L` is the largest number of tokens of a continuation.
        score: `f32[B, k]`, sum of the log-probabilities of a chain's tokens.
        length: `i32[B, k]`, number of tokens by which `score` is divided.
        ended: `bool[B, k]`, True after an end token or a stop string.
        stop: `i32[B, k]`, state of the stop automaton.
        looks: `i32[B]`, number of look-aheads so far.
    """

    depth: Array
    tokens: Array
    score: Array
    length: Array
    ended: Array
    stop: Array
    looks: Array


@dataclasses.dataclass(frozen=True)
class AdaDec(Varies, Concludes, Paced):
    """Adaptive decoding with uncertainty guidance (He et al., 2025): plain decoding, with a look-ahead at uncertain
    positions.

    If the entropy of the distribution is below `threshold`, the token is that of plain decoding. Otherwise each of the
    `k` most likely tokens is continued greedily by up to `length` tokens or to the end of the text, and the candidate
    with the largest mean log-probability of itself and its continuation is taken.

    A look-ahead takes `length + 1` forward passes, each over all `k` chains. Tokens after the chosen one are appended
    in the same round as long as plain decoding would give them, with entropies below the threshold.

    The authors' code differs from the paper if chains have different lengths. After the end of one chain, its further
    tokens still add to its score while others continue, but not to its length; `counting="running"` does the same.
    Their texts end at a line of code that is not indented; here they end at `eos_token_id` or `stop`.

    Entropies are in nats and those of the policy's distribution; greedy rows use temperature 1 for them. With an
    infinite threshold this is plain decoding, also with a temperature.

    Attributes:
        threshold: entropy in nats. The paper fits it by logistic regression for each model and gets 0.615 to 1.32. It
            may change without a retrace.
        k: number of candidates.
        length: largest number of tokens of a continuation.
        counting: "ended": tokens of a chain count up to its end. "running": as in the authors' code, see above.
        wide: set by the library: True for rounds in which some row looks ahead.

    Raises:
        ValueError: a number out of its range.
    """

    threshold: float = data(1.0, bare=0.0)
    k: int = 3
    length: int = 5
    counting: Counting = "ended"
    wide: bool | None = None

    def __post_init__(self) -> None:
        if not self.threshold >= 0:
            raise ValueError(f"threshold: got {self.threshold!r}, takes a number of nats from 0 on")
        if self.k < 2 or self.length < 1:
            raise ValueError(f"k and length: got {self.k} and {self.length}, take at least 2 and 1")
        if self.counting not in ("ended", "running"):
            raise ValueError(f"counting: got {self.counting!r}, takes 'ended' or 'running'")

    @property
    def traits(self) -> Traits:
        emits = self.length + 2     # the chosen token, its continuation, and one token more
        return Traits(emits=emits, commits=emits, needs=frozenset(("trees",)))

    @property
    def variants(self) -> tuple[Algorithm, ...]:
        return tuple(dataclasses.replace(self, wide=wide) for wide in (False, True)) if self.wide is None else ()

    def choose(self, params: Params, policy: Any, s: State) -> Array:
        return ((s.algo.depth > 0) & s.running).any().astype(jnp.int32)

    def most_rounds(self, budget: int, rows: int) -> int:
        return (budget + 1) * (self.length + 2) + 8

    def findings(self, s: State) -> dict[str, Array]:
        """Returns `looks`, the number of look-aheads of each row."""
        return {"looks": s.algo.looks}

    def init(self, params: Params, s: State) -> LookAhead:
        none = jnp.zeros((s.batch, self.k), jnp.int32)
        return LookAhead(
            depth=jnp.zeros(s.batch, jnp.int32), tokens=jnp.zeros((s.batch, self.k, self.length + 1), jnp.int32),
            score=none.astype(jnp.float32), length=none, ended=none > 0, stop=none,
            looks=jnp.zeros(s.batch, jnp.int32))

    def propose(self, params: Params, policy: Any, s: State) -> tuple[Window, Any]:
        a, k, n = s.algo, self.k, self.length + 1
        if not self.wide:
            return causal(s.newest[:, None], s.length - 1, s.running[:, None]), a
        depth = np.concatenate([[0], np.tile(np.arange(1, n + 1), k)])
        chain = np.concatenate([[-1], np.repeat(np.arange(k), n)])
        sees = (chain[:, None] == chain) & (depth <= depth[:, None]) | (depth == 0)
        live = (depth <= a.depth[:, None]) & s.running[:, None]
        return Window(tokens=jnp.concatenate([s.newest[:, None], a.tokens.reshape(s.batch, -1)], 1),
                      positions=s.length[:, None] - 1 + jnp.asarray(depth, jnp.int32), mask=jnp.asarray(sees)[None],
                      live=live), a

    def decide(self, params: Params, dist: Any, s: State, window: Window, out: Out, algo: Any) -> Decision:
        a, rows = algo, jnp.arange(s.batch)
        log_p = dist.warm.log_probs()
        drawn = dist.draw()                                 # [B, W], the token of plain decoding at each node
        p = jnp.exp(log_p)
        entropy = -jnp.where(p > 0, p * log_p, 0).sum(-1)
        sure = ~(entropy >= params.draft)                   # a NaN is left to plain decoding, which reports it
        # rows that do not look yet: a token, or the first candidates
        begins = (a.depth == 0) & ~sure[:, 0] & (drawn[:, 0] >= 0) & s.running
        best, first = top_k(log_p[:, 0], self.k)
        new = self._grown(dist.policy, s, a.replace(
            score=jnp.zeros_like(a.score), length=jnp.zeros_like(a.length), ended=jnp.zeros_like(a.ended),
            stop=jnp.broadcast_to(s.stop[:, None], a.stop.shape)), first.astype(jnp.int32), best, 0)
        plain = jnp.where((a.depth == 0) & ~begins, 1, 0)
        tokens = jnp.zeros((s.batch, self.traits.emits), jnp.int32).at[:, 0].set(drawn[:, 0])
        source = jnp.zeros((s.batch, self.traits.emits), jnp.int32)
        path = jnp.where(jnp.arange(window.width) == 0, window.positions, -1)
        if not self.wide:
            a = _where(begins, new.replace(depth=jnp.ones_like(a.depth), looks=a.looks + 1), a)
            slots = jnp.where((plain > 0)[:, None] & (tokens[:, :1] >= 0), path, -1)
            return Decision(tokens=tokens, count=plain, slots=slots, source=source, algo=a)

        # rows that look ahead: one more token after each chain
        n = self.length + 1
        at = 1 + jnp.arange(self.k) * n + jnp.maximum(a.depth - 1, 0)[:, None]          # the chains' last nodes
        ends = take(log_p, at)
        goes = (a.depth > 0) & (a.depth < n) & ~self._over(a, a.depth) & s.running
        longer = self._grown(dist.policy, s, a, jnp.argmax(ends, -1).astype(jnp.int32), ends.max(-1), a.depth)
        moved = _where(goes, longer.replace(depth=a.depth + 1), a)
        ready = (a.depth > 0) & ((moved.depth == n) | self._over(moved, moved.depth)) & s.running
        # the best chain, and the part of it that plain decoding would write
        mean = moved.score / jnp.maximum(moved.length, 1)
        chosen = jnp.argmax(jnp.where(jnp.isnan(mean), -jnp.inf, mean), -1)
        node = jnp.concatenate([jnp.zeros((s.batch, 1), jnp.int32), 1 + chosen[:, None] * n + jnp.arange(n)], 1)
        line = moved.tokens[rows, chosen]                                               # [B, n]
        scored = jnp.arange(1, n + 1) <= a.depth[:, None]
        own, calm = take(drawn, node[:, 1:]), take(sure, node[:, 1:]) & scored           # after each token of the line
        same = jnp.concatenate([own[:, :-1] == line[:, 1:], jnp.zeros((s.batch, 1), bool)], 1)
        # token j + 1 is kept if everything up to j was plain decoding's; the first other token is the last one
        reach = jnp.cumprod(calm & jnp.concatenate([jnp.ones((s.batch, 1), bool), same[:, :-1]], 1), 1).astype(bool)
        found = jnp.concatenate([line[:, :1], own], 1)
        count = jnp.where(ready, 1 + reach.sum(1, dtype=jnp.int32), plain)
        tokens = jnp.where(ready[:, None], found, tokens)
        source = jnp.where(ready[:, None], node, source)
        if (horizon := s.cache.max_commit()) is not None:
            count = jnp.minimum(count, horizon)
        on = (source[:, :, None] == jnp.arange(window.width)) & (
            jnp.arange(tokens.shape[1]) < count[:, None])[:, :, None]
        slots = jnp.where(on.any(1) & (tokens[:, :1] >= 0), window.positions, -1)
        a = _where(begins, new.replace(depth=jnp.ones_like(a.depth), looks=a.looks + 1),
                   moved.replace(depth=jnp.where(ready, 0, moved.depth)))
        return Decision(tokens=tokens, count=count, slots=slots, source=source, algo=a)

    def _grown(self, policy: Any, s: State, a: LookAhead, token: Array, log_p: Array, depth: Array | int) -> LookAhead:
        """Returns the chains `a` with `token` (`i32[B, k]`, log-probability `log_p`) at index `depth`."""
        here = jnp.arange(self.length + 1) == jnp.reshape(jnp.asarray(depth), (-1, 1, 1))
        ripe = (s.length - s.prompt_length + depth >= s.min_new)[:, None]
        ends = (token[..., None] == policy.eos[:, None]).any(-1) & ripe
        stop, hit = a.stop, jnp.zeros_like(ends)
        if policy.stops is not None:
            stop, hit = policy.stops.advance(stop, token, (s.max_length - s.length - depth - 1)[:, None])
        adds = counts = ~a.ended
        if self.counting == "running":      # there the first token after a candidate always counts
            adds, counts = jnp.ones_like(a.ended), counts | (jnp.reshape(jnp.asarray(depth), (-1, 1)) < 2)
        return a.replace(tokens=jnp.where(here, token[..., None], a.tokens), score=a.score + jnp.where(adds, log_p, 0),
                         length=a.length + counts, ended=a.ended | ends | (hit & ripe), stop=stop)

    def _over(self, a: LookAhead, depth: Array) -> Array:
        """Returns the rows in which all chains have ended, `bool[B]`."""
        return a.ended.all(1) & (depth >= (1 if self.counting == "ended" else 2))


def _where(rows: Array, new: LookAhead, old: LookAhead) -> LookAhead:
    return jax.tree.map(lambda a, b: jnp.where(rows.reshape(-1, *[1] * (a.ndim - 1)), a, b), new, old)


@ALGORITHMS.register("adadec", "Towards Better Code Generation: Adaptive Decoding with Uncertainty Guidance",
                     "He et al. 2025", family="search")
def adadec(threshold: NonNegative = 1.0, k: Annotated[int, Range(2)] = 3, length: Count = 5,
           counting: Counting = "ended") -> AdaDec:
    """At uncertain positions, ranks candidates by the probability of their greedy continuations.

    For code. At positions where the model is certain it is plain decoding.

    Args:
        threshold: entropy in nats from which candidates are compared; the paper fits 0.615 to 1.32 for its models.
        k: number of candidates.
        length: largest number of tokens of a continuation.
        counting: "ended": tokens of a continuation count up to its end. "running": as in the authors' code, see
            `AdaDec`.
    """
    return AdaDec(threshold, k, length, counting)
