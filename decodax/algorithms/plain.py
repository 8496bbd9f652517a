"""Plain autoregressive decoding: one token in each round. Exact methods are compared with it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from decodax.common.registry import ALGORITHMS
from decodax.core.algorithm import Algorithm, Traits
from decodax.core.state import State
from decodax.core.types import Decision, Out, Params
from decodax.core.window import Window, causal


@ALGORITHMS.register("autoregressive", "Plain autoregressive decoding", "", family="ar-sampling",
                     guarantee="seed-exact")
@dataclasses.dataclass(frozen=True)
class Autoregressive(Algorithm):
    """Scores the newest token and draws the next one from the sampling policy: the most likely token at temperature 0,
    otherwise a sample.

    `decodax.generate` uses this method if `algorithm=` is not given.
    """

    @property
    def traits(self) -> Traits:
        return Traits(guarantee="seed-exact")

    def init(self, params: Params, s: State) -> Any:
        return None

    def propose(self, params: Params, policy: Any, s: State) -> tuple[Window, Any]:
        return causal(s.newest[:, None], s.length - 1, s.running[:, None]), None

    def decide(self, params: Params, dist: Any, s: State, window: Window, out: Out, algo: Any) -> Decision:
        token = dist.draw()
        return Decision(tokens=token, count=jnp.ones(s.batch, jnp.int32), source=jnp.zeros_like(token), algo=algo,
                        slots=jnp.where(token >= 0, window.positions, -1))
