"""Algorithms whose rows go on from one another: beam search as in transformers, a particle filter, and a method around
another one.

All of it runs as one program, `tests/extending` runs it, and the pages of docs/extending explain the contracts.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

import decodax as dx
from decodax.common.struct import Struct, struct
from decodax.core import keys
from decodax.core.algorithm import Concludes
from decodax.core.around import Around
from decodax.core.keys import Purpose
from decodax.core.types import DEAD_END, INVALID
from decodax.core.window import causal
from decodax.models import Transformer, llama

network = Transformer(llama(vocab=16, width=16, layers=2, heads=4, kv_heads=2, mlp=24, context=256))
weights = jax.tree.map(lambda x: 8 * x if x.ndim > 1 else x, network.init_params(jax.random.key(1)))
lm = dx.LM(model=network, params=weights, vocab_size=16, generation_config={"eos_token_id": 4})

prompts = [[1, 2, 3, 4], [9, 3], [5, 5, 5, 2, 7, 1]]


@dataclasses.dataclass(frozen=True)
class Beams(Concludes):
    """Beam search. Each `2 * width` rows are one prompt's: its pool, then its live beams.

    Attributes:
        width: `K`, live beams, and hypotheses of the pool.
        length_penalty: the power of the length by which the sum of log-probabilities is divided.
        early_stopping: when the search of a prompt is over. True: once the pool is full. False: once no live beam would
            enter it if it ended at its present length. "never": once none can enter it at any length.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    @property
    def traits(self):
        return dx.Traits(samples=2 * self.width)

    def findings(self, s):
        return {"score": s.algo}

    def init(self, params, s):
        return jnp.zeros(s.batch, jnp.float32)

    def propose(self, params, policy, s):
        return causal(s.newest[:, None], s.length - 1, (s.running & self.lives(s))[:, None]), s.algo

    def lives(self, s):
        """`bool[B]`: rows of live beams."""
        return jnp.arange(s.batch) % (2 * self.width) >= self.width

    def decide(self, params, dist, s, window, out, algo):
        K = self.width
        group = lambda x: x.reshape(-1, 2 * K, *x.shape[1:])                # [P, 2K, ...], by prompt
        shared = lambda x: group(x)[:, K]                                   # what the live beams of a prompt share
        place = group(jnp.arange(s.batch, dtype=jnp.int32))

        # At temperature 1 also where the policy is greedy. Not normalised again over what the policy allows: so the
        # search is for the likeliest of the allowed texts.
        log_p = dist.warm.processed()[:, 0] - jax.nn.logsumexp(dist.logits()[:, 0], -1, keepdims=True)

        # before the first step the pool is empty, and the live beams are one and the same text, which counts once
        started = shared(s.length > s.prompt_length)[:, None]
        pool = jnp.where(started, group(algo)[:, :K], -jnp.inf)
        live = jnp.where(started, group(algo)[:, K:], jnp.where(jnp.arange(K) == 0, 0, -jnp.inf))
        total = live[..., None] + group(log_p)[:, K:]                       # [P, K, V]

        # enough candidates that at least K of them do not end the text
        V, eos = total.shape[-1], shared(dist.policy.eos)
        count = min(max(2, 1 + eos.shape[1]) * K, K * V)
        best, index = jax.lax.top_k(total.reshape(-1, K * V), count)
        beam, token = index // V, (index % V).astype(jnp.int32)
        made = shared(s.length - s.prompt_length)[:, None] + 1              # tokens of a candidate
        budget = shared(s.max_length - s.prompt_length)[:, None]
        ripe = made > shared(s.min_new)[:, None]
        ends = ((token[..., None] == eos[:, None]).any(-1) & ripe) | (made >= budget)

        # those among the first K that end join the pool; the others live on
        norm = lambda length: length.astype(jnp.float32) ** self.length_penalty
        ended = jnp.where(ends & (jnp.arange(count) < K), best / norm(made), -jnp.inf)
        pool, which = jax.lax.top_k(jnp.concatenate([pool, ended], 1), K)
        live, going = jax.lax.top_k(jnp.where(ends, -jnp.inf, best), K)
        pick = lambda x, at: jnp.take_along_axis(x, at, 1)
        filled, joins = pool > -jnp.inf, (pool > -jnp.inf) & (which >= K)
        joined = jnp.maximum(which - K, 0)
        rows = jnp.where(joins, pick(place, K + pick(beam, joined)), pick(place, jnp.minimum(which, K - 1)))
        rows = jnp.where(filled, rows, place[:, :K])                        # an empty place stays what it is

        # whether that was the last step
        longest = budget if self.early_stopping == "never" and self.length_penalty > 0 else made
        over = (made >= budget) | ~(live[:, :1] / norm(longest) > pool[:, -1:])
        if self.early_stopping is True:
            over = over | filled[:, -1:]

        # what happens in the rows of the pool and in the live ones, which at the end become copies of the pool
        in_pool = rows, jnp.where(filled, pick(token, joined), DEAD_END), joins | (over & ~filled)
        in_live = pick(place, K + pick(beam, going)), pick(token, going), jnp.ones_like(joins)
        both = lambda a, b: jnp.concatenate([a, jnp.where(over, a, b)], 1)
        rows, tokens, appends = map(both, in_pool, in_live)

        # a prompt whose search was over before, and one with broken logits, whose rows end with that status
        broken = jnp.isnan(total).any((1, 2))[:, None]
        works = group(s.running)[:, K:K + 1] & ~broken
        flat = lambda new, old: jnp.where(works, new, old).reshape(-1)
        rows, tokens, appends = flat(rows, place), flat(tokens, INVALID)[:, None], flat(appends, broken)
        slots = jnp.where((tokens >= 0) & appends[:, None], window.positions[rows], -1)
        return dx.Decision(tokens=tokens, count=appends.astype(jnp.int32), slots=slots, source=jnp.zeros_like(tokens),
                           rows=rows, idle=~self.lives(s), algo=flat(jnp.concatenate([pool, live], 1), group(algo)))


