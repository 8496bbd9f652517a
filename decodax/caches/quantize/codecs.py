"""The contract of a codec, which encodes the keys and values of tokens in fewer bytes and decodes them.

A codec encodes consecutive tokens, a multiple of `unit`, and the codes of one unit do not depend on the next.
`decodax.caches.quantize.quantized` stores the codes of the older tokens, and the latest tokens unquantized. Each paper
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
        codes: `u8[..., n * bits / 8]`, packed numbers; see `pack`.
        steps, lows: quantization step and zero point of each group.
    """

    codes: Array
    steps: Array
    lows: Array


def pack(codes: Array, bits: int) -> Array:
    """Packs numbers below `2^bits`, `u8[..., n]`, into bytes, `u8[..., m]` with `m = n * bits / 8`.

    Number `i` is in bits `bits * (i // m)` and above of byte `i % m`.
    """
    each = 8 // bits
    parts = codes.reshape(*codes.shape[:-1], each, -1)
    shifts = (bits * jnp.arange(each, dtype=jnp.uint8))[:, None]
    return (parts << shifts).sum(-2, dtype=jnp.uint8)


def unpack(codes: Array, bits: int) -> Array:
    """Inverts `pack`, and returns `u8[..., n]`."""
    each = 8 // bits
    shifts = (bits * jnp.arange(each, dtype=jnp.uint8))[:, None]
    return ((codes[..., None, :] >> shifts) & ((1 << bits) - 1)).reshape(*codes.shape[:-1], -1)


def packs(count: int, bits: int) -> bool:
    """Returns True if `count` numbers of `bits` bits fill whole bytes, as `pack` requires."""
    return bits in (1, 2, 4) and count * bits % 8 == 0


def join_heads(x: Array) -> Array:
    """Concatenates the heads of each token: `f[G, n, d]` becomes `f[n, G d]`."""
    return x.swapaxes(0, 1).reshape(x.shape[1], -1)


def split_heads(x: Array, heads: int) -> Array:
    """Inverts `join_heads`: `f[n, G d]` becomes `f[G, n, d]`."""
    return x.reshape(len(x), heads, -1).swapaxes(0, 1)


@struct
class Span(Struct):
    """The position and layer of tokens that are encoded or decoded together, for codecs that need them.

    Attributes:
        start: `i32[]`, position of the first token; the others follow it.
        study: the result of `Codec.study` for this layer and row.
        layer: static; number of the layer.
        below: the result of `Codec.below` for the layer below. None: there is none, or the codec does not use it.
    """

    start: Array
    study: PyTree
    layer: int = static()
    below: PyTree = None


