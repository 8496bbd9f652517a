"""Block heads: decoder layers that predict the next tokens in one pass over a block of mask tokens.

DFlash (Chen, Liang and Liu, 2026) reads the target's hidden states as keys and values: each layer projects the context
features of all verified tokens by its own key and value projections, and the slots of the block attend to them and to
each other. The features of a token are projected once and stored. DSpark (Cheng et al., 2026), Domino (Huang et al.,
2026), DFlash2 (Z Lab, 2026), JetSpec (Hu et al., 2026) and XPress (2026) are settings of the same network.

Letters: S slots of a block; slot 0 has the newest token, the others have masks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, cast

import jax.numpy as jnp
from flax import nnx
from jax import Array

from decodax.cache import KVLayer
from decodax.cache.entry import KVEntry
from decodax.models.blocks.attention import Attend, Attention
from decodax.models.blocks.layer import DecoderLayer
from decodax.models.config import DecoderConfig
from decodax.models.drafters.corrections import BlockSizes, Correction
from decodax.models.drafters.head import Depth, Embed, HeadStep, ModuleHead, Weights
from decodax.models.drafters.local_convolution import Convolutions, LocalConvolution
from decodax.models.drafters.prefixed import rope_tables
from decodax.models.kv_shapes import kv_layers
from decodax.models.layers import Linear, Norm, optional, weight


@dataclasses.dataclass(frozen=True)
class BlockHead(ModuleHead):
    """A head that predicts a block of tokens in one pass.

    Attributes:
        config: shape and options of its layers; `vocab` is its number of logits, `width` that of embeddings and hidden
            states.
        block: number of slots `S`.
        mask: the target's token in the slots after the first; None: they have a learned vector in place of an
            embedding, for targets without an unused token.
        feature_width: width of one of the target's layers; None: `config.width`.
        target_vocab: number of the target's tokens; None: `vocab`.
        first_predicts: True: slot `k` predicts the token after its position (DSpark). False: it predicts the token at
            its position, and slot 0 predicts nothing (DFlash).
        causal: True: slots attend to the slots before them and themselves only (JetSpec).
        causal_sliding: the same in layers with a sliding window; None: as `causal`.
        window_from: "slot": in layers with a sliding window, a slot attends to the `sliding` positions up to its own
            (SpecForge). "newest": all slots attend to the `sliding` positions before the newest token (speculators).
        correction: correction of the logits by the tokens drafted before, or None.
        confidence: input of the layer that predicts the probability that a draft is accepted: "hidden", the hidden
            state, or "token", that and `W1[token]` of a `Markov` correction. None: there is no such layer.
        temperatures: number for each draft of a block by which the logit of that probability is divided, so that the
            probabilities are those of the texts it was fitted to; empty: 1.
        convolution: local convolutions around the halves of layers (DFlash2), or None.
        own_head: True if the head has a vocabulary matrix.
        own_table: True if the head has an embedding table.
    """

    config: DecoderConfig = dataclasses.field(kw_only=True)
    block: int = dataclasses.field(kw_only=True)
    mask: int | None = None
    feature_width: int | None = None
    target_vocab: int | None = None
    first_predicts: bool = False
    causal: bool = False
    causal_sliding: bool | None = None
    window_from: Literal["slot", "newest"] = "slot"
    correction: Correction | None = None
    confidence: Literal["hidden", "token"] | None = None
    temperatures: tuple[float, ...] = ()
    convolution: LocalConvolution | None = None
    own_head: bool = False
    own_table: bool = False

    def __post_init__(self) -> None:
        if self.vocab != self.config.vocab:
            raise ValueError(f"vocab: got {self.vocab}, takes that of config, {self.config.vocab}")
        least = 1 if self.first_predicts else 2
        if self.block < least:
            raise ValueError(f"block: got {self.block}, takes at least {least}")
        if self.mask is not None and not 0 <= self.mask < self.tokens:
            raise ValueError(f"mask: got {self.mask}, takes a token below {self.tokens}")
        c = self.config
        if c.recurrent or c.latent or c.shared or c.streams is not None or any(
                layer.mixture is not None or layer.linear is not None for layer in c.layers):
            raise ValueError("config: takes layers with a dense MLP, and with keys and values of their own")
        if self.temperatures and (len(self.temperatures) != self.longest or min(self.temperatures) <= 0):
            raise ValueError(f"temperatures: got {self.temperatures}, takes {self.longest} positive numbers or none")
        if self.convolution is not None and c.block != "pre":
            raise ValueError(f"convolution: takes layers with a norm before each half, got {c.block!r}")

    @property
    def tokens(self) -> int:
        """Number of token ids of the target: `target_vocab`, or `vocab` if that is None."""
        return self.target_vocab or self.vocab

    @property
    def target_width(self) -> int:
        return self.feature_width or self.config.width

    @property
    def offset(self) -> int:
        """Index of the first slot whose logits are used as a draft: 0 if `first_predicts`, else 1."""
        return 0 if self.first_predicts else 1

    @property
    def sizes(self) -> BlockSizes:
        """The widths and counts of this head that its correction's network is built from."""
        return BlockSizes(self.config.width, self.vocab, self.tokens, self.block, self.offset)

    @property
    def longest(self) -> int:
        return self.block - self.offset

    @property
    def parallel(self) -> bool:
        return self.correction is None

    @property
    def state_width(self) -> int:
        return self.config.width

    @property
    def memory(self) -> int:
        """Number of channels `m` of the recurrent state that the correction carries from slot to slot; 0: none."""
        return 0 if self.correction is None else self.correction.memory(self.sizes)

    @property
    def kv_layers(self) -> tuple[KVLayer, ...]:
        return tuple(kv_layers(self.config, None))

    def module(self, rngs: nnx.Rngs) -> BlockNetwork:
        return BlockNetwork(self, rngs)

    def enter(self, weights: Weights, features: Array) -> Array:
        """Projects the target's features `f[B, W, F]` of verified tokens to context features `f[B, W, d]`, from which
        every layer computes keys and values."""
        return self.network(weights).enter(features)

    def context(self, weights: Weights, state: Array, positions: Array) -> tuple[KVEntry, ...]:
        """Returns for each layer the keys and values, `f[B, W, G, e]` each, of context features `state`, `f[B, W, d]`
        (results of `enter`), at positions `i32[B, W]`. The slots of a block attend to them."""
        return self.network(weights).context(state, positions)

    def step(self, weights: Weights, tokens: Array, embed: Embed, state: Array, positions: Array, depth: Depth,
             attend: Attend | None) -> HeadStep:
        """Runs all layers on blocks: `tokens`, `i32[B, W]`, are the newest token and then masks, `positions` theirs.
        The slots attend to the context by `attend`. `state` only gives the dtype, and `depth` is not used."""
        assert attend is not None
        network = self.network(weights)
        hidden, entries = network(network.embedded(embed, tokens).astype(state.dtype), positions, attend)
        return HeadStep(hidden=hidden, state=hidden, entries=entries)

    def logits(self, weights: Weights, hidden: Array, depth: Depth, head: Callable[[Array], Array]) -> Array:
        """Returns the logits `f32[B, W, vocab]` of slots with hidden states `f[B, W, d]`, before the correction: by the
        head's own vocabulary matrix, or else by the target's, `head`."""
        own = self.network(weights).lm_head
        return head(hidden) if own is None else own(hidden).astype(jnp.float32)

    def prepare(self, weights: Weights, hidden: Array) -> Array:
        """Returns the vectors `f[B, S, e]` that the correction reads for the `S` slots of a block, computed once from
        their hidden states `f[B, S, d]`. Without a correction these are the hidden states."""
        correction = self.network(weights).correction
        return hidden if correction is None else correction.prepare(hidden)

    def opening(self, weights: Weights, seen: Array, newest: Array, before: Array, embed: Embed) -> Array:
        """Returns the state of the correction before the first slot that predicts, `f[B, 1, m]`: zeros, or the state
        after slot 0 if the correction starts by reading the newest token or the one before it.

        Args:
            weights: the head's weights.
            seen: `f[B, S, e]`, from `prepare`.
            newest: `i32[B]`, the newest token.
            before: `i32[B]`, the token before it.
            embed: the target's embedding table.
        """
        network, empty = self.network(weights), jnp.zeros((seen.shape[0], 1, self.memory), seen.dtype)
        how = "skipped" if self.correction is None or self.first_predicts else self.correction.opening
        if how == "skipped" or not self.memory:
            return empty
        token = (newest if how == "newest" else before)[:, None]
        logits = jnp.zeros((*token.shape, self.vocab), jnp.float32)
        return network.correction(logits, seen[:, :1], token, network.embedding(embed), empty, jnp.zeros_like(token))[1]

    def correct(self, weights: Weights, logits: Array, seen: Array, tokens: Array, embed: Embed, memory: Array,
                slots: Array) -> tuple[Array, Array]:
        """Returns the logits of slots corrected for the token before each, `f32[B, W, vocab]`, and the correction's new
        state. Without a correction, `logits` and `memory` are returned unchanged.

        Args:
            weights: the weights of the head.
            logits, seen, tokens, memory, slots: see `CorrectionNetwork.__call__`.
            embed: function from token ids to embeddings of the target.
        """
        network = self.network(weights)
        if network.correction is None:
            return logits, memory
        return network.correction(logits, seen, tokens, network.embedding(embed), memory, slots)

    def chance(self, weights: Weights, hidden: Array, tokens: Array, depth: Array) -> Array | None:
        """Returns the logit of the predicted probability that a draft is accepted, `f32[B, W]`, or None if the head has
        no such layer.

        Args:
            weights: the weights.
            hidden: `f[B, W, d]`, the hidden state of the draft's slot.
            tokens: `i32[B, W]`, the token before.
            depth: `i32[B or 1, W]`, number of drafts of the block before.
        """
        network = self.network(weights)
        if network.confidence is None:
            return None
        if self.confidence == "token":
            hidden = jnp.concatenate([hidden, network.correction.table[...][tokens].astype(hidden.dtype)], -1)
        logit = network.confidence(hidden)[..., 0].astype(jnp.float32)
        return logit / jnp.array(self.temperatures, jnp.float32)[depth] if self.temperatures else logit


