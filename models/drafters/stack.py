"""Stacked heads: small networks, one for each of the next tokens, on one hidden state of the target.

Blockwise parallel decoding (Stern et al., 2018) and Medusa (Cai et al., 2024) predict all tokens from that state alone;
IBM's MLP speculator (Wertheimer et al., 2024) and Hydra (`decodax.models.drafters.hydra`) also read the tokens drafted
before.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from decodax.models.drafters.head import Depth, Embed, HeadStep, ModuleHead, Weights
from decodax.models.layers import Linear, weight


def at_depth(depth: Depth, heads: int, one: Callable[[int, Array], Array], x: Array) -> Array:
    """Returns `one(i, x)`, `f[B, W, ...]`, where `i` is each node's depth, at most `heads - 1`: applies to a node the
    head of its depth.

    If all nodes have the same depth, which holds for the nodes of one level of a draft tree, only that head is
    computed; otherwise all heads are, and each node takes its own result.
    """
    if isinstance(depth, int) or heads == 1:
        return one(min(int(depth), heads - 1) if isinstance(depth, int) else 0, x)
    which = jnp.minimum(depth, heads - 1)
    branches = [functools.partial(one, i) for i in range(heads)]

    def each(x: Array) -> Array:
        found = branches[0](x)
        for i, branch in enumerate(branches[1:], 1):
            found = jnp.where((which == i)[..., None], branch(x), found)
        return found

    return lax.cond((which == which[:1, :1]).all(), lambda x: lax.switch(which[0, 0], branches, x), each, x)


class StackedHead(ModuleHead):
    """Base class of drafters with one small network ("head") for each draft depth, as in Medusa. They have no
    attention, so no cache, and read the target's hidden state after the final norm.

    Attributes:
        width: width `D` of the target.
        heads: number of heads `K`, the largest number of drafts on a path.
    """

    width: int
    heads: int

    @property
    def target_width(self) -> int:
        return self.width

    @property
    def longest(self) -> int:
        return self.heads

    @property
    def state_width(self) -> int:
        return self.width

    def enter(self, weights: Weights, features: Array) -> Array:
        return features


class IndependentHeads(StackedHead):
    """Base class of stacked heads whose predictions do not depend on the drafted tokens: head `i` predicts the draft at
    depth `i` from the target's hidden state alone."""

    @property
    def parallel(self) -> bool:
        return True

    def step(self, weights: Weights, tokens: Array, embed: Embed, state: Array, positions: Array, depth: Depth,
             attend: Any) -> HeadStep:
        return HeadStep(hidden=state, state=state)


@dataclasses.dataclass(frozen=True)
class MedusaHead(IndependentHeads):
    """Medusa (Cai et al., 2024): head `i` is `blocks` times `z + silu(W z + b)`, then a vocabulary matrix.

    Attributes:
        taps: empty: the hidden state after the final norm.
        vocab: number of logits.
        width: width `D` of the target.
        heads: number of heads `K`.
        blocks: number of residual blocks of a head. The authors' code repeats one block, with the same weights.
        own_head: True: each head has a vocabulary matrix; False: all use the target's (their older trainer).
    """

    width: int = dataclasses.field(kw_only=True)
    heads: int = dataclasses.field(default=5, kw_only=True)
    blocks: int = 1
    own_head: bool = True

    def module(self, rngs: nnx.Rngs) -> nnx.Module:
        module: Any = nnx.Module()
        module.heads = nnx.Dict({str(i): _Medusa(self, rngs) for i in range(self.heads)})
        return module

    def logits(self, weights: Weights, hidden: Array, depth: Depth, head: Callable[[Array], Array]) -> Array:
        network = self.network(weights)

        def one(i: int, z: Array) -> Array:
            own = network.heads[str(i)]
            z = own(z)
            return own.head(z).astype(jnp.float32) if own.head is not None else head(z)

        return at_depth(depth, self.heads, one, hidden)


class _Medusa(nnx.Module):
    def __init__(self, h: MedusaHead, rngs: nnx.Rngs):
        self.blocks = h.blocks
        # Zeros, so that a fresh head with the target's matrix predicts what the target does.
        self.block = Linear(rngs, (h.width, h.width), ("embed", None), True, 0.0)
        self.head = Linear(rngs, (h.width, h.vocab), ("embed", "vocab"), False) if h.own_head else None

    def __call__(self, z: Array) -> Array:
        for _ in range(self.blocks):
            z = z + jax.nn.silu(self.block(z))
        return z


@dataclasses.dataclass(frozen=True)
class BlockwiseHead(IndependentHeads):
    """Blockwise parallel decoding (Stern, Shazeer and Uszkoreit, 2018): one layer of `heads * inner` units with a
    rectifier, from which head `i` reads its own `inner` ones, `f + V_i relu(U_i f + b_i) + c_i`, and predicts with the
    target's vocabulary matrix.

    Attributes:
        taps: empty: the hidden state after the final norm.
        vocab: number of logits.
        width: width `D` of the target.
        heads: number of heads `K`; a block has one token more, the target's own.
        inner: units of a head.
    """

    width: int = dataclasses.field(kw_only=True)
    heads: int = dataclasses.field(default=7, kw_only=True)
    inner: int = dataclasses.field(kw_only=True)

    @property
    def own_head(self) -> bool:
        """False: the vocabulary matrix is the target's."""
        return False

    def module(self, rngs: nnx.Rngs) -> nnx.Module:
        module: Any = nnx.Module()
        module.up = Linear(rngs, (self.width, self.heads * self.inner), ("embed", None), True)
        # Zeros, so that fresh heads predict what the target does.
        module.down = nnx.Dict({str(i): Linear(rngs, (self.inner, self.width), (None, "embed"), True, 0.0)
                                for i in range(self.heads)})
        return module

    def logits(self, weights: Weights, hidden: Array, depth: Depth, head: Callable[[Array], Array]) -> Array:
        network = self.network(weights)
        up = jax.nn.relu(network.up(hidden)).reshape(*hidden.shape[:2], self.heads, self.inner)
        return at_depth(depth, self.heads, lambda i, z: head(hidden + network.down[str(i)](z[:, :, i])), up)


