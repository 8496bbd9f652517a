"""The base of sources that draft with the target itself: with a part of its layers, or on another cache.

Drafts attend to what the target cached of the verified text; there is no second model and no cache to keep in step. The
keys and values of draft nodes lie in a scratch until the round ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from decodax.algorithms.speculative.drafter import TREES
from decodax.algorithms.speculative.source import Answer, Level, Source
from decodax.core.cache import Feature
from decodax.core.capabilities import Draftable, tree_buffer
from decodax.core.loaded import network_of
from decodax.core.state import State
from decodax.core.types import LayeredModel, Out, Params
from decodax.core.window import Window, causal
from decodax.sampling.guidance import GuidedCache

Keep = Sequence[tuple[bool, bool]] | Array
"""Halves of each layer that run, attention and MLP, static; or layers that each row runs, `bool[B, L]`, traced."""


class SelfDraft(Source):
    """A source that drafts with the target. By default its state is a struct with a field `scratch`, which holds the
    round's nodes and is None between rounds. Derive a frozen dataclass from this.

    Attributes:
        model: the target's network. Its weights are `Params.target`.
    """

    model: Any
    cache_needs: ClassVar[frozenset[Feature]] = TREES       # its own nodes lie beside the target's cache

    def running(self, s: State, state: Any) -> Keep | None:
        """Returns the layers, or halves of layers, that draft in this round; None: all of them."""
        return None

    def view(self, s: State) -> Any:
        """Returns the cache that drafts attend to. Under guidance it is that of the branch with the prompt."""
        return conditional(s)

    def forward(self, params: Params, window: Window, cache: Any, keep: Keep | None) -> Out:
        """Runs the network that drafts."""
        return self.model.apply(params.target, window, cache, *(() if keep is None else (keep,)))

    def run_root(self, params: Params, s: State, state: Any, room: int) -> tuple[Draftable, Out]:
        """Runs the newest token.

        Returns:
            A scratch that holds it and has room for `room` nodes, without its base (the cache), so that a loop may
            carry it; and the network's output.
        """
        cache = self.view(s)
        out = self.forward(params, causal(s.newest[:, None], s.length - 1), cache, self.running(s, state))
        scratch = tree_buffer(cache, out.entries, 1 + room)
        scratch = scratch.append(out.entries, s.length[:, None] - 1, jnp.zeros((), jnp.int32))
        return scratch.replace(base=None), out

    def run_level(self, params: Params, s: State, state: Any, scratch: Draftable,
                  level: Level) -> tuple[Draftable, Out]:
        """Runs the nodes of a level. Returns the scratch with them, without its base, and the network's output."""
        sees = jnp.pad(level.sees, ((0, 0), (0, 0), (1, 0)), constant_values=True)  # all are below the newest token
        out = self.run_nodes(params, s, scratch, level.tokens, level.positions, sees, level.inside,
                             self.running(s, state))
        return scratch.append(out.entries, level.positions, level.at + 1), out

    def run_nodes(self, params: Params, s: State, scratch: Draftable, tokens: Array, positions: Array, sees: Array,
                  inside: Array, keep: Keep | None) -> Out:
        """Runs nodes `i32[B, w]` that see `sees` (`bool[B, w, 1 + room]`) of a scratch and `inside` (`bool[1, w, w]`)
        of one another."""
        window = Window(tokens=tokens, positions=positions, mask=inside, live=jnp.ones(tokens.shape, bool))
        return self.forward(params, window, scratch.replace(base=self.view(s)).seen_by(sees), keep)

    def start(self, params: Params, s: State, state: Any, room: int) -> tuple[Any, Answer]:
        scratch, out = self.run_root(params, s, state, room)
        return state.replace(scratch=scratch), Answer(out.logits(), out.hidden)

    def extend(self, params: Params, s: State, state: Any, level: Level) -> tuple[Any, Answer]:
        scratch, out = self.run_level(params, s, state, state.scratch, level)
        return state.replace(scratch=scratch), Answer(out.logits(), out.hidden)


def layered(model: Any) -> LayeredModel:
    """Returns the network of a model from `decodax.load`, or a network as it is.

    Raises:
        ValueError: it cannot run without some of its layers.
    """
    network, _ = network_of(model)
    if not isinstance(network, LayeredModel):
        raise ValueError(f"model: got {type(network).__name__}, takes a Transformer, whose layers run one by one")
    return network


def conditional(s: State) -> Any:
    """Returns the target's cache; under guidance that of the branch with the prompt."""
    return s.cache.conditional if isinstance(s.cache, GuidedCache) else s.cache