class BlockNetwork(nnx.Module):
    """The module with the weights of a `BlockHead`: the projection of the target's features, the decoder layers over
    the slots of blocks, and what the head's options add."""

    def __init__(self, h: BlockHead, rngs: nnx.Rngs):
        c = h.config
        self.h, features = h, max(len(h.taps), 1) * (h.feature_width or c.width)
        self.taps = Linear(rngs, (features, c.width), (None, "embed"), False)
        self.tap_norm = Norm(c.norm, (c.width,), ("embed",))
        self.layers = nnx.Dict({str(i): DecoderLayer(c, layer, rngs) for i, layer in enumerate(c.layers)})
        around = None if h.convolution is None else h.convolution
        self.convolutions = None if around is None else nnx.Dict({
            f"{i}_{half}": Convolutions(around, c.width, h.block, rngs) for i in range(len(c.layers))
            for half in ("attn", "mlp")})
        self.norm = Norm(c.norm, (c.width,), ("embed",))
        self.lm_head = Linear(rngs, (c.width, c.vocab), ("embed", "vocab"), c.head_bias) if h.own_head else None
        self.embed = weight(rngs, (h.tokens, c.width), ("vocab", "embed")) if h.own_table else None
        self.mask = weight(rngs, (c.width,), ("embed",)) if h.mask is None else None
        self.correction: Any = None if h.correction is None else h.correction.module(h.sizes, rngs)
        table = None if self.correction is None else self.correction.table
        if h.confidence == "token" and table is None:
            raise ValueError("confidence: got 'token', takes a head with a Markov correction")
        wide = c.width + (table.shape[1] if table is not None and h.confidence == "token" else 0)
        self.confidence = Linear(rngs, (wide, 1), (None, None), True) if h.confidence is not None else None

    def embedding(self, embed: Embed) -> Embed:
        """Returns the function from token ids to embeddings that the head uses: its own table if it has one, else
        `embed`, the target's."""
        own = self.embed
        return embed if own is None else lambda tokens: own[...][tokens]

    def embedded(self, embed: Embed, tokens: Array) -> Array:
        """Returns the inputs `f[B, W, d]` of blocks with `tokens`, `i32[B, W]`: their embeddings, or, if the head has a
        learned mask vector, the embedding of each block's first token and that vector for the others."""
        x = self.embedding(embed)(tokens)
        if self.mask is None:
            return x
        first = jnp.arange(tokens.shape[1]) % self.h.block == 0
        return jnp.where(first[:, None], x, self.mask[...].astype(x.dtype))

    def enter(self, features: Array) -> Array:
        """Projects the target's features `f[B, W, F]` to context features `f[B, W, d]`, with a norm."""
        return self.tap_norm(self.taps(features))

    def context(self, state: Array, positions: Array) -> tuple[KVEntry, ...]:
        """Returns for each layer the keys and values, `f[B, W, G, e]` each, of context features `f[B, W, d]` at
        positions `i32[B, W]`."""
        tables = rope_tables(self.h.config, positions)
        return tuple(KVEntry(*cast(Attention, layer.attn).keys_values(state, tables)) for layer in self._layers())

    def __call__(self, x: Array, positions: Array, attend: Attend) -> tuple[Array, tuple[Any, ...]]:
        """Returns the hidden states `f[B, W, d]` of slots after the final norm, and the layers' entries."""
        tables, entries = rope_tables(self.h.config, positions), []
        for i, layer in enumerate(self._layers()):
            if self.convolutions is None:
                x, entry = layer(i, x, tables, attend)
            else:
                around = self.convolutions[f"{i}_attn"]
                given, kernels = around(optional(layer.attn_in, x))
                branch, entry = cast(Attention, layer.attn)(i, given, tables, attend)
                x = x + around.after(branch, kernels)
                around = self.convolutions[f"{i}_mlp"]
                given, kernels = around(optional(layer.mlp_in, x))
                x = x + around.after(cast(Any, layer.mlp)(given), kernels)
            entries.append(entry)
        return self.norm(x), tuple(entries)

    def _layers(self) -> list[DecoderLayer]:
        return [self.layers[str(i)] for i in range(len(self.h.config.layers))]


__all__ = ["BlockHead", "BlockNetwork"]
