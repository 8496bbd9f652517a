"""Drafting with the target itself, some of its layers left out: no second model, no second cache.

`LayerSkip(model, skip=...)` leaves out a fixed set of layers, or of their attention and MLP halves: Draft & Verify
(Zhang et al. 2023). `LayerSkip.exit(model, layer)` stops after some layers and puts the target's own norm and head on
what is there: the decoding half of LayerSkip (Elhoushi et al. 2024), which pays on models trained for early exits.

As in both papers a draft attends to what the full model cached of the verified text; there is no other cache. The keys
of draft nodes lie in a scratch until the round ends.

The layers that run whole from the first one on, E of L, all of an early exit's, are the target's own forward over the
drafts. As in LayerSkip the verification goes on from there: it takes over their keys, values and states
(`PartialForward`), and runs only the layers behind. Nodes that were not expanded, a chain's last draft, run through
the E layers first. So a round of K drafts costs a row `K E + E + (K + 1) (L - E)` layers instead of `K E + (K + 1) L`:
5 L instead of 7 L with K 4 and half of the layers. Weights are read as often either way, `K E + L` layers of them, and
so is the cache: where reading is all that counts, nothing is gained. On two busy CPU cores (float32, K 4, half of the
layers, pairs of runs side by side) a round takes 0.88 to 0.94 times as long, of the shipped `pycode` and of a 125M
shape, at batch 1 and 8.

What is taken over was computed a node at a time, by a whole forward all nodes at once: the same sums, rounded in
another order. Plain decoding takes a token at a time too, so a window's rounding is what stands between the two with
reuse and without, and the guarantee, which is the verifier's, asks the same of both: tokens are equal but where two
candidates are as near as rounding. The shape must have a fixed topology (`Chain`, `Fixed`); under others the
verification is whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from decodax.algorithms.speculative.drafter import TREES
from decodax.algorithms.speculative.source import Answer, Level, Source
from decodax.algorithms.speculative.tree import Proposal, tree
from decodax.common.struct import Struct, struct
from decodax.core.cache import Draftable, Feature
from decodax.core.loaded import network_of
from decodax.core.state import State
from decodax.core.types import Decision, LayeredModel, Out, Params, PartialForward
from decodax.core.window import Window, causal
from decodax.sampling.guidance import GuidedCache

Keep = Sequence[tuple[bool, bool]] | Array
"""Which halves of each layer run, attention and MLP, static; or which layers each row runs, `bool[B, L]`, traced."""


@struct
class Shared(Struct):
    """The nodes that have been run in a round: their keys in `scratch`, and `layers`, `f[B, 1 + room, D]` each, the
    residual stream after each layer that the target shares."""

    scratch: Draftable
    layers: tuple[Array, ...]


@dataclasses.dataclass(frozen=True)
class LayerSkip(Source):
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
    cache_needs: ClassVar[frozenset[Feature]] = TREES       # its own nodes lie beside the target's cache

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", layered(self.model))
        L = self.model.depth
        for name in ("skip", "skip_attention", "skip_mlp"):
            chosen = tuple(sorted(set(getattr(self, name))))
            if chosen and not 0 <= chosen[0] <= chosen[-1] < L:
                raise ValueError(f"{name}: got {chosen}, takes layers from 0 to {L - 1}")
            object.__setattr__(self, name, chosen)

    @classmethod
    def exit(cls, model: Any, layer: int) -> LayerSkip:
        """The first `layer` layers alone."""
        L = layered(model).depth
        if not 1 <= layer <= L:
            raise ValueError(f"layer: got {layer}, takes 1 to {L}")
        return cls(model, skip=tuple(range(layer, L)))

    @property
    def keep(self) -> tuple[tuple[bool, bool], ...]:
        """Which layers' attention and MLP run."""
        return tuple((i not in self.skip + self.skip_attention, i not in self.skip + self.skip_mlp)
                     for i in range(self.model.depth))

    @property
    def shared(self) -> int:
        """`E`, how many layers from the first on are the target's own, whole."""
        return next((i for i, halves in enumerate(self.keep) if not all(halves)), self.model.depth)

    def start(self, params: Params, s: State, state: Any, room: int) -> tuple[Shared, Answer]:
        scratch, out = draft_root(self.model, params, s, room, self.keep)
        assert out.layers is not None
        wide = lambda x: jnp.pad(x, ((0, 0), (0, room), (0, 0)))
        return Shared(scratch, tuple(wide(x) for x in out.layers[:self.shared])), Answer(out.logits(), out.hidden)

    def extend(self, params: Params, s: State, state: Shared, level: Level) -> tuple[Shared, Answer]:
        scratch, out = draft_level(self.model, params, s, state.scratch, level, self.keep)
        assert out.layers is not None
        put = lambda x, new: lax.dynamic_update_slice_in_dim(x, new, level.at + 1, 1)
        layers = tuple(put(x, new) for x, new in zip(state.layers, out.layers[:self.shared], strict=True))
        return Shared(scratch, layers), Answer(out.logits(), out.hidden)

    def begin(self, params: Params, s: State, state: Shared, proposal: Proposal, slots: Array) -> PartialForward | None:
        """The shared layers of the target's forward over the newest token and the drafts."""
        if not (self.shared and isinstance(slots, np.ndarray)):
            return None
        t = tree(s.newest, proposal, proposal.tokens.shape[1])
        ran = np.concatenate([[0], slots[0]])       # the node that lies in each place of the scratch
        rest = np.setdiff1d(np.arange(t.size), ran)
        sees = np.broadcast_to(t.sees[:, rest][:, :, ran] & (ran >= 0), (s.batch, len(rest), len(ran)))
        first = tuple((i < self.shared,) * 2 for i in range(self.model.depth))
        out = run_nodes(self.model, params, s, state.scratch, t.tokens[:, rest],
                        s.length[:, None] - 1 + t.depth[:, rest], jnp.asarray(sees), first)
        assert out.layers is not None
        order = [*ran.tolist(), *rest.tolist()]
        place = np.array([order.index(node) for node in range(t.size)])
        whole = lambda known, new: jnp.concatenate([known, new], 1)[:, place]
        E, scratch = self.shared, state.scratch
        return PartialForward(model=self.model, layers=tuple(map(whole, state.layers, out.layers[:E])),
                              entries=jax.tree.map(whole, scratch.entries[:E], tuple(out.entries[:E])))

    def observe(self, s: State, window: Window, out: Out, decision: Decision | None, state: Any) -> None:
        return None