def beam_search(lm, prompts, width, returns=1, length_penalty=1.0, early_stopping=False, **options):
    """For each prompt the best `returns` continuations with their scores, the best first."""
    alg = Beams(width, length_penalty, early_stopping)
    out = dx.generate(lm, prompts, algorithm=alg, **options)
    found = lambda rows: [(out.row(i).tolist(), float(out.findings["score"][i])) for i in rows
                          if out.status[i] != dx.Status.DEAD_END]
    return [found(range(first, first + returns)) for first in range(0, len(out), 2 * width)]


for prompt, found in zip(prompts, beam_search(lm, prompts, width=4, returns=2, max_new_tokens=8), strict=False):
    for text, score in found:
        print(prompt, "->", text, f"{score:.3f}")


@struct
class Weights(Struct):
    """`log_weight` `f32[B]` of each particle since the last resampling; `log_mean` `f32[B]`, the sum of the logarithms
    of the mean weights at the resamplings of its prompt; `resampled` `i32[B]`, the number of these."""

    log_weight: jax.Array
    log_mean: jax.Array
    resampled: jax.Array


@dataclasses.dataclass(frozen=True)
class Particles(Concludes):
    """Sequential Monte Carlo. Each `size` rows are the particles of one prompt.

    Attributes:
        potential: hashable; from texts `i32[B, N]` and their lengths `i32[B]` the logarithm of the potential of each
            one's last token, `f32[B]`.
        size: `N`.
        least: the effective sample size, as a share of `N`, below which particles are resampled; 0: never.
    """

    potential: Callable[[jax.Array, jax.Array], jax.Array]
    size: int
    least: float = 0.5

    @property
    def traits(self):
        return dx.Traits(samples=self.size)

    def findings(self, s):
        """The mean of `exp(log_weight)` over a prompt's particles is the estimate."""
        return {"log_weight": s.algo.log_mean + s.algo.log_weight, "resampled": s.algo.resampled}

    def init(self, params, s):
        zero = lambda dtype: jnp.zeros(s.batch, dtype)
        return Weights(log_weight=zero(jnp.float32), log_mean=zero(jnp.float32), resampled=zero(jnp.int32))

    def propose(self, params, policy, s):
        return causal(s.newest[:, None], s.length - 1, s.running[:, None]), s.algo

    def decide(self, params, dist, s, window, out, algo):
        rows, again = self.resample(s, algo)
        each = lambda x: jnp.repeat(x, self.size)
        old = algo.log_weight.reshape(-1, self.size)
        mean = jax.nn.logsumexp(old, 1) - jnp.log(self.size)
        log_weight = jnp.where(each(again), 0, algo.log_weight)

        moved = s.succeed(rows)
        token = dist.select(rows).draw()
        text = moved.tokens.at[jnp.arange(s.batch), moved.length].set(token[:, 0])
        gain = jnp.where(token[:, 0] >= 0, self.potential(text, moved.length + 1), -jnp.inf)
        new = Weights(log_weight=log_weight + jnp.where(moved.running, gain, 0),
                      log_mean=algo.log_mean + each(jnp.where(again, mean, 0)), resampled=algo.resampled + each(again))
        return dx.Decision(tokens=token, count=jnp.ones(s.batch, jnp.int32), source=jnp.zeros_like(token), rows=rows,
                           slots=jnp.where(token >= 0, window.positions[rows], -1), algo=new)

    def resample(self, s, algo):
        """Returns the row that each row continues, `i32[B]`, and the prompts that are resampled, `bool[P]`."""
        by_prompt = lambda x: x.reshape(-1, self.size)
        weight = jax.nn.softmax(by_prompt(algo.log_weight))
        # a prompt whose particles have all ended, or all weigh nothing (NaN), is left alone
        again = (1 / (weight ** 2).sum(1) < self.least * self.size) & by_prompt(s.running).any(1)
        u = keys.uniforms(s.key[::self.size], by_prompt(s.length).max(1, keepdims=True), Purpose.ORDER)[:, 0, :1]
        at = (jnp.arange(self.size) + u) / self.size
        chosen = jax.vmap(lambda sums, at: jnp.searchsorted(sums, at, side="right"))(jnp.cumsum(weight, 1), at)
        own = jnp.arange(self.size)
        chosen = jnp.where(again[:, None], jnp.minimum(chosen, self.size - 1), own)
        first = jnp.arange(0, s.batch, self.size)
        return (first[:, None] + chosen).reshape(-1).astype(jnp.int32), again


