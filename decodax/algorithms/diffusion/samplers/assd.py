"""ASSD, any-subset speculative decoding ("Reviving Any-Subset Autoregressive Models with Principled Parallel Sampling
and Speculative Decoding", Guo and Ermon, 2025): a model that gives the distribution of any token after any subset of
the others fills the gaps of a text, or continues it, in fewer forward passes than tokens.

Such a model has two streams, as XLNet (Yang et al., 2019). A node of the first stands for a known token and attends to
the known tokens before it in the order of decoding. A node of the second has the mask token at the position of a token
that is asked for, attends to the known tokens before that one, and predicts it. Both are nodes of one window here, so
any network that obeys the window's mask can be tuned for it (`decodax.train.tuning.AnySubsetLoss`). Given tokens come
first and attend to each other; gaps are filled from left to right, as in the paper's experiments.

A draft pass asks for the next `k` gaps after the known tokens alone. The first of these tokens is the model's own; the
others are drafts. A verify pass asks for each of them after the ones before it. Each pass decides at least one token,
so there are never more forward passes than tokens, the paper's theorem. Three things are saved here:

- Entries of known tokens stay in the cache, since no later token changes what they attend to. The first pass computes
  those of the given tokens.
- The verify pass also asks for the `k` gaps after the drafts. If all drafts are accepted, it was a draft pass, too.
- A draft is accepted if the model draws it again with the same random numbers, in place of a test by the ratio of both
  probabilities. So the text is that of one token a forward pass with the same seed, and no distribution is kept.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.algorithms.diffusion.adapter import Adapter, FillsCanvas
from decodax.algorithms.diffusion.canvas import cut
from decodax.algorithms.diffusion.policies import BudgetSized
from decodax.algorithms.diffusion.predict import Decided
from decodax.common.options import Count
from decodax.common.registry import ALGORITHMS
from decodax.common.struct import Struct, struct
from decodax.constraints.canvas import OnCanvas
from decodax.core import keys
from decodax.core.algorithm import Algorithm, Traits, Varies
from decodax.core.around import Around
from decodax.core.keys import Purpose
from decodax.core.record import Record, empty_record, record
from decodax.core.state import State
from decodax.core.types import Decision, Out, Params
from decodax.core.window import Window, take
from decodax.sampling.draw import draw


@struct
class Gaps(Struct):
    """The text of each row by absolute position, with its gaps.

    Attributes:
        tokens: `i32[B, N]`; a gap has the mask token until it is filled.
        open: `bool[B, N]`, gaps that are not filled yet.
        end: `i32[B]`, end of the text.
        order: `i32[B, N]`, positions of the gaps from left to right, filled ones too, then the others.
        count, filled: `i32[B]`, number of gaps, and of filled ones.
        begun: `bool[B]`, True if the given tokens are in the cache.
        drafts: `i32[B, D]`, drafts for the next gaps.
        drafted: `bool[B]`, True if there are drafts.
        record: log-probabilities by position, or None.
    """

    tokens: Array
    open: Array
    end: Array
    order: Array
    count: Array
    filled: Array
    begun: Array
    drafts: Array
    drafted: Array
    record: Record | None

    def at(self, index: Array) -> tuple[Array, Array]:
        """Returns the absolute positions of gaps, `i32[B, n]`, and whether these exist, `bool[B, n]`. `index` (`i32[B,
        n]`) are their numbers in the order of decoding, from 0."""
        return take(self.order, jnp.clip(index, 0, self.order.shape[1] - 1)), index < self.count[:, None]

    @property
    def known(self) -> Array:
        """Positions of the text that have a token, given or decoded: `bool[B, N]`."""
        return ~self.open & (jnp.arange(self.tokens.shape[1]) < self.end[:, None])


@dataclasses.dataclass(frozen=True)
class AnySubset(BudgetSized, Varies, FillsCanvas):
    """Any-subset speculative decoding.

    Attributes:
        adapter: the mask token, and the canvas.
        k: number of tokens that a draft pass asks for.
        draft: "model": drafts of the model itself; "ngram": drafts by the bigrams of the text, without draft passes.
        size: maximum number of tokens after the first gap of a text with given tokens there; None until `with_length`
            sets it.
    """

    adapter: Adapter
    k: int = 10
    draft: Literal["model", "ngram"] = "model"
    size: int | None = None

    @property
    def drafts(self) -> int:
        """Number of drafted tokens that one forward pass verifies: `k`, or `k - 1` with drafts of the model itself."""
        return self.k - 1 if self.draft == "model" else self.k

    @property
    def ahead(self) -> int:
        """Number of gaps after the drafts for which a forward pass computes logits: 1 for the next token, and with
        drafts of the model itself `k - 1` more, from which the next drafts are drawn."""
        return self.k if self.draft == "model" else 1

    @property
    def width(self) -> int:
        """Largest number of tokens that a round emits: one more than the number of drafts; in infilling also the given
        tokens after a gap, which are emitted with it."""
        least = self.drafts + 1
        return max(least, self.size or 1) if self.adapter.canvas.given else least

    def with_length(self, budget: int) -> AnySubset:
        return super().with_length(budget) if self.adapter.canvas.given else self

    @property
    def traits(self) -> Traits:
        return Traits(emits=self.width, guarantee="seed-exact", canvas=True, prefills=False,
                      needs=frozenset(("trees", "subsets", "rewrites")), refuses=(
                          ("guidance_scale", "got one with assd, which takes none"),
                          ("constraint", "got one with assd, whose tokens are those of the model one after another; "
                                         "takes None")))

    @property
    def variants(self) -> tuple[Algorithm, ...]:
        return Pass(self, first=True), Pass(self, first=False)

    def choose(self, params: Params, policy: Any, s: State) -> Array:
        return jnp.where((s.running & ~s.algo.begun).any(), 0, 1)

    def init(self, params: Params, s: State) -> Gaps:
        B, N = s.tokens.shape
        tokens, open = self.adapter.canvas.fill(self.adapter, s.tokens, s.prompt_length, s.key)
        end = jnp.minimum(s.max_length, N - self.width)
        open &= jnp.arange(N) < end[:, None]
        return Gaps(tokens=tokens, open=open, end=end, order=jnp.argsort(~open, axis=1, stable=True).astype(jnp.int32),
                    count=open.sum(1, dtype=jnp.int32), filled=jnp.zeros(B, jnp.int32), begun=jnp.zeros(B, bool),
                    drafts=jnp.zeros((B, self.drafts), jnp.int32), drafted=jnp.zeros(B, bool),
                    record=None if s.record is None else empty_record((B, N), s.record.count))

    def propose(self, params: Params, policy: Any, s: State) -> tuple[Window, Gaps]:
        return self.variants[0].propose(params, policy, s)

    def decide(self, params: Params, dist: Any, s: State, window: Window, out: Out, algo: Gaps) -> Decision:
        return self.variants[0].decide(params, dist, s, window, out, algo)


@dataclasses.dataclass(frozen=True)
class Pass(Around):
    """A forward pass: the first one, over the given tokens, or one that verifies drafts or makes them, in each row what
    comes next.

    Its window has known tokens and drafts, then nodes that ask: for each draft, and for the gaps after them.

    Attributes:
        of: the method.
        first: whether it is the first one.
    """

    of: Algorithm
    first: bool

    @property
    def inner(self) -> Any:
        return self.of

    @property
    def variants(self) -> tuple[Algorithm, ...]:
        return ()

    def _turn(self, s: State) -> Array:
        """Returns the rows that take part, `bool[B]`."""
        return s.running & (s.algo.begun != self.first)

    def propose(self, params: Params, policy: Any, s: State) -> tuple[Window, Gaps]:
        c: Gaps = s.algo
        D, F, S = self.inner.drafts, self.inner.ahead, c.tokens.shape[1] - self.inner.width
        if self.first:
            D, place = 0, jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (s.batch, S))
            texts, live = c.tokens[:, :S], c.known[:, :S]
            sees, cached = np.ones((S, S), bool), jnp.zeros((s.batch, 0), bool)
        else:
            place, live = c.at(c.filled[:, None] - 1 + jnp.arange(1 + D))       # the newest token, then the drafts
            live &= c.drafted[:, None] | (jnp.arange(1 + D) == 0)
            texts = jnp.concatenate([take(c.tokens, place[:, :1]), c.drafts], 1)
            sees = np.tril(np.ones((1 + D, 1 + D), bool))
            cached = c.known[:, :S] & (jnp.arange(S) != place[:, :1])
        after, exists = c.at((c.filled + jnp.where(c.drafted, D, 0))[:, None] + jnp.arange(F))
        n, asks = sees.shape[0], D + F
        mask = np.zeros((n + asks, n + asks), bool)
        mask[:n, :n] = sees
        mask[n:, :n] = np.concatenate([sees[:D], np.ones((F, n), bool)])
        mask[n:, n:] = np.eye(asks, dtype=bool)
        own = slice(n - D, n)       # nodes of the drafts
        blank = jnp.full((s.batch, asks), self.inner.adapter.blank, jnp.int32)
        return Window(tokens=jnp.concatenate([jnp.maximum(texts, 0), blank], 1), mask=jnp.asarray(mask)[None],
                      positions=jnp.concatenate([place, place[:, own], after], 1), cached=cached,
                      live=jnp.concatenate([live, live[:, own], exists], 1) & self._turn(s)[:, None]), c

    def decide(self, params: Params, dist: Any, s: State, window: Window, out: Out, algo: Gaps) -> Decision:
        c, of, turn = algo, self.inner, self._turn(s)
        D, F = of.drafts, of.ahead
        B, asks = s.batch, F if self.first else D + F
        n = window.width - asks
        nodes = jnp.broadcast_to(jnp.arange(n, n + asks, dtype=jnp.int32), (B, asks))
        here = self._distribution(dist, s, c, window, out)
        token = here.draw(nodes, Purpose.TOKEN)

        # the model's tokens at the drafts, up to the first one that differs, or the next token after all of them
        own = jnp.pad(token[:, :asks - F], ((0, 0), (0, D - (asks - F))))
        left = c.count - c.filled
        index = jnp.arange(D + 1, dtype=jnp.int32)
        holds = (own == c.drafts) & c.drafted[:, None] & (index[:D] < left[:, None])
        accepted = jnp.cumprod(holds, 1).sum(1, dtype=jnp.int32)
        next_ = jnp.where(c.drafted, D, 0)[:, None]
        source = jnp.where(index < next_, index, asks - F)
        new = jnp.where(turn, jnp.minimum(accepted + 1, left), 0)
        place = jnp.where(index < new[:, None], c.at(c.filled[:, None] + index)[0], c.tokens.shape[1])
        put = lambda old, x: jax.vmap(lambda row, at, x: row.at[at].set(x, mode="drop"))(old, place, x)
        tokens = put(c.tokens, take(token, source))
        again = c.replace(tokens=tokens, open=put(c.open, jnp.zeros(place.shape, bool)), filled=c.filled + new,
                          begun=c.begun | turn)
        if c.record is not None:
            note = record(here.logits(nodes), here.log_probs(nodes), token, c.record.count)
            again = again.replace(record=jax.tree.map(lambda old, x: put(old, take(x, source)), c.record, note))
        if of.draft == "ngram":
            size = jax.eval_shape(out.head, out.hidden).shape[-1]
            drafts, drafted = bigrams(again, s.key, of.drafts, dist.policy.greedy, size), jnp.ones(B, bool)
        else:
            drafts, drafted = token[:, asks - F + 1:], ~c.drafted | (accepted == D)
        again = again.replace(drafts=jnp.where(turn[:, None], drafts, c.drafts),
                              drafted=jnp.where(turn, drafted, c.drafted))

        position = window.positions[:, :n]
        keep = position >= 0 if self.first else jnp.arange(n) <= accepted[:, None]
        keep &= window.live[:, :n] & (token[:, :1] >= 0)        # the slots depend on the output, see `Decision.slots`
        start, exists = again.at(again.filled[:, None])
        front = jnp.where(exists, start, again.end[:, None])[:, 0]      # all before the next gap is final
        return Decision(
            tokens=cut(tokens, s.length, of.width), count=jnp.where(turn, jnp.clip(front - s.length, 0, of.width), 0),
            slots=jnp.pad(jnp.where(keep, position, -1), ((0, 0), (0, asks)), constant_values=-1),
            source=jnp.zeros((B, of.width), jnp.int32), algo=again, accepted=jnp.where(turn, accepted, 0),
            drafted=jnp.where(turn & c.drafted, jnp.minimum(D, left), 0), idle=~turn,
            record=None if again.record is None else jax.tree.map(lambda x: cut(x, s.length, of.width), again.record))

    def _distribution(self, dist: Any, s: State, c: Gaps, window: Window, out: Out) -> Any:
        """Returns the policy's distributions of the tokens at the window's positions."""
        assert not any(isinstance(t, OnCanvas) for t in dist.policy.transforms)
        text = Decided(tokens=jnp.where(c.known, c.tokens, -1), length=jnp.full(s.batch, c.tokens.shape[1], jnp.int32),
                       prompt_length=s.prompt_length, key=s.key, policy=s.policy)
        asks = self.inner.ahead if self.first else self.inner.drafts + self.inner.ahead
        known = jnp.broadcast_to(jnp.arange(window.width) < window.width - asks, window.tokens.shape)
        out = dataclasses.replace(out, head=self.inner.adapter.clean(out.head))
        return dist.policy.over(text, window, out).on_canvas(known, window.positions)


def bigrams(c: Gaps, key: Array, count: int, greedy: Array, vocabulary: int) -> Array:
    """Returns drafts for the next gaps, `i32[B, count]`, each drawn by how often tokens follow the one before it in the
    known text; if none does, by how often they occur at all. The random numbers are those of the model's draw."""
    known = c.known
    before, after = jnp.where(known, c.tokens, -1)[:, :-1], jnp.where(known, c.tokens, -1)[:, 1:]
    B = len(before)
    rows = jnp.arange(B)[:, None]
    counts = lambda tokens, which: jnp.zeros((B, vocabulary)).at[rows, jnp.maximum(tokens, 0)].add(which)
    every = counts(c.tokens, known)
    drafts: list[Array] = []
    for i in range(count):
        place = c.at(c.filled[:, None] + i)[0]
        last = take(c.tokens, jnp.maximum(place - 1, 0))
        if i:       # before an open gap another one was drafted
            last = jnp.where(take(c.open, jnp.maximum(place - 1, 0)), drafts[-1], last)
        pairs = counts(after, (before == last) & (before >= 0) & (after >= 0))
        some = jnp.log(jnp.where(pairs.any(1, keepdims=True), pairs, every))[:, None]
        drafts.append(draw(some, keys.addresses(key, place, Purpose.TOKEN), (greedy[:, None], some)))
    return jnp.concatenate(drafts, 1)


