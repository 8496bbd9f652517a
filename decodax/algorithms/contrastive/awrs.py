"""Adaptive weighted rejection sampling (AWRS): constraints that only a program can check, token by token ("Fast
Controlled Generation from Language Models with Adaptive Weighted Rejection Sampling", Lipkin et al., 2025)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.common.options import Count
from decodax.common.registry import ALGORITHMS
from decodax.common.struct import Struct, struct
from decodax.core import keys
from decodax.core.algorithm import Concludes, Traits
from decodax.core.keys import Purpose
from decodax.core.state import State
from decodax.core.types import DEAD_END, INVALID, Decision, Out, Params
from decodax.core.window import Window, causal
from decodax.sampling.draw import race

Check = Callable[[list[int]], bool]
"""A function of the new tokens of a text, which may include an end token. It returns True if they can still become an
allowed text."""


@struct
class Weighed(Struct):
    """State of `AWRS` (adaptive weighted rejection sampling).

    Attributes:
        log_weight: `f32[B]`, logarithm of the importance weight of each row's text so far.
        calls: `i32[B]`, number of calls of the user's check for the row so far.
    """

    log_weight: Array
    calls: Array


@ALGORITHMS.register("awrs", "Fast Controlled Generation from Language Models with Adaptive Weighted Rejection "
                     "Sampling", "Lipkin et al. 2025", family="search")
@dataclasses.dataclass(frozen=True)
class AWRS(Concludes):
    """Samples under a constraint given as a function: draws tokens until the function accepts one, and computes the
    weight of the text.

    Use it for a constraint that is a program instead of a grammar, since it calls the check only for drawn tokens, not
    for the complete vocabulary. In each round it draws tokens from the policy without replacement until the check
    accepts one. This samples from the policy restricted to the allowed tokens.

    With `proper`, each token also gets a weight, an unbiased estimate of the total probability of the allowed tokens.
    Let `q` be the probability of a drawn token among the tokens not drawn before it, and draw one more token after the
    accepted one. The weight is the product of `1 - q` over the rejected tokens; if the extra token is rejected too, it
    is also multiplied by the `q` of the accepted token. `findings["log_weight"]` is the sum of the log weights of a
    text. Weighted in this way, texts are samples from the policy restricted to allowed texts.

    If no token is allowed, the row ends with `Status.DEAD_END` and weight 0. Greedy rows take the most likely allowed
    token and have weight 1. The check runs on the host, in each round. Its result must depend on the tokens only.

    Attributes:
        check: function of the new tokens, a list of ids, that returns True if they can become an allowed text.
        proper: True: compute weights, which takes one more check for each token. False: weights are 1.
        most: largest number of tokens that are rejected at one position; then the row ends with `Status.DEAD_END`.
            None: no limit.
    """

    check: Check
    proper: bool = True
    most: Count | None = None

    @property
    def traits(self) -> Traits:
        return Traits(commits=1)

    def findings(self, s: State) -> dict[str, Array]:
        """Returns `log_weight`, `f32[B]`, and `calls`, the number of calls of the check, `i32[B]`."""
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
            chosen[b], weight[b], calls[b] = self.draw_one(text, order[b], log_p[b].astype(np.float64))
        return chosen, weight, calls

    def draw_one(self, text: list[int], order: np.ndarray, log_p: np.ndarray) -> tuple[int, float, int]:
        """Draws a token for one row.

        Args:
            text: the new tokens so far.
            order: `f32[V]`, numbers by which tokens are tried, the largest first.
            log_p: `f64[V]`, their log-probabilities.

        Returns:
            The accepted token, or `DEAD_END`; the logarithm of its weight; and the number of calls of the check.
        """
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
        return found, log_weight + float(np.log(share)), calls          # no token is left after it


def ranked(order: np.ndarray, first: int = 16) -> Any:
    """Yields the indices of the entries of the 1-D array `order`, by falling value. It sorts lazily: at first only the
    `first` largest entries, and more when they are asked for."""
    count, done = min(first, len(order)), 0
    while done < len(order):
        top = np.argpartition(-order, count - 1)[:count] if count < len(order) else np.arange(len(order))
        top = top[np.lexsort((top, -order[top]))]
        yield from top[done:].tolist()
        done, count = count, min(count * 8, len(order))


def on_text(tokenizer: Any, check: Callable[[str], bool], eos: Any = ()) -> Check:
    """Returns a check of token ids, made from a function of the decoded text. The end tokens `eos` are left out of the
    text."""
    ends = set(eos)
    return lambda ids: check(tokenizer.decode([t for t in ids if t not in ends]))
