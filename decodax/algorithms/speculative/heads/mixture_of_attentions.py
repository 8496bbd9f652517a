"""Mixture of Attentions: drafts attend to one vector for each verified token, made of the target's keys and values in
all layers ("Mixture of Attentions For Speculative Decoding", Zimmer et al., 2024).

The vectors are computed once, after verification, from the keys and values that the target returns for its cache. Here
no layers of the target run while drafting, as with the paper's N = 0; its client and server are not separated."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
from jax import Array

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.fixed_trees import Chain
from decodax.algorithms.speculative.heads.cross_kv import CrossKVDraft, cross_kv
from decodax.algorithms.speculative.source import Shape
from decodax.algorithms.speculative.trees.eagle2 import ConfidenceTree
from decodax.algorithms.speculative.verifier import SeedExact, Verifier
from decodax.common.options import Count, Whole
from decodax.common.registry import ALGORITHMS
from decodax.common.struct import short
from decodax.core.cache import Cache
from decodax.core.state import State
from decodax.core.types import Out, Params
from decodax.core.window import take
from decodax.models.drafters.mixture import MixtureHead


@dataclasses.dataclass(frozen=True)
class MixtureDraft(CrossKVDraft):
    """Drafts with a `MixtureHead`, whose cache has a second layer: the keys and values of its cross-attention.
    Attributes: see `CrossKVDraft`."""

    __repr__ = short

    head: MixtureHead
    defers: ClassVar[bool] = False      # it reads the entries of the target's cache

    def _known(self, s: State, cache: Cache) -> tuple[Cache, int]:
        return cache, 1

    def _entries(self, params: Params, tokens: Array, positions: Array, out: Out,
                 source: Array | None) -> tuple[Any, ...]:
        shape = (*out.hidden.shape[:2], self.head.kv_layers[0].heads, self.head.kv_layers[0].width)
        if any(len(entry) < 2 or any(x.shape != shape for x in entry[:2]) for entry in out.entries):
            raise ValueError("cache: the head reads the target's keys and values in the entries of its cache, which "
                             "has others; takes a dense cache")
        pairs = {i: tuple(entry[:2]) for i, entry in enumerate(out.entries)}
        pairs = pairs if source is None else jax.tree.map(lambda x: take(x, source), pairs)
        return (*super()._entries(params, tokens, positions, out, source),
                self.head.known(params.draft.head, pairs, positions))


@ALGORITHMS.register("mixture-of-attentions", "Mixture of Attentions For Speculative Decoding", "Zimmer et al. 2024",
                     family="speculative-tree", needs="a trained drafter", guarantee="seed-exact")
def mixture_of_attentions(lm: Any, draft: Any = None, length: Count = 6, nodes: Whole = 60, width: Count = 10,
                          shape: Shape | None = None, verify: Verifier | None = None) -> Speculative:
    """Drafts the tree of which a head on the keys and values of all the target's layers is most confident.

    Args:
        lm: the target.
        draft: a drafter from `decodax.load_drafter`; None: the shipped one.
        length: number of levels.
        nodes: number of drafts to verify; 0: a chain of `length`.
        width: number of nodes expanded in a level, and of children of each.
        shape: another shape of the draft tree.
        verify: the rule that accepts drafts; None: seed-exact.
    """
    tree = shape or (ConfidenceTree(nodes, length, width) if nodes else Chain(length))
    return Speculative(mixture(lm, draft, "mixture-of-attentions"), verify or SeedExact(), tree)


def mixture(lm: Any, draft: Any, *systems: str) -> MixtureDraft:
    """Returns the source of drafts for a target, from a drafter with a `MixtureHead`; the arguments are those of
    `trained`.

    Raises:
        ValueError: as in `trained`, or the drafter has another head.
    """
    made = cross_kv(lm, draft, *systems)
    if not isinstance(made.head, MixtureHead):
        raise ValueError(f"draft: got one with a {type(made.head).__name__}, {systems[0]!r} takes one with a "
                         "MixtureHead")
    return MixtureDraft(made.model, made.head, made.weights)
