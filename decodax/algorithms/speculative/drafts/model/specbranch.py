"""SpecBranch: while the target verifies, the draft model continues several possible tokens at once ("SpecBranch:
Speculative Decoding via Hybrid Drafting and Rollback-Aware Branch Parallelism", Shen et al., 2025).

As in PEARL, the draft model works one round ahead of the target. It continues from the *branch point*, the position
after the last pending draft: there it takes the `branches` most likely tokens and makes a continuation of each. If all
pending drafts are accepted and the target's own token after them is one of the branch tokens, its continuation is
pending in the next round, and nothing is rolled back. Otherwise all continuations are dropped.

The number of tokens of a continuation that become pending sets the next branch point. It is chosen so that a likely
rejection falls on the branch point, for which several tokens are prepared:

- By the draft model's confidence, the probability of its most likely token: the pending drafts end before the first
  token below `threshold`. As in the authors' code the first token is not tested.
- With `lengths` (H-RAD), a classifier predicts from the target's hidden states whether the target will reject all of
  the continuation (then nothing is pending, and the branch point is right after the target's token), accept all of it
  (then all of it is pending), or neither, in which case the confidence decides.

Neither model needs the other's results of the round, so the two can run at the same time on separate devices
(`decodax.algorithms.speculative.halves`). On the same devices one runs after the other, with the same result.

The authors accept the most likely branch token under the target with probability p / q, and otherwise draw from the
residual. Since their branches are the most likely tokens and not draws, this keeps the target's distribution only for
greedy decoding. Here the target draws its own token, and the branch with this token continues: the guarantee is that of
the verifier, and no rule accepts a set of deterministic candidates more often. All `branches` continuations are made in
each round, as in their code, since a program with a fixed width saves nothing with fewer.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, ClassVar

import jax.numpy as jnp
from jax import Array

from decodax.algorithms.speculative.adaptive.lengths import Lengths
from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafter import AroundSource
from decodax.algorithms.speculative.drafts.model.draft_model import DraftModel
from decodax.algorithms.speculative.source import Draft, Grower, Source, fitted
from decodax.algorithms.speculative.tree import Drawn, Proposal
from decodax.common.options import Count, Range, Share, check_options
from decodax.common.registry import ALGORITHMS
from decodax.common.struct import Struct, struct
from decodax.core.state import State
from decodax.core.types import Decision, Out, Params
from decodax.core.window import Window, take


@struct
class Branches(Struct):
    """State of `SpecBranch`; `K` is gamma - 1.

    Attributes:
        source: the state of the source.
        waiting: `i32[B, K]`, the continuation that may be pending.
        sure: `i32[B]`, number of its tokens before the confidence falls below the threshold.
        waits: `bool[B]`, True if it is pending.
        offered: `i32[B]`, number of drafts that are verified in this round.
        seen: `f32[B, F]`, features of the target for the classifier; F is 0 without one.
        heads: `i32[B, k]`, tokens at the branch point, -1 for none.
        rest: `i32[B, k, K]`, continuation of each.
        confident: `i32[B, k]`, number of tokens of each continuation before the confidence falls below the threshold.
    """

    source: Any
    waiting: Array
    sure: Array
    waits: Array
    offered: Array
    seen: Array
    heads: Array
    rest: Array
    confident: Array


@dataclasses.dataclass(frozen=True)
class SpecBranch(AroundSource, Draft):
    """Drafts chains of a source that are made one round ahead, for several tokens that the target may choose (Shen et
    al., 2025).

    Attributes:
        source: a `Source` that supports `chained` levels, such as `DraftModel`.
        gamma: number of tokens that the source makes in a round, at least 2.
        branches: number of branch tokens.
        threshold: confidence below which pending drafts end, from 0 (never) to 1.
        lengths: the classifier of H-RAD, from `fit_lengths`; None: confidence alone.
        written: fields of the state that `write` sets beside `source` and that the target's devices need. Only the
            draft model's devices need `source`.

    Raises:
        ValueError: a number out of range.
    """

    source: Source
    gamma: Annotated[int, Range(2)] = 4
    branches: Count = 3
    threshold: Share = 0.4
    lengths: Lengths | None = None
    written: ClassVar[tuple[str, ...]] = ("heads", "rest", "confident")

    def __post_init__(self) -> None:
        check_options(type(self), vars(self))

    @property
    def length(self) -> int:
        return self.gamma - 1

    @property
    def prefill_observer(self) -> SpecBranch | None:
        return None if self.source.prefill_observer is None else self

    @property
    def weights(self) -> Any:
        own = self.source.weights
        return own if self.lengths is None else {"source": own, "lengths": self.lengths.weights}

    def bare(self) -> SpecBranch:
        lengths = None if self.lengths is None else self.lengths.bare()
        return dataclasses.replace(self, source=self.source.bare(), lengths=lengths)

    def check_fit(self, model: Any, cache: Any) -> None:
        super().check_fit(model, cache)
        self.source.check_chained()

    def init(self, params: Params, s: State) -> Branches:
        K, k, zeros = self.length, self.branches, lambda *more: jnp.zeros((s.batch, *more), jnp.int32)
        features = 0 if self.lengths is None else self.lengths.features(params.draft["lengths"])
        return Branches(source=self.source.init(self._own(params), s), waiting=zeros(K), sure=zeros(),
                        waits=jnp.zeros(s.batch, bool), offered=zeros(), heads=zeros(k), rest=zeros(k, K),
                        confident=zeros(k), seen=jnp.zeros((s.batch, features), jnp.float32))

    def propose(self, params: Params, policy: Any, s: State, state: Any, drawn: Drawn) -> tuple[Proposal, Any]:
        proposal, state = self.offer(params, s, state)
        return proposal, self.write(params, policy, s, state, drawn)

    def offer(self, params: Params, s: State, state: Branches) -> tuple[Proposal, Branches]:
        """Returns the drafts of this round, which the last round has prepared (none if they do not continue the text),
        and the state with their number. It runs no model."""
        count = state.sure
        if self.lengths is not None:
            kind = self.lengths.classify(params.draft["lengths"], state.seen, s.newest)
            count = jnp.stack([jnp.zeros_like(count), count, jnp.full_like(count, self.length)], 1)
            count = take(count, kind[:, None])[:, 0]
        count = jnp.where(state.waits, count, 0)
        live = jnp.arange(self.length) < count[:, None]
        return Proposal(tokens=state.waiting, live=live), state.replace(offered=count)

    def write(self, params: Params, policy: Any, s: State, state: Branches, drawn: Drawn) -> Branches:
        """Prepares the drafts of the next round: runs the draft model after each of the tokens with which the target
        may end this round (the branches). Returns the state with new `source`, `heads`, `rest` and `confident`."""
        source, K, k, n = fitted(self.source, policy.vocab_size), self.length, self.branches, state.offered
        grower = Grower(source, self._own(params), policy, s, drawn).ranked     # the branches are no draws
        # the pending drafts are in slots 1 to K; nothing goes on from others there
        g, first = grower.start(state.source, K + k * K, k)
        g, behind = grower.expand(g, state.waiting, jnp.zeros((1, 1), jnp.int32), k, chained=True)
        places = jnp.concatenate([first.tokens, behind.tokens], 1), jnp.concatenate([first.live, behind.live], 1)
        heads, live = (take(x, n[:, None])[:, 0] for x in places)
        tokens, parents, rest, trust = heads, jnp.broadcast_to(n[:, None], heads.shape), [], []
        for i in range(K):
            g, after = grower.expand(g, tokens, parents, 1)
            tokens = after.tokens[:, :, 0]
            parents = jnp.broadcast_to(1 + K + i * k + jnp.arange(k, dtype=jnp.int32), heads.shape)
            rest.append(tokens)
            trust.append(jnp.exp(after.log_own.max(-1)) >= self.threshold if i else jnp.ones(heads.shape, bool))
        nodes = jnp.concatenate([jnp.arange(1, K + 1, dtype=jnp.int32), jnp.full(k * K, -1, jnp.int32)])[None]
        confident = jnp.cumprod(jnp.stack(trust, -1).astype(jnp.int32), -1).sum(-1, dtype=jnp.int32)
        return state.replace(source=source.place(g.source, nodes), heads=jnp.where(live, heads, -1),
                             rest=jnp.stack(rest, -1), confident=confident)

    def observe(self, params: Params, s: State, window: Window, out: Out, decision: Decision | None, state: Any) -> Any:
        return self.learn(params, s, window, out, decision, self.look(out, decision), state)

    def look(self, out: Out, decision: Decision | None) -> Any:
        """Returns the target's features at the last accepted token, `f32[B, F]`, from which the classifier `lengths`
        predicts; None without a classifier or after a prefill chunk."""
        if self.lengths is None or decision is None or decision.accepted is None:
            return None
        return self.lengths.read(out, take(decision.source, decision.accepted[:, None])[:, 0])

    def learn(self, params: Params, s: State, window: Window, out: Out, decision: Decision | None, seen: Any,
              state: Branches) -> Branches:
        """Returns the state after a round: selects the prepared branch that begins with the target's token, if there is
        one.

        The arguments are those of `Drafter.observe` (weights, state before the round, window, the target's output,
        decision), and `seen`, the result of `look`. `out` is passed to the source only.
        """
        source = self.source.observe(self._own(params), s, window, out, decision, state.source)
        if decision is None or decision.accepted is None:
            return state.replace(source=source, waits=jnp.zeros_like(state.waits))
        own = take(decision.tokens, decision.accepted[:, None])
        prepared = state.heads == own
        whole = decision.count == decision.accepted + 1         # a cache may cut what was accepted
        branch = jnp.argmax(prepared, 1).astype(jnp.int32)[:, None]
        return state.replace(
            source=source, waits=(decision.accepted == state.offered) & whole & prepared.any(1),
            waiting=take(state.rest, branch)[:, 0], sure=take(state.confident, branch)[:, 0],
            seen=state.seen if seen is None else seen)

    def _own(self, params: Params) -> Params:
        return params if self.lengths is None else params.replace(draft=params.draft["source"])


@ALGORITHMS.register("specbranch",
                     "SpecBranch: Speculative Decoding via Hybrid Drafting and Rollback-Aware Branch Parallelism",
                     "Shen et al. 2025", family="speculative-linear", needs="a draft model", guarantee="seed-exact")
def specbranch(draft: Any, gamma: Annotated[int, Range(2)] = 4, branches: Count = 3, threshold: Share = 0.4,
               lengths: Lengths | None = None) -> Speculative:
    """Continues several likely tokens with the draft model while the target verifies.

    Like `pearl`, with fewer rollbacks. It pays if each model has devices of its own; see
    `decodax.algorithms.speculative.apart`.

    Args:
        draft: the draft model.
        gamma: number of tokens that the draft model makes in a round.
        branches: number of tokens that it continues.
        threshold: confidence of the draft model below which pending drafts end; 0: never.
        lengths: classifier of draft lengths (H-RAD), from `decodax.train.fit_lengths`; None: confidence alone.
    """
    return Speculative(SpecBranch(DraftModel(draft), gamma, branches, threshold, lengths))
