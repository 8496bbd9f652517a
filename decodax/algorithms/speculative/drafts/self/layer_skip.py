"""LayerSkip: drafts with the target's first layers and its output head ("LayerSkip: Enabling Early Exit Inference and
Self-Speculative Decoding", Elhoushi et al., 2024), or with any fixed set of its layers (Draft & Verify, Zhang et al.,
2023).

`LayerSkip(layer)` stops after some layers and applies the target's own norm and head to their output, which works well
with models trained for early exits. `LayerSkip(skip=...)` leaves out layers, or their attention or MLP. As in both
papers, drafts attend to the full model's cache of the verified text.

The first E of the L layers, those before the first skipped one (for an early exit all that draft), compute exactly the
target's own forward pass over the drafts. As in LayerSkip, the verification reuses their keys, values and states
(`PartialForward`) and runs only the layers after them. Nodes that were not expanded, such as a chain's last draft, run
through the E layers first. So a round of K drafts costs a row `K E + E + (K + 1) (L - E)` layers instead of `K E + (K +
1) L`: 5 L instead of 7 L with K = 4 and half of the layers. Weights and cache are read equally often in both cases (`K
E + L` layers), so if reading them dominates, nothing is gained. On two busy CPU cores (float32, K = 4, half of the
layers, pairs of runs side by side) a round takes 0.88 to 0.94 times as long, for the shipped `pycode` and for a 125M
shape, at batch sizes 1 and 8.

The reused values were computed one node at a time, instead of all nodes at once: the same sums with another rounding.
Plain decoding also computes one token at a time. So the guarantee, which is the verifier's, holds with and without
reuse: tokens are equal unless two candidates are as close as rounding errors. Reuse needs a shape with a fixed topology
(`Chain`, `Fixed`); with others the verification runs all layers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from decodax.algorithms.speculative.algorithm import Speculative
from decodax.algorithms.speculative.drafts.self.self_draft import SkipsLayers, conditional, whole_text
from decodax.algorithms.speculative.fixed_trees import Chain
from decodax.algorithms.speculative.source import Answer, Level
from decodax.algorithms.speculative.tree import Proposal, tree
from decodax.common.options import Count
from decodax.common.registry import ALGORITHMS
from decodax.common.struct import Struct, struct
from decodax.core.capabilities import Draftable
from decodax.core.state import State
from decodax.core.types import Decision, Out, Params, PartialForward
from decodax.core.window import Window


@struct
class Shared(Struct):
    """State of `LayerSkip` within a round.

    Attributes:
        buffer: keys and values of the nodes of the draft tree that have been processed.
        layers: for each of the first `E` layers, which the draft shares with the target, its output at these nodes,
            `f[B, 1 + room, D]`.
    """

    buffer: Draftable
    layers: tuple[Array, ...]


@dataclasses.dataclass(frozen=True)
class LayerSkip(SkipsLayers):
    """Drafts with the target without a fixed set of its layers (Elhoushi et al., 2024; Zhang et al., 2023).

    Attributes:
        layer: number of first layers that draft, an early exit. None: all, or half of them if nothing is skipped below.
        skip: skipped layers, counted from 0.
        skip_attention: layers whose attention is skipped.
        skip_mlp: layers whose MLP is skipped.
    """

    layer: int | None = None
    skip: tuple[int, ...] = ()
    skip_attention: tuple[int, ...] = ()
    skip_mlp: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("skip", "skip_attention", "skip_mlp"):
            object.__setattr__(self, name, tuple(sorted(set(getattr(self, name)))))

    def for_target(self, model: Any) -> LayerSkip:
        new = super().for_target(model)
        L = new.model.depth
        if self.layer is not None and not 1 <= self.layer <= L:
            raise ValueError(f"layer: got {self.layer}, takes 1 to {L}")
        for name in ("skip", "skip_attention", "skip_mlp"):
            chosen = getattr(self, name)
            if chosen and not 0 <= chosen[0] <= chosen[-1] < L:
                raise ValueError(f"{name}: got {chosen}, takes layers from 0 to {L - 1}")
        return new

    @property
    def keep(self) -> tuple[tuple[bool, bool], ...]:
        """For each of the target's layers a pair of bools: whether its attention runs, and whether its MLP runs, in
        drafting."""
        L, some = self.model.depth, self.skip or self.skip_attention or self.skip_mlp
        end = self.layer or (L if some else max(L // 2, 1))
        left_out = {*self.skip, *range(end, L)}
        return tuple((i not in left_out.union(self.skip_attention), i not in left_out.union(self.skip_mlp))
                     for i in range(L))

    @property
    def shared(self) -> int:
        """Number `E` of layers, from the first on, of which nothing is skipped. Their outputs in drafting are those of
        the target, so verification need not compute them again."""
        return next((i for i, halves in enumerate(self.keep) if not all(halves)), self.model.depth)

    def running(self, s: State, state: Any) -> tuple[tuple[bool, bool], ...]:
        return self.keep

    def start(self, params: Params, s: State, state: Any, room: int) -> tuple[Shared, Answer]:
        buffer, out = self.run_root(params, s, state, room)
        assert out.layers is not None
        wide = lambda x: jnp.pad(x, ((0, 0), (0, room), (0, 0)))
        return Shared(buffer, tuple(wide(x) for x in out.layers[:self.shared])), Answer(out.logits(), out.hidden)

    def extend(self, params: Params, s: State, state: Shared, level: Level) -> tuple[Shared, Answer]:
        buffer, out = self.run_level(params, s, state, state.buffer, level)
        assert out.layers is not None
        put = lambda x, new: lax.dynamic_update_slice_in_dim(x, new, level.at + 1, 1)
        layers = tuple(put(x, new) for x, new in zip(state.layers, out.layers[:self.shared], strict=True))
        return Shared(buffer, layers), Answer(out.logits(), out.hidden)

    def begin(self, params: Params, s: State, state: Shared, proposal: Proposal, slots: Array) -> PartialForward | None:
        """Returns the outputs of the target's first `shared` layers at the newest token and all drafts, from which the
        target's forward pass of verification continues; None if no layers are shared or the tree's topology is not
        fixed, or the verification also writes a second cache, whose entries the draft does not compute."""
        if not (self.shared and isinstance(slots, np.ndarray)) or (
                jax.tree.structure(whole_text(s)) != jax.tree.structure(conditional(s))):
            return None
        t = tree(s.newest, proposal, proposal.tokens.shape[1])
        ran = np.concatenate([[0], slots[0]])       # the node that lies in each place of the buffer
        rest = np.setdiff1d(np.arange(t.size), ran)
        sees = np.broadcast_to(t.sees[:, rest][:, :, ran] & (ran >= 0), (s.batch, len(rest), len(ran)))
        first = tuple((i < self.shared,) * 2 for i in range(self.model.depth))
        out = self.run_nodes(params, s, state.buffer, t.tokens[:, rest], s.length[:, None] - 1 + t.depth[:, rest],
                             jnp.asarray(sees), jnp.eye(len(rest), dtype=bool)[None], first)
        assert out.layers is not None
        order = [*ran.tolist(), *rest.tolist()]
        place = np.array([order.index(node) for node in range(t.size)])
        whole = lambda known, new: jnp.concatenate([known, new], 1)[:, place]
        E, buffer = self.shared, state.buffer
        return PartialForward(model=self.model, layers=tuple(map(whole, state.layers, out.layers[:E])),
                              entries=jax.tree.map(whole, buffer.entries[:E], tuple(out.entries[:E])))

    def observe(self, params: Params, s: State, window: Window, out: Out, decision: Decision | None,
                state: Any) -> None:
        return None


@ALGORITHMS.register("layerskip", "LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding",
                     "Elhoushi et al. 2024", family="speculative-self", guarantee="seed-exact")
def layerskip(layer: Count | None = None, length: Count = 4) -> Speculative:
    """Drafts with the target's first layers and its output head; the verification reuses their results.

    For models that were trained for early exits; others draft badly with half of their layers.

    Args:
        layer: number of layers that draft; None: half of them.
        length: number of drafts in a round.
    """
    return Speculative(LayerSkip(layer), shape=Chain(length))
