"""Keys and values in 2, 4 or 8 bits, and the latest tokens whole ("KIVI: A Tuning-Free Asymmetric 2bit Quantization for
KV Cache", Liu et al., 2024).

Codes are `round((x - low) / step)` with `step = (high - low) / (2^bits - 1)`. A group of keys is one channel of `group`
tokens that follow one another, since single channels of keys are large; a group of values is `group` channels of one
token. The tokens since the last multiple of `residual` stay as they are; when there are `residual` of them they are
quantised together. (In the authors' code that holds for keys, and values leave one by one. Then a round of several
tokens would show its nodes other values than plain decoding does.) A prompt is read whole and then quantised.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from decodax.cache import Cache, Dense, Kind, KVLayer, ReadPrompt, Scratch, Wrapper, dense
from decodax.cache.base import Draftable, Entries, PyTree
from decodax.cache.dense import write
from decodax.pallas_kernels.window_attention import BLOCK as WALK
from decodax.pallas_kernels.window_attention import Bias, merge, prefix_attention, window_attention_lse
from decodax.struct import Struct, static, struct

BLOCK = 512
"""Tokens that are taken out of their codes at a time."""


@struct
class Codes(Struct):
    """Numbers in few bits.

    Attributes:
        codes: `u8[..., n * bits / 8]`, number `i` in bits `bits * (i // m)` of byte `i % m`, of `m` bytes.
        steps, lows: of each group.
    """

    codes: Array
    steps: Array
    lows: Array


def pack(codes: Array, bits: int) -> Array:
    """`u8[..., n]` below `2^bits` as `u8[..., n * bits / 8]`."""
    each = 8 // bits
    parts = codes.reshape(*codes.shape[:-1], each, -1)
    shifts = (bits * jnp.arange(each, dtype=jnp.uint8))[:, None]
    return (parts << shifts).sum(-2, dtype=jnp.uint8)


def unpack(codes: Array, bits: int) -> Array:
    """The inverse of `pack`."""
    each = 8 // bits
    shifts = (bits * jnp.arange(each, dtype=jnp.uint8))[:, None]
    return ((codes[..., None, :] >> shifts) & ((1 << bits) - 1)).reshape(*codes.shape[:-1], -1)


def quantized(x: Array, bits: int, axis: int, dtype: Any) -> tuple[Array, Array, Array]:
    """Codes `u8` of the shape of `x`, steps and lows without the axis over which a group runs."""
    low, high = x.min(axis, keepdims=True), x.max(axis, keepdims=True)
    step = (high - low) / (2**bits - 1)
    codes = jnp.round(jnp.clip((x - low) / jnp.where(step > 0, step, 1), 0, 2**bits - 1)).astype(jnp.uint8)
    return codes, step.squeeze(axis).astype(dtype), low.squeeze(axis).astype(dtype)


def of_keys(x: Array, bits: int, group: int) -> Codes:
    """`f[G, S, d]`, whose groups are `group` tokens of a channel: steps `f[G, S / group, d]`."""
    G, S, d = x.shape
    codes, steps, lows = quantized(x.reshape(G, -1, group, d), bits, 2, x.dtype)
    return Codes(codes=pack(codes.reshape(G, S, d), bits), steps=steps, lows=lows)


def of_values(x: Array, bits: int, group: int) -> Codes:
    """`f[G, S, e]`, whose groups are `group` channels of a token: steps `f[G, S, e / group]`."""
    G, S, e = x.shape
    codes, steps, lows = quantized(x.reshape(G, S, -1, group), bits, 3, x.dtype)
    return Codes(codes=pack(codes.reshape(G, S, e), bits), steps=steps, lows=lows)


def keys_of(own: Codes, bits: int, group: int, dtype: Any) -> Array:
    """What codes of keys stand for."""
    wide = lambda x: jnp.repeat(x, group, axis=-2)
    return unpack(own.codes, bits).astype(dtype) * wide(own.steps) + wide(own.lows)


def values_of(own: Codes, bits: int, group: int, dtype: Any) -> Array:
    """What codes of values stand for."""
    wide = lambda x: jnp.repeat(x, group, axis=-1)
    return unpack(own.codes, bits).astype(dtype) * wide(own.steps) + wide(own.lows)


@struct
class Quantized(Cache):
    """Codes of the tokens before the latest ones, and those.

    Attributes:
        keys, values: a tuple of one `Codes` a layer, arrays `[B, G, S, ...]`.
        rest: a tuple of one `f[B, G, R, d + e]` a layer, the token at position `p` in slot `p % residual`.
        length: `i32[B]`. given: see `Cache.inputs`.
    """

    keys: tuple[Codes, ...]
    values: tuple[Codes, ...]
    rest: tuple[Array, ...]
    length: Array
    given: PyTree
    shapes: tuple[KVLayer, ...] = static()
    size: int = static()
    kind: KIVI = static()

    supports = frozenset({"trees"})

    @property
    def capacity(self) -> int:
        return self.size

    @property
    def inputs(self) -> PyTree:
        return self.given

    @property
    def whole(self) -> Array:
        """`i32[B]`: how many tokens are not in codes."""
        return self.length % self.kind.residual

    def horizon(self) -> Array | None:
        return self.kind.residual - self.whole if self.rest else None

    def attend(self, layer: int, q: Array, k: Array, v: Array, window: Any, *, scale: float,
               sliding: int | None = None, softcap: float | None = None,
               bias: Bias | None = None) -> tuple[Array, PyTree]:
        if window.certain or bias is not None:
            raise ValueError("cache: kivi reads a prompt as a whole, which only the model that answers does, and takes "
                             "no bias of the scores; give a draft model another cache")
        kind, at = self.kind, window.positions
        options: dict[str, Any] = dict(scale=scale, sliding=sliding, softcap=softcap)
        coded = self.length - self.whole
        slots = self.keys[layer].codes.shape[2]
        block = kind.block(slots)

        def part(i: Array, so_far: tuple[Array, Array]) -> tuple[Array, Array]:
            def some(x: Array) -> Array:
                size = block * x.shape[2] // slots
                return lax.dynamic_slice_in_dim(x, i * size, size, 2)

            keys, values = (jax.tree.map(some, x[layer]) for x in (self.keys, self.values))
            both = jnp.concatenate([keys_of(keys, kind.key_bits, kind.group, q.dtype),
                                    values_of(values, kind.value_bits, kind.group_of(v.shape[-1]), q.dtype)], -1)
            own = prefix_attention(q, at - i * block, both, jnp.clip(coded - i * block, 0, block), **options)
            return merge(so_far, own)

        own = k.shape[1] - q.shape[1]
        held = coded[:, None] + jnp.arange(self.rest[layer].shape[2], dtype=jnp.int32)
        held = jnp.where(held < self.length[:, None], held, -1)[:, None]
        latest = window_attention_lse(q, k, v, window.visible(), at, self.rest[layer], slot_positions=held,
                                      key_positions=window.key_positions, **options)
        out, _ = lax.fori_loop(0, (coded.max() + block - 1) // block, part, latest)
        return out, (k[:, own:], v[:, own:])

    def commit(self, entries: Entries, slots: Array) -> Quantized:
        if not self.rest:
            return self
        R = self.kind.residual
        to = jnp.where(slots >= 0, slots % R, -1)
        rest = tuple(write(held, jnp.concatenate(entry[:2], -1), to) for held, entry in
                     zip(self.rest, entries, strict=True))
        new = self.replace(rest=rest, length=jnp.maximum(self.length, slots.max(1) + 1))
        full = (new.length > self.length) & (new.length % R == 0)
        # a loop of one trip or none, since XLA copies what a conditional writes to
        once = lambda c: (jnp.zeros((), bool), c[1]._flushed(full))
        return lax.while_loop(lambda c: c[0], once, (full.any(), new))[1]

    def _flushed(self, rows: Array) -> Quantized:
        """With the latest tokens of those rows (`bool[B]`) in codes."""
        R = self.kind.residual

        def put(into: Array, new: Array, start: Array, choose: Array) -> Array:
            at = start * new.shape[1] // R
            old = lax.dynamic_slice_in_dim(into, at, new.shape[1], 1)
            return lax.dynamic_update_slice_in_dim(into, jnp.where(choose, new, old), at, 1)

        keys, values = list(self.keys), list(self.values)
        for layer, rest in enumerate(self.rest):
            new = jax.vmap(functools.partial(self.kind.coded, self.shapes[layer]))(rest[:, :, :R])
            row = lambda into, own, start, choose: jax.tree.map(lambda x, y: put(x, y, start, choose), into, own)
            keys[layer], values[layer] = jax.vmap(row)((keys[layer], values[layer]), new, self.length - R, rows)
        return self.replace(keys=tuple(keys), values=tuple(values))

    def for_prompt(self) -> Cache:
        if not self.rest:
            return self
        return PromptInFull(base=dense(self.shapes, self.length.shape[0], self.size, self.rest[0].dtype, self.given),
                            shapes=self.shapes, kind=self.kind)

    def scratch(self, entries: Entries, room: int) -> Draftable:
        return Scratch.empty(self, entries, room)


@struct
class PromptInFull(Wrapper):
    """A prompt that will be quantised."""

    base: Dense
    shapes: tuple[KVLayer, ...] = static()
    kind: KIVI = static()

    def settled(self, prompt: ReadPrompt) -> Cache:     # type: ignore[override]
        R, length = self.kind.residual, self.base.length
        into = self.kind.empty(self.shapes, length.shape[0], self.base.capacity, self.base.kv[0].dtype, self.inputs)
        made, latest = [], into.rest[0].shape[2]
        for shape, kv, codes in zip(self.shapes, self.base.kv, into.keys, strict=True):
            pad = codes.codes.shape[2] - kv.shape[2]

            def one(row: tuple[Array, Array], shape: KVLayer = shape, pad: int = pad) -> Any:
                kv, start = row
                kv = jnp.pad(kv, ((0, 0), (0, pad + latest), (0, 0)))
                return self.kind.coded(shape, kv[:, :-latest]), lax.dynamic_slice_in_dim(kv, start, latest, 1)

            made.append(lax.map(one, (kv, length - length % R)))
        return into.replace(keys=tuple(keys for (keys, _), _ in made), values=tuple(values for (_, values), _ in made),
                            rest=tuple(rest for _, rest in made), length=length)


@dataclasses.dataclass(frozen=True)
class KIVI(Kind):
    """The kind of `Quantized`.

    Attributes:
        key_bits, value_bits: 2, 4 or 8. group: numbers that share a step. residual: the most tokens that stay whole, a
            multiple of `group`.
    """

    key_bits: int = 2
    value_bits: int = 2
    group: int = 32
    residual: int = 128

    def __post_init__(self) -> None:
        for name, bits in (("key_bits", self.key_bits), ("value_bits", self.value_bits)):
            if bits not in (2, 4, 8):
                raise ValueError(f"{name}: got {bits}, takes 2, 4 or 8")
        if self.group < 1 or self.residual < 1 or self.residual % self.group:
            raise ValueError(f"residual: got {self.residual}, takes a multiple of the group of {self.group}")

    def block(self, slots: int) -> int:
        """Tokens that are taken out of their codes at a time, whole groups, of so many slots."""
        return min(max(BLOCK // self.group, 1) * self.group, slots)

    def group_of(self, width: int) -> int:
        """Channels of a value that share a step: all of them where the width is no multiple of `group`."""
        return self.group if width % self.group == 0 else width

    def coded(self, shape: KVLayer, kv: Array) -> tuple[Codes, Codes]:
        """Keys and values of a row, `f[G, S, d + e]`."""
        keys, values = kv[..., :shape.width], kv[..., shape.width:]
        return (of_keys(keys, self.key_bits, self.group),
                of_values(values, self.value_bits, self.group_of(values.shape[-1])))

    def empty(self, shapes: tuple[KVLayer, ...], batch: int, size: int, dtype: Any, inputs: PyTree) -> Quantized:
        """An empty cache."""
        block = self.block(-(-size // self.group) * self.group) if size else 1
        slots = -(-size // block) * block
        zeros = lambda *dims, dtype=dtype: jnp.zeros((batch, *dims), dtype)
        keys, values = [], []
        for shape in shapes:
            G, d, e = shape.heads, shape.width, shape.both - shape.width
            for name, width, bits in (("width", d, self.key_bits), ("value_width", e, self.value_bits)):
                if width * bits % 8:
                    raise ValueError(f"{name}: got heads of {width}, takes a multiple of {8 // bits} with {bits} bits")
            one = lambda *dims, steps, zeros=zeros: Codes(codes=zeros(*dims, dtype=jnp.uint8), steps=zeros(*steps),
                                                          lows=zeros(*steps))
            keys.append(one(G, slots, d * self.key_bits // 8, steps=(G, slots // self.group, d)))
            values.append(one(G, slots, e * self.value_bits // 8, steps=(G, slots, e // self.group_of(e))))
        # a walk takes whole blocks
        latest = self.residual if self.residual <= WALK else -(-self.residual // WALK) * WALK
        rest = tuple(zeros(shape.heads, latest, shape.both) for shape in shapes)
        return Quantized(keys=tuple(keys), values=tuple(values), rest=rest, length=zeros(dtype=jnp.int32), given=inputs,
                         shapes=shapes, size=size, kind=self)

    def __call__(self, layers: Sequence[tuple[Any, ...]], batch: int, capacity: int, dtype: jax.typing.DTypeLike,
                 inputs: PyTree = None) -> Cache:
        shapes = tuple(KVLayer(*layer) for layer in layers) if capacity else ()
        return self.empty(shapes, batch, capacity, dtype, inputs)
