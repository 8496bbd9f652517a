"""Mixture of Attentions: drafts attend to one vector for each verified token, made of the target's keys and values in
all layers ("Mixture of Attentions For Speculative Decoding", Zimmer et al., 2024).

The vectors are computed once, after verification, from the keys and values that the target returns for its cache. With
`MixtureHead.above` the last layers of the target run on the drafts, too (target layer inference): they attend to its
cache of the verified text, and to keys and values of the drafts. The paper's client and server are not separated."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafts.self.self_draft import whole_text
from decodax.algorithms.speculative.fixed_trees import Chain
from decodax.algorithms.speculative.heads.cross_kv import CrossKVDraft, CrossState
from decodax.algorithms.speculative.source import Answer, Level, Shape
from decodax.algorithms.speculative.trees.eagle2 import ConfidenceTree
from decodax.algorithms.speculative.verifier import SeedExact, Verifier
from decodax.cache.entry import KVEntry
from decodax.cache.views import whole_entry
from decodax.common.options import Count, Whole
from decodax.common.registry import ALGORITHMS
from decodax.common.struct import short, struct
from decodax.core.cache import Cache
from decodax.core.capabilities import Draftable, tree_buffer
from decodax.core.state import State
from decodax.core.types import Out, Params
from decodax.core.window import Window, causal, take
from decodax.models.drafters.head import DraftHead
from decodax.models.drafters.mixture import MixtureHead


@struct
class MixtureState(CrossState):
    """State of `MixtureDraft` within a round: the fields of `CrossState` (the head's cache, the buffer of the draft
    tree's nodes, ...), and one more.

    Attributes:
        above: keys and values of the nodes in the target's last layers.
    """

    above: Draftable | None = None


@dataclasses.dataclass(frozen=True)
class MixtureDraft(CrossKVDraft):
    """Drafts with a mixture-of-attentions head (`MixtureHead`), which attends to the target's cache. Its own cache has
    a second layer, the keys and values of its cross-attention. The attributes are those of `CrossKVDraft`: the target,
    the head's network and its weights."""

    __repr__ = short

    head: MixtureHead
    takes: ClassVar[tuple[type[DraftHead], str]] = MixtureHead, "one with a MixtureHead"
    defers: ClassVar[bool] = False      # it reads the entries of the target's cache

    @property
    def takes_gaps(self) -> bool:
        return False

    def start(self, params: Params, s: State, state: CrossState, room: int) -> tuple[CrossState, Answer]:     # type: ignore[override]
        state, answer = super().start(params, s, state, room)
        if not self.head.above:
            return state, answer
        window = causal(s.newest[:, None], s.length - 1)
        out = self._run_above(params, window, answer.hidden, whole_text(s))
        above = tree_buffer(whole_text(s), out.entries, 1 + room)
        above = above.append(out.entries, window.positions, jnp.zeros((), jnp.int32)).replace(base=None)
        return (MixtureState(cache=state.cache, buffer=state.buffer, skipped=state.skipped, above=above),
                Answer(self._logits(params, out.hidden, 0), out.hidden))

    def extend(self, params: Params, s: State, state: CrossState, level: Level) -> tuple[CrossState, Answer]:     # type: ignore[override]
        state, answer = super().extend(params, s, state, level)
        if not isinstance(state, MixtureState):
            return state, answer
        assert state.above is not None
        window = Window(tokens=level.tokens, positions=level.positions, mask=level.inside,
                        live=jnp.ones(level.tokens.shape, bool))
        sees = jnp.pad(level.sees, ((0, 0), (0, 0), (1, 0)), constant_values=True)  # all are below the newest token
        out = self._run_above(params, window, answer.hidden, state.above.replace(base=whole_text(s)).seen_by(sees))
        above = state.above.append(out.entries, level.positions, level.at + 1)
        return state.replace(above=above), Answer(self._logits(params, out.hidden, 0), out.hidden)

    def _run_above(self, params: Params, window: Window, hidden: Any, cache: Any) -> Out:
        """Runs the target's last layers on the head's output."""
        window = window.replace(embeddings=hidden, embedded=jnp.ones(window.tokens.shape, bool))
        return self.model.apply(params.target, window, cache, self.head.keep)

    def _known(self, s: State, cache: Cache) -> tuple[Cache, int]:
        return cache, 1

    def _entries(self, params: Params, tokens: Array, positions: Array, out: Out,
                 source: Array | None) -> tuple[Any, ...]:
        shape = (*out.hidden.shape[:2], self.head.kv_layers[0].heads, self.head.kv_layers[0].width)
        held = [whole_entry(entry) for entry in out.entries]
        if any(not isinstance(entry, KVEntry) or entry.keys.shape != shape or entry.values.shape != shape
               for entry in held):
            raise ValueError("cache: the head reads the target's keys and values in the entries of its cache, which "
                             "has others; takes a dense cache")
        pairs = {i: entry.pair for i, entry in enumerate(held)}
        pairs = pairs if source is None else jax.tree.map(lambda x: take(x, source), pairs)
        return (*super()._entries(params, tokens, positions, out, source),
                KVEntry(*self.head.known(params.draft.head, pairs, positions)))


@ALGORITHMS.register("mixture-of-attentions", "Mixture of Attentions For Speculative Decoding", "Zimmer et al. 2024",
                     family="speculative-tree", needs="a trained drafter", guarantee="seed-exact")
def mixture_of_attentions(lm: Any, draft: Any = None, length: Count = 6, nodes: Whole = 60, width: Count = 10,
                          shape: Shape | None = None, verify: Verifier | None = None) -> Speculative:
    """Drafts the tree of which a head on the keys and values of all the target's layers is most confident.

    Args:
        lm: the target.
        draft: a drafter from `decodax.load_drafter`; None: the one shipped for the target, if any.
        length: number of levels.
        nodes: number of drafts to verify; 0: a chain of `length`.
        width: number of nodes expanded in a level, and of children of each.
        shape: another shape of the draft tree.
        verify: the rule that accepts drafts; None: seed-exact.
    """
    tree = shape or (ConfidenceTree(nodes, length, width) if nodes else Chain(length))
    return Speculative(MixtureDraft.trained(lm, draft, "mixture-of-attentions"), verify or SeedExact(), tree)
