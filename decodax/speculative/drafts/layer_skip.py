"""Drafting with the target itself, some of its layers left out: no second model, no second cache.

`LayerSkip(model, skip=...)` leaves out a fixed set of layers, or of their attention and MLP halves: Draft & Verify
(Zhang et al. 2023). `LayerSkip.exit(model, layer)` stops after some layers and puts the target's own norm and head on
what is there: the decoding half of LayerSkip (Elhoushi et al. 2024), which pays on models trained for early exits.

As in both papers a draft attends to what the full model cached of the verified text. The keys of draft nodes lie in a
scratch until the round ends. LayerSkip's cache reuse, by which the verification does not run the first layers again on
the drafts of an early exit, is not done: a round is its drafts and one whole target forward.

The guarantee is the verifier's.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from decodax.cache import Scratch, Window, causal
from decodax.core.state import State
from decodax.core.types import Decision, Out, Params
from decodax.models.decoder import Keep
from decodax.policy.guidance import GuidedCache
from decodax.speculative.source import Level, Stateless


@dataclasses.dataclass(frozen=True)
class LayerSkip(Stateless):
    """Drafts from the target without some of its layers.

    Attributes:
        model: the target: a `Transformer`, or what `decodax.load` gave. Weights are `Params.target`.
        skip: layers left out, from 0. skip_attention, skip_mlp: layers that lose only that half.

    Raises:
        ValueError: a model that cannot leave layers out, or a layer that it does not have.
    """

    model: Any
    skip: tuple[int, ...] = ()
    skip_attention: tuple[int, ...] = ()
    skip_mlp: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", network_of(self.model))
        L = depth(self.model)
        for name in ("skip", "skip_attention", "skip_mlp"):
            chosen = tuple(sorted(set(getattr(self, name))))
            if chosen and not 0 <= chosen[0] <= chosen[-1] < L:
                raise ValueError(f"{name}: got {chosen}, takes layers from 0 to {L - 1}")
            object.__setattr__(self, name, chosen)

    @classmethod
    def exit(cls, model: Any, layer: int) -> LayerSkip:
        """The first `layer` layers alone."""
        L = depth(network_of(model))
        if not 1 <= layer <= L:
            raise ValueError(f"layer: got {layer}, takes 1 to {L}")
        return cls(model, skip=tuple(range(layer, L)))

    @property
    def keep(self) -> tuple[tuple[bool, bool], ...]:
        """Which layers' attention and MLP run."""
        return tuple((i not in self.skip + self.skip_attention, i not in self.skip + self.skip_mlp)
                     for i in range(depth(self.model)))

    def start(self, params: Params, s: State, state: Any, room: int) -> tuple[Scratch, Array]:
        return draft_root(self.model, params, s, room, self.keep)

    def extend(self, params: Params, s: State, state: Scratch, level: Level) -> tuple[Scratch, Array]:
        return draft_level(self.model, params, s, state, level, self.keep)

    def observe(self, s: State, window: Window, out: Out, decision: Decision | None, state: Any) -> None:
        return None


def network_of(model: Any) -> Any:
    """The network of what a user handed in.

    Raises:
        ValueError: it cannot run without some of its layers.
    """
    network = model.model if hasattr(model, "params") else model      # an LM: its weights are `Params.target` already
    if not hasattr(network, "walk"):
        raise ValueError(f"model: got {type(network).__name__}, takes a Transformer or what decodax.load gave")
    return network


def depth(model: Any) -> int:
    """Layers `L` of a network."""
    return len(model.config.layers)


def verified(s: State) -> Any:
    """The target's cache; under guidance that of the branch with the prompt."""
    return s.cache.conditional if isinstance(s.cache, GuidedCache) else s.cache


def draft_root(model: Any, params: Params, s: State, room: int, keep: Keep) -> tuple[Scratch, Array]:
    """Runs the newest token through the layers of `keep`.

    Returns:
        A scratch that holds it and has room for `room` nodes, without its base (the target's cache), so that a loop may
        carry it. Logits `f32[B, 1, V]`.
    """
    cache = verified(s)
    out = model.apply(params.target, causal(s.newest[:, None], s.length - 1), cache, keep)
    scratch = Scratch.empty(cache, out.kv, 1 + room).append(out.kv, s.length[:, None] - 1, jnp.zeros((), jnp.int32))
    return scratch.replace(base=None), out.logits()


def draft_level(model: Any, params: Params, s: State, scratch: Scratch, level: Level,
                keep: Keep) -> tuple[Scratch, Array]:
    """Runs the nodes of a level: the scratch with them, and logits `f32[B, w, V]`."""
    B, w = level.tokens.shape
    window = Window(tokens=level.tokens, positions=level.positions, mask=jnp.eye(w, dtype=bool)[None],
                    live=jnp.ones((B, w), bool))
    sees = jnp.concatenate([jnp.ones((B, w, 1), bool), level.sees], 2)      # all stand below the newest token
    out = model.apply(params.target, window, scratch.replace(base=verified(s)).seen_by(sees), keep)
    return scratch.append(out.kv, level.positions, level.at + 1), out.logits()
