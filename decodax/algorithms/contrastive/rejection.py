"""Adaptive weighted rejection sampling: constraints that only a program can check, token by token."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.common.registry import ALGORITHMS
from decodax.common.struct import Struct, struct
from decodax.core import keys
from decodax.core.keys import Purpose
from decodax.core.state import State
from decodax.core.types import DEAD_END, INVALID, Algorithm, Decision, Out, Params
from decodax.core.window import Window, causal
from decodax.sampling.draw import race

Check = Callable[[list[int]], bool]
"""Whether the new tokens of a text, perhaps with an end of the sequence, can still become an allowed text."""


@struct
class Weighed(Struct):
    """Attributes: log_weight: `f32[B]`. calls: `i32[B]`, how often the check was asked."""

    log_weight: Array
    calls: Array


@dataclasses.dataclass(frozen=True)
class AWRS(Algorithm):
    """Adaptive weighted rejection sampling (Lipkin et al., 2025): draws from what a check allows, without asking it
    about the whole vocabulary.

    Tokens are drawn without replacement until the check accepts one: that is a draw from the allowed ones. One token
    more is drawn for the weight, which is on average the probability that the policy gives to all allowed tokens: the
    product of `1 - q` over those that were rejected, where `q` is a token's share of what was left, times the share of
    the accepted one if the token behind it is rejected. So weighted by the product of these, texts are draws from the
    policy held to the allowed texts: `findings["log_weight"]`. If nothing is allowed a row ends as `Status.DEAD_END`,
    and weighs nothing. Greedy rows take the likeliest allowed token, and their weight is 1.

    The check is asked on the host, in each round. What it allows must only depend on the tokens.

    Attributes:
        check: see `Check`. proper: whether weights are taken, for which one token more is checked.
        most: rejections of a token, behind which the row ends as if nothing were allowed; None: any number.
    """

    check: Check
    proper: bool = True
    most: int | None = None

    emits = 1
    commits = 1

    def findings(self, s: State) -> dict[str, Array]:
        """`log_weight`, and `calls` of the check."""
        return {"log_weight": s.algo.log_weight, "calls": s.algo.calls}

    def init(self, params: Params, s: State) -> Weighed:
        return Weighed(log_weight=jnp.zeros(s.batch, jnp.float32), calls=jnp.zeros(s.batch, jnp.int32))

    def propose(self, params: Params, policy: Any, s: State) -> tuple[Window, Any]:
        return causal(s.newest[:, None], s.length - 1, s.running[:, None]), s.algo

    def decide(self, params: Params, dist: Any, s: State, window: Window, out: Out, algo: Any) -> Decision:
        warm = dist.warm.processed()[:, 0]
        cold = dist.policy.greedy
        address = keys.addresses(s.key, s.length[:, None], Purpose.TOKEN)[:, 0]
        order = jnp.where(cold[:, None], warm, race(warm, address))
        shape = [jax.ShapeDtypeStruct((s.batch,), t) for t in (jnp.int32, jnp.float32, jnp.int32)]
        token, log_weight, calls = jax.pure_callback(
            self._choose, shape, s.tokens, s.prompt_length, s.length, s.running, order, jax.nn.log_softmax(warm))
        log_weight = jnp.where(cold & (token >= 0), 0, log_weight)
        new = Weighed(log_weight=algo.log_weight + jnp.where(s.running, log_weight, 0), calls=algo.calls + calls)
        token = token[:, None]
        return Decision(tokens=token, count=jnp.ones(s.batch, jnp.int32), source=jnp.zeros_like(token), algo=new,
                        slots=jnp.where(token >= 0, window.positions, -1))

    def _choose(self, tokens: Any, begin: Any, end: Any, running: Any, order: Any, log_p: Any) -> tuple[Any, ...]:
        tokens, begin, end, running, order, log_p = map(np.asarray, (tokens, begin, end, running, order, log_p))
        rows = len(tokens)
        chosen, weight = np.full(rows, DEAD_END, np.int32), np.zeros(rows, np.float32)
        calls: np.ndarray = np.zeros(rows, np.int32)
        for b in np.flatnonzero(running).tolist():
            if np.isnan(log_p[b]).any():
                chosen[b] = INVALID
                continue
            text = tokens[b, begin[b]:end[b]].tolist()
            chosen[b], weight[b], calls[b] = self._one(text, order[b], log_p[b].astype(np.float64))
        return chosen, weight, calls

    def _one(self, text: list[int], order: np.ndarray, log_p: np.ndarray) -> tuple[int, float, int]:
        """The token, the logarithm of its weight, and the number of calls."""
        found, share, log_weight, rejected, calls = DEAD_END, 0.0, 0.0, 0.0, 0
        for token in ranked(order):
            if not np.isfinite(log_p[token]):
                break
            if found == DEAD_END and self.most is not None and calls >= self.most:
                break
            p, left = np.exp(log_p[token]), 1 - rejected
            q = min(p / left, 1.0) if left > 0 else 1.0
            calls += 1
            accepted = bool(self.check([*text, token]))
            if found != DEAD_END:
                return found, log_weight + (0.0 if accepted else float(np.log(share))), calls
            if accepted:
                found, share = token, q
                if not self.proper:
                    return found, 0.0, calls
                continue
            rejected += p
            log_weight += float(np.log1p(-q)) if q < 1 else -np.inf
        if found == DEAD_END:
            return DEAD_END, -np.inf, calls
        return found, log_weight + float(np.log(share)), calls          # no token was left behind it


def ranked(order: np.ndarray, first: int = 16) -> Any:
    """The places of the largest entries, largest first, without a sort of all."""
    count, done = min(first, len(order)), 0
    while done < len(order):
        top = np.argpartition(-order, count - 1)[:count] if count < len(order) else np.arange(len(order))
        top = top[np.lexsort((top, -order[top]))]
        yield from top[done:].tolist()
        done, count = count, min(count * 8, len(order))


def on_text(tokenizer: Any, check: Callable[[str], bool], eos: Any = ()) -> Check:
    """A check of ids, of one that takes the text; ends of the sequence are left out of it."""
    ends = set(eos)
    return lambda ids: check(tokenizer.decode([t for t in ids if t not in ends]))


@ALGORITHMS.register("awrs",
                     "Fast Controlled Generation from Language Models with Adaptive Weighted Rejection Sampling",
                     "Lipkin et al. 2025", family="search")
def awrs(check: Callable[[list[int]], bool] | None = None, proper: bool = True, most: int | None = None) -> AWRS:
    """Draws tokens until a check accepts one, and keeps the weight that makes texts draws of the held model.

    Args:
        check: function of the new tokens that says whether they may stand; has to be given.
        proper: whether an unbiased weight is estimated. most: number of draws a token at most; None: no bound.
    """
    if check is None:
        raise ValueError("'awrs' needs check=, a function of the new tokens")
    return AWRS(check, proper, most)