@dataclasses.dataclass(frozen=True)
class Without:
    """Potential 0 for a token, and 1 for all others."""

    token: int

    def __call__(self, text, length):
        return jnp.where(text[jnp.arange(text.shape[0]), length - 1] == self.token, -jnp.inf, 0.0)


particles = Particles(Without(3), size=64, least=0.9)
out = dx.generate(lm, prompts, algorithm=particles, max_new_tokens=6, temperature=1.0)
estimate = np.exp(out.findings["log_weight"]).reshape(-1, 64).mean(1)
print("no 3 among the next 6 tokens:", estimate)


@dataclasses.dataclass(frozen=True)
class Bounded(Around):
    """`method`, at most `most` rounds a row."""

    method: dx.Algorithm
    most: int

    @property
    def inner(self):
        return self.method

    def decide(self, params, dist, s, window, out, algo):
        decision = self.method.decide(params, dist, s, window, out, algo)
        over = s.stats.rounds + 1 >= self.most
        return decision.replace(status=jnp.where(over, jnp.int32(dx.Status.TIME), jnp.int32(dx.Status.RUNNING)))


lookup = dx.Speculative(dx.drafts.PromptLookup(length=4))
out = dx.generate(lm, prompts, algorithm=Bounded(lookup, most=5), max_new_tokens=24, eos_token_id=[])
print(out.stats.rounds, out.lengths, out.status)