@ALGORITHMS.register("assd", "Reviving Any-Subset Autoregressive Models with Principled Parallel Sampling and "
                     "Speculative Decoding", "Guo and Ermon 2025", family="masked-diffusion",
                     needs="a diffusion model", guarantee="seed-exact")
def assd(lm: Any, k: Count = 10, draft_source: Literal["model", "ngram"] = "model") -> AnySubset:
    """Fills gaps from left to right, several tokens in a forward pass, with the text of one token after another.

    For any-subset models. In `dx.infill` every gap sees all given tokens, also those after it; `dx.generate` continues
    a text. Each token has the model's distribution after all tokens before it in the order of decoding, in
    no more forward passes than tokens. Constraints, guidance and transforms that read a text in its order are refused.
    No shipped model is one. This tunes `pycode` and writes it to `runs/pycode-any-subset/model`:

        python scripts/train.py tune --objective any-subset --target pycode --data src/*.py

    Args:
        k: number of tokens that are drafted at once, the paper's k (theirs: 10 to 15). 1: one token a forward pass.
        draft_source: "model": drafts of the model itself. "ngram": drafts by the bigrams of the text, which cost no
            forward pass.
    """
    d = lm.diffusion
    if d is None or d.attention != "any-subset":
        raise ValueError(f"lm: got {lm.name!r}, takes an any-subset model, as scripts/train.py tune --objective "
                         "any-subset makes it")
    return AnySubset(Adapter(d.mask), k, draft_source)
