"""The options of one layer of a decoder."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from decodax.cache import LinearRule
from decodax.common.arguments import check_counts
from decodax.models.compressed.options import Pooling, SharedKey
from decodax.models.latent.shape import Latent
from decodax.models.recurrent.options import GatedDelta, RecurrentBlocks
from decodax.models.residual.options import HashedNGrams
from decodax.models.rope import Chunks, Rope
from decodax.models.routing import ClippedSwiGLU, Experts
from decodax.pallas_kernels.window_attention import FixedBias


@dataclasses.dataclass(frozen=True)
class QueryScale:
    """A factor of the queries that grows with the position: `1 + beta * log(1 + floor((position + shift) / length))`.

    It keeps the attention of long texts from becoming flat (Llama 4, Ministral 3).
    """

    beta: float
    length: float
    shift: int = 0

    def table(self, positions: Array) -> Array:
        """Returns the factors `f32[B, W, 1, 1]` at positions `i32[B, W]`."""
        steps = jnp.floor((positions + self.shift).astype(jnp.float32) / self.length)
        # Nodes that are not live may have positions below 0.
        return (1 + self.beta * jnp.log1p(jnp.maximum(steps, 0)))[..., None, None]


@dataclasses.dataclass(frozen=True)
class BlockIndex:
    """The choice of the blocks of text that a query attends to. See `decodax.models.blocks.block_index`.

    Attributes:
        heads: number of index heads, a multiple or a divisor of the number of key/value heads.
        width: number of channels of an index query and of an index key.
        size: number of positions of a block.
        top: number of blocks that a query attends to.
        local: number of latest blocks, that of the query included, that are among these in any case.
    """

    heads: int
    width: int
    size: int
    top: int
    local: int = 1

    def __post_init__(self) -> None:
        check_counts(self, "heads", "width", "size", "top")
        if not 0 <= self.local <= self.top:
            raise ValueError(f"local: got {self.local}, takes 0 to the number of blocks, {self.top}")


@dataclasses.dataclass(frozen=True)
class GroupIndex:
    """The choice of groups of tokens by pooled index keys (Qwen4). See `decodax.models.blocks.group_index`.

    Attributes:
        heads: number of index queries of a token.
        width: number of channels of an index query and of an index key.
        top: number of groups that a query attends to.
    """

    heads: int
    width: int
    top: int

    def __post_init__(self) -> None:
        check_counts(self, "heads", "width", "top")


@dataclasses.dataclass(frozen=True)
class OutputGate:
    """A factor of the attention's output, computed from the layer's input by a projection and an activation.

    Attributes:
        each: "channels": a number for each channel of each head; "heads": one for all channels of a head.
        activation: "sigmoid" (Qwen3-Next, LFM3) or "softplus" (Laguna).
        bias: True adds a bias to the projection.
    """

    each: Literal["channels", "heads"]
    activation: Literal["sigmoid", "softplus"] = "sigmoid"
    bias: bool = False

    def __call__(self, projected: Array) -> Array:
        """Returns the factors of projected inputs, in their dtype. A softplus is computed in float32."""
        if self.activation == "sigmoid":
            return jax.nn.sigmoid(projected)
        return jax.nn.softplus(projected.astype(jnp.float32)).astype(projected.dtype)


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer: its attention, and its mixture of experts if it has one.

    Attributes:
        rope: rotary embedding of queries and keys; None if positions are learned, or the layer has none.
        sliding: a query attends to the latest `sliding` positions, its own included; None: all.
        scale: factor of the attention scores; None: `head_dim ** -0.5`.
        experts: the mixture in place of the MLP; None: the MLP.
        reads: index of an earlier layer whose keys and values this layer attends to. It has no projections for keys and
            values, and the cache stores nothing for it; see `cla` and `yoco`. None: its own.
        linear: the rule of linear attention, which replaces softmax and has a state of constant size, and no scale of
            scores; see `decodax.models.linear`. None: softmax.
        echoes: index of an earlier layer whose attention weights this layer uses with its own values. It has no
            projections for queries and keys, and the cache stores no keys for it; see `echo_att`. None: its own.
        bias: added to the attention scores, by the positions of query and key. See `decodax.models.biases`.
        query_scale: a factor of the queries that grows with the position, or None.
        recurrent: the recurrent block in place of attention, which has no other of these options but `experts` and
            `block`. None: attention.
        qk_norm: False leaves out the norm of queries and keys that `DecoderConfig.qk_norm` describes.
        heads, kv_heads, head_dim: number of query heads of this layer, of its key/value heads, and of channels of a
            head; None: as in the decoder.
        keys_as_values: True uses the projection of keys, before its norm and rotation, as values, too.
        mlp: number of inner channels of this layer's MLP; None: `DecoderConfig.mlp`.
        glu: the gated activation of this layer's MLP or shared expert; None: that of `DecoderConfig.glu`.
        sparsity: share of the inner channels of this layer's MLP that are 0 for a token, about; 0: all may count.
        sinks: True gives each query head a learned score that takes part in the softmax without a value, so that the
            weights of keys sum to less than one (GPT-OSS).
        latent: multi-head latent attention in place of keys and values for each head. It takes a rope, whose width is
            the rotated part of a head, or `Latent.plain`. With an indexer it takes neither, too, and the layer may read
            the latents of an earlier one (`reads`) or, with a `Pooling` as `recurrent` and `beside`, choose groups of
            tokens by pooled index keys. None: keys and values for each head.
        shared_key: attention with one head of keys that are the values, too. It takes a rope, a sliding window and
            sinks; with a `Pooling` as `recurrent` and `beside`, queries also attend to pooled keys. None: see above.
        output_gate: multiplies the attention's output by a function of the layer's input; None: no gate.
        block: position of the norms in this layer, "pre" or "post"; None: as `DecoderConfig.block` says.
        half: the only half of the layer: "attention", or the recurrent block in its place, or "mlp", for which the
            cache stores nothing; None: both. Some layers of a decoder with halves have a recurrent block.
        beside: True computes attention beside the recurrent block, from the same input, and adds their outputs.
        index: the choice of the blocks of text that a query attends to, or of groups of tokens, which takes a `Pooling`
            as `recurrent`, and `beside`; None: all of them.
        ngrams: embeddings of n-grams that are added to the residual streams before the layer, which has a gated delta
            rule in place of attention; None: none.
        shortcut: a mixture beside the MLP, which reads what the MLP reads, and whose output is added to the residual
            stream after the next layer (shortcut-connected mixture of experts; Cai et al., 2024). On several devices
            the tokens then travel to the experts while the next layer is computed. None: none.
    """

    rope: Rope | None = None
    sliding: int | None = None
    scale: float | None = None
    experts: Experts | None = None
    reads: int | None = None
    linear: LinearRule | None = None
    echoes: int | None = None
    bias: FixedBias | None = None
    query_scale: QueryScale | None = None
    qk_norm: bool = True
    recurrent: RecurrentBlocks | None = None
    sinks: bool = False
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    keys_as_values: bool = False
    mlp: int | None = None
    glu: ClippedSwiGLU | None = None
    sparsity: float = 0.0
    latent: Latent | None = None
    shared_key: SharedKey | None = None
    output_gate: OutputGate | None = None
    block: Literal["pre", "post"] | None = None
    half: Literal["attention", "mlp"] | None = None
    beside: bool = False
    index: BlockIndex | GroupIndex | None = None
    ngrams: HashedNGrams | None = None
    shortcut: Experts | None = None

    def __post_init__(self) -> None:
        chosen = self.latent is not None and self.latent.indexer is not None
        pool = self.recurrent if isinstance(self.recurrent, Pooling) else None
        pools, grouped = pool is not None, chosen and pool is not None and self.beside and self.reads is None
        index = self.index if isinstance(self.index, GroupIndex) else None
        if pools and self.shared_key is None and not grouped and index is None:
            raise ValueError("recurrent: got a Pooling, takes beside with it and a shared_key, latents of its own with "
                             "an indexer, or a GroupIndex")
        if index is not None and (pool != Pooling(pool.every if pool else 1, index.width, scored=False) or (
                not self.beside)):
            raise ValueError(f"index: got {index} with {self.recurrent}, takes beside with it a Pooling that is not "
                             "scored and as wide as the index keys")
        if self.ngrams is not None and (not isinstance(self.recurrent, GatedDelta) or self.beside):
            raise ValueError(f"ngrams: got a layer with recurrent = {self.recurrent} and beside = {self.beside}, takes "
                             "one with a GatedDelta in place of attention")
        if self.latent is not None and (((self.rope is None) != (self.latent.plain > 0) and not (
                chosen and self.rope is None)) or (self.rope is not None and self.rope.chunks is not None) or (
                dataclasses.replace(self, latent=None, rope=None, scale=None, experts=None, query_scale=None,
                                    shortcut=None, sinks=False, output_gate=None, reads=None if chosen else self.reads,
                                    recurrent=None if grouped else self.recurrent,
                                    beside=self.beside and not grouped) != Layer())):
            raise ValueError("latent: takes a rope without chunks, or none and a width of the key that heads share "
                             "(plain), of the other options scale, experts, shortcut, query_scale, sinks and "
                             "output_gate, and with an indexer reads, or a Pooling beside, and no such width")
        if pool is not None and self.latent is not None and self.latent.indexer is not None:
            self.latent.indexer.check_groups(pool)
        if self.shared_key is not None and (
                self.rope is None or self.rope.chunks is not None or self.sliding is None or not self.sinks
                or pools != self.beside or (self.recurrent is not None and not pools) or dataclasses.replace(
                    self, shared_key=None, rope=None, sliding=None, sinks=False, experts=None, recurrent=None,
                    beside=False) != Layer()):
            raise ValueError("shared_key: takes a rope without chunks, a sliding window and sinks, a Pooling beside or "
                             "none, and of the other options experts")
        if self.recurrent is not None and not self.beside and dataclasses.replace(
                self, recurrent=None, experts=None, block=None, half=None, ngrams=None) != Layer():
            raise ValueError("recurrent: cannot be combined with options of attention or of an MLP of its own")
        if not 0 <= self.sparsity < 1:
            raise ValueError(f"sparsity: got {self.sparsity}, takes a number from 0 and below 1")
        if self.beside and (self.recurrent is None or self.half is not None or (self.latent is not None and not pools)):
            raise ValueError("beside: takes a layer with a recurrent block, both halves and no latent")
        if self.half == "mlp" and dataclasses.replace(self, half=None, experts=None, block=None) != Layer():
            raise ValueError("half: got 'mlp' with options of attention or of an MLP of its own, takes none")
        if self.shortcut is not None and (self.experts is not None or self.half is not None or self.block is not None
                                          or self.shortcut.hashed):
            raise ValueError(f"shortcut: got {self.shortcut} with experts = {self.experts}, half = {self.half!r} and "
                             f"block = {self.block!r}, takes a layer with attention and a dense MLP, no block, and "
                             "experts that are not hashed")
        if self.half == "attention" and self.experts is not None:
            raise ValueError("half: got 'attention' with experts, takes none")
        if self.sliding is not None and self.sliding < 1:
            raise ValueError(f"sliding: got {self.sliding}, takes 1 or more, or None")
        if self.linear is not None and (self.sliding is not None or self.scale is not None or self.reads is not None):
            raise ValueError("linear: cannot be combined with a sliding window, a scale or another layer's keys")
        if self.linear is not None and (self.sinks or self.output_gate):
            name = "sinks" if self.sinks else "output_gate"
            raise ValueError(f"{name}: cannot be combined with linear attention")
        grouped = index is not None
        if self.index is not None and ((self.rope is not None and (
                self.rope.chunks is not None or self.rope.width > self.index.width)) or dataclasses.replace(
                self, index=None, rope=None, scale=None, experts=None, qk_norm=True, mlp=None,
                output_gate=None if grouped else self.output_gate, recurrent=None if grouped else self.recurrent,
                beside=self.beside and not grouped) != Layer()):
            raise ValueError("index: takes a rope without chunks that is at most as wide as the index keys, or none, "
                             "and of the other options scale, experts, qk_norm and mlp, with groups output_gate")
        if self.bias is not None and (self.linear is not None or (
                self.rope is not None and self.rope.chunks is not None)):
            raise ValueError("bias: cannot be combined with linear attention or dual chunk attention")

    @property
    def mixture(self) -> Experts | None:
        """The mixture of the layer, in place of its MLP or beside it; None without one."""
        return self.shortcut if self.experts is None else self.experts

    @property
    def state_kind(self) -> type | None:
        """The kind of the recurrent block; None without one. Pooled keys go with a gated delta rule in other layers."""
        kind = None if self.recurrent is None else type(self.recurrent)
        return GatedDelta if kind is Pooling else kind

    @property
    def parts(self) -> tuple[int, ...]:
        """The numbers of the layer's entries in a cache: 0 for keys and values, or a state of linear attention, 1 for
        what a recurrent block or pooled keys need, 2 for embeddings of n-grams."""
        recurs = self.recurrent is not None
        return (*((0,) if not recurs or self.beside else ()), *((1,) if recurs else ()),
                *((2,) if self.ngrams is not None else ()))

    @property
    def reading(self) -> bool:
        """True if the layer uses the keys and values, or the attention weights, of an earlier one."""
        return self.reads is not None or self.echoes is not None

    @property
    def chosen_before(self) -> bool:
        """True if the layer takes the choice of tokens of an earlier one."""
        return self.latent is not None and self.latent.indexer is not None and self.latent.indexer.shared

    def latents_like(self, other: Layer) -> bool:
        """Returns True if both layers have latents, with index keys, of the same widths, or neither has any."""
        if self.latent is None or other.latent is None:
            return self.latent is other.latent
        one, two = ((x.rank, x.indexer and x.indexer.width) for x in (self.latent, other.latent))
        return one == two


def in_chunks(layers: tuple[Layer, ...], chunks: Chunks | None) -> tuple[Layer, ...]:
    """Returns the layers in which rotary positions restart in each chunk, as `chunks` says (dual chunk attention);
    None: positions count from the start of the text. Layers without a rotary embedding do not change."""
    return tuple(layer if layer.rope is None else
                 dataclasses.replace(layer, rope=dataclasses.replace(layer.rope, chunks=chunks)) for layer in layers)


def lacks_next_layer(layers: tuple[Layer, ...]) -> bool:
    """Returns True if a layer with a shortcut has no next layer, or one with a shortcut, too."""
    after = (*layers[1:], None)
    return any(one.shortcut and (two is None or two.shortcut) for one, two in zip(layers, after, strict=True))
