"""Cascaded decoding: all positions of a text at once, by Markov models of increasing order ("Cascaded Text Generation
with Markov Transformers", Deng and Rush, 2020)."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jax import Array

from decodax.algorithms.parallel.survivors import EPSILON, Bounds, best_text, edges, first, prune
from decodax.common.options import Count, Range, TokenId, Whole, check_options
from decodax.common.registry import ALGORITHMS
from decodax.common.struct import Struct, struct
from decodax.core.algorithm import Algorithm, Concludes, Paced, Traits, Varies, check_policy
from decodax.core.around import Around
from decodax.core.record import record
from decodax.core.state import State, Status
from decodax.core.types import DEAD_END, INVALID, Decision, Out, Params
from decodax.core.window import Window


@struct
class Survivors(Struct):
    """State of a cascade: the n-grams that are left at each position of a text. A prompt has one row for each position;
    row `l` has the n-grams that begin at position `l`.

    Attributes:
        order: `i32[B]`, the order of the next round.
        grams: `i32[B, K, m]`, the n-grams; the first `max(order, 1)` tokens are valid.
        score: `f32[B, K]`, -inf for an unused place, otherwise 0; at position 0 the log-probability of the n-gram.
        log_prob: `f32[B]`, log-probability of the final text.
    """

    order: Array
    grams: Array
    score: Array
    log_prob: Array


@dataclasses.dataclass(frozen=True)
class TargetLengths:
    """Bounds on the length of a text that depend on its prompt: for a prompt of `T` tokens, `round(a * T + b) + 1`
    tokens with the end token, plus or minus `spread`. With these bounds every text has an end token.

    Attributes:
        a: slope of a linear regression on the model's training data, as in the authors' code.
        b: intercept of that regression.
        spread: largest deviation in tokens.
    """

    a: float = 1.0
    b: float = 0.0
    spread: int = 3


@dataclasses.dataclass(frozen=True)
class Cascade(Varies, Concludes, Paced):
    """Cascaded decoding with a Markov transformer (Deng and Rush, 2020): finds a likely text in `orders + 1` forward
    passes, whatever its length.

    Such a model was trained with barriers. A barrier is a token in place of a token of the text; the tokens after it
    attend only to the prompt and to tokens from the barrier on. So `m` tokens after a barrier the model is a Markov
    model of order `m`. The rounds are:

    - Order 0: barriers at all positions give each position a distribution by itself. The `keep` most likely tokens of
      each position are kept.
    - Order `m`: each kept `m`-gram of each position is processed after a barrier. This scores its extensions by one
      token, which are `(m + 1)`-grams. Of these, each position keeps the `keep` with the largest max-marginal, the
      score of the best complete text that contains them (`max_plus.max_marginals`).
    - After the last order the best text is the result.

    Positions after the end of a text have the symbol epsilon, with score 0, so that texts of all lengths compete. End
    tokens and epsilon are always kept at order 0 where the length allows them.

    A prompt has `longest` rows, one for each position, whose windows attend to the prompt; `cache="paged"` and
    `cache="hydragen"` store it once. A model is trained on `prompt, barrier, text` with further barriers in place of
    some tokens of the text, so the barrier of position `l` is in the place of token `l - 1`. A temperature divides
    log-probabilities, and nothing is drawn. The policy must not depend on the text (penalties, constraints); a stop
    string cuts the final text.

    Attributes:
        barrier: id of the barrier token.
        orders: highest Markov order.
        keep: `K`, number of n-grams that each position keeps.
        longest: largest number of new tokens of a text; `max_new_tokens` may be smaller.
        lengths: further bounds on the length; None: none.

    Raises:
        ValueError: a number out of its range, `max_new_tokens` above `longest`, or a policy that depends on the text.
    """

    barrier: Whole
    orders: Whole = 4
    keep: Count = 32
    longest: Annotated[int, Range(2)] = 32
    lengths: TargetLengths | None = None

    def __post_init__(self) -> None:
        check_options(type(self), vars(self))

    @property
    def traits(self) -> Traits:
        return Traits(emits=self.longest, commits=1, samples=self.longest, answers=1, needs=frozenset(("trees",)),
                      refuses=(("transforms", "which is found at all positions at once"),))

    @property
    def last(self) -> int:
        """Highest Markov order that is used, `min(orders, longest - 1)`, since a text of `longest` tokens has no longer
        contexts."""
        return min(self.orders, self.longest - 1)

    @property
    def variants(self) -> tuple[Algorithm, ...]:
        return tuple(_Order(self, m) for m in range(self.last + 1))

    def choose(self, params: Params, policy: Any, s: State) -> Array:
        # rows that joined later wait at their order until the others are done
        return jnp.where(s.running, s.algo.order, self.last).min()

    def with_length(self, budget: int) -> Cascade:
        if budget > self.longest:
            raise ValueError(f"max_new_tokens: got {budget} for a cascade with longest={self.longest}, takes at most "
                             "that")
        return self

    def most_rounds(self, budget: int, rows: int) -> int:
        return self.last + 8

    def findings(self, s: State) -> dict[str, Array]:
        """Returns `log_prob`, `f32[B]`, the log-probability of each text under the model of the last order."""
        return {"log_prob": s.algo.log_prob}

    def init(self, params: Params, s: State) -> Survivors:
        B, K = s.batch, self.keep
        return Survivors(order=jnp.zeros(B, jnp.int32), grams=jnp.zeros((B, K, max(self.last, 1)), jnp.int32),
                         score=jnp.zeros((B, K), jnp.float32), log_prob=jnp.zeros(B, jnp.float32))

    def propose(self, params: Params, policy: Any, s: State) -> tuple[Window, Any]:
        raise NotImplementedError("its rounds are those of its variants")

    def decide(self, params: Params, dist: Any, s: State, window: Window, out: Out, algo: Any) -> Decision:
        raise NotImplementedError("its rounds are those of its variants")

    def bounds(self, s: State, eos: Array) -> Bounds:
        """Returns the minimum and maximum text length of each prompt, in tokens with the end token, and its end tokens.

        Args:
            s: the state; a prompt has `longest` rows, so there are `P = B / longest` prompts.
            eos: `i32[B, E]`, end tokens of each row, padded with -1.

        Returns:
            `Bounds` with arrays `i32[P]` and `i32[P, E]`.
        """
        some = lambda x: x[::self.longest]
        least, most = some(s.min_new) + 1, jnp.minimum(some(s.max_length - s.prompt_length), self.longest)
        words = most
        if (by := self.lengths) is not None:
            middle = jnp.round(by.a * some(s.prompt_length) + by.b).astype(jnp.int32) + 1
            least = jnp.minimum(jnp.maximum(least, middle - by.spread), most)
            most = jnp.clip(middle + by.spread, least, most)
            words = most - 1
        return Bounds(least=least, most=most, words=words, eos=some(eos))


@dataclasses.dataclass(frozen=True)
class _Order(Around):
    """The round of a cascade for one order. The window has the prompt's newest token, the barrier, and then the row's
    n-grams side by side."""

    cascade: Cascade
    order: int

    @property
    def inner(self) -> Cascade:
        return self.cascade

    @property
    def variants(self) -> tuple[Algorithm, ...]:
        return ()

    def propose(self, params: Params, policy: Any, s: State) -> tuple[Window, Any]:
        check_policy(c := self.cascade, policy)
        assert not jax.tree.leaves(s.policy)
        m, a = self.order, s.algo
        K, B = c.keep if m else 0, s.batch
        root = s.length + jnp.arange(B, dtype=jnp.int32) % c.longest
        grams = jnp.maximum(a.grams[:, :K, :m], 0).reshape(B, K * m)
        barrier = jnp.full((B, 1), c.barrier, jnp.int32)
        places = root[:, None] + 1 + jnp.arange(K * m, dtype=jnp.int32) % max(m, 1)
        return Window(tokens=jnp.concatenate([s.newest[:, None], barrier, grams], 1),
                      positions=jnp.concatenate([s.length[:, None] - 1, root[:, None], places], 1),
                      mask=sight(K, m)[None], live=jnp.broadcast_to(s.running[:, None], (B, 2 + K * m))), a

    def decide(self, params: Params, dist: Any, s: State, window: Window, out: Out, algo: Survivors) -> Decision:
        c, m = self.cascade, self.order
        L, B = c.longest, s.batch
        P = B // L
        group = lambda x: x.reshape(P, L, *x.shape[1:])
        flat = lambda x: x.reshape(B, *x.shape[2:])
        # the barrier before a text moves its tokens one position after their places in it
        dist = dist.replace(predicts=window.positions).warm
        # the last tokens of the n-grams, or the barrier
        leaves = jnp.array([1]) if m == 0 else 1 + m * (1 + jnp.arange(c.keep))
        log_p = dist.log_probs(jnp.broadcast_to(leaves.astype(jnp.int32), (B, len(leaves))))
        works = s.running & (algo.order == m)
        broken = jnp.repeat(jnp.isnan(group(log_p)).any((1, 2, 3)), L) & works
        log_p, bounds = group(log_p), c.bounds(s, dist.policy.eos)

        grams, score = group(algo.grams), group(algo.score)
        if m == 0:
            grams, score = first(log_p[:, :, 0], bounds, c.keep, grams.shape[-1])
        steps = None
        if m > 0 or c.last == 0:
            steps = edges(log_p, grams[..., :max(m, 1)], score, bounds, m)
        if steps is not None and m < c.last:
            grams, score = prune(steps, grams, score, m)
        new = Survivors(order=algo.order + 1, grams=flat(grams), score=flat(score), log_prob=algo.log_prob)
        tokens, count = jnp.zeros((B, L), jnp.int32), jnp.zeros(B, jnp.int32)
        status, noted = jnp.full(B, Status.RUNNING, jnp.int32), None
        if steps is not None and m == c.last:
            text, path, total = best_text(steps, grams[..., :max(m, 1)])
            new = new.replace(log_prob=jnp.repeat(total, L))
            lead = jnp.arange(B) % L == 0
            tokens = jnp.where(lead[:, None], jnp.repeat(text, L, 0), 0)
            dead = jnp.repeat(total == -jnp.inf, L)
            count = jnp.where(lead, jnp.where(dead, 1, (tokens != EPSILON).sum(1)), 0).astype(jnp.int32)
            tokens = jnp.where((lead & dead)[:, None], DEAD_END, jnp.maximum(tokens, 0))
            status = jnp.where(dead & ~lead, Status.DEAD_END, Status.LENGTH).astype(jnp.int32)
            if s.record is not None:
                noted = self._record(dist, group, path, jnp.maximum(text, 0), s.record.count)
        tokens = jnp.where(broken[:, None], INVALID, tokens)
        hold = lambda x, old: jnp.where(works.reshape(-1, *[1] * (x.ndim - 1)), x, old)
        # never 0 or more, but computed from the model's output: XLA's CPU else copies the cache to be safe
        slots = jnp.minimum(jnp.zeros_like(window.tokens) + jnp.argmax(flat(log_p)[:, :1], -1), 0) - 1
        return Decision(tokens=tokens, count=jnp.where(works, jnp.where(broken, 1, count), 0), slots=slots,
                        source=jnp.zeros_like(tokens), algo=jax.tree.map(hold, new, algo), record=noted, idle=~works,
                        status=jnp.where(works, status, Status.RUNNING))

    def _record(self, dist: Any, group: Any, path: Array, text: Array, count: int) -> Any:
        """Returns the log-probabilities of the final text, in the first row of each prompt. The first tokens have
        theirs along the n-gram of the first position, the others at the ends of the n-grams on the path."""
        m, (P, L) = self.order, text.shape
        depth = jnp.arange(m + 1, dtype=jnp.int32)
        at = jnp.pad(path, ((0, 0), (0, L - path.shape[1])))[..., None]                         # [P, L, 1]
        along = jnp.where(depth == 0, 1, 1 + at * m + depth)
        row = jnp.arange(L)[:, None]
        nodes = jnp.where(row == 0, along, along[..., m:]).reshape(P * L, m + 1)
        place = jnp.arange(L)
        pick = lambda x: group(x)[:, jnp.maximum(place - m, 0), jnp.minimum(place, m)]
        found = record(pick(dist.logits(nodes)), pick(dist.log_probs(nodes)), text, count)
        spread = lambda x: jnp.where((jnp.arange(P * L) % L == 0).reshape(-1, *[1] * (x.ndim - 1)), jnp.repeat(x, L, 0),
                                     jnp.zeros((), x.dtype))
        return jax.tree.map(spread, found)


def sight(count: int, length: int) -> Array:
    """Returns the attention mask of a round, `bool[W, W]`, for the newest token, the barrier, and `count` n-grams of
    `length` tokens. N-grams do not attend to each other.

    >>> for row in sight(2, 2).astype(int).tolist():
    ...     print(row)
    [1, 0, 0, 0, 0, 0]
    [1, 1, 0, 0, 0, 0]
    [1, 1, 1, 0, 0, 0]
    [1, 1, 1, 1, 0, 0]
    [1, 1, 0, 0, 1, 0]
    [1, 1, 0, 0, 1, 1]
    """
    which = jnp.concatenate([jnp.array([-2, -1]), jnp.repeat(jnp.arange(count), length)])
    return jnp.tri(2 + count * length, dtype=bool) & ((which < 0) | (which == which[:, None]))


@ALGORITHMS.register("cascade", "Cascaded Text Generation with Markov Transformers", "Deng & Rush 2020",
                     family="search", needs="a model", model="numerals")
def cascade(lm: Any, barrier: TokenId | None = None, orders: Whole = 4, keep: Count = 32, longest: Count = 32,
            lengths: tuple[float, float, int] | None = None) -> Cascade:
    """Finds all positions of a text at once, by Markov models of increasing order.

    For models trained with barriers. A text takes `orders + 1` forward passes, whatever its length.

    Args:
        barrier: id of the barrier token that the model was trained with. None: the tokenizer's <|barrier|>.
        orders: highest Markov order.
        keep: number of n-grams that each position keeps after each order.
        longest: largest number of new tokens of a text.
        lengths: `(a, b, spread)`: for a prompt of `T` tokens, a text has `round(a * T + b) + 1` tokens, plus or minus
            `spread`. None: any length.
    """
    if barrier is None and lm.tokenizer is not None:
        barrier = lm.tokenizer.backend.token_to_id("<|barrier|>")
    if barrier is None:
        raise ValueError("algorithm: 'cascade' needs barrier=, the token that the model was trained with as one; the "
                         "tokenizer has no <|barrier|>")
    return Cascade(barrier, orders, keep, longest, None if lengths is None else TargetLengths(*lengths))
