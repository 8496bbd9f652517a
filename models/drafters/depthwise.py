"""A layer for multi-token prediction for each depth (DeepSeek-V3: DeepSeek-AI, 2024; Gloeckle et al., 2024).

Layer `k` reads the output of layer `k - 1` where layer 0 reads the target's hidden state. So at a pair of position `p`
it reads that of the pair before, and it has no pairs before position `k`. The token after `j` drafts is predicted by
layer `j`, and after more drafts than there are layers by the last one, applied again to its own output.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from decodax.cache import KVLayer
from decodax.models.biases import BeginsAt
from decodax.models.blocks.attention import Attend
from decodax.models.config import DecoderConfig
from decodax.models.drafters.head import Depth, Embed, HeadStep, ModuleHead, Weights
from decodax.models.drafters.recurrent import RecurrentHead, RecurrentHeadNetwork


@dataclasses.dataclass(frozen=True)
class DepthwiseHead(ModuleHead):
    """A drafter head with another layer for each draft depth (multi-token prediction with several modules).

    Its state is the concatenation of the states of all layers. For a verified pair, the first part is computed from the
    target's hidden state. The others are read at the first pair of a call alone; they are the states of the first
    `count - 1` layers at the pair before it.

    Attributes:
        layer: the network of each layer.
        count: number of layers, at least 2.
    """

    layer: RecurrentHead = dataclasses.field(kw_only=True)
    count: int = dataclasses.field(kw_only=True)

    def __post_init__(self) -> None:
        if self.count < 2:
            raise ValueError(f"count: got {self.count}, takes 2 or more layers")
        if any(own.chooses for own in self.layer.kv_layers):
            raise ValueError("layer: got one whose queries choose the tokens that they attend to, takes another for "
                             f"count = {self.count}, of which the later ones leave out the first tokens of a text")

    @property
    def own_head(self) -> bool:
        return self.layer.own_head

    @property
    def target_width(self) -> int:
        return self.layer.target_width

    @property
    def tap_width(self) -> int:
        return self.layer.tap_width

    @property
    def state_width(self) -> int:
        return self.count * self.layer.state_width

    @property
    def kv_layers(self) -> tuple[KVLayer, ...]:
        return tuple(own._replace(bias=True) for own in self.layer.kv_layers) * self.count

    @property
    def carries_state(self) -> bool:
        return True

    def check_target(self, config: DecoderConfig) -> None:
        self.layer.check_target(config)

    def module(self, rngs: nnx.Rngs) -> DepthwiseNetwork:
        return DepthwiseNetwork(self, rngs)

    def enter(self, weights: Weights, features: Array) -> Array:
        return self.network(weights).depths["0"].enter(features)

    def follow(self, entered: Array, before: Array) -> Array:
        rest = jnp.zeros((*entered.shape[:2], self.state_width - entered.shape[-1]), entered.dtype)
        return jnp.concatenate([entered, rest.at[:, 0].set(before[:, :rest.shape[-1]])], -1)

    def step(self, weights: Weights, tokens: Array, embed: Embed, state: Array, positions: Array, depth: Depth,
             attend: Attend | None) -> HeadStep:
        assert attend is not None
        if state.shape[-1] != self.state_width:
            raise ValueError(f"state: got width {state.shape[-1]}, takes {self.state_width}, from `follow`")
        embedded = None if self.layer.own_table else embed(tokens).astype(state.dtype)
        return self.network(weights)(tokens, embedded, state, positions, depth, attend)

    def logits(self, weights: Weights, hidden: Array, depth: Depth, head: Callable[[Array], Array]) -> Array:
        return self.network(weights).logits(hidden, depth) if self.own_head else head(hidden)


class DepthwiseNetwork(nnx.Module):
    """The module with the weights of a `DepthwiseHead`: a `RecurrentHeadNetwork` for each depth."""

    def __init__(self, h: DepthwiseHead, rngs: nnx.Rngs):
        self.h = h
        self.depths = nnx.Dict({str(i): RecurrentHeadNetwork(h.layer, rngs) for i in range(h.count)})

    def logits(self, hidden: Array, depth: Depth) -> Array:
        """Returns logits `f32[B, W, vocab]` of hidden states, each by the vocabulary matrix of the layer of its `depth`
        (`i32[B, W]`; an int: layer 0 for all)."""
        found = self.depths["0"].logits(hidden)
        for i in range(1, 1 if isinstance(depth, int) else self.h.count):
            found = jnp.where(depth[..., None] >= i, self.depths[str(i)].logits(hidden), found)     # type: ignore[index]
        return found

    def __call__(self, tokens: Array, embedded: Array | None, state: Array, positions: Array, depth: Depth,
                 attend: Attend) -> HeadStep:
        parts, last, steps = jnp.split(state, self.h.count, -1), self.h.count - 1, list[HeadStep]()
        for i in range(self.h.count):
            if isinstance(depth, int):      # verified pairs, one after the other
                own = parts[0] if i == 0 else jnp.concatenate([parts[i][:, :1], steps[-1].state[:, :-1]], 1)
            elif i == 0:
                continue                    # which only reads the target's states
            else:
                own = parts[i - 1] if i < last else jnp.where(depth[..., None] > last, parts[last], parts[last - 1])
            layer = self.depths[str(i)]
            read = layer.embedded(tokens, state.dtype) if embedded is None else embedded
            steps.append(layer(read, own, positions, _alone(i, attend)))
        if isinstance(depth, int):
            hidden = steps[0].hidden
        else:
            steps = [jax.tree.map(jnp.zeros_like, steps[0]), *steps]
            hidden = steps[1].hidden
            for i in range(2, self.h.count):
                hidden = jnp.where(depth[..., None] >= i, steps[i].hidden, hidden)
        return HeadStep(hidden=hidden, state=jnp.concatenate([step.state for step in steps], -1),
                        entries=tuple(entry for step in steps for entry in step.entries))


def _alone(index: int, attend: Attend) -> Attend:
    """Returns the attention function of a network that is the layer `index` of several."""
    def inside(layer: int, q: Any, k: Any, v: Any, **options: Any) -> tuple[Array, Any]:
        if index and options.get("bias") is not None:
            raise ValueError("layer: has a bias of its own, which layers for multi-token prediction cannot have")
        return attend(index, q, k, v, **(options | ({"bias": BeginsAt(index)} if index else {})))

    return inside


__all__ = ["DepthwiseHead", "DepthwiseNetwork"]