@dataclasses.dataclass(frozen=True)
class MLPSpeculatorHead(StackedHead):
    """IBM's MLP speculator (Wertheimer et al., 2024): a recurrent network with another set of weights for each step.

    Step `i` turns the state into `gelu(norm_i(P_i s + (c_e / c_s) E_i[token]))`, with `c_s = 0.5 ** (0.5 / K)` and `c_e
    = sqrt((1 - c_s ** 2) inner / 2)`, and predicts `H_i s`. The norm divides by the root of the mean square, then has a
    scale and a shift.

    Attributes:
        taps: empty: the hidden state after the final norm.
        vocab: number of logits.
        width: width `D` of the target.
        heads: number of steps `K`.
        inner: width of the state.
        tied: True: all steps share embedding, norm and vocabulary matrix, and all but the first the projection.
        scale_input: True divides the feature by `sqrt(2)` times the root of its mean square.
        own_head: False: the target's embeddings and vocabulary matrix are used, which takes `inner` equal to `width`.
    """

    width: int = dataclasses.field(kw_only=True)
    heads: int = dataclasses.field(default=3, kw_only=True)
    inner: int = dataclasses.field(kw_only=True)
    tied: bool = False
    scale_input: bool = False
    own_head: bool = True

    def __post_init__(self) -> None:
        if not self.own_head and self.inner != self.width:
            raise ValueError(f"inner: got {self.inner} with the target's matrices, takes its width, {self.width}")

    @property
    def state_width(self) -> int:
        return max(self.width, self.inner)

    @property
    def state_weight(self) -> float:
        """`c_s` of the formula in `MLPSpeculatorHead`, the weight of the state where it is added to a token's
        embedding."""
        return 0.5 ** (0.5 / self.heads)

    @property
    def token_weight(self) -> float:
        """`c_e / c_s` of the formula in `MLPSpeculatorHead`, the factor of a token's embedding where it is added to the
        state. The norm that follows makes a common factor `c_s` of both unnecessary."""
        return math.sqrt((1 - self.state_weight ** 2) * self.inner / 2) / self.state_weight

    def module(self, rngs: nnx.Rngs) -> nnx.Module:
        module: Any = nnx.Module()
        std = self.inner ** -0.5
        many = lambda count, one: nnx.Dict({str(i): one(i) for i in range(count)})
        sets = 1 if self.tied else self.heads
        module.project = many(min(self.heads, 2) if self.tied else self.heads, lambda i: Linear(
            rngs, (self.width if i == 0 else self.inner, self.inner), (None, None), False, std))
        module.norm = many(sets, lambda i: _ScaleShift(self.inner))
        if self.own_head:
            module.embed = many(sets, lambda i: _TokenTable(rngs, (self.vocab, self.inner), ("vocab", None), std))
            module.head = many(sets, lambda i: Linear(rngs, (self.inner, self.vocab), (None, "vocab"), False, std))
        return module

    def enter(self, weights: Weights, features: Array) -> Array:
        if self.scale_input:
            x = features.astype(jnp.float32)
            features = (x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * 0.5 ** 0.5).astype(features.dtype)
        return jnp.pad(features, ((0, 0), (0, 0), (0, self.state_width - self.width)))

    def step(self, weights: Weights, tokens: Array, embed: Embed, state: Array, positions: Array, depth: Depth,
             attend: Any) -> HeadStep:
        network = self.network(weights)

        def one(i: int, state: Array) -> Array:
            into, own = min(i, 1) if self.tied else i, 0 if self.tied else i
            token = network.embed[str(own)](tokens) if self.own_head else embed(tokens).astype(state.dtype)
            x = network.project[str(into)](state[..., :self.width if i == 0 else self.inner])
            return jax.nn.gelu(network.norm[str(own)](x + self.token_weight * token), approximate=False)

        hidden = at_depth(depth, self.heads, one, state)
        return HeadStep(hidden=hidden, state=jnp.pad(hidden, ((0, 0), (0, 0), (0, self.state_width - self.inner))))

    def logits(self, weights: Weights, hidden: Array, depth: Depth, head: Callable[[Array], Array]) -> Array:
        if not self.own_head:
            return head(hidden)
        network = self.network(weights)
        if self.tied:
            return network.head["0"](hidden).astype(jnp.float32)
        return at_depth(depth, self.heads, lambda i, z: network.head[str(i)](z).astype(jnp.float32), hidden)


class _TokenTable(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, shape: tuple[int, int], axes: tuple[str | None, ...], std: float):
        self.table = weight(rngs, shape, axes, std)

    def __call__(self, tokens: Array) -> Array:
        return self.table[...][tokens]


class _ScaleShift(nnx.Module):
    def __init__(self, width: int):
        self.scale, self.shift = nnx.Param(jnp.ones(width), axes=(None,)), nnx.Param(jnp.zeros(width), axes=(None,))

    def __call__(self, x: Array) -> Array:
        y = x.astype(jnp.float32)
        y = y * lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + 1e-6)
        return (y * self.scale[...].astype(jnp.float32) + self.shift[...].astype(jnp.float32)).astype(x.dtype)


__all__ = ["BlockwiseHead", "IndependentHeads", "MLPSpeculatorHead", "MedusaHead", "StackedHead", "at_depth"]
