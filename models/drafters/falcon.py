"""Falcon's head: predicts a block of tokens in each pass, and feeds the block back (Gao et al., 2024)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from decodax.cache import KVLayer
from decodax.cache.entry import KVEntry
from decodax.models.blocks.attention import Attend
from decodax.models.blocks.layer import DecoderLayer
from decodax.models.config import DecoderConfig
from decodax.models.drafters.head import Depth, Embed, HeadStep, ModuleHead, Weights
from decodax.models.drafters.prefixed import rope_tables
from decodax.models.kv_shapes import kv_layers
from decodax.models.layers import Linear


@dataclasses.dataclass(frozen=True)
class FalconHead(ModuleHead):
    """Falcon (Gao et al., 2024): the last `block` pairs of the text predict the next `block` hidden states in one pass.

    Two layers of an LSTM read embedding and feature of each pair in order. A decoder layer without input norm and final
    norm follows, under a *relaxed causal mask*: a pair attends to all pairs up to the end of its block. The output at
    position `p` stands for the hidden state at `p + block`, to which the target's vocabulary matrix is applied.

    Blocks end at the newest pair. In the authors' training, and here, they begin at multiples of `block`; in their
    drafting it depends on the number of tokens that a round accepts. Their code leaves `batch_first` of the LSTM unset,
    by which it would run over the rows of a batch; here it runs over the text, as in the paper. The head has one
    decoder layer, so that keys and values of a pair do not depend on its block.

    Attributes:
        taps: empty: the hidden state after the final norm.
        vocab: number of logits.
        config: shape and options of the decoder layer, of the target's width.
        block: number of tokens `k` of a block.
        cells: number of layers of the LSTM.
    """

    config: DecoderConfig = dataclasses.field(kw_only=True)
    block: int = 2
    cells: int = 2

    def __post_init__(self) -> None:
        if len(self.config.layers) != 1:
            raise ValueError(f"config: got {len(self.config.layers)} layers, takes one")
        if self.block < 2:
            raise ValueError(f"block: got {self.block}, takes at least 2")

    @property
    def own_head(self) -> bool:
        """False: the vocabulary matrix is the target's."""
        return False

    @property
    def target_width(self) -> int:
        return self.config.width

    @property
    def state_width(self) -> int:
        return self.config.width

    @property
    def carry_width(self) -> int:
        """Number of channels `c` of the LSTM's state: hidden state and cell state of each layer, side by side."""
        return 2 * self.cells * self.config.width

    @property
    def kv_layers(self) -> tuple[KVLayer, ...]:
        return tuple(kv_layers(self.config, None))

    def module(self, rngs: nnx.Rngs) -> nnx.Module:
        module: Any = nnx.Module()
        D, std = self.config.width, self.config.width ** -0.5
        gates = lambda inputs: Linear(rngs, (inputs + D, 4 * D), (None, None), True, std)
        module.lstm = nnx.Dict({str(i): gates(D if i else 2 * D) for i in range(self.cells)})
        module.layers = nnx.Dict({"0": DecoderLayer(self.config, self.config.layers[0], rngs)})
        module.layers["0"].attn_in = None
        return module

    def enter(self, weights: Weights, features: Array) -> Array:
        return features

    def read(self, weights: Weights, embedded: Array, features: Array, carry: Array, live: Array | None = None
             ) -> tuple[Array, Array]:
        """Runs the LSTM over pairs in order.

        Args:
            weights: the head's weights.
            embedded: `f[B, W, D]`, the embeddings of the pairs' tokens.
            features: `f[B, W, D]`, their features.
            carry: `f[B, c]`, the LSTM's state before them.
            live: `bool[B, W]`, False for pairs that are left out; None: all count.

        Returns:
            Its output `f[B, W, D]`, and its state after the last pair.
        """
        network = self.network(weights)

        def one(carry: Array, pair: tuple[Array, Array]) -> tuple[Array, Array]:
            x, counts = pair
            states = jnp.split(carry, 2 * self.cells, -1)
            after: list[Array] = []
            for i in range(self.cells):
                h, c = states[2 * i:2 * i + 2]
                into, forget, new, out = jnp.split(network.lstm[str(i)](jnp.concatenate([x, h], -1)), 4, -1)
                c = jax.nn.sigmoid(forget) * c + jax.nn.sigmoid(into) * jnp.tanh(new)
                x = jax.nn.sigmoid(out) * jnp.tanh(c)
                after += [x, c]
            return jnp.where(counts[:, None], jnp.concatenate(after, -1), carry), x

        pairs = jnp.concatenate([embedded, features], -1).swapaxes(0, 1)
        counts = jnp.ones(pairs.shape[:2], bool) if live is None else live.swapaxes(0, 1)
        carry, found = jax.lax.scan(one, carry, (pairs, counts))
        return found.swapaxes(0, 1), carry

    def context(self, weights: Weights, state: Array, positions: Array) -> tuple[KVEntry]:
        """Returns the keys and values, `f[B, W, G, e]` each, of the decoder layer, as a tuple of one entry, from
        outputs `state`, `f[B, W, D]`, of the LSTM at positions `i32[B, W]`."""
        layer = self.network(weights).layers["0"]
        return (KVEntry(*layer.attn.keys_values(state, rope_tables(self.config, positions))),)

    def step(self, weights: Weights, tokens: Array, embed: Embed, state: Array, positions: Array, depth: Depth,
             attend: Attend | None) -> HeadStep:
        """Runs the decoder layer on `state`, `f[B, W, D]`, outputs of the LSTM at `positions`, with attention by
        `attend`. `tokens`, `embed` and `depth` are not used, since the LSTM has read the embeddings."""
        assert attend is not None
        x, entry = self.network(weights).layers["0"](0, state, rope_tables(self.config, positions), attend)
        return HeadStep(hidden=x, state=x, entries=(entry,))

    def logits(self, weights: Weights, hidden: Array, depth: Depth, head: Callable[[Array], Array]) -> Array:
        return head(hidden)


__all__ = ["FalconHead"]