class OwnLayers(Source):
    """What the sources share that choose which layers of the target draft: their states have a `scratch` of the round's
    nodes, None between rounds."""

    model: Any
    cache_needs: ClassVar[frozenset[Feature]] = TREES

    def running(self, s: State, state: Any) -> Keep:
        """The layers, or halves of layers, that draft this round."""
        raise NotImplementedError

    def start(self, params: Params, s: State, state: Any, room: int) -> tuple[Any, Answer]:
        scratch, out = draft_root(self.model, params, s, room, self.running(s, state))
        return state.replace(scratch=scratch), Answer(out.logits(), out.hidden)

    def extend(self, params: Params, s: State, state: Any, level: Level) -> tuple[Any, Answer]:
        scratch, out = draft_level(self.model, params, s, state.scratch, level, self.running(s, state))
        return state.replace(scratch=scratch), Answer(out.logits(), out.hidden)


def layered(model: Any) -> LayeredModel:
    """The network of what a user handed in: its weights are `Params.target` already.

    Raises:
        ValueError: it cannot run without some of its layers.
    """
    network, _ = network_of(model)
    if not isinstance(network, LayeredModel):
        raise ValueError(f"model: got {type(network).__name__}, takes a Transformer, whose layers run one by one")
    return network


def verified(s: State) -> Any:
    """The target's cache; under guidance that of the branch with the prompt."""
    return s.cache.conditional if isinstance(s.cache, GuidedCache) else s.cache


def draft_root(model: Any, params: Params, s: State, room: int, keep: Keep) -> tuple[Draftable, Out]:
    """Runs the newest token through the layers of `keep`.

    Returns:
        A scratch that holds it and has room for `room` nodes, without its base (the target's cache), so that a loop may
        carry it; and what the model made of it.
    """
    cache = verified(s)
    out = model.apply(params.target, causal(s.newest[:, None], s.length - 1), cache, keep)
    scratch = cache.tree_buffer(out.entries, 1 + room).append(out.entries, s.length[:, None] - 1, jnp.zeros((),
                                                                                                            jnp.int32))
    return scratch.replace(base=None), out


def draft_level(model: Any, params: Params, s: State, scratch: Draftable, level: Level,
                keep: Keep) -> tuple[Draftable, Out]:
    """Runs the nodes of a level: the scratch with them, and what the model made of them."""
    sees = jnp.pad(level.sees, ((0, 0), (0, 0), (1, 0)), constant_values=True)      # all stand below the newest token
    out = run_nodes(model, params, s, scratch, level.tokens, level.positions, sees, keep)
    return scratch.append(out.entries, level.positions, level.at + 1), out


def run_nodes(model: Any, params: Params, s: State, scratch: Draftable, tokens: Array, positions: Array, sees: Array,
              keep: Keep) -> Out:
    """Nodes `i32[B, w]` that see `sees` (`bool[B, w, 1 + room]`) of a scratch and themselves."""
    window = Window(tokens=tokens, positions=positions, mask=jnp.eye(tokens.shape[1], dtype=bool)[None],
                    live=jnp.ones(tokens.shape, bool))
    return model.apply(params.target, window, scratch.replace(base=verified(s)).seen_by(sees), keep)
