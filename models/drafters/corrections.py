"""Corrections of a block head's logits by the tokens drafted before, which one pass over a block cannot know.

DSpark (Cheng et al., 2026), Domino (Huang et al., 2026), DFlash2 (Z Lab, 2026) and XPress (2026) add them. All are
small networks that run from slot to slot: they read the slot's hidden state, the token before the one it predicts, and
a memory of earlier slots. So the distribution of a slot is conditional on the drafts before it, in chains and in trees.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from decodax.models.drafters.head import Embed
from decodax.models.layers import Linear, weight
from decodax.pallas_kernels.vocabulary import top_k

Opening = Literal["skipped", "newest", "before"]
"""How a correction treats the slot of the newest token if that slot predicts nothing: the slot is left out, or the
memory after it is computed with the newest token as its previous one, or with the token before."""


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """The sizes of a block head that its correction depends on.

    Attributes:
        width: width `d` of hidden states and embeddings.
        vocab: number of logits.
        tokens: number of the target's tokens.
        block: number of slots.
        offset: index of the first slot that predicts.
    """

    width: int
    vocab: int
    tokens: int
    block: int
    offset: int


@dataclasses.dataclass(frozen=True)
class Correction(abc.ABC):
    """Base class of corrections: options of a small network that changes the logits of a block's slots, given the token
    drafted in the slot before. Derive a frozen dataclass from it; it is static under jit."""

    opening: ClassVar[Opening] = "skipped"

    def memory(self, sizes: BlockSizes) -> int:
        """Returns the number of channels of the state that is carried from slot to slot; 0: there is no state."""
        return 0

    @abc.abstractmethod
    def module(self, sizes: BlockSizes, rngs: nnx.Rngs) -> CorrectionNetwork:
        """Returns the network of the correction with random weights, for a head with these `sizes`."""


class CorrectionNetwork(nnx.Module):
    """The network of a `Correction`: changes the logits of the slots of a drafted block, slot after slot.

    Attributes:
        table: `f[V, r]`, a learned vector for each token, from which a head may predict its confidence; None: the
            correction has none.
    """

    table: Any = None

    def prepare(self, hidden: Array) -> Array:
        """Returns the values `f[B, S, e]` that the correction reads of the hidden states `f[B, S, d]` of a block."""
        return hidden

    def __call__(self, logits: Array, seen: Array, tokens: Array, embed: Embed, memory: Array, slots: Array
                 ) -> tuple[Array, Array]:
        """Corrects the logits of slots.

        Args:
            logits: `f32[B, W, V]`, before the correction.
            seen: `f[B, W, e]`, entries of `prepare` for these slots.
            tokens: `i32[B, W]`, the token before the one that each slot predicts.
            embed: the embedding table.
            memory: `f[B, W, m]`, the memory after the slot before; zeros before the first.
            slots: `i32[B, W]`, indices in the block.

        Returns:
            The corrected logits, and the memory after these slots.
        """
        raise NotImplementedError

    def learned(self, corrected: Array, logits: Array, seen: Array, tokens: Array, labels: Array) -> Array:
        """Returns the corrected logits that training reads, `f32[B, W, V]`: those given as `corrected`, but for a
        correction that leaves tokens out, which must not leave out those to be learned.

        Args:
            corrected: `f32[B, W, V]`, what calling the network returns.
            logits, seen, tokens: those of the call.
            labels: `i32[B, W]`, the tokens to be learned, as indices of the logits; -1: none.
        """
        return corrected


@dataclasses.dataclass(frozen=True)
class Markov(Correction):
    """The sequential head of DSpark: adds `W2 W1[token]` to the logits.

    Attributes:
        rank: width of `W1[token]`.
        form: "vanilla": as above. "gated": `W1[token]` times the sigmoid of a linear map of hidden state and
            `W1[token]`. "rnn": a gated state, updated from slot to slot, takes the place of `W1[token]`.
    """

    rank: int = 256
    form: Literal["vanilla", "gated", "rnn"] = "vanilla"
    opening: ClassVar[Opening] = "newest"

    def memory(self, sizes: BlockSizes) -> int:
        return self.rank if self.form == "rnn" else 0

    def module(self, sizes: BlockSizes, rngs: nnx.Rngs) -> MarkovNetwork:
        return MarkovNetwork(self, sizes, rngs)


class MarkovNetwork(CorrectionNetwork):
    """The network of `Markov`: adds logits that depend on the token before, by two low-rank matrices."""

    def __init__(self, c: Markov, sizes: BlockSizes, rngs: nnx.Rngs):
        self.form, r, wide = c.form, c.rank, sizes.width
        self.table = weight(rngs, (sizes.tokens, r), ("vocab", None), 0.01)
        # zeros: a fresh correction changes nothing
        self.out = Linear(rngs, (r, sizes.vocab), (None, "vocab"), False, 0.0)
        self.gate = Linear(rngs, (wide + r, r), (None, None), True) if c.form == "gated" else None
        self.joint = Linear(rngs, (2 * r + wide, 3 * r), (None, None), True) if c.form == "rnn" else None

    def __call__(self, logits: Array, seen: Array, tokens: Array, embed: Embed, memory: Array, slots: Array
                 ) -> tuple[Array, Array]:
        token = self.table[...][tokens]
        if self.gate is not None:
            token = token * jax.nn.sigmoid(self.gate(jnp.concatenate([seen, token], -1)))
        if self.joint is not None:
            gate, new, out = jnp.split(self.joint(jnp.concatenate([memory, token, seen], -1)), 3, -1)
            gate = jax.nn.sigmoid(gate)
            memory, token = gate * memory + (1 - gate) * jnp.tanh(new), jnp.tanh(out)
        return logits + self.out(token).astype(logits.dtype), memory


@dataclasses.dataclass(frozen=True)
class PrefixGRU(Correction):
    """The correction of Domino: a GRU over the embeddings of the drafts before; adds `W_b silu(W_a [hidden, state])`.

    Attributes:
        state: width of the GRU.
        rank: width between `W_a` and `W_b`.
        first: index of the first draft that is corrected (`pure_draft_prefix_len`).
    """

    state: int = 1024
    rank: int = 256
    first: int = 1

    def memory(self, sizes: BlockSizes) -> int:
        return self.state

    def module(self, sizes: BlockSizes, rngs: nnx.Rngs) -> PrefixGRUNetwork:
        return PrefixGRUNetwork(self, sizes, rngs)


class PrefixGRUNetwork(CorrectionNetwork):
    """The network of `PrefixGRU`: a GRU over the drafted tokens, whose state changes the logits of the next slot."""

    def __init__(self, c: PrefixGRU, sizes: BlockSizes, rngs: nnx.Rngs):
        wide = sizes.width
        self.first = c.first + sizes.offset
        self.into = Linear(rngs, (wide, 3 * c.state), ("embed", None), False)
        self.again = Linear(rngs, (c.state, 3 * c.state), (None, None), False)
        self.down = Linear(rngs, (wide + c.state, c.rank), (None, None), False)
        self.up = Linear(rngs, (c.rank, sizes.vocab), (None, "vocab"), False, 0.0)

    def __call__(self, logits: Array, seen: Array, tokens: Array, embed: Embed, memory: Array, slots: Array
                 ) -> tuple[Array, Array]:
        reset, update, new = jnp.split(self.into(embed(tokens).astype(seen.dtype)), 3, -1)
        again = jnp.split(self.again(memory), 3, -1)
        update = jax.nn.sigmoid(update + again[1])
        new = jnp.tanh(new + jax.nn.sigmoid(reset + again[0]) * again[2])
        memory = (1 - update) * new + update * memory
        bias = self.up(jax.nn.silu(self.down(jnp.concatenate([seen, memory], -1)))).astype(logits.dtype)
        return logits + jnp.where((slots >= self.first)[..., None], bias, 0), memory


@dataclasses.dataclass(frozen=True)
class CandidateSelector(Correction):
    """The candidate selector of DFlash2: of the `top_k` likeliest tokens `c` of a slot, the logit grows by `sum_r
    P[token]_r (H hidden)_r S[c]_r`; all other tokens are left out.

    Attributes:
        rank: width of the codebooks `P` and `S`.
        top_k: number of candidates.
    """

    rank: int = 256
    top_k: int = 16

    def module(self, sizes: BlockSizes, rngs: nnx.Rngs) -> SelectorNetwork:
        return SelectorNetwork(self, sizes, rngs)


class SelectorNetwork(CorrectionNetwork):
    """The network of `CandidateSelector`: rescores the `top_k` likeliest tokens of each slot; all other logits become
    -inf."""

    def __init__(self, c: CandidateSelector, sizes: BlockSizes, rngs: nnx.Rngs):
        self.top_k = min(c.top_k, sizes.vocab)
        self.before = weight(rngs, (sizes.tokens, c.rank), ("vocab", None))
        self.after = weight(rngs, (sizes.vocab, c.rank), ("vocab", None))
        self.project = Linear(rngs, (sizes.width, c.rank), ("embed", None), False)

    def prepare(self, hidden: Array) -> Array:
        return self.project(hidden)

    def __call__(self, logits: Array, seen: Array, tokens: Array, embed: Embed, memory: Array, slots: Array
                 ) -> tuple[Array, Array]:
        return self._among(*top_k(logits, self.top_k), logits, seen, tokens), memory

    def learned(self, corrected: Array, logits: Array, seen: Array, tokens: Array, labels: Array) -> Array:
        best, ids = top_k(logits, self.top_k)
        missing = (labels >= 0) & (ids != labels[..., None]).all(-1)
        # in the place of the least likely candidate, as in the public trainers
        put = lambda last, own: last.at[..., -1].set(jnp.where(missing, own, last[..., -1]))
        own = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[..., None], -1)[..., 0]
        return self._among(put(best, own), put(ids, labels), logits, seen, tokens)

    def _among(self, best: Array, ids: Array, logits: Array, seen: Array, tokens: Array) -> Array:
        """Returns the logits `f32[B, W, V]` of the candidates `ids`, `i32[B, W, k]`, whose logits were `best`."""
        context = self.before[...][tokens] * seen
        best = best + jnp.einsum("bwr,bwkr->bwk", context, self.after[...][ids]).astype(best.dtype)
        rows, nodes = (jnp.arange(n, dtype=jnp.int32) for n in logits.shape[:2])
        alone = jnp.full_like(logits, -jnp.inf)
        return alone.at[rows[:, None, None], nodes[None, :, None], ids].set(best)


@dataclasses.dataclass(frozen=True)
class Refiner(Correction):
    """The causal refiner of XPress. Each slot has a vector of its hidden state, of the mean over the block, and of the
    token before; vectors are mixed over the slots before by a learned matrix for each channel, and a gated MLP and a
    readout give the change of the logits.

    The paper resolves a block by several parallel passes on the likeliest tokens, whose fixed point is this walk.

    Attributes:
        rank: width of the vectors.
        ratio: width of the MLP in multiples of `rank`.
    """

    rank: int = 256
    ratio: int = 2
    opening: ClassVar[Opening] = "before"

    def memory(self, sizes: BlockSizes) -> int:
        return self.rank * sizes.block

    def module(self, sizes: BlockSizes, rngs: nnx.Rngs) -> RefinerNetwork:
        return RefinerNetwork(self, sizes, rngs)


class RefinerNetwork(CorrectionNetwork):
    """The network of `Refiner`. The state that it carries from slot to slot has the vectors of all slots so far."""

    def __init__(self, c: Refiner, sizes: BlockSizes, rngs: nnx.Rngs):
        r, wide = c.rank, sizes.width
        small = lambda a, b: Linear(rngs, (a, b), (None, None), False)
        self.table = weight(rngs, (sizes.tokens, r), ("vocab", None))
        self.own, self.mean = small(wide, r), small(wide, r)
        self.fuse = small(3 * r, r)
        self.mix = nnx.Param(jnp.zeros((r, sizes.block, sizes.block)), axes=(None, None, None))
        self.gate, self.up, self.down = small(r, c.ratio * r), small(r, c.ratio * r), small(c.ratio * r, r)
        self.readout = Linear(rngs, (r, sizes.vocab), (None, "vocab"), False)

    def prepare(self, hidden: Array) -> Array:
        mean = jnp.broadcast_to(hidden.mean(1, keepdims=True), hidden.shape)
        return jnp.concatenate([self.own(hidden), self.mean(mean)], -1)

    def __call__(self, logits: Array, seen: Array, tokens: Array, embed: Embed, memory: Array, slots: Array
                 ) -> tuple[Array, Array]:
        x = self.fuse(jnp.concatenate([seen, self.table[...][tokens].astype(seen.dtype)], -1))
        r, block = self.mix.shape[:2]
        here = jnp.arange(block) == slots[..., None]
        vectors = jnp.where(here[..., None], x[:, :, None], memory.reshape(*slots.shape, block, r))
        weights = jnp.moveaxis(self.mix[...], 0, -1)[slots]                                    # [B, W, block, r]
        x = x + jnp.where((jnp.arange(block) <= slots[..., None])[..., None], weights * vectors, 0).sum(2)
        x = x + self.down(jax.nn.silu(self.gate(x)) * self.up(x))
        return logits + self.readout(x).astype(logits.dtype), vectors.reshape(*slots.shape, -1)


def walk(network: CorrectionNetwork, logits: Array, seen: Array, tokens: Array, embed: Embed, memory: Array,
         first: int) -> Array:
    """Applies a correction to `S` consecutive slots whose tokens are all known, in order, and returns the corrected
    logits, `f32[B, S, V]`.

    Args:
        network: the correction.
        logits, seen, tokens: those of `CorrectionNetwork`, for these slots.
        embed: the embedding table.
        memory: `f[B, 1, m]`, the memory before them.
        first: index of the first of them in the block.
    """
    slots = jnp.broadcast_to(first + jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    if not memory.shape[-1]:
        return network(logits, seen, tokens, embed, jnp.zeros((*tokens.shape, 0), seen.dtype), slots)[0]

    def visit(memory: Array, x: Any) -> tuple[Array, Array]:
        logits, seen, tokens, slots = (part[:, None] for part in x)
        logits, memory = network(logits, seen, tokens, embed, memory, slots)
        return memory, logits[:, 0]

    by_slot = jax.tree.map(lambda x: x.swapaxes(0, 1), (logits, seen, tokens, slots))
    return jax.lax.scan(visit, memory, by_slot)[1].swapaxes(0, 1)


__all__ = ["BlockSizes", "CandidateSelector", "Correction", "CorrectionNetwork", "Markov", "PrefixGRU", "Refiner",
           "walk"]