class Codec(abc.ABC):
    """Base of codecs. Derive a frozen dataclass; it is compared by value and static under jit.

    Attributes:
        needs_positions: True if `encode` and `decode` need a `Span`.
        stacked: True if a layer can only be decoded together with the layers below it. `decode` then gets the codes of
            all layers up to its own, which have one shape, and `encode` gets the result of `below` for the layer
            before.
    """

    needs_positions: ClassVar[bool] = False
    stacked: ClassVar[bool] = False

    @property
    def unit(self) -> int:
        """Number of consecutive tokens that are encoded together; codes are computed for multiples of it."""
        return 1

    @abc.abstractmethod
    def encode(self, shape: KVLayer, kv: Array, span: Span | None = None) -> PyTree:
        """Encodes the keys and values of consecutive tokens in one layer of one row.

        Args:
            shape: shape of the layer, with `G` heads and widths `d` of keys and `e` of values.
            kv: `f[G, n, d + e]`, the key and then the value of each of `n` tokens; `n` is a multiple of `unit`.
            span: position and layer of the tokens; may be None unless `needs_positions`.

        Returns:
            A pytree of arrays `[G, n * c, ...]` with `c` entries for each token, such as 1, or `1 / unit` for one entry
            in a unit; `c` may differ between arrays. The first axis is 1 if all heads are encoded together.
        """

    @abc.abstractmethod
    def decode(self, shape: KVLayer, codes: PyTree, dtype: Any, span: Span | None = None) -> Array:
        """Returns the decoded keys and values of one layer of one row, `f[G, n, d + e]`.

        Args:
            shape: shape of the layer.
            codes: the codes, a result of `encode`.
            dtype: dtype of the result.
            span: position and layer of the tokens; may be None unless `needs_positions`.
        """

    def below(self, shape: KVLayer, codes: PyTree, dtype: Any, span: Span) -> PyTree:
        """Returns the values from which the next layer's tokens are predicted, computed from the codes of this layer, a
        pytree of arrays `[n, ...]`. None, the default: the codec does not predict layers from each other."""
        return None

    def reads(self, layer: int, coded: Array, study: PyTree) -> Array | None:
        """Returns the number of encoded tokens that each head attends to, `i32[B, G]`: the first ones. None, the
        default: all.

        Args:
            layer: number of the layer.
            coded: `i32[B]`, number of encoded tokens of each row.
            study: the result of `study` for this layer.
        """
        return None

    def for_drafts(self) -> Codec | None:
        """Returns a codec that decodes the same codes from fewer bytes, for drafting with the same model. None: there
        is none."""
        return None

    def start(self, shape: KVLayer, batch: int) -> PyTree:
        """Returns the initial statistics of a prompt's queries in one layer, arrays `[B, ...]`. None: the codec
        collects none."""
        return None

    def gather(self, shape: KVLayer, gathered: PyTree, queries: Array, live: Array) -> PyTree:
        """Returns the statistics of a prompt with further queries.

        Args:
            shape: shape of the layer.
            gathered: the statistics so far.
            queries: `f[B, W, H, d]`, rotated.
            live: `bool[B, W]`, queries that count.
        """
        return gathered

    def study(self, shapes: Sequence[KVLayer], kv: Sequence[Array], length: Array, gathered: Sequence[PyTree],
              prompt: ReadPrompt | None) -> Sequence[PyTree]:
        """Computes what the codec needs to know about each layer of a prompt; it is used for all later tokens, too.

        Args:
            shapes: shape of each layer.
            kv: `f[B, G, S, d + e]` for each layer.
            length: `i32[B]`, number of tokens.
            gathered: the statistics of each layer (`gather`).
            prompt: the prompt and the model. None if only the shapes of the result are needed.

        Returns:
            A pytree of arrays `[B, ...]` for each layer.
        """
        return [None] * len(shapes)

    def check(self, shape: KVLayer) -> None:        # noqa: B027
        """Raises ValueError if the codec does not support a layer of this shape."""

    def check_model(self, model: Any) -> None:      # noqa: B027
        """Raises ValueError if the codec, which may run the model once more (`study`), does not support it."""


@struct
class WholeTokens(Struct):
    """Tokens of a prompt that are stored unquantized beside the codes.

    Attributes:
        at: `i32[..., P]`, positions, -1: none; of equal positions the first counts.
        kv: `f[..., G, P, d + e]`, keys and values.
    """

    at: Array
    kv: Array

    @classmethod
    def first(cls, kv: Array, length: Array, count: int) -> WholeTokens:
        """Returns the first `count` tokens of texts with keys and values `f[B, G, S, d + e]` and `length` (`i32[B]`)
        tokens."""
        at = jnp.arange(count, dtype=jnp.int32)
        more = max(count - kv.shape[2], 0)
        return cls(at=jnp.where(at < length[:, None], at, -1),
                   kv=jnp.pad(kv[:, :, :count], ((0, 0), (0, 0), (0, more), (0, 0))))

    def put(self, decoded: Array, start: Array) -> Array:
        """Returns `decoded` (`f[G, n, d + e]`, the decoded tokens of one row from position `start` on) with the
        unquantized tokens written over those at their positions."""
        at = self.at - start
        return decoded.at[:, jnp.where((at >= 0) & (self.at >= 0), at, decoded.shape[1])].set(
            self.kv.astype(decoded.dtype), mode="drop")
