"""Superposed decoding: several drafts of a text with one forward pass for each token ("Superposed Decoding: Multiple
Generations from a Single Autoregressive Inference Pass", Shen et al., 2024)."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.algorithms.beams.beam_search import largest
from decodax.algorithms.beams.ngrams import NGrams
from decodax.algorithms.beams.pool import Finished, append
from decodax.common.options import Count, NonNegative, Positive, Range
from decodax.common.registry import ALGORITHMS
from decodax.common.struct import Struct, struct
from decodax.core.algorithm import Concludes, Traits
from decodax.core.around import Readout
from decodax.core.cache import Cache
from decodax.core.composed import data
from decodax.core.record import record
from decodax.core.state import State, Status
from decodax.core.types import DEAD_END, INVALID, Decision, Model, Out, Params, embeddings
from decodax.core.window import Window, causal, take
from decodax.pallas_kernels.vocabulary import cooled, top_k


@struct
class Shares(Struct):
    """A hint (`Window.hints`) for the model `Superposition`, which reads a weighted mean of the newest tokens'
    embeddings of a prompt's drafts.

    Attributes:
        values: `f32[B]`, the weight of each row's token.
    """

    values: Array


@struct
class Drafts(Struct):
    """State of superposed decoding.

    Attributes:
        score: `f32[B]`, score of each draft; -inf: the row has no draft.
        finished: the texts that have ended.
    """

    score: Array
    finished: Finished


@dataclasses.dataclass(frozen=True)
class Superposition(Readout):
    """A model for `k` drafts of each prompt that runs `base` once for all of them: its input is the weighted sum of the
    embeddings of their newest tokens (weights from the hint `Shares`), and all `k` rows get the same output."""

    k: int

    def apply(self, params: Any, window: Window, cache: Cache) -> Out:
        shares = window.hint(Shares)
        if shares is None:
            return self.base.apply(params, window, cache)
        each = jnp.arange(window.tokens.shape[0], dtype=jnp.int32)
        first = each[::self.k]
        rows = embeddings(self.base, params, window.tokens)
        mixed = (rows * shares.values[:, None, None].astype(rows.dtype)).reshape(len(first), self.k, *rows.shape[1:])
        one = window.replace(hints=()).select(first).replace(embeddings=mixed.sum(1),
                                                             embedded=jnp.ones((len(first), 1), bool))
        return self.base.apply(params, one, cache.select(first)).rows(each // self.k)


@ALGORITHMS.register("superposed-decoding",
                     "Superposed Decoding: Multiple Generations from a Single Autoregressive Inference Pass",
                     "Shen et al. 2024", family="search")
@dataclasses.dataclass(frozen=True)
class Superposed(Concludes):
    """Writes `k` drafts of a text with one forward pass for each token, and ranks them with an n-gram model (Shen et
    al., 2024).

    For several suggestions at the cost of one, such as completions in an editor. The input of the model is the mean of
    the embeddings of the drafts' newest tokens, weighted by the drafts' probabilities, so all drafts get the same
    distribution `p`. For each draft, the `candidates` most likely tokens, renormalised, are scored by `(1 - alpha) log
    p + alpha log q`, where `q` is their probability in the n-gram model after this draft. If the n-gram model gives all
    of them probability 0, the score is `(1 - alpha) log p - penalty`. Without a table it is `log p`. Of the `2 k` best
    extensions of all drafts, those that end are added to the ended texts, of which the best `k` are kept; the best `k`
    others are the new drafts.

    The `k` rows of a prompt are its answers: of drafts and ended texts, the `k` with the lowest perplexity (by score),
    lowest first. The authors' code returns both lists with their perplexities. Each row has a cache, all of them equal,
    and a round uses the first one; the authors have only one.

    Attributes:
        k: number of drafts.
        table: counts of n-grams in a corpus (`decodax.algorithms.beams.NGrams`). None: no n-gram model.
        alpha: weight of the n-gram model, from 0 to below 1.
        candidates: number of most likely tokens that are scored.
        temperature: temperature of rows for which the request sets none (greedy rows); default the authors' setting.
        weights_of: weights of the n-gram orders from 2 on.
        penalty: amount subtracted from the score if the n-gram model supports no candidate.

    Raises:
        ValueError: a number out of its range.
    """

    k: Count = 3
    table: NGrams | None = data()
    alpha: Annotated[float, Range(0, 1, below=True)] = data(0.54, bare=0.0)
    candidates: Count = 9
    temperature: Positive = data(0.06, bare=1.0)
    weights_of: tuple[NonNegative, ...] = (0.01, 0.04, 0.15, 0.18, 0.12)
    penalty: float = data(200.0, bare=0.0)

    def __post_init__(self) -> None:
        if self.k < 1 or self.candidates < 1:
            raise ValueError(f"k and candidates: got {self.k} and {self.candidates}, take at least 1")
        if not 0 <= self.alpha < 1:
            raise ValueError(f"alpha: got {self.alpha!r}, takes a number from 0 to below 1")
        if not self.temperature > 0:
            raise ValueError(f"temperature: got {self.temperature!r}, takes a number above 0")

    @property
    def traits(self) -> Traits:
        return Traits(f"Superposed({self.k})", commits=1, samples=self.k)

    @property
    def weights(self) -> Any:
        return (self.table, *map(np.float32, (self.alpha, self.temperature, self.penalty)),
                np.asarray(self.weights_of, np.float32))

    def bare(self) -> Superposed:
        return dataclasses.replace(super().bare(), weights_of=(0.0,) * len(self.weights_of))

    def wrap_model(self, model: Model) -> Model:
        return Superposition(model, self.k)

    def findings(self, s: State) -> dict[str, Array]:
        """Returns `score`, `f32[B]`, the joint score of each text."""
        return {"score": s.algo.finished.score}

    def init(self, params: Params, s: State) -> Drafts:
        return Drafts(jnp.zeros(s.batch, jnp.float32), Finished.empty(s))

    def propose(self, params: Params, policy: Any, s: State) -> tuple[Window, Any]:
        share = jax.nn.softmax(s.algo.score.reshape(-1, self.k)).reshape(-1)
        share = jnp.where(jnp.isnan(share), 1 / self.k, share)
        # at first all rows hold the same token, and one of them counts
        begins = s.length == s.prompt_length
        share = jnp.where(begins, (jnp.arange(s.batch) % self.k == 0).astype(share.dtype), share)
        window = causal(s.newest[:, None], s.length - 1, s.running[:, None])
        return window.replace(hints=(Shares(share),)), s.algo

    def decide(self, params: Params, dist: Any, s: State, window: Window, out: Out, algo: Any) -> Decision:
        k, V = self.k, out.logits().shape[-1]
        P = s.batch // k
        group = lambda x: x.reshape(P, k, *x.shape[1:])
        flat = lambda x: x.reshape(s.batch, *x.shape[2:])
        processed = dist.warm.processed()[:, 0]
        cold = dist.policy.greedy
        gain = self._gains(params.draft, s, cooled(processed, jnp.where(cold, params.draft[2], 1)))
        begins = s.length == s.prompt_length
        spare = begins & (jnp.arange(s.batch) % k > 0)
        total = group(jnp.where(spare, -jnp.inf, algo.score)[:, None] + gain)
        beam, token = largest(total, min(2 * k, k * V))
        best = total[jnp.arange(P)[:, None], beam, token]
        ripe = group(s.length - s.prompt_length + 1 > s.min_new)[:, :1]
        eos = (token[..., None] == group(dist.policy.eos)[:, :1]).any(-1) & ripe
        stop, hit = take(group(s.stop), beam), jnp.zeros_like(eos)
        if dist.policy.stops is not None:
            left = group(s.max_length - s.length - 1)[:, :1]
            stop, hit = dist.policy.stops.advance(stop, token, left)
        ends = eos | (hit & ripe)
        why = jnp.where(eos, Status.EOS, Status.STOP).astype(jnp.int32)

        first = jnp.arange(0, s.batch, k, dtype=jnp.int32)[:, None]
        own = jnp.arange(s.batch, dtype=jnp.int32)
        broken = jnp.repeat(group(jnp.isnan(processed).any(-1)).any(1), k) & s.running
        works = s.running & ~broken
        score, going = jax.lax.top_k(jnp.where(ends, -jnp.inf, best), k)
        # a dead draft is a copy of the best one
        at = jnp.where(score == -jnp.inf, going[:, :1], going)
        rows = jnp.where(works, flat(first + take(beam, at)), own)
        alive = jnp.repeat(score[:, 0] > -jnp.inf, k)
        new = jnp.where(broken, INVALID, jnp.where(alive, flat(take(token, at)), DEAD_END))[:, None]
        finished = self._finished(s, dist, algo.finished, jnp.where(ends & (best > -jnp.inf), best, -jnp.inf),
                                  first + beam, token, why, works)
        algo = Drafts(jnp.where(works, flat(score), algo.score), finished)
        slots = jnp.where(new >= 0, window.positions[rows], -1)
        return Decision(tokens=new, count=jnp.ones(s.batch, jnp.int32), slots=slots, source=jnp.zeros_like(new),
                        algo=algo, rows=rows)

    def _gains(self, weights: Any, s: State, logits: Array) -> Array:
        """Returns the amount that each token adds to the score of its draft, `f32[B, V]`; -inf for tokens that are no
        candidates."""
        table, alpha, _, penalty, orders = weights
        best, ids = top_k(logits, min(self.candidates, logits.shape[-1]))
        own = jnp.where(best == -jnp.inf, -jnp.inf, jax.nn.log_softmax(best))
        if table is not None:
            back = jnp.arange(-len(self.weights_of), 0) + s.length[:, None]
            before = jnp.where(back >= 0, jnp.take_along_axis(s.tokens, jnp.maximum(back, 0), 1), -1)
            both = (1 - alpha) * own + alpha * jnp.log(table.probability(before, ids, orders))
            none = (both == -jnp.inf).all(-1, keepdims=True)
            own = jnp.where(none, (1 - alpha) * own - penalty, both)
        return jnp.full_like(logits, -jnp.inf).at[jnp.arange(s.batch)[:, None], ids].set(own)

    def _finished(self, s: State, dist: Any, held: Finished, score: Array, rows: Array, token: Array, why: Array,
                  works: Array) -> Finished:
        """Returns the best `k` ended texts of each prompt: of those in `held` and of the candidates `[P, c]` that end
        (`score` above -inf)."""
        k, P = self.k, score.shape[0]
        best, index = jax.lax.top_k(jnp.concatenate([held.score.reshape(P, k), score], 1), k)
        joins, pick = index >= k, jnp.maximum(index - k, 0)
        place = jnp.arange(0, s.batch, k, dtype=jnp.int32)[:, None] + jnp.minimum(index, k - 1)
        own = jnp.arange(s.batch, dtype=jnp.int32)
        joins = joins.reshape(-1) & works
        source = jnp.where(works, jnp.where(joins, take(rows, pick).reshape(-1), place.reshape(-1)), own)
        wide = lambda x: joins.reshape(-1, *[1] * (x.ndim - 1))
        mix = lambda new, old: jax.tree.map(lambda a, b: jnp.where(wide(a), a[source], b[source]), new, old)
        tokens, count = take(token, pick).reshape(-1, 1), joins.astype(jnp.int32)
        noted = mix(s.record, held.record)
        if s.record is not None:
            raw = record(dist.logits()[source], dist.warm.log_probs()[source], tokens, s.record.count)
            noted = jax.tree.map(lambda x, y: append(x, y, s.length[source], count), noted, raw)
        status = jnp.where(joins, take(why, pick).reshape(-1), held.status[source])
        new = jnp.where(works, best.reshape(-1), held.score)
        return Finished(tokens=append(mix(s.tokens, held.tokens), tokens, s.length[source], count),
                        length=mix(s.length, held.length) + count, status=status, score=new, log_prob=new,
                        beams=held.beams, record=noted)

    def outcome(self, s: State) -> State:
        """Returns the state whose rows have the best texts of each prompt: those with the lowest perplexity among the
        ended texts and the drafts that have not ended."""
        P = s.batch // self.k
        group = lambda x: x.reshape(P, self.k, *x.shape[1:])
        held, score = s.algo.finished, s.algo.score
        drafts = held.replace(tokens=s.tokens, length=s.length, status=s.status, score=score, log_prob=score,
                              record=s.record)
        ended = held.replace(status=jnp.where(held.score > -jnp.inf, held.status, jnp.int32(Status.DEAD_END)),
                             length=jnp.where(held.score > -jnp.inf, held.length, s.prompt_length))
        both = jax.tree.map(lambda a, b: jnp.concatenate([group(a), group(b)], 1), ended, drafts)
        made = both.length - group(s.prompt_length)[:, :1]
        mean = jnp.where(both.score > -jnp.inf, both.score / jnp.maximum(made, 1), -jnp.inf)
        best = jax.lax.top_k(mean, self.k)[1]
        best = jax.tree.map(lambda x: take(x, best).reshape(s.batch, *x.shape[2:]), both)
        dead = (best.score == -jnp.inf) & (best.status != Status.INVALID)
        return s.replace(tokens=best.tokens, length=jnp.where(dead, s.prompt_length, best.length), record=best.record,
                         status=jnp.where(dead, jnp.int32(Status.DEAD_END), best.status),
                         algo=s.algo.replace(finished=best))
