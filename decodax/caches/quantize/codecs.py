"""The contract of a codec: how the keys and values of tokens are written in fewer bytes and read again.

A codec encodes consecutive tokens, `unit` of them or a multiple, and the codes of one unit do not depend on the next.
`decodax.caches.quantize.quantized` keeps the codes of the older tokens, and the latest tokens as they are. Each paper
has a file with its codec.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from decodax.cache.key_values import KVLayer
from decodax.common.struct import Struct, static, struct
from decodax.core.capabilities import ReadPrompt

PyTree = Any


@struct
class Codes(Struct):
    """Quantized numbers with the scales of their groups.

    Attributes:
        codes: `u8[..., n * bits / 8]`, see `pack`. steps, lows: step and zero point of each group.
    """

    codes: Array
    steps: Array
    lows: Array


def pack(codes: Array, bits: int) -> Array:
    """Packs `u8[..., n]`, numbers below `2^bits`, into `u8[..., m]` with `m = n * bits / 8`.

    Number `i` is in bits `bits * (i // m)` and above of byte `i % m`.
    """
    each = 8 // bits
    parts = codes.reshape(*codes.shape[:-1], each, -1)
    shifts = (bits * jnp.arange(each, dtype=jnp.uint8))[:, None]
    return (parts << shifts).sum(-2, dtype=jnp.uint8)


def unpack(codes: Array, bits: int) -> Array:
    """The inverse of `pack`."""
    each = 8 // bits
    shifts = (bits * jnp.arange(each, dtype=jnp.uint8))[:, None]
    return ((codes[..., None, :] >> shifts) & ((1 << bits) - 1)).reshape(*codes.shape[:-1], -1)


def packs(count: int, bits: int) -> bool:
    """True if `count` numbers of `bits` bits fill whole bytes, so that `pack` takes them."""
    return bits in (1, 2, 4) and count * bits % 8 == 0


def join_heads(x: Array) -> Array:
    """Concatenates the heads of each token: `f[G, n, d]` as `f[n, G d]`."""
    return x.swapaxes(0, 1).reshape(x.shape[1], -1)


def split_heads(x: Array, heads: int) -> Array:
    """The inverse of `join_heads`."""
    return x.reshape(len(x), heads, -1).swapaxes(0, 1)


@struct
class Span(Struct):
    """Where the tokens that are encoded or decoded together are, for codecs that need it.

    Attributes:
        start: `i32[]`, the position of the first token; the others follow it.
        study: what the codec measured on this layer of this row's prompt (`Codec.study`).
        layer: static; number of the layer.
        below: what the layer below predicts from (`Codec.below`). None: there is none, or the codec has no use for it.
    """

    start: Array
    study: PyTree
    layer: int = static()
    below: PyTree = None


class Codec(abc.ABC):
    """Base of codecs. Derive a frozen dataclass; it is compared by value and static under jit.

    Attributes:
        needs_positions: whether `encode` and `decode` need a `Span`.
        stacked: whether a layer can only be decoded together with the layers below it. `decode` is then given the codes
            of all layers up to its own, which have one shape, and `encode` what `below` returned for the layer before.
    """

    needs_positions: ClassVar[bool] = False
    stacked: ClassVar[bool] = False

    @property
    def unit(self) -> int:
        """Number of tokens that are encoded together."""
        return 1

    @abc.abstractmethod
    def encode(self, shape: KVLayer, kv: Array, span: Span | None = None) -> PyTree:
        """Encodes the keys and values of one layer of one row.

        Args:
            kv: `f[G, n, d + e]`; `n` is a multiple of `unit`.

        Returns:
            A pytree of arrays `[G, n * c, ...]`, where `c` may differ between arrays; the first axis is 1 where all
            heads are encoded together.
        """

    @abc.abstractmethod
    def decode(self, shape: KVLayer, codes: PyTree, dtype: Any, span: Span | None = None) -> Array:
        """Returns the keys and values that codes represent, `f[G, n, d + e]`."""

    def below(self, shape: KVLayer, codes: PyTree, dtype: Any, span: Span) -> PyTree:
        """Returns what the next layer's tokens are predicted from, arrays `[n, ...]`, given the codes of this layer's.
        None: nothing."""
        return None

    def reads(self, layer: int, coded: Array, study: PyTree) -> Array | None:
        """Returns the number of a text's first tokens that each head attends to, `i32[B, G]`, when `coded` (`i32[B]`)
        are encoded. None: all."""
        return None

    def for_drafts(self) -> Codec | None:
        """Returns a codec that decodes the same codes from fewer bytes, for drafts of the model itself. None: there is
        none."""
        return None

    def start(self, shape: KVLayer, batch: int) -> PyTree:
        """Returns the initial statistics of a prompt's queries in one layer, arrays `[B, ...]`. None: the codec
        collects none."""
        return None

    def gather(self, shape: KVLayer, gathered: PyTree, queries: Array, live: Array) -> PyTree:
        """Adds rotated queries `f[B, W, H, d]` of a prompt to the statistics, where `live` (`bool[B, W]`)."""
        return gathered

    def study(self, shapes: Sequence[KVLayer], kv: Sequence[Array], length: Array, gathered: Sequence[PyTree],
              prompt: ReadPrompt | None) -> Sequence[PyTree]:
        """Measures what the codec needs to know of each layer of a prompt; used for all tokens that follow.

        Args:
            kv: `f[B, G, S, d + e]` of each layer, of which the first `length` (`i32[B]`) tokens count.
            gathered: the statistics of each layer. prompt: None if only the shapes of the result are wanted.

        Returns:
            A pytree of arrays `[B, ...]` for each layer.
        """
        return [None] * len(shapes)

    def check(self, shape: KVLayer) -> None:        # noqa: B027
        """Raises ValueError if the codec does not support a layer of this shape."""


@struct
class WholeTokens(Struct):
    """Tokens of a prompt that are kept as they are, beside the codes.

    Attributes:
        at: `i32[..., P]` positions, -1 for none; of equal positions the first counts. kv: `f[..., G, P, d + e]`.
    """

    at: Array
    kv: Array

    @classmethod
    def first(cls, kv: Array, length: Array, count: int) -> WholeTokens:
        """Keeps the first `count` tokens of `f[B, G, S, d + e]`, texts of `length` (`i32[B]`)."""
        at = jnp.arange(count, dtype=jnp.int32)
        more = max(count - kv.shape[2], 0)
        return cls(at=jnp.where(at < length[:, None], at, -1),
                   kv=jnp.pad(kv[:, :, :count], ((0, 0), (0, 0), (0, more), (0, 0))))

    def put(self, decoded: Array, start: Array) -> Array:
        """Replaces these tokens in decoded ones, `f[G, n, d + e]` from position `start` on, of one row."""
        at = self.at - start
        return decoded.at[:, jnp.where((at >= 0) & (self.at >= 0), at, decoded.shape[1])].set(
            self.kv.astype(decoded.dtype), mode="drop")
