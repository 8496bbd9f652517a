"""Base class of sources that draft with the target itself, with a part of its layers or with another cache.

Drafts attend to the target's cache of the verified text, so there is neither a second model nor a second cache to keep
up to date. Keys and values of draft nodes are kept in a buffer until the round ends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import jax.numpy as jnp
from jax import Array

from decodax.algorithms.speculative.drafter import TREES
from decodax.algorithms.speculative.source import Answer, Level, Source
from decodax.core.around import PairedReadout, Readout
from decodax.core.cache import Feature
from decodax.core.capabilities import Draftable, check_drafts, tree_buffer, without_views
from decodax.core.loaded import network_of
from decodax.core.state import State
from decodax.core.target import RunsTarget
from decodax.core.types import LayeredModel, Out, Params
from decodax.core.window import Window, causal
from decodax.sampling.guidance import Guided, GuidedCache

Keep = Sequence[tuple[bool, bool]] | Array
"""The parts of the layers that run: static, a pair of bools (attention, MLP) for each layer; or traced, `bool[B, L]`
for complete layers or `bool[B, L, 2]` for halves, by row."""


@dataclasses.dataclass(frozen=True)
class SelfDraft(RunsTarget, Source):
    """Base class of sources that draft with the target network itself, such as with some of its layers. Derive a frozen
    dataclass. By default the state is a struct with a field `buffer`, the keys and values of the round's draft tree,
    which is None between rounds.
    """

    cache_needs: ClassVar[frozenset[Feature]] = TREES       # its own nodes lie beside the target's cache

    def for_target(self, model: Any) -> Self:
        return super().for_target(model.base if isinstance(model, Guided) else model)

    def check_fit(self, model: Any, cache: Any) -> None:
        check_drafts(without_views(cache))

    def running(self, s: State, state: Any) -> Keep | None:
        """Returns which layers, or halves of layers (attention, MLP), run in this round's drafting; None: all."""
        return None

    def view(self, s: State) -> Any:
        """Returns the cache of the text to which drafts attend: by default the target's, without second caches beside
        it. Under classifier-free guidance it is that of the conditional branch."""
        return whole_text(s)

    def forward(self, params: Params, window: Window, cache: Any, keep: Keep | None) -> Out:
        """Runs the drafting network: by default the target's, on the window `window`, with the layers `keep` only
        (None: all). Returns its output."""
        return self.model.apply(params.target, window, cache, *(() if keep is None else (keep,)))

    def run_root(self, params: Params, s: State, state: Any, room: int) -> tuple[Draftable, Out]:
        """Runs the drafting network on the newest token.

        Returns:
            A buffer with its keys and values and space for `room` more nodes, without its base (the cache) so that a
            loop can carry it; and the network's output.
        """
        cache = self.view(s)
        out = self.forward(params, causal(s.newest[:, None], s.length - 1), cache, self.running(s, state))
        buffer = tree_buffer(cache, out.entries, 1 + room)
        buffer = buffer.append(out.entries, s.length[:, None] - 1, jnp.zeros((), jnp.int32))
        return buffer.replace(base=None), out

    def run_level(self, params: Params, s: State, state: Any, buffer: Draftable, level: Level
                  ) -> tuple[Draftable, Out]:
        """Runs the drafting network on the draft-tree nodes in `level`. Returns the buffer of the tree's keys
        and values with those of the new nodes, and the network's output."""
        sees = jnp.pad(level.sees, ((0, 0), (0, 0), (1, 0)), constant_values=True)  # all are below the newest token
        out = self.run_nodes(params, s, buffer, level.tokens, level.positions, sees, level.inside,
                             self.running(s, state))
        return buffer.append(out.entries, level.positions, level.at + 1), out

    def run_nodes(self, params: Params, s: State, buffer: Draftable, tokens: Array, positions: Array, sees: Array,
                  inside: Array, keep: Keep | None) -> Out:
        """Runs the drafting network on nodes with the given `tokens` and `positions`, each `i32[B, w]`.

        Args:
            params: the weights.
            s: the decoding state.
            buffer: the buffer with earlier nodes.
            tokens: the nodes' tokens.
            positions: their positions.
            sees: `bool[B, w, 1 + room]`, nodes of the buffer to which each attends.
            inside: `bool[1, w, w]`, nodes of this call to which each attends.
            keep: the parts of the layers that run.
        """
        window = Window(tokens=tokens, positions=positions, mask=inside, live=jnp.ones(tokens.shape, bool))
        return self.forward(params, window, buffer.replace(base=self.view(s)).seen_by(sees), keep)

    def start(self, params: Params, s: State, state: Any, room: int) -> tuple[Any, Answer]:
        buffer, out = self.run_root(params, s, state, room)
        return state.replace(buffer=buffer), Answer(out.logits(), out.hidden)

    def extend(self, params: Params, s: State, state: Any, level: Level) -> tuple[Any, Answer]:
        buffer, out = self.run_level(params, s, state, state.buffer, level)
        return state.replace(buffer=buffer), Answer(out.logits(), out.hidden)


@dataclasses.dataclass(frozen=True)
class SkipsLayers(SelfDraft):
    """Base class of sources that draft with a part of the target's layers."""

    def for_target(self, model: Any) -> Self:
        if self.target is not None:
            return super().for_target(model)
        network, _ = network_of(model)
        # drafts need neither the second branch of guidance nor the logits of a readout
        while isinstance(network, Guided | Readout) and not isinstance(network, PairedReadout):
            network = network.base
        return super().for_target(layered(network))


def layered(model: Any) -> LayeredModel:
    """Returns the network of `model`, a network or a result of `decodax.load`, after checking that its layers can be
    run one by one.

    Raises:
        ValueError: they cannot.
    """
    network, _ = network_of(model)
    if not isinstance(network, LayeredModel):
        raise ValueError(f"model: got {type(network).__name__}, takes a Transformer, whose layers run one by one")
    return network


def conditional(s: State) -> Any:
    """Returns the target's cache in the state `s`; under classifier-free guidance, the cache of the conditional branch,
    the one with the prompt."""
    return s.cache.conditional if isinstance(s.cache, GuidedCache) else s.cache


def whole_text(s: State) -> Any:
    """Returns `conditional(s)` without the second caches that other drafts read (`decodax.cache.views`)."""
    return without_views(conditional(s))
