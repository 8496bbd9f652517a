"""Stochastic beam search: draws texts without replacement ("Stochastic Beams and Where to Find Them: The Gumbel-Top-k
Trick for Sampling Sequences Without Replacement", Kool et al., 2019)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from decodax.algorithms.beams.beam_search import largest
from decodax.common.options import Count
from decodax.common.registry import ALGORITHMS
from decodax.common.struct import Struct, struct
from decodax.core import keys
from decodax.core.algorithm import Concludes, Grouped, Traits
from decodax.core.keys import Purpose
from decodax.core.state import State
from decodax.core.types import DEAD_END, INVALID, Decision, Out, Params
from decodax.core.window import Window, causal
from decodax.sampling.draw import exponentials


@struct
class Perturbed(Struct):
    """State of stochastic beam search.

    Attributes:
        log_prob: `f32[B]`, log-probability of each text.
        value: `f32[B]`, the log-probability with Gumbel noise; -inf: there is no text.
        kappa: `f32[B]`, the smallest value of the prompt's rows.
    """

    log_prob: Array
    value: Array
    kappa: Array


@ALGORITHMS.register("stochastic-beam-search", "Stochastic Beams and Where to Find Them: The Gumbel-Top-k Trick for "
                     "Sampling Sequences Without Replacement", "Kool et al. 2019", family="search")
@dataclasses.dataclass(frozen=True)
class StochasticBeams(Grouped, Concludes):
    """Draws `k` different texts of each prompt, without replacement (Kool et al., 2019).

    For diverse samples, and for estimates with low variance. It is a beam search on log-probabilities with Gumbel
    noise. The noise of a text is passed on to its extensions: their noise is conditioned so that the best extension has
    the value of the text. The `k` texts with the largest values are `k` draws without replacement from the policy's
    distribution over complete texts, in the order in which they were drawn. Greedy rows draw at temperature 1.

    One more beam gives `kappa`, the value of the text after the last one. The probability that a text is drawn at all
    is then `1 - exp(-exp(log_prob - kappa))`, and `log_weight` is `log_prob` minus the logarithm of that. The sum of
    `f(text) * exp(log_weight)` over the drawn texts is an unbiased estimate of the mean of `f` over all texts.

    Attributes:
        k: number of texts. `findings` has `log_prob`, `value`, `kappa` and `log_weight` of each.
    """

    k: Count = 4

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"k: got {self.k!r}, takes at least 1")

    @property
    def group(self) -> int:
        """Number of rows that a prompt takes in the batch: one for each text, and one for an extra beam."""
        return self.k + 1

    @property
    def traits(self) -> Traits:
        return Traits(f"StochasticBeams({self.k})", commits=1, samples=self.group, answers=self.k)

    def answering(self, count: int) -> StochasticBeams:
        return dataclasses.replace(self, k=count)

    def findings(self, s: State) -> dict[str, Array]:
        a: Perturbed = s.algo
        drawn = jnp.log(-jnp.expm1(-jnp.exp(a.log_prob - a.kappa)))
        weight = a.log_prob - jnp.where(a.kappa == -jnp.inf, 0, drawn)      # all texts have been drawn
        return {"log_prob": a.log_prob, "value": a.value, "kappa": a.kappa, "log_weight": weight}

    def init(self, params: Params, s: State) -> Perturbed:
        u = keys.uniforms(s.key, s.prompt_length[:, None], Purpose.ORDER)[:, 0, 0]
        gumbel = -jnp.log(-jnp.log(jnp.maximum(u, jnp.finfo(jnp.float32).tiny)))
        return Perturbed(jnp.zeros(s.batch, jnp.float32), gumbel, jnp.full_like(gumbel, -jnp.inf))

    def propose(self, params: Params, policy: Any, s: State) -> tuple[Window, Any]:
        return causal(s.newest[:, None], s.length - 1, s.running[:, None]), s.algo

    def decide(self, params: Params, dist: Any, s: State, window: Window, out: Out, algo: Any) -> Decision:
        K = self.group
        group = lambda x: x.reshape(-1, K, *x.shape[1:])
        log_p = dist.warm.log_probs()[:, 0]
        V = log_p.shape[-1]
        # the rows of a prompt begin as one and the same text, which counts once
        begins = (s.length == s.prompt_length) & s.running
        spare = begins & (jnp.arange(s.batch) % K > 0)
        above = jnp.where(spare, -jnp.inf, algo.value)
        address = keys.addresses(s.key, s.length[:, None], Purpose.TOKEN)[:, 0]
        below = algo.log_prob[:, None] + log_p
        value = lowered(below - jnp.log(exponentials(address, V)), above)
        value = jnp.where(s.running[:, None] & (above > -jnp.inf)[:, None], value, -jnp.inf)
        # a text that has ended stays as it is
        stays = jnp.where(s.running, -jnp.inf, above)
        parents, tokens = largest(group(value), K)
        at = lambda x: x[jnp.arange(len(parents))[:, None], parents, tokens]
        best, index = jax.lax.top_k(jnp.concatenate([at(group(value)), group(stays)], 1), K)
        whole, from_these = index >= K, lambda x: jnp.take_along_axis(x, jnp.minimum(index, K - 1), 1)
        parent = jnp.where(whole, index - K, from_these(parents))
        token = jnp.where(whole, 0, from_these(tokens))
        token = jnp.where(best == -jnp.inf, DEAD_END, token)
        pick = lambda x: jnp.take_along_axis(group(x), parent, 1)
        log_prob = jnp.where(whole, pick(algo.log_prob),
                             from_these(at(group(below))))
        first = jnp.arange(0, s.batch, K, dtype=jnp.int32)[:, None]
        rows = first + parent
        # a prompt with broken logits, and one that has ended, stay where they are
        broken = (jnp.isnan(group(log_p)).any(-1) & group(s.running)).any(1, keepdims=True)
        moves = group(s.running).any(1, keepdims=True) & ~broken
        own = first + jnp.arange(K, dtype=jnp.int32)
        flat = lambda x: x.reshape(-1)
        rows = flat(jnp.where(moves, rows, own))
        token = flat(jnp.where(moves, token, INVALID))[:, None]
        appends = flat(jnp.where(moves, ~whole, broken))
        new = Perturbed(flat(jnp.where(moves, jnp.where(best == -jnp.inf, -jnp.inf, log_prob), group(algo.log_prob))),
                        flat(jnp.where(moves, best, group(algo.value))),
                        flat(jnp.where(moves, jnp.broadcast_to(best[:, -1:], best.shape), group(algo.kappa))))
        slots = jnp.where((token >= 0) & appends[:, None], window.positions[rows], -1)
        return Decision(tokens=token, count=appends.astype(jnp.int32), slots=slots, source=jnp.zeros_like(token),
                        algo=new, rows=rows)


def lowered(values: Array, top: Array) -> Array:
    """Returns Gumbel noise `values` (`f32[B, V]`) changed so that the largest entry of each row is `top` (`f32[B]`):
    samples conditioned on their maximum (Kool et al., 2019, appendix B.3)."""
    largest = values.max(-1, keepdims=True)
    t = top[:, None]
    rest = jnp.where(values < largest, jnp.log1p(-jnp.exp(jnp.minimum(values - largest, -1e-30))), -jnp.inf)
    v = t - values + rest
    lower = t - jnp.maximum(v, 0) - jnp.log1p(jnp.exp(-jnp.abs(v)))
    return jnp.where(values == largest, t, jnp.where(values == -jnp.inf, -jnp.inf, lower))
