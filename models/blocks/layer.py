"""One layer of a decoder: attention and MLP, or one of them, with their norms and further paths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array

from decodax.models.blocks.attention import Attend, Attention
from decodax.models.blocks.options import Layer
from decodax.models.compressed.attention import SharedKeyAttention
from decodax.models.compressed.options import Pooling
from decodax.models.config import DecoderConfig
from decodax.models.feed_forward import MLP, Mixture
from decodax.models.latent.attention import LatentAttention
from decodax.models.layers import Norm, kept, optional
from decodax.models.recurrent.blocks import Block, recurrent_block
from decodax.models.residual.gated_connections import GatedConnection
from decodax.models.residual.hyper_connections import HyperConnection
from decodax.models.residual.layer_inputs import LayerFactor, LayerInput
from decodax.models.residual.ngrams import NGramInput
from decodax.models.residual.options import GatedConnections, HyperConnections, Streams
from decodax.models.residual.streams import LowRankPath, StreamMixer

Keep = Sequence[tuple[bool, bool]] | Array
"""The parts of the layers that run: attention and MLP of each, fixed; or as data, whole layers `bool[B or 1, L]` or
their halves `bool[B or 1, L, 2]`. Parts that are left out add nothing to the residual stream. With data, a part is
computed for all rows if some row keeps it, so one set for all rows saves the most. The entry of an attention that is
left out is meaningless; that of one that is always left out is `()`."""


class DecoderLayer(nnx.Module):
    """Attention and MLP, or experts, with norms as set by `DecoderConfig.block`."""

    def __init__(self, c: DecoderConfig, layer: Layer, rngs: nnx.Rngs):
        self.c = c
        norm = lambda present, kind=c.norm: Norm(kind, (c.width,), ("embed",)) if present else None
        after = c.out_norm_kind or c.norm
        block, attends, feeds = layer.block or c.block, layer.half != "mlp", layer.half != "attention"
        gated = isinstance(c.streams, GatedConnections)        # the streams are normed
        self.attn_in = norm(block != "post" and attends and not gated)
        self.attn = self._mixer(layer, rngs) if attends else None
        self.beside = recurrent_block(c, layer.recurrent, rngs) if (
            layer.beside and layer.recurrent and not isinstance(layer.recurrent, Pooling)) else None
        self.attn_out = norm(block in ("post", "sandwich") and attends, after)
        apart = layer.experts is not None and layer.experts.branch_norms
        self.mlp_in = norm((block in ("pre", "sandwich") or c.twin_norms) and feeds and not apart and not gated)
        self.mlp = None if not feeds else Mixture(c, layer.experts, rngs, layer.glu) if layer.experts is not None else (
            MLP(c, rngs, layer.mlp, sparsity=layer.sparsity, glu=layer.glu))
        self.shortcut = None if layer.shortcut is None else Mixture(c, layer.shortcut, rngs)
        self.mlp_out = norm(block in ("post", "sandwich") and feeds, after)
        self.inputs = LayerInput(c, rngs) if c.layer_inputs is not None else None
        self.factor = LayerFactor(c.conditioned) if c.layer_scale else None
        several = c.streams if isinstance(c.streams, Streams) else None
        self.streams = None if several is None else StreamMixer(c, rngs)
        self.low_rank = None if several is None else LowRankPath(c, rngs, several.rank)
        hyper = lambda: HyperConnection(c, rngs) if isinstance(c.streams, HyperConnections) else (
            GatedConnection(c, rngs) if gated else None)
        self.attn_hc, self.mlp_hc = hyper(), hyper()
        self.ngrams = None if layer.ngrams is None else NGramInput(c, layer.ngrams, rngs)

    def _mixer(self, layer: Layer, rngs: nnx.Rngs) -> Attention | LatentAttention | SharedKeyAttention | Block:
        """Returns the layer's attention, or the block in its place."""
        if layer.shared_key is not None:
            return SharedKeyAttention(self.c, layer, rngs)
        if layer.latent is not None:
            return LatentAttention(self.c, layer, rngs)
        if layer.recurrent is None or layer.beside:
            return Attention(self.c, layer, rngs)
        return recurrent_block(self.c, layer.recurrent, rngs)

    def __call__(self, index: int, x: Array, tables: dict[Any, Any], attend: Attend,
                 keep: tuple[bool, bool] | Array = (True, True)) -> tuple[Array, Any]:
        if isinstance(keep, Array) and keep.ndim == 1:
            after, entry = kept(lambda x: self(index, x, tables, attend), x, keep)
            return jnp.where(keep[:, None, None], after, x), entry
        if self.streams is not None and self.inputs is not None:
            x = self.streams.predicted(x)
            active, entry = self._block(index, x[:, :, self.streams.options.active], tables, attend, keep)
            x = self.streams.corrected(x, active)
            more = self.inputs(self.streams.scaled(x), tables["inputs"][:, :, index])
            return x.at[:, :, 1:].add(more[:, :, None]), entry
        if self.attn_hc is not None and self.mlp_hc is not None:
            of_ngrams = None
            if self.ngrams is not None:
                added, of_ngrams = self.ngrams(index, x, tables, attend)
                x = x + added
            active, after = self.attn_hc(x)
            branch, entry = self._attention(index, optional(self.attn_in, active), tables, attend, True)
            active, onward = self.mlp_hc(after(branch))
            return onward(self._fed(active, tables)), entry if self.ngrams is None else (entry, of_ngrams)
        x, entry = self._block(index, x, tables, attend, keep)
        return self._finished(index, x, tables, keep[:, 1] if isinstance(keep, Array) else keep[1]), entry

    def _block(self, index: int, x: Array, tables: dict[Any, Any], attend: Attend,
               keep: tuple[bool, bool] | Array) -> tuple[Array, Any]:
        """Returns the residual stream after attention and MLP, and the layer's entry."""
        scale, mlp = self.c.residual_scale, self.mlp
        keeps = (keep[:, 0], keep[:, 1]) if isinstance(keep, Array) else keep
        normed = optional(self.attn_in, x)
        entry = ()
        if self.attn is not None:
            branch, entry = self._attention(index, normed, tables, attend, keeps[0])
            if self.c.block == "parallel":
                assert mlp is not None
                beside = self.mlp_in(x) if self.mlp_in is not None else normed
                return x + scale * (branch + kept(mlp, beside, keeps[1])), entry
            x = x + scale * branch
        if self.low_rank is not None:
            x = (x + self.low_rank(normed)) * 2 ** -0.5
        if mlp is None:
            return x, entry
        return x + scale * kept(lambda x: self._fed(x, tables), x, keeps[1]), entry

    def _fed(self, x: Array, tables: dict[Any, Any]) -> Array:
        """Returns the output of the MLP, with its norms. That of a mixture beside it is left in `tables` under
        "shortcut"."""
        assert self.mlp is not None
        normed = optional(self.mlp_in, x)
        if self.shortcut is not None:
            tables["shortcut"] = self.shortcut(normed)
        if isinstance(self.mlp, Mixture) and self.mlp.hashed is not None:
            return optional(self.mlp_out, self.mlp(normed, tables["inputs"]))
        return optional(self.mlp_out, self.mlp(normed))

    def _finished(self, index: int, x: Array, tables: dict[Any, Any], keep: bool | Array) -> Array:
        """Returns the residual stream with what follows the MLP, in rows that keep it."""
        if (self.inputs is None and self.factor is None) or keep is False:
            return x
        y = x if self.inputs is None else x + self.inputs(x, tables["inputs"][:, :, index])
        y = y if self.factor is None else self.factor(y, tables["canvas"])
        return y if keep is True else jnp.where(keep[:, None, None], y, x)

    def attention_half(self, index: int, x: Array, tables: dict[Any, Any],
                       attend: Attend) -> tuple[Array, Any]:
        """Runs the attention of layer `index`, with its norm, on the residual stream `x`, `f[B, W, D]`. Returns what is
        to be added to the stream, and what is to be committed to the cache. `tables` are those of `Decoder.tables`."""
        branch, entry = self._attention(index, optional(self.attn_in, x), tables, attend, True)
        return self.c.residual_scale * branch, entry

    def mlp_half(self, x: Array) -> Array:
        """Returns the output of the MLP, which is added to the residual stream. `x` is the stream after attention, in a
        `parallel` block the stream before it."""
        alone = self.c.block == "parallel" and not self.c.twin_norms
        normed = optional(self.attn_in if alone else self.mlp_in, x)
        assert self.mlp is not None
        return self.c.residual_scale * optional(self.mlp_out, self.mlp(normed))

    def values(self, x: Array) -> Array:
        """Returns the values that attention computes from the residual stream `x`, `f[B, W, D]`: `f[B, W, G, d]`,
        without queries and keys."""
        assert isinstance(self.attn, Attention)
        return self.attn._values(optional(self.attn_in, x))

    def _attention(self, index: int, x: Array, tables: dict[Any, Any], attend: Attend,
                   keep: bool | Array) -> tuple[Array, Any]:
        def inside(x: Array) -> tuple[Array, Any]:
            assert self.attn is not None
            branch, entry = self.attn(index, x, tables, attend)
            if self.beside is not None:
                more, own = self.beside(index, x, tables, attend)
                branch, entry = branch + more, (entry, own)
            return optional(self.attn_out, branch), entry

        if keep is False:
            return jnp.zeros_like(x), () if self.beside is None else ((), ())
        return kept(inside, x, keep)
