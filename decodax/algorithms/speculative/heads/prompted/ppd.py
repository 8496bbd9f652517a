"""Parallel prompt decoding: trained prompt tokens after each draft let the target predict further tokens in the forward
pass that verifies ("Hardware-Aware Parallel Prompt Decoding for Memory-Efficient Acceleration of LLM Inference", Chen
et al., 2024).

Every node of the draft tree has prompt tokens of its own. Those of the last accepted node give the next round's
guesses, so drafting has no forward pass and no weights but their embeddings. The paper's prompt tokens may be ensembles
and differ in number between nodes; here each is one, and every node has all of them. Training: distance to the target's
own distribution, at places of a text (`decodax.train.drafting.prompt_tokens`).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafter import TREES
from decodax.algorithms.speculative.fixed_trees import Chain
from decodax.algorithms.speculative.heads.source import HeadWeights, logits_by_depth, spread, trained
from decodax.algorithms.speculative.source import Answer, Level, Shape, Source
from decodax.algorithms.speculative.tree import Probes, Proposal, tree
from decodax.algorithms.speculative.verifier import SeedExact, Verifier
from decodax.common.registry import ALGORITHMS
from decodax.common.struct import Struct, short, struct
from decodax.core.cache import Feature
from decodax.core.composed import data
from decodax.core.loaded import network_of
from decodax.core.state import State
from decodax.core.types import Decision, Out, Params, Transfer, embeddings, logits_of
from decodax.core.window import Window, take
from decodax.models.drafters.prompt_tokens import ProbesHead


@struct
class Prompted(Struct):
    """State of `PromptTokens`.

    Attributes:
        hidden: `f[B, K, D]`, the target's hidden states of which the drafts of each depth are made: those at the probes
            after the last accepted token; zeros before the first round.
    """

    hidden: Array


@dataclasses.dataclass(frozen=True)
class PromptTokens(Source):
    """Drafts with the target's own predictions at trained probes: prompt tokens, or transferred hidden states.

    Attributes:
        model: the target: a `Model`, or the result of `decodax.load`. Its weights are `Params.target`.
        head: the probes after each node.
        weights: their `HeadWeights`.
        vocab_size: number of logits of the target; None: that of the head.
    """

    __repr__ = short

    model: Any
    head: ProbesHead
    weights: Any = data()
    vocab_size: int | None = None
    cache_needs: ClassVar[frozenset[Feature]] = TREES

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", network_of(self.model)[0])

    def for_vocabulary(self, size: int) -> PromptTokens:
        """Returns the drafter for a target with `size` logits; if `vocab_size` is set, it is not changed."""
        return self if self.vocab_size else dataclasses.replace(self, vocab_size=size)

    @property
    def longest(self) -> int:
        return self.head.longest

    def init(self, params: Params, s: State) -> Prompted:
        if not isinstance(params.draft, HeadWeights):
            raise ValueError("params: PromptTokens needs its HeadWeights in Params.draft")
        one = jax.eval_shape(lambda params: embeddings(self.model, params.target, jnp.zeros((1, 1), jnp.int32)), params)
        return Prompted(hidden=jnp.zeros((s.batch, self.longest, one.shape[-1]), one.dtype))

    def start(self, params: Params, s: State, state: Prompted, room: int) -> tuple[Prompted, Answer]:
        hidden = state.hidden[:, :1]
        return state, Answer(self._logits(params, hidden), hidden)

    def extend(self, params: Params, s: State, state: Prompted, level: Level) -> tuple[Prompted, Answer]:
        hidden, logits = logits_by_depth(state.hidden, level.positions - s.length[:, None] + 1,
                                         functools.partial(self._logits, params))
        return state, Answer(logits, hidden)

    def probes(self, params: Params, s: State, state: Prompted, proposal: Proposal) -> Probes | None:
        t, K = tree(s.newest, proposal, self.head.heads), self.head.heads
        node, index = np.divmod(np.arange(t.size * K), K)
        own = (node[:, None] == node) & (index <= index[:, None])
        above = jnp.asarray(t.sees)[:, node]
        sees = jnp.concatenate([above, jnp.broadcast_to(own, (above.shape[0], *own.shape))], 2)
        vectors, transfer = self.head.inputs(params.draft.head, jnp.arange(t.size, dtype=jnp.int32)[None])
        return Probes(tokens=jnp.zeros((s.batch, len(node)), jnp.int32), sees=sees,
                      offset=jnp.asarray(t.depth)[:, node] + 1 + index.astype(np.int32),
                      embeddings=None if vectors is None else vectors[index][None], transfer=transfer)

    def observe(self, params: Params, s: State, window: Window, out: Out, decision: Decision | None,
                state: Prompted) -> Prompted:
        if decision is None or (window.embedded is None and window.hint(Transfer) is None):
            return state                    # of a window that another drafter has proposed
        K = self.head.heads
        last = jnp.maximum(decision.count - 1, 0)[:, None]
        node = jnp.maximum(jnp.take_along_axis(decision.source, last, 1), 0)
        found = take(out.hidden, window.width // (1 + K) + node * K + jnp.arange(K, dtype=jnp.int32))
        return Prompted(hidden=jnp.where((decision.count > 0)[:, None, None], found, state.hidden))

    def _logits(self, params: Params, hidden: Array) -> Array:
        return spread(logits_of(self.model, params.target, hidden), None, self.vocab_size)


@ALGORITHMS.register("ppd",
                     "Hardware-Aware Parallel Prompt Decoding for Memory-Efficient Acceleration of LLM Inference",
                     "Chen et al. 2024", family="speculative-tree", needs="a trained drafter", guarantee="seed-exact")
def ppd(lm: Any, draft: Any = None, shape: Shape | None = None, verify: Verifier | None = None) -> Speculative:
    """Drafts with the target itself, by trained prompt tokens after each draft.

    A few embeddings are all that is trained and kept in memory. Forward passes are wide: each draft takes its prompt
    tokens along.

    Args:
        lm: the target.
        draft: a drafter from `decodax.load_drafter`; None: the shipped one.
        shape: shape of the draft tree; None: a chain with a draft for each prompt token.
        verify: the rule that accepts drafts; None: seed-exact.
    """
    source = prompt_tokens(lm, draft, "ppd")
    return Speculative(source, verify or SeedExact(), shape or Chain(source.longest))


def prompt_tokens(lm: Any, draft: Any, *systems: str) -> PromptTokens:
    """Returns the source of drafts for a target, from trained probes; the arguments are those of `trained`.

    Raises:
        ValueError: as in `trained`, or the drafter has a network.
    """
    made = trained(lm, draft, *systems)
    if not isinstance(made.head, ProbesHead):
        raise ValueError(f"draft: got one with a {type(made.head).__name__}, {systems[0]!r} takes trained probes")
    return PromptTokens(made.model, made.head, made.weights)
